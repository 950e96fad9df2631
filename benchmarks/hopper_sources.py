"""Versions of the Hopper kernel side by side, beside a BF16 kernel, as `bench decode` times one.

    python benchmarks/hopper_sources.py FOLDER [--libraries DIR] [--output FILE]

FOLDER holds copies of src/quantmla/kernels/cuda, one for each version, named as they are to be
called. All versions of a shape run in the same repetitions, each from a graph of one call after an
L2 flush, in two orders whose medians are averaged: differences of half a percent show, where runs
and machines differ by several. A version that disagrees with the first one is an error. The shared
structure of arguments must be the one of this repository.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from quantmla.arguments import new_or_old_file, run_script
from quantmla.bench.baselines import BASELINES, bf16_cache, find_libraries, load
from quantmla.bench.inputs import RANK, ROPE, synthetic_cache, synthetic_query
from quantmla.bench.results import write
from quantmla.bench.timing import interleaved_us
from quantmla.device import resolve_device
from quantmla.errors import QuantMLAError, require
from quantmla.kernels import api
from quantmla.kernels.cuda import backend, build, launch
from quantmla.quant.format import parse_format
from quantmla.quant.layout import page_layout

SHAPES = ((32, 32768, 32), (16, 32768, 32), (16, 8192, 32), (16, 32768, 1), (32, 8192, 32))
FORMAT = parse_format("c4r4")
BASELINE = "fa3_mla"
REPETITIONS = 30
AGREE = 5e-3  # relative: some versions keep what others round to float16


class Version(NamedTuple):
    name: str
    build: ModuleType  # its sources, in their order
    arguments: ModuleType  # its shared_bytes


def _module(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def versions_in(folder: Path) -> list[Version]:
    """QuantMLAError where there is none."""
    found = sorted(path.parent for path in folder.glob("*/build.py"))
    require(bool(found), f"{folder} has no folder with a build.py: name copies of kernels/cuda")
    return [
        Version(
            path.name,
            _module(path / "build.py", f"{path.name}_build"),
            _module(path / "arguments.py", f"{path.name}_arguments"),
        )
        for path in found
    ]


def compile_all(versions: list[Version]) -> dict[tuple[str, tuple[str, ...]], bytes]:
    """Machine code by version and macros; NVRTC works on several threads."""
    layout = page_layout(RANK, ROPE, FORMAT)

    def one(job: tuple[Version, build.Variant]) -> tuple[tuple[str, tuple[str, ...]], bytes]:
        version, variant = job
        macros = build.defines(variant, layout)
        code = version.build.text(macros)
        return (version.name, macros), version.build.compile_text(code, macros)

    jobs = [(version, v) for version in versions for v in (backend.NARROW, backend.WIDE)]
    with ThreadPoolExecutor() as pool:
        return dict(pool.map(one, jobs))


class Calls:
    """Decodes by version: the backend is told whose machine code to take before each capture."""

    def __init__(self, versions: list[Version]) -> None:
        self.images = compile_all(versions)
        self.loaded: dict[tuple[str, tuple[str, ...]], launch.Kernels] = {}

    def call(self, version: Version, query: Any, view: Any) -> Callable[[], Any]:
        def kernels(macros: tuple[str, ...], shared: int, device: torch.device) -> launch.Kernels:
            key = version.name, macros
            if key not in self.loaded:
                self.loaded[key] = launch.load(self.images[key], shared, device)
            return self.loaded[key]

        def run() -> Any:
            backend.kernels, backend.shared_bytes = kernels, version.arguments.shared_bytes
            return api.decode(query, view, backend="cuda")

        return run


def measure(calls: Calls, versions: list[Version], shape: tuple[int, int, int]) -> dict[str, Any]:
    """Microseconds by version and of the baseline."""
    heads, context, batch = shape
    view, query = synthetic_cache(context, batch, FORMAT), synthetic_query(batch, 1, heads)
    cache = bf16_cache(context, batch, view.block_table_BJ)
    first = calls.call(versions[0], query, view)().out_BSNR.float()
    for version in versions[1:]:
        out = calls.call(version, query, view)().out_BSNR.float()
        error = float((out - first).norm() / first.norm())
        if not error < AGREE:
            raise QuantMLAError(f"{version.name} differs from {versions[0].name} by {error:.1e}")
    times = []
    for order in (versions, versions[::-1]):
        named = {version.name: calls.call(version, query, view) for version in order}
        named[BASELINE] = BASELINES[BASELINE](query, cache)
        times.append(interleaved_us(named, REPETITIONS))
    us = {name: round(sum(t[name] for t in times) / 2, 1) for name in times[0]}
    return {"heads": heads, "context": context, "batch": batch, "us": us}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--libraries", type=Path, help="with vLLM's BF16 kernels (default: vllm's)")
    parser.add_argument("--output", type=new_or_old_file)
    run_script(parser, run)


def run(options: argparse.Namespace) -> None:
    versions = versions_in(options.folder)
    resolve_device("cuda")
    baselines = load(find_libraries(options.libraries))
    require(
        BASELINE in baselines, f"{BASELINE} is not among {baselines}: it needs vllm's libraries"
    )
    calls, rows = Calls(versions), []
    for shape in SHAPES:
        rows.append(measure(calls, versions, shape))
        torch.cuda.empty_cache()
        if options.output is not None:
            write(options.output, rows)  # first: a reader of stdout may have left
        print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
