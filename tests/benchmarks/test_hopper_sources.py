"""Versions of the Hopper kernel are read from folders; what needs a GPU is not tried here."""

import shutil
from pathlib import Path

import hopper_sources
import pytest

from quantmla.errors import QuantMLAError
from quantmla.kernels import cuda
from quantmla.kernels.cuda import backend, build
from quantmla.kernels.cuda.arguments import shared_bytes
from quantmla.quant.format import parse_format
from quantmla.quant.layout import page_layout

LAYOUT = page_layout(512, 64, parse_format("c4r4"))


def test_each_version_has_its_own_sources(tmp_path):
    here = Path(cuda.__file__).parent
    for name in ("as_is", "changed"):
        shutil.copytree(here, tmp_path / name)
    source = tmp_path / "changed" / "schedule.cuh"
    source.write_text(source.read_text().replace("#define ITEM_COST 8", "#define ITEM_COST 9"))
    one, other = hopper_sources.versions_in(tmp_path)
    assert (one.name, other.name) == ("as_is", "changed")
    macros = build.defines(backend.WIDE, LAYOUT)
    assert one.build.text(macros) == build.text(macros)
    assert "#define ITEM_COST 9" in other.build.text(macros)
    assert one.arguments.shared_bytes(backend.WIDE, LAYOUT) == shared_bytes(backend.WIDE, LAYOUT)


def test_a_folder_without_versions(tmp_path):
    with pytest.raises(QuantMLAError, match="no folder with a build"):
        hopper_sources.versions_in(tmp_path)
