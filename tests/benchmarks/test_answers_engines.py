"""Engines side by side: what each leaves, and what is said of one that fails."""

import argparse
import itertools
import json
import os
import sys
import threading
import time
from types import SimpleNamespace

import answers_engines
import pytest
from answers_engines import ENGINES, possible, run_engine, run_engines
from serve_answers import ANSWERS, main, run_all, run_collect

from quantmla.errors import UsageError

SCRIPT = """
import json, os, sys
from pathlib import Path
command, checkpoint, file = sys.argv[1:4]
config = json.loads((Path(checkpoint) / "config.json").read_text())
name = config["quantmla_config"]["format"]["content_bits"]
if command == "collect":
    if "--drafts 3" in " ".join(sys.argv):
        raise SystemExit("no engine today")
    runner = "V2" if os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1" else "V1"
    parallel = int(sys.argv[-1])
    found = {"format": f"c{name}r4", "runner": runner, "drafts": 0, "tensor_parallel": parallel}
    Path(file).write_text(json.dumps(found | {"environment": {}}))
else:
    print("a word of transformers")
    runner = json.loads(Path(file).read_text())["runner"]
    print(json.dumps({"case": "chat", "fault": "rms" if runner == "V2" and name == 2 else None}))
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    monkeypatch.setattr(answers_engines, "SCRIPT", path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)


def test_two_gpus_run_all_engines_and_one_those_that_fit():
    assert possible(2) == list(ENGINES)
    assert possible(1) == [name for name in ENGINES if name != "c4r4-v2-2gpus"]


def test_an_engine_leaves_answers_and_lines(script, tmp_path):
    lines = run_engine(tmp_path / "one", ENGINES["c4r4-v2-2gpus"])
    assert lines == [{"case": "chat", "fault": None}]
    found = json.loads((tmp_path / "one" / "answers.json").read_text())
    assert (found["runner"], found["tensor_parallel"], found["format"]) == ("V2", 2, "c4r4")
    assert json.loads((tmp_path / "one" / "lines.json").read_text()) == lines


def test_engines_that_fail_or_answer_wrongly_are_named(script, tmp_path, capsys):
    options = argparse.Namespace(work=tmp_path / "w", engines=None, output=tmp_path / "rows.json")
    options.engines = ["c4r4-v1", "c2r4-v2", "c4r4-v1-drafts"]
    assert not run_all(options)
    said = capsys.readouterr().out
    assert "c4r4-v1: 1 cases, faults: none" in said
    assert "c2r4-v2: 1 cases, faults: {'chat': 'rms'}" in said
    assert "c4r4-v1-drafts: no answers, see" in said
    assert "no engine today" in (tmp_path / "w" / "c4r4-v1-drafts" / "log.txt").read_text()
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {row["run"] for row in rows} == {"c4r4, V1 runner", "c2r4, V2 runner"}
    options.engines = ["c4r4-v1"]
    with pytest.raises(UsageError, match="c4r4-v1 exists"):
        list(run_engines(options.work, options.engines))
    with pytest.raises(UsageError, match=r"rows\.json is not a folder"):
        list(run_engines(options.output, options.engines))
    options.work = tmp_path / "again"
    assert run_all(options)


def test_an_engine_that_hangs_is_ended(tmp_path, monkeypatch):
    path = tmp_path / "script.py"
    path.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(answers_engines, "SCRIPT", path)
    monkeypatch.setattr(answers_engines, "SECONDS", 0.5)
    assert run_engine(tmp_path / "one", ENGINES["c4r4-v1"]) is None
    assert "no end after 0.5 s" in (tmp_path / "one" / "log.txt").read_text()


@pytest.mark.parametrize(("cpus", "most"), [(1, 1), (3, 1), (4, 2), (64, 3)])
def test_no_more_engines_at_once_than_cpus_can_start(cpus, most, tmp_path, monkeypatch):
    running, seen = threading.Semaphore(0), []
    first, together = itertools.count(), threading.Barrier(most)

    def run(folder, engine):
        running.release()
        if next(first) < most:
            together.wait(60)
        time.sleep(0.05)  # in which one too many would begin
        seen.append(running._value)
        running.acquire()
        return []

    monkeypatch.setattr(answers_engines, "run_engine", run)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    names = ["c4r4-v1", "c4r4-v2", "c2r4-v1"]
    assert {name for name, _ in run_engines(tmp_path, names)} == set(names)
    assert max(seen) == most


def test_cases_before_the_end_of_an_engine_are_kept(tmp_path, monkeypatch):
    def collect(checkpoint, text, drafts, tensor_parallel):
        yield {"requests": [1]}
        yield {"requests": [1, 2]}
        if drafts:
            raise RuntimeError("the engine died")

    monkeypatch.setitem(sys.modules, "answers_collect", SimpleNamespace(collect=collect))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    file, part = tmp_path / "answers.json", tmp_path / "answers.json.part"
    options = argparse.Namespace(checkpoint="nano", file=file, drafts=3, tensor_parallel=1)
    with pytest.raises(RuntimeError):
        run_collect(options)
    assert json.loads(part.read_text()) == {"requests": [1, 2]}
    assert not file.exists()
    options.drafts = 0
    assert run_collect(options)
    assert json.loads(file.read_text()) == {"requests": [1, 2]}
    assert not part.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["all", "w"], "needs 1 GPU(s), and torch sees 0"),
        (["all", "w", "--engines", "c4r4-v2-2gpus"], "needs 2 GPU(s), and torch sees 0"),
        (["all", "w", "--output", "none/rows.json"], "is not a file in a folder that exists"),
        (["all", "w", "--output", "other.json"], "'other.json' is no earlier result"),
        (["collect", "nano", "answers.json"], "needs 1 GPU(s), and torch sees 0"),
        (["collect", "nano", "answers.json", "--drafts", "-1"], "'-1' is not a whole number"),
        (["compare", "none", "none"], "none cannot be read: No such file or directory"),
        (["compare", "nano", "other.json"], "other.json is not a file with environment, format"),
        (["compare", "none", "answers.json"], "no model at 'none'"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_done_is_one_sentence(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["serve_answers.py", *arguments])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "answers.json").write_text(json.dumps(dict.fromkeys(ANSWERS, 0) | {"requests": []}))
    with pytest.raises(SystemExit, match="2"):
        main()
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
