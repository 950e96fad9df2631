"""What a layer of vLLM costs the host in an eager step, without a GPU: every launch is a stub.

    python benchmarks/host_overhead.py [--layers 27] [--steps 60] [--output FILE]

A step of 8 decodes and two chunks of 40 tokens, which are two calls of the decode kernel, beside a
prefill whose context is gathered in two parts. The plugin's own code runs as it does beside a GPU,
on tensors of the CPU, down to the call of the CUDA driver. Not in it: the driver, the GPU's caching
allocator, torch's look at the current stream and device, and what vLLM does between our calls.

Microseconds of one call, medians over steps: of the first layer, which makes the step's plans, of
the others, and the mean over layers. benchmarks/results/host_<yyyymmdd>.json is the name for FILE.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from cuda.bindings import driver

from quantmla.arguments import new_or_old_file, positive, run_script
from quantmla.bench.results import write
from quantmla.errors import UsageError, require
from quantmla.kernels import problem
from quantmla.kernels.api import Tokens
from quantmla.kernels.cuda import backend, launch, rows
from quantmla.quant.format import parse_format
from quantmla.serve.vllm import impl as module
from quantmla.serve.vllm.plans import StepPlans
from quantmla.serve.vllm.pool import PoolLayout, pool_layout
from quantmla.serve.vllm.step import Call, ContextChunk, FirstLayer

RANK, ROPE, HEADS = 512, 64, 16
DECODES, CHUNKS, CHUNK, CONTEXT = 8, 2, 40, 4096
CALLS = {"append": 1, "decode": 2, "gather": 2}  # in each layer


class _Device:
    """In place of torch.cuda.device."""

    def __init__(self, device: object) -> None:
        self.device = device

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def stub_gpu() -> list[int]:
    """Hopper as the kernels' host code sees it; the list counts launches."""
    launches = [0]

    def launched(*_: object) -> tuple[Any]:
        launches[0] += 1
        return (driver.CUresult.CUDA_SUCCESS,)

    driver.cuLaunchKernelEx = launched
    driver.cuTensorMapEncodeTiled = lambda *_: (driver.CUresult.CUDA_SUCCESS, driver.CUtensorMap())
    problem.platform_of = lambda _: ("cuda", (9, 0))
    torch.cuda.device = _Device
    torch.cuda.current_device = lambda: None  # the index of torch.device("cpu")
    torch.cuda.current_stream = lambda _: SimpleNamespace(cuda_stream=7)
    torch._C._cuda_getCurrentRawStream = lambda _: 7
    # a CPU's allocator takes large pieces, as the scratch memory of 132 would be, from the system
    backend.multiprocessors = rows.multiprocessors = lambda _: 8
    launch.cubin = lambda _: b""
    launch.load = lambda _, shared, device: launch.Kernels(None, function(), function(), shared)
    rows._load = lambda *_: rows.Loaded(None, function())
    return launches


def function() -> Any:
    return driver.CUfunction(1)


