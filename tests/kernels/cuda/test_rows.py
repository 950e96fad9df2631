"""The Hopper append and gather: the reference's bits, by the emulator; and their machine code."""

import ctypes
import re
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from cases import Case, all_tokens, build, empty_cache, keep_all_rows, random_rows

from quantmla.cache.view import CacheView
from quantmla.kernels import reference
from quantmla.kernels.cuda.build import source
from quantmla.kernels.cuda.rows import (
    THREADS,
    append_arguments,
    cubin,
    defines,
    gather_arguments,
    tile_rows,
)
from quantmla.kernels.problem import Rows, Tokens
from quantmla.quant.format import parse_format
from quantmla.quant.layout import page_layout


@pytest.fixture
def emulate(emulated_rows):
    def run(name: str, view: CacheView, launch: tuple[ctypes.Structure, int]) -> None:
        arguments, blocks = launch
        emulated_rows(name, view.fmt.name).run(ctypes.byref(arguments), blocks)

    return run


def copy_of(view: CacheView) -> CacheView:
    pool = view.pages_JY
    whole = pool.as_strided((pool.shape[0], pool.stride(0)), (pool.stride(0), 1), 0).clone()
    pages = whole[:, pool.stride(0) - pool.shape[1] :]
    return replace(view, pages_JY=pages, window_pages_JMC=view.window_pages_JMC.clone())


def padded(rows: Rows, tokens: Tokens, at: int) -> tuple[Rows, Tokens]:
    """With a padding row, of NaN, before row `at`."""

    def with_gap(x: torch.Tensor, value: float) -> torch.Tensor:
        gap = torch.full((1, *x.shape[1:]), value, dtype=x.dtype)
        return torch.cat((x[:at], gap, x[at:]))

    return (
        Rows(*(with_gap(x, torch.nan) for x in rows)),
        Tokens(with_gap(tokens.sequence_T, -1), with_gap(tokens.position_T, 2**30)),
    )


@pytest.mark.parametrize(
    ("case", "cuts", "tile"),
    [
        (Case(name="prompts", lengths=(130, 200), window_page=16), (), 32),
        (Case(name="chunks", lengths=(130, 200), fmt="c2r4"), (70, 230, 293), 16),
        (Case(name="wide", lengths=(200,), pool_stride=3, row_scale=1e-3), (63, 127, 130), 8),
        (Case(name="huge", lengths=(128,), row_scale=1e8, sinks=0), (127,), 1),
        (Case(name="clipped", lengths=(64, 3, 70), changes={"content_clip": 0.9}), (20,), 32),
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_append_writes_the_references_bytes(emulate, case, cuts, tile):
    """However a prompt is cut, and with a row of padding between two sequences."""
    generator = torch.Generator().manual_seed(3)
    view = keep_all_rows(empty_cache(case, generator))
    tokens = all_tokens(case.lengths)
    rows = random_rows(len(tokens.position_T), case, generator)
    mine = copy_of(view)
    reference.append(rows, tokens, view)
    edges = (0, *cuts, len(tokens.position_T))
    for first, last in pairwise(edges):
        part = Rows(*(x[first:last] for x in rows))
        which = Tokens(*(x[first:last] for x in tokens))
        inside = min(max(case.lengths[0] - first, 0), last - first)  # between two sequences
        part, which = padded(part, which, inside)
        part = Rows(part.latent_TR.repeat(1, 2)[:, :512], part.k_rope_TE)  # wider rows than needed
        emulate("append", mine, append_arguments(part, which, mine, tile))
    assert torch.equal(mine.pages_JY, view.pages_JY)
    assert torch.equal(
        mine.window_pages_JMC.view(torch.int16), view.window_pages_JMC.view(torch.int16)
    )


def test_single_tokens_of_many_requests(emulate):
    """Each ends a page, whose other rows are in the window."""
    case = Case(name="many", lengths=(64, 128, 64, 192), window_page=16)
    generator = torch.Generator().manual_seed(4)
    view = keep_all_rows(empty_cache(case, generator))
    tokens = all_tokens(case.lengths)
    rows = random_rows(len(tokens.position_T), case, generator)
    last = torch.tensor(case.lengths).cumsum(0) - 1
    early = torch.ones(len(tokens.position_T), dtype=torch.bool)
    early[last] = False
    reference.append(Rows(*(x[early] for x in rows)), Tokens(*(x[early] for x in tokens)), view)
    mine = copy_of(view)
    now, which = Rows(*(x[last] for x in rows)), Tokens(*(x[last] for x in tokens))
    reference.append(now, which, view)
    emulate("append", mine, append_arguments(now, which, mine, 1))
    assert torch.equal(mine.pages_JY, view.pages_JY)


@pytest.mark.parametrize(
    "case",
    [
        Case(name="plain", lengths=(0, 5, 300), window_page=16),
        Case(name="c2r4", lengths=(193, 400), fmt="c2r4", pool_stride=2),
        Case(name="lost", lengths=(300, 200), lost_window=True, lost_sinks=True),
    ],
    ids=lambda case: case.name,
)
def test_gather_reads_what_decode_reads(emulate, case):
    _, view = build(case)
    tokens = all_tokens(case.lengths)
    tokens.sequence_T[::7] = -1
    out = torch.full((len(tokens.sequence_T), 576), 7.0, dtype=torch.bfloat16)
    wanted = out.clone()
    reference.gather(tokens, view, wanted)
    emulate("gather", view, gather_arguments(tokens, view, out))
    assert torch.equal(out, wanted)


def test_host_and_device_agree_on_the_number_of_threads():
    for name, threads in THREADS.items():
        assert re.search(rf"#define {name.upper()}_THREADS {threads}\b", source(f"{name}.cu"))


def test_few_rows_are_spread_over_many_blocks():
    assert [tile_rows(n, 264) for n in (1, 256, 600, 8192, 65536)] == [1, 1, 2, 16, 32]


@pytest.mark.parametrize("fmt", ["c4r4", "c2r4"])
@pytest.mark.parametrize(("name", "most"), [("append", 4700), ("gather", 2200)])
def test_machine_code_is_short_and_keeps_out_of_local_memory(tmp_path, name, fmt, most):
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    triton = pytest.importorskip("triton", reason="brings cuobjdump")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    path = tmp_path / "rows.cubin"
    path.write_bytes(cubin(name, defines(page_layout(512, 64, parse_format(fmt)))))

    def read(flag: str) -> str:
        return subprocess.run([tool, flag, path], capture_output=True, text=True, check=True).stdout

    (stack,) = re.findall(rf"Function {name}:\n.*?STACK:(\d+)", read("-res-usage"))
    sass = read("-sass")
    assert int(stack) <= 16
    assert len(re.findall(r"/\*[0-9a-f]{4,6}\*/\s", sass)) <= most
