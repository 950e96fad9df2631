"""Medians of interleaved CUDA-graph replays with a cold L2."""

from collections.abc import Callable, Mapping
from statistics import median

import torch

FLUSH_BYTES = 256 << 20  # several times the L2 of any GPU so far
WARM_UP = 3


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The call as a graph, after warm-up runs that compile and allocate."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def interleaved_us(calls: Mapping[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    """Microseconds of each call: every repetition runs all of them, each after an L2 flush.

    The flush keeps the GPU busy while the host enqueues, so launch latency is not measured.
    """
    graphs = {name: capture(call) for name, call in calls.items()}
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {
        name: [] for name in calls
    }
    for _ in range(repetitions):
        for name, graph in graphs.items():
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            flush.zero_()
            pair[0].record()
            graph.replay()
            pair[1].record()
            events[name].append(pair)
    torch.cuda.synchronize()
    return {
        name: 1e3 * median(start.elapsed_time(end) for start, end in pairs)
        for name, pairs in events.items()
    }
