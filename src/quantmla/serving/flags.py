"""The flags of `quantmla serve`; imports nothing heavy until it runs."""

import argparse


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--print", action="store_true", help="print the vllm command and stop")
    add("output", metavar="OUT", help="what quantize wrote: a folder or a hub id")
    rest = "arguments of `vllm serve`, as they are"
    action = add("vllm_args", metavar="VLLM_ARG", nargs=argparse.REMAINDER, help=rest)
    action.required = False  # argparse would name it among what is missing


def run(args: argparse.Namespace) -> int:
    from quantmla.serving.command import serve

    rest = [argument for argument in args.vllm_args if argument != "--print"]
    serve(args.output, rest, only_print=args.print or len(rest) < len(args.vllm_args))
    return 0
