"""The command line: which flags there are, what they pass on, and how it ends."""

import argparse
import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import types

import pytest
import yaml

import quantmla
from quantmla.cli import build_parser, main
from quantmla.errors import QualityGateFailed, QuantMLAError, UnsupportedModel
from quantmla.recipe import AnalysisRequest, EvaluationRequest, Recipe, with_changes

FLAGS = {
    "inspect": ["MODEL", "--json"],
    "estimate": ["MODEL", "--format", "--context", "--batch", "--gpu-memory", "--json"],
    "quantize": [
        *("MODEL", "-o/--output", "--recipe", "--format", "--method", "--text"),
        *("--num-sequences", "--sequence-length", "--seed", "--device"),
        *("--resume", "--dry-run", "--overwrite", "--json", "--quiet"),
    ],
    "verify": ["OUT", "--against", "--json"],
    "eval": [
        *("MODEL_OR_OUT", "--baseline", "--methods", "--format", "--sinks", "--recent"),
        *("--unprotected", "--limit", "--device", "--text", "--context", "--json"),
        *("--tasks", "--data", "-o/--output", "--max-new-tokens", "--engine", "--resume"),
        "--run-code",
    ],
    "analyze": [
        *("MODEL", "-o/--output", "--preset", "--studies", "--text", "--budget"),
        *("--device", "--resume", "--overwrite", "--json", "--quiet"),
    ],
    "report": ["RUN", "-o/--output", "--overwrite", "--json"],
    "bench": [
        *("WHAT", "--backend", "--format", "--cases", "--seconds", "--libraries", "--output"),
    ],
    "serve": ["--print", "OUT", "VLLM_ARG"],
    "doctor": ["--json"],
}


@pytest.fixture
def calls(monkeypatch):
    """What the stage functions were called with; `calls.result` is returned."""
    seen = types.SimpleNamespace(result={"folder": "out"}, made=[])

    def stage(name):
        def run(*args, **kwargs):
            seen.made.append((name, args, kwargs))
            if isinstance(seen.result, BaseException):
                raise seen.result
            return seen.result

        return run

    stages = {
        "pipeline": ("quantize", "verify"),
        "evaluation": ("evaluate",),
        "analyze": ("analyze",),
    }
    for module, names in stages.items():
        fake = types.ModuleType(f"quantmla.{module}")
        for name in names:
            setattr(fake, name, stage(name))
        monkeypatch.setitem(sys.modules, f"quantmla.{module}", fake)
        monkeypatch.setattr(quantmla, module, fake, raising=False)
    return seen


