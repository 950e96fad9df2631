"""One run at a time in a work folder."""

import subprocess
import sys
from pathlib import Path

import pytest

from quantmla.errors import QuantMLAError, UsageError
from quantmla.lock import sole_user


def test_a_second_run_is_refused_until_the_first_ends(tmp_path: Path):
    folder = tmp_path / "a" / "out.work"
    with sole_user(folder):
        with pytest.raises(UsageError, match="another run is using"), sole_user(folder):
            pass
        assert folder.is_dir()
    assert not folder.exists()  # nothing was kept in it


def test_a_killed_run_holds_no_lock(tmp_path: Path):
    code = """
import os, pathlib, sys
from quantmla.lock import sole_user
with sole_user(pathlib.Path(sys.argv[1])):
    os.kill(os.getpid(), 9)
"""
    folder = tmp_path / "out.work"
    done = subprocess.run([sys.executable, "-c", code, str(folder)])
    assert done.returncode == -9
    with sole_user(folder):
        (folder / "kept").touch()
    assert (folder / "kept").exists()


def test_a_place_where_no_folder_can_be(tmp_path: Path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "x", tmp_path / ("a" * 300)):
        with pytest.raises(QuantMLAError, match="cannot use"), sole_user(path):
            pass
