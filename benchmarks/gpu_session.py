"""One GPU session: every case, compute-sanitizer if asked for, then timings.

    python benchmarks/gpu_session.py OUT [--libraries SO ...] [--seconds 230]

Each part is a process of its own with a time limit: one that hangs leaves the others alone.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

VARIANTS = ROOT / "benchmarks/decode_variants.py"


def run(name: str, command: list[str], out: Path, seconds: float) -> None:
    """Its output goes to the session's one log."""
    start = time.monotonic()
    with (out / "session.txt").open("a") as log:
        log.write(f"== {name}\n")
        log.flush()
        begin = log.tell()
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=seconds,
            )
            code: int | str = done.returncode
        except subprocess.TimeoutExpired:
            code = "timed out"
    print(f"== {name}: {code}, {time.monotonic() - start:.0f} s", flush=True)
    lines = (out / "session.txt").read_bytes()[begin:].decode(errors="replace").splitlines(True)
    print("".join(lines[-30:]), flush=True)


def main() -> None:
    from quantmla.arguments import run_script, seconds

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--libraries", type=Path, nargs="*", default=[])
    parser.add_argument("--seconds", type=seconds, default=230)
    parser.add_argument("--sanitize", action="store_true", help="also run compute-sanitizer (slow)")
    run_script(parser, session)


def session(options: argparse.Namespace) -> None:
    from quantmla.device import resolve_device
    from quantmla.workdir import check_makeable

    resolve_device("cuda")
    check_makeable(options.out, options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.seconds
    tests = [
        "-m",
        "pytest",
        "tests/kernels/test_gpu.py",
        "-m",
        "gpu",
        "-q",
        "-n",
        "8",
        "--maxfail=12",
        "-p",
        "no:cacheprovider",
    ]
    run("tests", [sys.executable, *tests], options.out, options.seconds * 0.55)
    if options.sanitize:
        for tool in ("memcheck", "racecheck"):
            chosen = [*tests[:4], "-q", "-k", "borders or strided or steps", "-m", "gpu"]
            command = [
                "compute-sanitizer",
                "--tool",
                tool,
                "--error-exitcode",
                "9",
                sys.executable,
                *chosen,
            ]
            run(tool, command, options.out, end - time.monotonic())
    libraries = [str(path.resolve()) for path in options.libraries]
    command = [sys.executable, str(VARIANTS), str(options.out), "--libraries", *libraries]
    run("timings", command, options.out, max(20.0, end - time.monotonic()))


if __name__ == "__main__":
    main()
