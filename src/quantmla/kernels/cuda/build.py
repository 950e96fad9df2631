"""CUDA C++ to machine code: the kernels' sources, their compile-time constants, and NVRTC."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from quantmla.errors import QuantMLAError

if TYPE_CHECKING:  # a process that only compiles does not wait for torch
    from quantmla.quant.layout import PageLayout

_NARROW = (
    "device.cuh",
    "schedule.cuh",
    "tile.cuh",
    "arrivals.cuh",
    "rows.cuh",
    "products.cuh",
    "nibbles.cuh",
    "pages.cuh",
    "content{bits}.cuh",
    "scores.cuh",
    "producer.cuh",
    "query.cuh",
    "window.cuh",
    "softmax.cuh",
    "result.cuh",
    "decode.cu",
    "combine.cu",
)
_WIDE = (
    "device.cuh",
    "wide_device.cuh",
    "schedule.cuh",
    "wide_tile.cuh",
    "arrivals.cuh",
    "rows.cuh",
    "nibbles.cuh",
    "wide_pages.cuh",
    "wide_content{bits}.cuh",
    "wide_query.cuh",
    "wide_softmax.cuh",
    "wide_rows.cuh",
    "wide_attend.cuh",
    "wide_result.cuh",
    "wide.cu",
    "combine.cu",
)
ARCHITECTURE = "sm_90a"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Compile-time choices of one kernel; speed alone depends on them."""

    columns: int  # heads x query length of a tile: 16, 32 or 64
    warpgroups: int
    stages: int  # pages in flight or in use: for each warpgroup, or for all if 64 columns
    defines: tuple[str, ...] = ()  # CHECKED: for compute-sanitizer's racecheck

    @property
    def threads(self) -> int:
        return self.warpgroups * 128 + 128  # one more warpgroup brings the pages


def source(name: str) -> str:
    return (Path(__file__).parent / name).read_text()


def defines(variant: Variant, layout: "PageLayout") -> tuple[str, ...]:
    """Macros of a variant, and of the page's bytes, as compiler options."""
    values = {
        "CONTENT_BITS": layout.content_row_bytes // 64,
        "HEADS": variant.columns,
        "WARPGROUPS": variant.warpgroups,
        "STAGES": variant.stages,
        "PAGE_BYTES": layout.page_bytes,
        "AT_ROPE": layout.rope.start,
        "AT_SCALES": layout.scales.start,
        "AT_ZEROS": layout.zero_points.start,
        "AT_MEAN": layout.mean.start,
    }
    own = tuple(f"-D{name}={value}" for name, value in values.items())
    return own + tuple(f"-D{name}" for name in variant.defines)


def text(macros: tuple[str, ...]) -> str:
    """All sources as one translation unit."""
    return "\n".join(map(source, source_names(macros))).replace("#pragma once", "")


def source_names(macros: tuple[str, ...]) -> tuple[str, ...]:
    """Files that the content's bits and the columns ask for, in order."""
    value = dict(macro.removeprefix("-D").split("=") for macro in macros if "=" in macro)
    names = _WIDE if value["HEADS"] == "64" else _NARROW
    return tuple(name.format(bits=value["CONTENT_BITS"]) for name in names)


@cache
def cubin(macros: tuple[str, ...]) -> bytes:
    """Machine code for Hopper of what `defines` describes; needs no GPU."""
    return compile_text(text(macros), macros)


def compile_text(code: str, macros: tuple[str, ...]) -> bytes:
    from cuda.bindings import nvrtc

    options = [f"--gpu-architecture={ARCHITECTURE}", "--std=c++17", *macros]
    error, program = nvrtc.nvrtcCreateProgram(code.encode(), b"decode.cu", 0, None, None)
    _check(error)
    (failed,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    if failed != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise QuantMLAError(
            f"NVRTC cannot compile the Hopper kernel: {log.decode(errors='replace')}"
        )
    error, size = nvrtc.nvrtcGetCUBINSize(program)
    _check(error)
    image: bytes = b" " * size
    _check(nvrtc.nvrtcGetCUBIN(program, image)[0])
    nvrtc.nvrtcDestroyProgram(program)
    return image


def _check(error: object) -> None:
    if getattr(error, "value", error) != 0:
        raise QuantMLAError(f"NVRTC failed: {error}")
