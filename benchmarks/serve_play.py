"""Plays a job on an engine and keeps the books: times of tokens, preemptions, work done twice."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from serve_jobs import Job


class Delivery(NamedTuple):
    """What a request has after a step."""

    request: str
    tokens: int  # new ones
    finished: bool
    answer: list[int]  # when finished, else empty


class Engine(Protocol):
    """vLLM on a GPU, or its scheduler alone."""

    def add(self, request: str, prompt: list[int], output: int, prefix_caching: bool) -> None: ...

    def step(self) -> list[Delivery]: ...

    def busy(self) -> bool: ...


@dataclass
class Ledger:
    """What the scheduler did, step by step; `observe` is called with each of its decisions."""

    steps: int = 0
    preemptions: int = 0
    scheduled_tokens: int = 0
    recomputed_tokens: int = 0
    max_running: int = 0
    peak_tokens: int = 0  # in the pool, at the step that holds most
    peak_blocks: int = 0  # taken at that step
    reached: dict[str, int] = field(default_factory=dict)  # tokens computed once, by chat
    asked: dict[str, int] = field(default_factory=dict)  # tokens at a request's first start
    reused_tokens: int = 0  # of prefixes, at a request's first start

    def observe(self, output: Any, scheduler: Any, spare_blocks: int) -> None:
        """`output` of one schedule() call; `spare_blocks` are taken out of the pool for good."""
        self.steps += 1
        self.scheduled_tokens += output.total_num_scheduled_tokens
        self.preemptions += len(output.preempted_req_ids or ())
        self.max_running = max(self.max_running, len(scheduler.running))
        cached = output.scheduled_cached_reqs
        starts = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        for name, start in starts.items():
            if name not in self.asked:
                self.asked[name] = start
                self.reused_tokens += start
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, start in starts.items():
            end, chat = start + output.num_scheduled_tokens[name], name.split("/")[0]
            before = self.reached.get(chat, 0)
            self.recomputed_tokens += max(0, min(end, before) - start)
            self.reached[chat] = max(before, end)
        held = sum(request.num_computed_tokens for request in scheduler.running)
        if held > self.peak_tokens:
            pool = scheduler.kv_cache_manager.block_pool
            self.peak_tokens = held
            self.peak_blocks = pool.num_gpu_blocks - 1 - spare_blocks - pool.get_num_free_blocks()


@dataclass(slots=True)
class _Request:
    chat: int
    turn: int
    prompt: list[int]
    began: float
    times: list[float] = field(default_factory=list)


class Times(NamedTuple):
    """Seconds."""

    wall: float
    output_tokens: int
    first: list[float]  # from asking to the first token, by request
    per_token: list[float]  # mean after the first, by request
    gaps: list[float]  # between tokens, of all requests


def play(
    job: Job, repeat: int, engine: Engine, clock: Callable[[], float] = time.perf_counter
) -> Times:
    """Runs every request of `job` to its end."""
    questions = job.questions(repeat)
    open_requests: dict[str, _Request] = {}
    done: list[_Request] = []

    def ask(chat: int, turn: int, past: list[int]) -> None:
        name = f"{chat}/{turn}"
        prompt = past + questions[chat][turn]
        open_requests[name] = _Request(chat, turn, prompt, clock())
        engine.add(name, prompt, job.output, job.prefix_caching)

    began = clock()
    for chat in range(job.requests):
        ask(chat, 0, [])
    while engine.busy():
        deliveries = engine.step()
        now = clock()
        for delivery in deliveries:
            request = open_requests[delivery.request]
            request.times += [now] * delivery.tokens
            if delivery.finished:
                done.append(open_requests.pop(delivery.request))
                if request.turn + 1 < job.turns:
                    ask(request.chat, request.turn + 1, request.prompt + delivery.answer)
    assert not open_requests, f"requests {sorted(open_requests)} never finished"
    assert all(len(r.times) == job.output for r in done)
    return Times(
        wall=clock() - began,
        output_tokens=sum(len(r.times) for r in done),
        first=[r.times[0] - r.began for r in done],
        per_token=[(r.times[-1] - r.times[0]) / (len(r.times) - 1) for r in done],
        gaps=[gap for r in done for gap in np.diff(r.times).tolist()],
    )


def row(job: Job, times: Times, ledger: Ledger) -> dict[str, Any]:
    """The measured part of a result row; times in seconds."""
    return {
        "output_tok_s": round(times.output_tokens / times.wall, 2),
        "preemptions": ledger.preemptions,
        "recomputed_tokens": ledger.recomputed_tokens,
        "max_running": ledger.max_running,
        "ttft_p50": _percentile(times.first, 50),
        "tpot_p50": _percentile(times.per_token, 50),
        "tpot_p99": _percentile(times.per_token, 99),
        "gap_p50": _percentile(times.gaps, 50),
        "gap_p99": _percentile(times.gaps, 99),
        "wall": round(times.wall, 3),
        "steps": ledger.steps,
        "scheduled_tokens": ledger.scheduled_tokens,
        "reused_tokens": ledger.reused_tokens,
        "peak_tokens": ledger.peak_tokens,
        "peak_blocks": ledger.peak_blocks,
    }


def _percentile(values: list[float], q: float) -> float:
    return round(float(np.percentile(values, q)), 6)
