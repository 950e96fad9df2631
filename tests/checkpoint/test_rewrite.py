import errno
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import build

import quantmla.checkpoint.rewrite as rewrite
from quantmla.checkpoint.rewrite import add_keys, rewrite_checkpoint
from quantmla.checkpoint.source import TensorSource, open_source
from quantmla.errors import QuantMLAError, UsageError

KV_B = "model.layers.0.self_attn.kv_b_proj.weight"


@pytest.fixture
def source(tmp_path: Path) -> TensorSource:
    folder = build("youtu", tmp_path / "model")
    (folder / "modeling_own.py").write_text("X = 1\n")
    (folder / "chat").mkdir()
    (folder / "chat" / "template.jinja").write_text("{{ x }}")
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("ref")
    (folder / "consolidated.safetensors").write_bytes(b"another copy of the weights")
    return open_source(folder)


def files(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


def write(
    source: TensorSource, out: Path, replace: Mapping[str, Any] | None = None, **options: Any
):
    defaults = {"config_update": {"quantmla_config": {"version": 1}}, "extra_files": {}}
    return rewrite_checkpoint(source, replace or {}, out, **(defaults | options))


def test_all_files_but_the_config_are_copied_bit_by_bit(source: TensorSource, tmp_path: Path):
    before = files(source.path)
    done = write(source, tmp_path / "out", extra_files={"recipe.yaml": "a: 1\n", "deep/raw": b"\0"})
    after = files(tmp_path / "out")
    left = {"consolidated.safetensors", ".git/HEAD"}
    assert set(after) == set(before) - left | {"recipe.yaml", "deep/raw"}
    assert done.left_out == ("consolidated.safetensors",)
    assert done.replaced == ()
    for name in set(before) - left - {"config.json"}:
        assert after[name] == before[name], name
    assert after["recipe.yaml"] == b"a: 1\n"
    assert files(source.path) == before


def test_config_gains_keys_and_changes_in_no_other_byte(source: TensorSource, tmp_path: Path):
    write(source, tmp_path / "out")
    old = (source.path / "config.json").read_text()
    new = (tmp_path / "out" / "config.json").read_text()
    assert new.startswith(old.rstrip().removesuffix("}").rstrip())
    assert list(json.loads(new)) == [*json.loads(old), "quantmla_config"]
    assert '\n  "quantmla_config": {\n    "version": 1\n  }\n}' in new


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"a": 1}',
        '{\n  "a": 1.0e-5,\n  "b": {"c": [1,2]}\n}\n',
        '{\r\n\t"ü": "é"\r\n}',
        ' {"a":1} ',
    ],
)
def test_keys_are_added_to_any_layout(text: str):
    update = {"x": {"y": [1, "}"]}, "z": None}
    new = add_keys(text, update)
    assert json.loads(new) == json.loads(text) | update
    assert new.startswith(text.rstrip().removesuffix("}").rstrip())
    assert add_keys(text, {}) == text


def test_a_checkpoint_that_has_the_key_is_refused(source: TensorSource, tmp_path: Path):
    write(source, tmp_path / "out")
    with pytest.raises(QuantMLAError, match="already has quantmla_config: start from the original"):
        write(open_source(tmp_path / "out"), tmp_path / "twice")


def test_replaced_tensors_are_there_and_no_others_change(source: TensorSource, tmp_path: Path):
    new = torch.full(source.shape(KV_B), 2.5)
    done = write(source, tmp_path / "out", {KV_B: lambda: new.T.contiguous().T})
    out = open_source(tmp_path / "out")
    assert done.replaced == (KV_B,)
    assert out.names == source.names
    assert [s.header for s in out.shards] == [s.header for s in source.shards]
    for name in out.names:
        expected = new if name == KV_B else source.tensor(name)
        assert torch.equal(out.tensor(name), expected), name


@pytest.mark.parametrize("wrong", [torch.zeros(160, 64, dtype=torch.float64), torch.zeros(64, 160)])
def test_tensors_keep_their_dtype_and_shape(
    source: TensorSource, tmp_path: Path, wrong: torch.Tensor
):
    with pytest.raises(QuantMLAError, match=rf"{KV_B} must stay torch.float32 \(160, 64\)"):
        write(source, tmp_path / "out", {KV_B: lambda: wrong})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_unknown_tensors_are_refused(source: TensorSource, tmp_path: Path):
    with pytest.raises(QuantMLAError, match=r"has no tensor \['nothing'\]"):
        write(source, tmp_path / "out", {"nothing": lambda: torch.zeros(1)})


