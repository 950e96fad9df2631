"""Builds the kernels for a CPU with emulator.hpp and runs a decode on them."""

import ctypes
import math
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantmla.cache.view import CacheView
from quantmla.kernels.cuda.arguments import DecodeArguments
from quantmla.kernels.cuda.build import Variant, defines, source, source_names
from quantmla.kernels.cuda.launch import combine_threads
from quantmla.kernels.problem import DecodeQuery
from quantmla.mla.partial import Partial
from quantmla.quant.format import CacheFormat
from quantmla.quant.layout import page_layout
from quantmla.quant.page import pack_pages

HERE = Path(__file__).parent
RANK, ROPE, PAGE, RING = 512, 64, 64, 4


@cache
def _library(folder: Path, macros: tuple[str, ...]) -> ctypes.CDLL:
    """The kernels of a variant as a shared library."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("the emulator needs g++")
    names = [name for name in source_names(macros) if "device" not in name]
    code = [
        (HERE / "emulator.hpp").read_text(),
        *map(source, names),
        (HERE / "emulated.cpp").read_text(),
    ]
    stem = "_".join(macro[2:].replace("=", "") for macro in macros)[:80]
    (folder / f"{stem}.cpp").write_text("\n".join(code).replace("#pragma once", ""))
    command = [compiler, "-std=c++20", "-O1", "-w", "-shared", "-fPIC", *macros]
    subprocess.run(
        [*command, str(folder / f"{stem}.cpp"), "-o", str(folder / f"{stem}.so")],
        check=True,
        timeout=100,
    )
    return ctypes.CDLL(str(folder / f"{stem}.so"))


def library(
    tmp_path_factory: pytest.TempPathFactory, fmt: CacheFormat, variant: Variant
) -> ctypes.CDLL:
    folder = tmp_path_factory.getbasetemp() / "emulated"
    folder.mkdir(exist_ok=True)
    return _library(folder, defines(variant, page_layout(RANK, ROPE, fmt)))


def emulate(
    kernels: ctypes.CDLL,
    columns: int,
    query: DecodeQuery,
    view: CacheView,
    splits: int | None = None,
) -> Partial:
    """A decode on four emulated multiprocessors."""
    arguments = DecodeArguments(query, view, splits, 4, columns)
    return run_emulated(kernels, arguments, query, view)


def run_emulated(
    kernels: ctypes.CDLL,
    arguments: DecodeArguments,
    query: DecodeQuery,
    view: CacheView,
    out_BSNR: Tensor | None = None,
) -> Partial:
    """With what the host has prepared; buffers are poisoned first."""
    buffers = arguments.fill(query, view.pages_JY, view.window_pages_JMC, out_BSNR)
    for x in (buffers.scratch, buffers.out_BSNR, buffers.lse_BSN):
        x.view(torch.uint8).fill_(255)
    kernels.run_decode(ctypes.byref(arguments.struct), 4)
    rows = math.prod(query.latent_BSNR.shape[:3])
    kernels.run_combine(ctypes.byref(arguments.struct), rows, combine_threads(rows, 33))
    return Partial(buffers.out_BSNR, buffers.lse_BSN)


def random_case(
    lengths: list[int], rows: tuple[int, int], fmt: CacheFormat, seed: int
) -> tuple[DecodeQuery, CacheView]:
    """A query of (length, heads) and a cache of random rows: shuffled pages, a window ring."""
    g = torch.Generator().manual_seed(seed)
    batch, (query_len, heads) = len(lengths), rows
    need = [length // PAGE + 1 for length in lengths]
    channels = torch.exp(0.5 * torch.randn(RANK, generator=g))
    latent = (torch.randn(sum(need), PAGE, RANK, generator=g) * channels).bfloat16()
    k_rope = (
        torch.randn(sum(need), PAGE, ROPE, generator=g) + 2 * torch.randn(ROPE, generator=g)
    ).bfloat16()
    order = torch.randperm(sum(need), generator=g).int()
    table = torch.full((batch, max(need)), -1, dtype=torch.int32)
    window = torch.full((batch * (RING + 1), PAGE, RANK + ROPE), torch.nan, dtype=torch.bfloat16)
    sinks = torch.full((batch,), -1, dtype=torch.int32)
    at = 0
    for b, length in enumerate(lengths):
        table[b, : need[b]] = order[at : at + need[b]]
        at += need[b]
        for t in range(length):
            row = torch.cat(
                (latent[table[b, t // PAGE], t % PAGE], k_rope[table[b, t // PAGE], t % PAGE])
            )
            window[b * RING + t // PAGE % RING, t % PAGE] = row
            if t < fmt.num_sink_tokens and b % 2 == 0:
                window[batch * RING + b, t] = row
        if b % 2 == 0:
            sinks[b] = batch * RING + b
    view = CacheView(
        fmt=fmt,
        kv_lora_rank=RANK,
        pages_JY=pack_pages(latent, k_rope, fmt),
        block_table_BJ=table,
        lengths_B=torch.tensor(lengths, dtype=torch.int32),
        window_pages_JMC=window,
        window_table_BW=torch.arange(batch * RING, dtype=torch.int32).view(batch, RING),
        sink_pages_B=sinks,
    )
    q = torch.randn(batch, query_len, heads, RANK + ROPE, generator=g).bfloat16()
    return DecodeQuery(q[..., :RANK].contiguous(), q[..., RANK:].contiguous(), 0.05), view
