"""Every script of benchmarks/ and training/ says how it is used, without a GPU."""

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    path
    for folder in ("benchmarks", "training")
    for path in sorted((ROOT / folder).glob("*.py"))
    if "__main__" in path.read_text()
]


def run(path: Path, monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    monkeypatch.syspath_prepend(str(path.parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        return end.code
    return 0


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_help_is_printed(path, monkeypatch, capsys):
    assert run(path, monkeypatch, "--help") == 0
    assert "usage: " in capsys.readouterr().out


NO_GPU = "'cuda' is not on this machine"
NO_HOPPER = "needs a Hopper GPU, and torch sees none"
COUNT = "is not a whole number of at least"
REFUSED = [
    ("bench_analysis.py --device cuda", NO_GPU),
    ("bench_bit_grid.py --work new --windows -3", f"'-3' {COUNT} 1"),
    ("bench_bit_grid.py --work new", "sensitivity_c2r2.safetensors does not exist"),
    ("bench_bit_plan.py --work new --budget nan", "'nan' is not a number above 0"),
    ("bench_bit_plan.py --work new --budget 3", "less than the smallest formats take"),
    ("bench_bit_plan.py --work /proc/x", "output /proc/x cannot be written"),
    ("bench_calibration.py", NO_GPU),
    ("bench_calibration.py --length 0", f"'0' {COUNT} 1"),
    ("bench_choices.py --device cuda", NO_GPU),
    ("bench_choices.py --windows 1", "--windows 1: paired errors need at least 2"),
    ("bench_choices.py --output none/x.json", "is not a file in a folder that exists"),
    ("bench_context.py --work new", "no model at"),
    ("bench_quality.py --work new --windows 0", f"'0' {COUNT} 1"),
    ("bench_quality.py --work /proc/x", "output /proc/x cannot be written"),
    ("bench_quantisers.py --work /proc/x", "output /proc/x cannot be written"),
    ("bench_quantisers.py --work new --windows 0", f"'0' {COUNT} 1"),
    ("bench_quantisers.py --work new --windows 1", "--windows 1: paired errors need at least 2"),
    ("bench_quality.py --work new --out none/x.json", "is not a file in a folder that exists"),
    ("bench_tasks.py --work new --data none", "--data none is not a folder"),
    ("bench_tasks.py --work new --data . --needles nope", "unknown task 'nope'"),
    ("decode_variants.py new", NO_GPU),
    ("eval_vllm.py --work new --data none", "--data 'none' is not a folder"),
    ("eval_vllm.py --work new --data . --tasks niah@512", "is needed|capability 9.0"),
    ("gpu_session.py new", NO_GPU),
    ("hopper_overlap.py", NO_HOPPER),
    ("hopper_products.py", NO_HOPPER),
    ("hopper_session.py", NO_HOPPER),
    ("hopper_session.py --only nope", "invalid choice: 'nope'"),
    ("hopper_sources.py none", "none has no folder with a build.py"),
    ("host_overhead.py --layers 0", f"'0' {COUNT} 1"),
    ("host_overhead.py --layers 1", "--layers 1: the first needs others"),
    ("native_steps.py new", NO_GPU),
    ("record_run.py none", "none is no folder that quantize wrote: no config.json"),
    ("rows_variants.py new", NO_GPU),
    ("serve_answers.py all new", r"needs 1 GPU\(s\)"),
    ("serve_families.py --families nope", "--families nope: none of deepseek_v2, "),
    ("serve_families.py", "is needed|capability 9.0"),
    ("serve_profile.py zzz", "invalid choice: 'zzz'"),
    ("serve_profile.py c4r4", r"needs 1 GPU\(s\)"),
    ("serve_scheduler.py --jobs nope", r"--jobs \['nope'\] are in no name of '6 x "),
    ("serve_scheduler.py --variants nope", "are none of bf16, c4r4, c2r4"),
    ("wide_nano.py /proc/x", "output /proc/x cannot be written"),
]


@pytest.mark.parametrize(("line", "words"), REFUSED, ids=[line for line, _ in REFUSED])
def test_what_cannot_be_meant_is_refused_in_a_sentence_before_work(
    line, words, tmp_path, monkeypatch, capsys
):
    name, *arguments = line.split()
    if name in ("host_overhead.py", "serve_scheduler.py"):
        pytest.importorskip("vllm", reason="vllm is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert run(ROOT / "benchmarks" / name, monkeypatch, *arguments) == 2
    *_, said = capsys.readouterr().err.splitlines()
    assert said.startswith(f"{name}: error: ")
    assert re.search(words, said)
    assert not list(tmp_path.iterdir())