def test_existing_output_needs_overwrite(source: TensorSource, tmp_path: Path):
    out = tmp_path / "out"
    write(source, out)
    (out / "stale").write_text("")
    with pytest.raises(
        UsageError, match=r"out exists: choose another output folder, or pass --over"
    ):
        write(source, out)
    assert (out / "stale").exists()
    write(source, out, overwrite=True)
    assert not (out / "stale").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out"]


def test_overwrite_spares_what_is_not_an_earlier_output(source: TensorSource, tmp_path: Path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "to_mother.txt").write_text("dear")
    (tmp_path / "file").write_text("x")
    for name in ("letters", "file"):
        with pytest.raises(UsageError, match=f"{name} is not an earlier output"):
            write(source, tmp_path / name, overwrite=True)
    assert (tmp_path / "letters" / "to_mother.txt").read_text() == "dear"
    (tmp_path / "empty").mkdir()
    write(source, tmp_path / "empty", overwrite=True)


def test_output_must_not_overlap_the_source(source: TensorSource, tmp_path: Path):
    link = tmp_path / "link"
    link.symlink_to(source.path)
    for out in (source.path, source.path / "inside", tmp_path, link, link / "inside"):
        with pytest.raises(UsageError, match="overlaps the model's own folder"):
            write(source, out, overwrite=True)


def test_a_disk_that_fills_leaves_nothing(source: TensorSource, tmp_path: Path, monkeypatch):
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(rewrite, "_copy_range", full)
    with pytest.raises(QuantMLAError, match="nothing of it was kept: the disk is full"):
        write(source, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_a_failed_overwrite_keeps_the_old_output(source: TensorSource, tmp_path: Path, monkeypatch):
    out = tmp_path / "out"
    write(source, out)
    before = files(out)
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if ".part-" in self.name:
            raise OSError(errno.EIO, "input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(QuantMLAError, match="input/output error"):
        write(source, out, overwrite=True)
    assert files(out) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out"]


def test_ctrl_c_leaves_nothing(source: TensorSource, tmp_path: Path):
    def interrupt() -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(
        KeyboardInterrupt, match=r"interrupted while writing .*nothing of it was kept"
    ):
        write(source, tmp_path / "out", {KV_B: interrupt})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("kind", [".part-", ".old-"])
def test_ctrl_c_around_the_last_renames_is_told_as_it_is(
    source: TensorSource, tmp_path: Path, monkeypatch, earlier: bool, kind: str
):
    """As a signal comes: just after the system renamed, before Python goes on."""
    out = tmp_path / "out"
    if earlier:
        write(source, out)
        (out / "old").touch()
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        rename(self, target)
        if kind in self.name or kind in Path(target).name:
            monkeypatch.setattr(Path, "rename", rename)
            raise KeyboardInterrupt
        return target

    monkeypatch.setattr(Path, "rename", interrupted)
    if kind == ".old-" and not earlier:
        write(source, out)
        return
    said = "it is whole" if kind == ".part-" else "nothing of it was kept"
    with pytest.raises(KeyboardInterrupt, match=f"interrupted while writing .*; {said}"):
        write(source, out, overwrite=earlier)
    assert (out / "old").exists() == (kind == ".old-")
    assert (out / "config.json").is_file()
    assert not list(tmp_path.glob("out.part-*"))
    write(source, out, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out"]


def test_space_is_checked_before_work(source: TensorSource, tmp_path: Path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(QuantMLAError, match=r"takes 0\.\d MiB, but .* has 0\.0 MiB free"):
        write(source, tmp_path / "out", {KV_B: lambda: pytest.fail("work was started")})


def test_folders_of_killed_runs_do_not_stay(tiny_checkpoint, tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    for name in (f"out.part-{dead.pid}", f"out.old-{dead.pid}", f"out.part-{os.getppid()}"):
        (tmp_path / name).mkdir()
    (tmp_path / f"other.part-{dead.pid}").mkdir()
    source = open_source(tiny_checkpoint("deepseek_v3"))
    rewrite_checkpoint(source, {}, tmp_path / "out", config_update={}, extra_files={})
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"out", f"out.part-{os.getppid()}", f"other.part-{dead.pid}"}
