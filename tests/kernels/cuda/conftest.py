"""Makes the emulation importable from the tests beside it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def emulated_rows(tmp_path_factory: pytest.TempPathFactory):
    """Gives the library of "append" or "gather" for a format by its name."""
    from emulated_rows import library_of_rows

    folder = tmp_path_factory.getbasetemp() / "emulated_rows"
    folder.mkdir(exist_ok=True)
    return lambda name, fmt: library_of_rows(folder, name, fmt)
