"""Builds append and gather for a CPU with emulator.hpp."""

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from quantmla.kernels.cuda.build import source
from quantmla.kernels.cuda.rows import (
    SHARED_BYTES,
    SOURCES,
    AppendArguments,
    GatherArguments,
    defines,
)
from quantmla.quant.format import parse_format
from quantmla.quant.layout import page_layout

HERE = Path(__file__).parent
ENTRY = """
extern "C" int argument_bytes() { return (int)sizeof(ARGUMENTS); }
extern "C" int shared_bytes() { return USED_SHARED; }
extern "C" void run(const ARGUMENTS* p, int blocks) {
  for (int x = 0; x < blocks; x++) {
    emulator::block_x = (u32)x;
    emulator::body = [&] { KERNEL(*p); };
    emulator::run_block(USED_THREADS);
  }
}
"""
KERNELS = {
    "append": ("AppendArguments", "APPEND_SHARED", AppendArguments),
    "gather": ("GatherArguments", "GATHER_SHARED", GatherArguments),
}


@cache
def library_of_rows(folder: Path, name: str, fmt: str) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("the emulator needs g++")
    arguments, shared, structure = KERNELS[name]
    entry = ENTRY.replace("ARGUMENTS", arguments).replace("USED_SHARED", shared)
    entry = entry.replace("USED_THREADS", shared.replace("SHARED", "THREADS"))
    code = [
        (HERE / "emulator.hpp").read_text(),
        (HERE / "emulated_places.cpp").read_text(),
        *(source(part) for part in SOURCES[name] if part != "device.cuh"),
        entry.replace("KERNEL", name),
    ]
    path = folder / f"{name}_{fmt}.cpp"
    path.write_text("\n".join(code).replace("#pragma once", ""))
    macros = defines(page_layout(512, 64, parse_format(fmt)))
    command = [compiler, "-std=c++20", "-O1", "-w", "-shared", "-fPIC", *macros, str(path)]
    subprocess.run([*command, "-o", str(path.with_suffix(".so"))], check=True, timeout=100)
    library = ctypes.CDLL(str(path.with_suffix(".so")))
    assert library.argument_bytes() == ctypes.sizeof(structure)
    assert library.shared_bytes() == SHARED_BYTES[name]
    return library
