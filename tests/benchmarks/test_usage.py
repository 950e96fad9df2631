"""Every script of benchmarks/ and training/ says how it is used, without a GPU."""

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


@pytest.mark.parametrize("name", ["hopper_products.py", "hopper_overlap.py"])
def test_without_a_gpu_they_say_that_they_need_one(name, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run(ROOT / "benchmarks" / name, monkeypatch) == 2
    assert "needs a Hopper GPU, and torch sees none" in capsys.readouterr().err
