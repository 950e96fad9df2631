"""Variants of the Hopper append and gather against each other, and what a part of the work costs.

    python benchmarks/rows_variants.py OUT

`nopack` keeps rows and packs nothing, `nokeep` packs and keeps nothing, `norope` leaves rope keys
out: for time only. Writes rows_<gpu>_<yyyymmdd>.json, microseconds by job and variant.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from quantmla.arguments import run_script
from quantmla.bench.append import GATHERED, Job, append_jobs, random_rows
from quantmla.bench.inputs import RANK, ROPE, synthetic_cache
from quantmla.bench.results import result_path, write
from quantmla.bench.timing import interleaved_us
from quantmla.cache.view import CacheView
from quantmla.device import resolve_device
from quantmla.kernels.api import Rows, Tokens, append
from quantmla.kernels.cuda import rows as cuda
from quantmla.quant.format import parse_format
from quantmla.workdir import check_makeable

TILES = (1, 2, 8, 16, 32)


def append_tiles(
    data: Rows, tokens: Tokens, view: CacheView, tile: int, macros: tuple[str, ...] = ()
) -> None:
    what = cuda.append_arguments(data, tokens, view, tile)
    launch = cuda.AppendRun("append", what, view, tokens, macros)
    launch(data, view.pages_JY, view.window_pages_JMC)


def without_rope(data: Rows, tokens: Tokens, view: CacheView, tile: int) -> None:
    arguments, blocks = cuda.append_arguments(data, tokens, view, tile)
    blocks -= arguments.rope_blocks
    arguments.rope_blocks = 0
    launch = cuda.AppendRun("append", (arguments, blocks), view, tokens)
    launch(data, view.pages_JY, view.window_pages_JMC)


def append_variants(job: Job) -> dict[str, Callable[[], object]]:
    data, tokens, view = random_rows(len(job.tokens.position_T)), job.tokens, job.view
    count = len(tokens.position_T)
    tile = cuda.tile_rows(count, 396)
    nowhere = {
        "nopack": replace(view, block_table_BJ=torch.full_like(view.block_table_BJ, -1)),
        "nokeep": replace(view, window_table_BW=torch.full_like(view.window_table_BW, -1)),
    }
    if not job.name.startswith("prompt"):
        del nowhere["nokeep"]  # the pages' other rows come from the window
    calls: dict[str, Callable[[], object]] = {
        name: partial(append, data, tokens, view, backend=name) for name in ("triton", "cuda")
    }
    calls |= {
        f"tile{size}": partial(append_tiles, data, tokens, view, size)
        for size in TILES
        if count // size >= 64
    }
    calls |= {
        f"blocks{n}": partial(append_tiles, data, tokens, view, tile, (f"-DAPPEND_BLOCKS={n}",))
        for n in (2, 4)
    }
    calls |= {name: partial(append_tiles, data, tokens, v, tile) for name, v in nowhere.items()}
    return calls | {"norope": partial(without_rope, data, tokens, view, tile)}


def gather_rows(tokens: Tokens, view: CacheView, out: torch.Tensor, rows: int, blocks: int) -> None:
    arguments, _ = cuda.gather_arguments(tokens, view, out)
    macros = (f"-DGATHER_ROWS={rows}", f"-DGATHER_BLOCKS={blocks}")
    what = arguments, -(-out.shape[0] // rows)
    launch = cuda.GatherRun("gather", what, view, tokens, macros)
    launch(out, view.pages_JY, view.window_pages_JMC)


def gather_variants(fmt_name: str) -> dict[str, Callable[[], object]]:
    view = synthetic_cache(GATHERED // 32, 32, parse_format(fmt_name))
    token = torch.arange(GATHERED, dtype=torch.int32, device="cuda")
    tokens = Tokens(token // (GATHERED // 32), token % (GATHERED // 32))
    out = torch.empty(GATHERED, RANK + ROPE, dtype=torch.bfloat16, device="cuda")
    return {
        f"rows{rows}_blocks{blocks}": partial(gather_rows, tokens, view, out, rows, blocks)
        for rows in (32, 64)
        for blocks in (2, 3)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    run_script(parser, run)


def run(options: argparse.Namespace) -> None:
    resolve_device("cuda")
    check_makeable(options.out, options.out)
    rows = []
    for fmt in ("c4r4", "c2r4"):
        jobs = [job for job in append_jobs(fmt) if job.layers == 1]
        tried = {job.name: partial(append_variants, job) for job in jobs}
        for name, variants in (tried | {"gather": partial(gather_variants, fmt)}).items():
            times = {key: round(us, 2) for key, us in interleaved_us(variants(), 20).items()}
            rows.append({"format": fmt, "job": name, "us": times})
            print(rows[-1], flush=True)
            write(result_path(options.out, "rows"), rows)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
