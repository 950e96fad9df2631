"""The command line: one subcommand, one stage function.

Nothing heavy is imported until a subcommand runs, so that `--help` answers at once. Results go to
stdout, progress and errors to stderr. Exit codes: 0 done, 1 error, 2 usage, 3 unsupported model,
4 quality gate failed, 130 interrupted.
"""

import argparse
import errno
import io
import os
import sys
from collections.abc import Callable, Sequence

from quantmla import __version__
from quantmla.arguments import DEVICE_HELP, MODEL_HELP, Parser, count, names, path, positive
from quantmla.bench import flags as bench
from quantmla.errors import QuantMLAError, UsageError, require
from quantmla.eval_command import evaluation_command, evaluation_flags
from quantmla.interrupts import exit_code, interrupts_noted, is_interrupt
from quantmla.report.command import report_command, report_flags
from quantmla.serving import flags as serving

UNSUPPORTED = 3
Command = Callable[[argparse.Namespace], int]


def build_parser() -> argparse.ArgumentParser:
    """Every subcommand and flag; `tests/test_cli.py` pins the list."""
    parser = Parser(
        prog="quantmla",
        description="Low-bit KV caches for Multi-head Latent Attention.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"quantmla {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Command, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(run=run)
        return sub

    _inspect_flags(add("inspect", _inspect, "Say what a model is and whether it is supported."))
    _estimate_flags(add("estimate", _estimate, "Size the cache from a model's config alone."))
    _quantize_flags(add("quantize", _quantize, "Learn transforms, fuse them, verify, write."))
    _verify_flags(add("verify", _verify, "Check that fusing left the model's function unchanged."))
    what = "Measure what a low-bit cache costs in quality."
    evaluation_flags(add("eval", evaluation_command, what))
    _analyze_flags(add("analyze", _analyze, "Study what cache errors do to attention, and why."))
    report_flags(add("report", report_command, "Write one page about runs from their results."))
    bench.add_flags(add("bench", bench.run, "Time the kernels on a GPU, beside BF16 ones."))
    serving.add_flags(add("serve", serving.run, "Serve what quantize wrote with vLLM."))
    _json_flag(add("doctor", _doctor, "Show versions, GPUs and what works on this machine."))
    return parser


def _json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _inspect_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=f"{MODEL_HELP}, or a config.json")
    _json_flag(parser)


def _estimate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=f"{MODEL_HELP}, or a config.json")
    parser.add_argument("--format", help="such as c2r4 (default: as recorded, else c4r4)")
    parser.add_argument("--context", type=positive, default=131_072, help="tokens per request")
    parser.add_argument("--batch", type=positive, default=1, help="requests (default: 1)")
    parser.add_argument(
        "--gpu-memory", metavar="SIZE", help="memory for the cache, such as 141GiB or 80GB"
    )
    _json_flag(parser)


def _quantize_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help=f"{MODEL_HELP} (or in the recipe)")
    add("-o", "--output", metavar="OUT", help="folder to write (or in the recipe)")
    add("--recipe", type=path, metavar="FILE", help="YAML recipe; flags override it")
    add("--format", help="such as c4r4 or c2r4 (default: c4r4)")
    add("--method", help="such as quantmla or rtn (default: quantmla)")
    add("--text", metavar="FILE", help="calibration text (default: packaged)")
    add("--num-sequences", type=positive, metavar="N", help="calibration sequences")
    add("--sequence-length", type=positive, metavar="N", help="tokens per sequence")
    add("--seed", type=count, metavar="N")
    add("--device", metavar="D", help=DEVICE_HELP)
    add("--resume", action="store_true", help="go on after the last finished layer")
    add("--dry-run", action="store_true", help="print what it would take and stop")
    add("--overwrite", action="store_true", help="replace OUT if it exists")
    _json_flag(parser)
    add("--quiet", action="store_true", help="no progress on stderr")


def _verify_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", metavar="OUT", help="a folder that quantize wrote")
    parser.add_argument("--against", metavar="MODEL", help="the original (default: as recorded)")
    _json_flag(parser)


def _analyze_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL_HELP)
    add("-o", "--output", metavar="DIR", required=True, help="folder for analysis.json")
    add("--preset", default="default", help="default, paper or quick (how much is measured)")
    add("--studies", type=names, metavar="A,B", help="only these, such as gain,bound")
    add("--text", action="append", metavar="FILE", help="a text; may be given more than once")
    add("--budget", type=float, metavar="N", help="bytes per token: also plan bits by layer")
    add("--device", metavar="D", default="auto", help=DEVICE_HELP)
    add("--resume", action="store_true", help="go on after the last finished layer")
    add("--overwrite", action="store_true", help="replace DIR/analysis.json if it exists")
    _json_flag(parser)
    add("--quiet", action="store_true", help="no progress on stderr")


