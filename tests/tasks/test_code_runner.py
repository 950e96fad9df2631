"""Programs run apart, limited, and are judged by what they do."""

import json
import time

import pytest

from quantmla.tasks import code_runner
from quantmla.tasks.code_runner import passes_check, passes_tests, run


def test_a_program_prints_what_it_read():
    assert run("print(input()[::-1])", "abc") == "cba\n"


@pytest.mark.parametrize(
    "program",
    [
        "1 / 0",
        "raise SystemExit(3)",
        "def",
        "while True:\n    print('x' * 1000)",
        "x = 'a' * 2**33",
    ],
    ids=["error", "exit", "syntax", "endless output", "memory"],
)
def test_a_program_that_fails(program):
    assert run(program) is None


def test_an_endless_program_is_stopped_with_what_it_started():
    began = time.perf_counter()
    program = "import subprocess, time\nsubprocess.Popen(['sleep', '600'])\ntime.sleep(600)"
    assert run(program, seconds=1) is None
    assert time.perf_counter() - began < 300


def test_nothing_of_ours_is_in_its_environment(monkeypatch):
    monkeypatch.setenv("A_SECRET", "x")
    assert run("import os\nprint('A_SECRET' in os.environ)") == "False\n"


def test_a_program_that_leaves_before_its_checks_has_not_passed():
    good = "def f(x):\n    return x + 1\ndef check(g):\n    assert g(1) == 2\n"
    assert passes_check(good + "check(f)\n")
    assert not passes_check(good.replace("x + 1", "x") + "check(f)\n")
    assert not passes_check("raise SystemExit(0)\n" + good + "check(f)\n")


def case(given: str, expected: str, kind: str) -> dict:
    return {"input": given, "output": expected, "testtype": kind}


def test_printed_words_decide():
    tests = json.dumps([case("2 3", "5 \n", "stdin"), case("1 1", "2", "stdin")])
    assert passes_tests("print(sum(map(int, input().split())), '')", tests, "")
    assert not passes_tests("print(5)", tests, "")
    assert not passes_tests("print(5)", "[]", "")


def test_a_method_is_called_with_every_line():
    tests = json.dumps([case("[1, 2]\n3", "[4, 5]", "functional")])
    method = "class Solution:\n    def add(self, xs: List[int], y: int):\n        print('noise')\n"
    assert passes_tests(method + "        return [x + y for x in xs]\n", tests, "add")
    assert not passes_tests(method + "        return [x - y for x in xs]\n", tests, "add")
    assert passes_tests("def add(xs, y):\n    return [x + y for x in xs]", tests, "add")
    assert not passes_tests("def sub(xs, y):\n    return 0", tests, "add")


def test_limits_are_set_in_the_program_itself():
    assert str(code_runner.MEMORY_BYTES) in code_runner.LAUNCH
