"""The flags of `quantmla bench`; imports nothing heavy until it runs."""

import argparse
from pathlib import Path

from quantmla.arguments import names, path, seconds

CASES = ("musts", "paper", "all")
RESULTS = Path("benchmarks/results")


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("what", metavar="WHAT", choices=("decode", "append"), help="decode or append")
    add("--backend", type=names, metavar="A,B", help="such as triton (default: all that can)")
    add("--format", type=names, metavar="A,B", help="such as c4r4 (default: c4r4,c2r4)")
    add("--cases", choices=CASES, default="musts", help="of decode: musts, paper or all")
    add("--seconds", type=seconds, metavar="N", help="start no new case after so long")
    add("--libraries", type=path, metavar="DIR", help="with vLLM's BF16 kernels (default: vllm's)")
    add("--output", type=path, metavar="DIR", default=RESULTS, help=f"default: {RESULTS}")


def run(args: argparse.Namespace) -> int:
    from quantmla.bench.command import Request, bench_and_store

    request = Request(
        what=args.what,
        backends=args.backend,
        formats=args.format,
        cases=args.cases,
        seconds=args.seconds,
        libraries=args.libraries,
        output=args.output,
    )
    bench_and_store(request)
    return 0