def test_the_flags_are_these_and_no_others():
    parser = build_parser()
    (subparsers,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    found = {
        name: [
            "/".join(a.option_strings) or a.metavar
            for a in sub._actions
            if not isinstance(a, argparse._HelpAction)
        ]
        for name, sub in subparsers.choices.items()
    }
    assert found == FLAGS


def test_help_imports_nothing_heavy():
    code = """
import sys
from quantmla.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
heavy = {"torch", "transformers", "pydantic", "rich"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "quantize" in done.stdout


@pytest.mark.parametrize("module", [["-m", "quantmla"]])
def test_version(module):
    done = subprocess.run([sys.executable, *module, "--version"], capture_output=True, text=True)
    assert done.stdout == f"quantmla {quantmla.__version__}\n"


def test_quantize_passes_a_recipe(calls, capsys):
    argv = "quantize nano -o out --format C2R4 --method rtn --seed 3 --num-sequences 5 --resume"
    assert main([*argv.split(), "--sequence-length", "128", "--text", "t", "--device", "cpu"]) == 0
    expected = with_changes(
        Recipe(),
        {
            "model.id": "nano",
            "output.folder": "out",
            "format.name": "c2r4",
            "transform.method": "rtn",
            "calibration.seed": 3,
            "calibration.num_sequences": 5,
            "calibration.sequence_length": 128,
            "calibration.text": "t",
            "calibration.device": "cpu",
        },
    )
    flags = {"resume": True, "dry_run": False, "overwrite": False, "progress": True}
    assert calls.made == [("quantize", (expected,), flags)]
    assert capsys.readouterr().out == "folder  out\n"


def test_flags_override_the_recipe(calls, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "model": {"id": "a/b"},
                "format": {"name": "c2r4", "sinks": 1, "layers": {0: "c4r4"}},
            }
        )
    )
    argv = ["quantize", "-o", "out", "--recipe", str(path), "--format", "c8r8"]
    assert main([*argv, "--dry-run", "--overwrite", "--quiet", "--json"]) == 0
    ((_, (recipe,), flags),) = calls.made
    assert (recipe.model.id, recipe.format.name, recipe.format.sinks) == ("a/b", "c8r8", 1)
    assert recipe.format.layers == {}  # one format was asked for, for all
    assert flags == {"resume": False, "dry_run": True, "overwrite": True, "progress": False}


def test_verify(calls, capsys):
    assert main(["verify", "out", "--against", "nano", "--json"]) == 0
    assert calls.made == [("verify", ("out",), {"against": "nano"})]
    assert json.loads(capsys.readouterr().out) == {"folder": "out"}


def test_eval_passes_a_request_and_writes_rows(calls, tmp_path, capsys):
    calls.result = [{"method": "rtn", "kl_mean": 0.25, "recall": float("nan")}]
    path = tmp_path / "rows.json"
    argv = ["eval", "out", "--baseline", "nano", "--methods", "rtn, quarot", "--format", "c4r4"]
    argv += ["--sinks", "0", "--recent", "64", "--context", "128", "--limit", "2"]
    assert main([*argv, "--json", str(path)]) == 0
    request = EvaluationRequest(
        model="out",
        baseline="nano",
        methods=("rtn", "quarot"),
        format="c4r4",
        sinks=0,
        recent=64,
        context=128,
        limit=2,
    )
    assert calls.made == [("evaluate", (request,), {"progress": True})]
    written = json.loads(path.read_text())
    assert written["rows"] == [{"method": "rtn", "kl_mean": 0.25, "recall": None}]
    assert written["header"]["versions"]["quantmla"] == quantmla.__version__
    assert [p.name for p in tmp_path.iterdir()] == ["rows.json"]
    assert "0.25" in capsys.readouterr().out


def test_analyze_passes_a_request(calls, capsys):
    argv = [
        "analyze",
        "nano",
        "-o",
        "out",
        "--preset",
        "paper",
        "--studies",
        "gain, bound",
        "--budget",
        "94",
    ]
    argv += ["--text", "a.txt", "--text", "b.txt", "--device", "cpu", "--resume", "--overwrite"]
    assert main([*argv, "--quiet"]) == 0
    request = AnalysisRequest(
        model="nano",
        output="out",
        preset="paper",
        studies=("gain", "bound"),
        texts=("a.txt", "b.txt"),
        budget=94.0,
        device="cpu",
        resume=True,
        overwrite=True,
    )
    assert calls.made == [("analyze", (request,), {"progress": False})]
    assert capsys.readouterr().out == "folder  out\n"


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (QuantMLAError("bad\n  thing"), 1, "bad thing"),
        (UnsupportedModel("no latent"), 3, "no latent"),
        (QualityGateFailed("worse"), 4, "worse"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "full", "out/x"), 1, "no space left on device: out/x"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), 1, "no space left"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(calls, capsys, error, code, words):
    calls.result = error
    assert main(["verify", "out"]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("quantmla: error: ")
    assert words in shown.err
    assert shown.err.count("\n") == 1


def test_our_own_faults_keep_their_traceback(calls):
    calls.result = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        main(["verify", "out"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "COMMAND"),
        (["quantise"], "'quantise'"),
        (["quantize", "-o", "out"], "MODEL"),
        (["quantize", "nano"], "-o OUT"),
        (["quantize", "nano", "-o", "out", "--format", "c9r4"], "'c9r4'"),
        (["quantize", "nano", "-o", "out", "--num-sequences", "0"], "'0' is not a whole number"),
        (["quantize", "nano", "-o", "out", "--recipe", "absent.yaml"], "absent.yaml"),
        (["eval", "nano", "--unprotected", "--sinks", "4"], "--unprotected"),
        (["eval", "nano", "--json", "absent/rows.json"], "absent/rows.json"),
        (["eval", "nano", "--json", "x" * 250], "cannot be written: File name too long"),
        (["eval", "nano", "--tasks", "piqa"], "-o RUN"),
        (["eval", "nano", "--tasks", "piqa", "-o", ""], "-o RUN"),
        (
            ["eval", "nano", "--tasks", "piqa", "-o", "r", "--context", "9"],
            "--context means nothing with --tasks: drop it",
        ),
        (["eval", "nano", "--run-code", "--data", "d"], "--data, --run-code mean nothing without"),
        (["eval", "nano", "--tasks", "piqa", "-o", "r", "--engine", "x"], "'x'"),
        (["eval", "nano", "--resume"], "--resume means nothing without --tasks: drop it"),
        (["eval", "nano", "--data", ""], "--data means nothing without --tasks: drop it"),
        (["eval", "nano", "--json", ""], "'' names no file or folder"),
        (["quantize", "-o", "out", "--recipe", ""], "'' names no file or folder"),
        (["quantize", "nano", "-o", "out", "--format", ""], "unknown cache format ''"),
        (["estimate", "nano", "--gpu-memory", "lots"], "'lots'"),
        (["estimate", "nano", "--form", "c4r4"], "--form"),
        (["verify", "out", "--bogus"], "--bogus"),
        (["analyze", "nano"], "-o/--output"),
        (["analyze", "nano", "-o", "out", "--budget", "much"], "'much'"),
        (["analyze", "nano", "-o", "out", "--studies", ","], "',' names none"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(calls, capsys, argv, words):
    assert main(argv) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("quantmla: error: ")
    assert words in shown
    assert shown.count("\n") == 1
    assert calls.made == []


def test_estimate_prints_json(capsys):
    assert main(["estimate", "nano", "--format", "c4r4", "--context", "4096", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["cached_layers"], found["bf16_bytes_per_token"]) == (8, 8 * 384)


def test_inspect_of_an_unsupported_model_ends_with_its_own_code(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama"}))
    assert main(["inspect", str(path), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["supported"] is False


def test_doctor(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["quantmla"] == quantmla.__version__
    assert found["works"]["quantize, verify, eval"].startswith("yes")


def test_a_fault_of_the_system_is_one_line_with_its_place(calls, capsys):
    calls.result = PermissionError(errno.EACCES, "Permission denied", "out/x")
    assert main(["verify", "out"]) == 1
    assert capsys.readouterr().err == "quantmla: error: Permission denied: out/x\n"


@pytest.mark.parametrize("model", ["a" * 5000, "a\0b", "", " "])
def test_what_cannot_be_a_path_is_no_model(model, capsys):
    for command in ("inspect", "estimate", "verify", "eval"):
        assert main([command, model]) == 1
        shown = capsys.readouterr().err
        assert shown.startswith("quantmla: error: no model at ")
        assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["eval", "nano", "--methods", ","], "',' names none"),
        (["eval", "nano", "--limit", "9" * 5000], "at most 18 digits"),
        (["estimate", "nano", "--context", "\u0663"], "is not a whole number"),
        (["estimate", "nano", "--gpu-memory", "9" * 400 + "GB"], "memory size"),
        (["quantize", "nano", "-o", "out", "--seed", str(2**32)], "calibration.seed"),
        (["estimate", "nano", "--format", ""], "unknown cache format ''"),
        (["eval", "nano", "--format", ""], "unknown cache format ''"),
        (["eval", "nano", "--device", ""], "device ''"),
        (["analyze", "nano", "-o", "out", "--device", ""], "device ''"),
    ],
)
def test_numbers_and_lists_that_cannot_be_meant(argv, words, capsys):
    assert main(argv) == 2
    shown = capsys.readouterr().err
    assert words in shown
    assert shown.count("\n") == 1


def test_a_method_named_twice_is_measured_once(calls):
    calls.result = []
    assert main(["eval", "nano", "--methods", "rtn,quarot,rtn"]) == 0
    ((_, (request,), _),) = calls.made
    assert request.methods == ("rtn", "quarot")


@pytest.mark.parametrize(
    ("redirect", "code", "said"),
    [(">&-", 0, ""), ("> /dev/full", 1, "quantmla: error: no space left on device\n")],
)
def test_a_stdout_that_takes_nothing(redirect, code, said):
    command = f"'{sys.executable}' -m quantmla estimate nano {redirect}"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (code, said)


def test_a_reader_that_leaves_early_gets_no_traceback():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "quantmla", "estimate", "nano"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_terminal_without_the_letters_of_a_path(tmp_path):
    path = tmp_path / "m\u00fc.json"
    path.write_text(json.dumps({"model_type": "llama"}))
    done = subprocess.run(
        [sys.executable, "-m", "quantmla", "inspect", str(path)],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (3, b"")
    assert b"m\\xfc.json" in done.stdout


ROWS = [{"method": "rtn", "format": "c4r4", "kl_mean": 0.25}]


def test_eval_replaces_its_own_earlier_rows_and_no_other_file(calls, tmp_path, capsys):
    calls.result = ROWS
    path = tmp_path / "rows.json"
    argv = ["eval", "nano", "--json", str(path)]
    path.touch()  # as mktemp leaves it
    assert main(argv) == main(argv) == 0
    mine = json.loads(path.read_text())
    bench = {"header": mine["header"] | {"model": "nano"}, "rows": ROWS}
    others = [
        {"architectures": ["A"]},
        {"rows": ROWS},
        bench,
        mine | {"rows": []},
        [],
        mine["rows"],
    ]
    for text in (*map(json.dumps, others), "model: nano", "\udc80"):
        path.write_bytes(text.encode(errors="surrogateescape"))
        before, calls.made[:] = path.read_bytes(), []
        assert main(argv) == 2
        assert f"{path} exists and holds no rows of an earlier eval" in capsys.readouterr().err
        assert (path.read_bytes(), calls.made) == (before, [])
    assert main(["eval", "nano", "--json", "/dev/null"]) == 2


@pytest.mark.parametrize("file_too", [True, False])
@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "full"), SystemExit(1)])
def test_rows_are_written_whatever_becomes_of_stdout(
    calls, tmp_path, monkeypatch, capsys, fault, file_too
):
    """rich ends a process whose reader left (SystemExit)."""

    def fails(*args):
        raise fault

    def full(*args):
        raise OSError(errno.EIO, "input/output error", "rows.json")

    calls.result, path = ROWS, tmp_path / "rows.json"
    argv = ["eval", "nano", "--json", str(path)]
    monkeypatch.setattr("quantmla.present.show_rows", fails)
    if file_too:
        monkeypatch.setattr("quantmla.present.write_rows", full)
        assert main(argv) == 1
        assert capsys.readouterr().err == "quantmla: error: input/output error: rows.json\n"
        return
    if isinstance(fault, SystemExit):
        with pytest.raises(SystemExit):
            main(argv)
    else:
        assert main(argv) == 1
    assert json.loads(path.read_text())["rows"] == ROWS


@pytest.mark.parametrize("kind", [ModuleNotFoundError, QuantMLAError])
def test_an_error_that_a_swallowed_interrupt_leads_to_is_an_interrupt(
    calls, monkeypatch, capsys, kind
):
    """As in imports: torch goes on without numpy, whose half then fails transformers'."""

    def swallowed(*args, **kwargs):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise kind("Could not import module 'DeepseekV3Model'")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(quantmla.pipeline, "verify", swallowed)
    try:
        assert main(["verify", "out"]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "quantmla: error: interrupted\n"


DELETED = """
import signal, sys, time
from quantmla import cli

class Group:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def slow(args):
    Group()
    time.sleep(60)

cli._doctor = slow
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(cli.main(["doctor"]))
"""


def test_an_interrupt_while_an_object_is_deleted_is_not_lost():
    done = subprocess.run(
        [sys.executable, "-c", DELETED], capture_output=True, text=True, timeout=50
    )
    assert (done.returncode, done.stderr) == (130, "quantmla: error: interrupted\n")


def test_rows_that_cannot_be_written_are_still_shown(calls, tmp_path, monkeypatch, capsys):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device", "rows.json")

    monkeypatch.setattr("quantmla.present.write_rows", full)
    calls.result = [{"method": "rtn", "kl_mean": 0.25}]
    assert main(["eval", "nano", "--json", str(tmp_path / "rows.json")]) == 1
    shown = capsys.readouterr()
    assert "0.25" in shown.out
    assert shown.err == "quantmla: error: no space left on device: rows.json\n"
