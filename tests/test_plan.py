"""What --dry-run says, against what a run does."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from quantmla.cli import main

Tiny = Callable[[str], Path]
AMOUNTS = ["--num-sequences", "3", "--sequence-length", "64", "--method", "rtn", "--device", "cpu"]


@pytest.mark.parametrize(("case", "layers"), [("deepseek_v3", 2), ("kimi_linear", 1)])
def test_sizes_are_those_of_the_run_and_nothing_is_written(
    case: str, layers: int, tiny_model: Tiny, short_text: Path, tmp_path: Path, capsys
):
    model, out = tiny_model(case), tmp_path / "far" / "out"
    argv = ["quantize", str(model), "-o", str(out), "--text", str(short_text), *AMOUNTS]
    assert main([*argv, "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layers"] == layers
    assert found["cache_format"] == "c4r4"
    # 40 of codes, 9 of groups, 3 of the mean and padding
    assert found["cache_bytes_per_token_and_layer"] == 52
    assert found["calibration_tokens"] == 64 * (3 + 1)
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    assert found["output_disk_bytes"] == weights
    assert found["memory_bytes"] > found["work_disk_bytes"]
    hidden, rank, rope, heads = 64, 64, 16, 4
    rows = 4 * rank + 2 * (rope + heads * (16 + rope))  # float32 latents; keys and queries
    assert found["work_disk_bytes"] == found["calibration_tokens"] * (2 * 2 * hidden + rows)
    assert found["free_disk_bytes"] > found["output_disk_bytes"]
    assert found["capture_seconds"] >= 0
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_leaves_an_earlier_output_and_its_work_folder(
    tiny_model: Tiny, short_text: Path, tmp_path: Path, monkeypatch, capsys
):
    out, work = tmp_path / "out", tmp_path / "out.work"
    out.mkdir()
    (out / "config.json").write_text('{"quantmla_config": {}}')
    work.mkdir()
    (work / "state.json").write_text("{}")
    argv = ["quantize", str(tiny_model("deepseek_v3")), "-o", str(out), "--text", str(short_text)]
    assert main([*argv, *AMOUNTS, "--dry-run", "--overwrite"]) == 0
    assert main([*argv, *AMOUNTS, "--dry-run", "--overwrite", "--resume"]) == 2
    assert "holds another run" in capsys.readouterr().err
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert main([*argv, *AMOUNTS, "--dry-run", "--overwrite"]) == 1
    assert "MiB free" in capsys.readouterr().err
    assert (work / "state.json").exists()
    assert (out / "config.json").exists()