def _inspect(args: argparse.Namespace) -> int:
    from quantmla import present
    from quantmla.inspection import inspect_model

    found = inspect_model(args.model)
    present.show(found.to_json(), as_json=args.json)
    return 0 if found.supported else UNSUPPORTED


def _estimate(args: argparse.Namespace) -> int:
    from quantmla import present
    from quantmla.checkpoint.locate import read_config
    from quantmla.estimate import Workload, chosen_format, estimate, parse_size

    budget = None if args.gpu_memory is None else parse_size(args.gpu_memory)
    load = Workload(context=args.context, batch=args.batch, budget=budget)
    config = read_config(args.model)
    result = estimate(config, chosen_format(config, args.model, args.format), load)
    present.show(result.to_json(), as_json=args.json)
    return 0


def _quantize(args: argparse.Namespace) -> int:
    from quantmla import pipeline, present
    from quantmla.recipe import Recipe, load_recipe, with_changes

    recipe = Recipe() if args.recipe is None else load_recipe(args.recipe)
    require(
        args.model is not None or args.recipe is not None,
        "name a MODEL, or a --recipe that has one",
        UsageError,
    )
    recipe = with_changes(
        recipe,
        {
            "model.id": args.model,
            "output.folder": args.output,
            "format.name": args.format,
            "format.layers": None if args.format is None else {},  # one format for all
            "transform.method": args.method,
            "calibration.text": args.text,
            "calibration.num_sequences": args.num_sequences,
            "calibration.sequence_length": args.sequence_length,
            "calibration.seed": args.seed,
            "calibration.device": args.device,
        },
    )
    require(recipe.output.folder is not None, "name the folder to write: -o OUT", UsageError)
    report = pipeline.quantize(
        recipe,
        resume=args.resume,
        dry_run=args.dry_run,
        overwrite=args.overwrite,
        progress=not args.quiet,
    )
    present.show(report, as_json=args.json)
    return 0


def _verify(args: argparse.Namespace) -> int:
    from quantmla import pipeline, present

    present.show(pipeline.verify(args.output, against=args.against), as_json=args.json)
    return 0


def _analyze(args: argparse.Namespace) -> int:
    from quantmla import present
    from quantmla.analyze import analyze
    from quantmla.recipe import AnalysisRequest

    request = AnalysisRequest(
        model=args.model,
        output=args.output,
        preset=args.preset,
        studies=args.studies or (),
        texts=tuple(args.text or ()),
        budget=args.budget,
        device=args.device,
        resume=args.resume,
        overwrite=args.overwrite,
    )
    present.show(analyze(request, progress=not args.quiet), as_json=args.json)
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from quantmla import doctor, present

    present.show(doctor.diagnose(), as_json=args.json)
    return 0


def _disk_is_full(error: Exception) -> bool:
    """safetensors and torch report a full disk as errors of their own, with the system's words."""
    code = error.errno if isinstance(error, OSError) else None
    return code in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path may hold what the terminal cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    with interrupts_noted():
        return _ended(argv)


def _ended(argv: Sequence[str] | None) -> int:
    """The exit code, after the one line of what went wrong."""
    try:
        args = build_parser().parse_args(argv)
        code: int = args.run(args)
        if sys.stdout is not None:  # None: closed by the caller
            sys.stdout.flush()  # here, where an error still has its sentence
        return code
    except KeyboardInterrupt as stop:
        return _fail(str(stop) or "interrupted", exit_code())
    except BrokenPipeError:
        # the reader, such as `head`, has had enough; Python's own last flush must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if is_interrupt(error):
            return _fail("interrupted", exit_code())
        if isinstance(error, QuantMLAError):
            return _fail(str(error), error.exit_code)
        if not isinstance(error, OSError) and not _disk_is_full(error):
            raise
        return _fail(_system_fault(error), 1)


def _system_fault(error: Exception) -> str:
    """What the system refused, and where; no fault of ours."""
    full = _disk_is_full(error)
    reason = "no space left on device" if full else getattr(error, "strerror", None) or str(error)
    place = getattr(error, "filename", None)
    return f"{reason}: {place}" if place else reason


def _fail(message: str, code: int) -> int:
    print(f"quantmla: error: {' '.join(message.split())}", file=sys.stderr)
    return code
