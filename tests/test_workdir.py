"""Work folders: ours, another run's, somebody else's."""

import errno
import json
import os
from pathlib import Path

import pytest
from killed import killed_before

from quantmla.errors import QuantMLAError, UsageError
from quantmla.workdir import (
    EMPTYING,
    STATE,
    UNFINISHED,
    check_file,
    check_makeable,
    check_workdir,
    empty_workdir,
    is_workdir,
    mark_workdir,
    remove_workdir,
    write_whole,
)

RUN = {"model": "abc", "seed": 0}


def test_a_place_for_an_output_is_tried_out_and_left_as_it_was(tmp_path: Path):
    (tmp_path / "file").touch()
    (tmp_path / "away").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(tmp_path.iterdir())
    for name in ("a/b/c", "a/../b", ".", "away/.."):
        check_makeable(tmp_path / name, tmp_path)
        check_file(tmp_path / name / "x.json")
    for name in ("file", "file/x", "away", "loop", "b/" + "a" * 300, "a\0b"):
        with pytest.raises(UsageError, match=r"^output \S+ cannot be written: "):
            check_makeable(tmp_path / name, tmp_path)
    for name in ("file/x", "a" * 250):
        with pytest.raises(UsageError, match=r"^output \S+ cannot be written: "):
            check_file(tmp_path / name)
    with pytest.raises(UsageError, match="is a folder: name a file"):
        check_file(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_a_marked_folder_is_taken_up_by_the_same_run_alone(tmp_path: Path):
    work = tmp_path / "work"
    check_workdir(work, RUN, resume=False)
    mark_workdir(work, RUN)
    check_workdir(work, RUN, resume=True)
    with pytest.raises(UsageError, match="unfinished run: go on with --resume"):
        check_workdir(work, RUN, resume=False)
    with pytest.raises(UsageError, match="another run, with other seed: remove it"):
        check_workdir(work, RUN | {"seed": 1}, resume=True)
    (work / STATE).write_text("{")
    with pytest.raises(QuantMLAError, match="is damaged"):
        check_workdir(work, RUN, resume=True)


def test_a_folder_killed_before_its_mark_is_free(tmp_path: Path):
    (tmp_path / (STATE + UNFINISHED)).write_text("{")
    check_workdir(tmp_path, RUN, resume=False)


def test_a_folder_of_somebody_else_stays(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("years")
    with pytest.raises(UsageError, match="no work folder"):
        check_workdir(tmp_path, RUN, resume=True)
    empty_workdir(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years"


def test_files_replace_what_was_there_whole(tmp_path: Path):
    write_whole(tmp_path / "a.json", json.dumps([1]).encode())
    write_whole(tmp_path / "a.json", json.dumps([2]).encode())
    assert json.loads((tmp_path / "a.json").read_text()) == [2]
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_write_that_fails_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="File too large") as caught:
        write_whole(tmp_path / "a.json", b"[1]")
    assert caught.value.filename == str(tmp_path / "a.json")
    assert not list(tmp_path.iterdir())


def test_a_work_folder_inside_another_goes_with_it(tmp_path: Path):
    outer, inner = tmp_path / "work", tmp_path / "work" / "fit.work"
    for folder in (outer, inner):
        mark_workdir(folder, RUN)
        write_whole(folder / "layer_0000.json", b"{}")
    (outer / "killed.work").mkdir()  # its mark went, and then the run was killed
    empty_workdir(outer)
    assert list(outer.iterdir()) == []
    remove_workdir(outer)
    remove_workdir(outer)
    assert not outer.exists()


def filled(outer: Path) -> None:
    """A run's folder with another run's in it, one of them with a file that is not finished."""
    for folder in (outer, outer / "fit.work"):
        mark_workdir(folder, RUN)
        write_whole(folder / "layer_0000.json", b"{}")
        (folder / ("hidden_1.safetensors" + UNFINISHED)).write_text("")
    (outer / "begun.work").mkdir()
    (outer / "begun.work" / (STATE + UNFINISHED)).write_text("{")


def test_a_kill_while_a_folder_is_emptied_leaves_all_of_it_or_a_free_one(tmp_path: Path):
    other, whole = RUN | {"seed": 1}, 0
    for change in range(100):
        work = tmp_path / f"{change}.work"
        filled(work)
        before = sorted(path.name for path in work.iterdir())
        if not killed_before(change, work, lambda work=work: empty_workdir(work)):
            assert list(work.iterdir()) == []
            break
        if is_workdir(work):
            assert sorted(path.name for path in work.iterdir()) == before
            check_workdir(work, RUN, resume=True)
            whole += 1
            continue
        check_workdir(work, other, resume=change % 2 == 0)
        # another kill while the next run takes the folder
        killed_before(change % 5, work, lambda work=work: mark_workdir(work, other))
        check_workdir(work, other, resume=True)
        mark_workdir(work, other)
        assert [path.name for path in work.iterdir()] == [STATE]
    assert change == 12  # two renames, eight files, two folders: each was tried
    assert whole == 1


def test_a_folder_that_no_run_made_stays_in_a_work_folder(tmp_path: Path):
    filled(tmp_path)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("years")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="thesis is no work folder of quantmla: move it away"):
        empty_workdir(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "thesis" / "thesis.txt").unlink()
    empty_workdir(tmp_path)
    assert not (tmp_path / EMPTYING).exists()