def new_layer(layout: PoolLayout, prefix: str, pages: int = 64) -> tuple[Any, torch.Tensor]:
    """A layer's implementation, of which only what the calls need is set, and its pool."""
    pool = torch.zeros(pages, layout.page_bytes, dtype=torch.uint8)
    channels, size = RANK + ROPE, layout.window_page_size
    window = pool.view(torch.bfloat16).as_strided(
        (pages, size, channels), (layout.page_bytes // 2, channels, 1)
    )
    layer = object.__new__(module.QuantMLAImpl)
    layer.kv_lora_rank, layer.qk_rope_head_dim, layer.scale = RANK, ROPE, 0.1
    layer.bind(prefix, SimpleNamespace(prefix=f"{prefix}.window", layout=layout, kv_cache=window))
    return layer, pool


def step_metadata(layers: list[Any]) -> dict[str, Any]:
    """As the builders leave it for one step."""
    count, batch = DECODES + CHUNKS * CHUNK, DECODES + CHUNKS
    ints = torch.zeros(4, max(count, CONTEXT), dtype=torch.int32)
    calls = (
        Call(slice(DECODES), slice(DECODES), DECODES),
        Call(slice(DECODES, batch), slice(DECODES, count), CHUNKS),
    )
    workspace = torch.zeros(CONTEXT, RANK + ROPE, dtype=torch.bfloat16)
    tokens = Tokens(ints[0, :CONTEXT], ints[1, :CONTEXT])
    packed = SimpleNamespace(
        block_table=torch.zeros(batch + 1, 64, dtype=torch.int32),
        lengths=ints[2, : batch + 1],
        tokens=Tokens(ints[0, :count], ints[1, :count]),
        first_layer=FirstLayer(lambda: None),
        num_decodes=batch,
        num_decode_tokens=count,
        num_reqs=batch + 1,
        calls=calls,
        context_lengths=ints[3, :1],
        context=[ContextChunk(tokens, workspace, None)] * 2,
        prefill=None,
        plans=StepPlans(),
    )
    table = torch.zeros(batch + 1, 256, dtype=torch.int32)
    window = SimpleNamespace(
        table=table,
        sink_pages=table[:, 0],
        starts=ints[3, : batch + 1],
        first_layer=FirstLayer(lambda: None),
    )
    return {
        name: metadata
        for layer in layers
        for name, metadata in ((layer.layer_name, packed), (layer.window.prefix, window))
    }


def measure(layers: int, steps: int) -> list[dict[str, object]]:
    launches = stub_gpu()
    layout = pool_layout(parse_format("c4r4"), RANK, ROPE)
    model = [new_layer(layout, f"layers.{i}") for i in range(layers)]
    count = DECODES + CHUNKS * CHUNK
    latent = torch.zeros(count, RANK, dtype=torch.bfloat16)
    k_rope = torch.zeros(count, 1, ROPE, dtype=torch.bfloat16)
    q = torch.zeros(count, HEADS, RANK, dtype=torch.bfloat16)
    q_rope = torch.zeros(count, HEADS, 192, dtype=torch.bfloat16)[..., 128:]
    for layer, _ in model:  # what follows a gather is vLLM's
        layer._attend_context = lambda *_: (latent, latent)
    module._merge = lambda one, _: one
    spent: dict[str, list[list[float]]] = {name: [] for name in CALLS}

    def timed(name: str, call: Callable[[Any, torch.Tensor], object]) -> None:
        times = [time.perf_counter()]
        for layer, pool in model:
            call(layer, pool)
            times.append(time.perf_counter())
        spent[name].append([(b - a) / CALLS[name] * 1e6 for a, b in pairwise(times)])

    for _ in range(steps):
        metadata = step_metadata([layer for layer, _ in model])
        packed = metadata["layers.0"]
        module.get_forward_context = lambda found=metadata: SimpleNamespace(attn_metadata=found)
        timed("append", lambda x, p: x.do_kv_cache_update(latent, k_rope, p, None, "auto", None))
        timed("decode", lambda x, p, m=packed: x.forward_mqa((q, q_rope), p, m, None))
        timed("gather", lambda x, p, m=packed: x._compute_prefill_context(latent, p, m, None))
    assert launches[0] == steps * layers * (1 + 2 * 2 + 2), "a decode is two launches"
    return [summary(name, times) for name, times in spent.items()]


def summary(operation: str, steps: list[list[float]]) -> dict[str, object]:
    median = statistics.median
    return {
        "operation": operation,
        "layers": len(steps[0]),
        "first_us": round(median(step[0] for step in steps), 1),
        "other_us": round(median(median(step[1:]) for step in steps), 1),
        "mean_us": round(median(statistics.fmean(step) for step in steps), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=positive, default=27)
    parser.add_argument("--steps", type=positive, default=60)
    parser.add_argument("--output", type=new_or_old_file)
    run_script(parser, run)


def run(args: argparse.Namespace) -> None:
    require(
        args.layers > 1, f"--layers {args.layers}: the first needs others beside it", UsageError
    )
    torch.set_num_threads(1)
    rows = measure(args.layers, args.steps)
    if args.output is not None:
        write(args.output, rows)  # first: a reader of stdout may have left
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
