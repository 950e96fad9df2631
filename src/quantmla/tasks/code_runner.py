"""Runs programs that a model wrote, one at a time, and says whether they did what they should.

Each runs in a Python of its own, in an empty folder, with no environment, limited in time, memory
and size of files. That stops accidents, not malice: there is no jail, and the network is not cut
off. Nothing here is called without the user's consent.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

TEST_SECONDS = 10
MEMORY_BYTES = 4 * 2**30
FILE_BYTES = 2**24  # also the most that a program can print
LAUNCH = f"""
import resource, runpy, sys
for limit, value in (("CPU", {TEST_SECONDS}), ("AS", {MEMORY_BYTES}), ("FSIZE", {FILE_BYTES})):
    resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (value, value))
runpy.run_path("program.py", run_name="__main__")
"""
# contests' solutions count on these names
IMPORTS = """
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from typing import *
import bisect, collections, functools, heapq, itertools, math, random, re, string, sys
"""
# reads the arguments of one call as JSON lines and prints its result as JSON
CALL = """
import json as _json, sys as _sys
_arguments = [_json.loads(line) for line in _sys.stdin.read().split("\\n") if line.strip()]
_owner = Solution() if "Solution" in globals() else None
_function = getattr(_owner, {name!r}) if _owner is not None else globals()[{name!r}]
_result = _json.dumps(_function(*_arguments))
print()
print(_result)
"""


def run(program: str, stdin: str = "", seconds: float = TEST_SECONDS) -> str | None:
    """What a program printed; None where it failed or was stopped."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "program.py").write_text(program, "utf-8", errors="backslashreplace")
        with open(folder / "printed", "w+b") as printed:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", LAUNCH],
                stdin=subprocess.PIPE,
                stdout=printed,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={},
                start_new_session=True,
            )
            try:
                process.communicate(stdin.encode("utf-8"), timeout=seconds)
            except subprocess.TimeoutExpired:
                return None
            finally:
                _end(process)
            printed.seek(0)
            out = printed.read()
    return out.decode("utf-8", errors="replace") if process.returncode == 0 else None


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Stops the program and whatever it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def passes_check(program: str) -> bool:
    """Whether a program that checks itself ends without an error."""
    done = "the checks are through"
    written = run(f"{program}\nprint({done!r})\n")
    return written is not None and written.rstrip().endswith(done)


def passes_tests(program: str, tests: str, function: str) -> bool:
    """Whether a program passes all tests, JSON of [{input, output, testtype}, ...].

    Programs are compared by what they print, word by word; with `function`, by what it returns.
    """
    cases: list[dict[str, Any]] = json.loads(tests)
    return bool(cases) and all(_passes(IMPORTS + program, case, function) for case in cases)


def _passes(program: str, case: dict[str, Any], function: str) -> bool:
    if case.get("testtype") != "functional":
        written = run(program, case["input"])
        return written is not None and _words(written) == _words(case["output"])
    written = run(program + "\n" + CALL.format(name=function), case["input"])
    if written is None:
        return False
    try:
        return bool(json.loads(written.rstrip().split("\n")[-1]) == json.loads(case["output"]))
    except ValueError:
        return False


def _words(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().split("\n")]
