"""vLLM's own scheduler without a model: predicts the jobs' preemptions and concurrency on a CPU.

    python benchmarks/serve_scheduler.py [--variants bf16,c4r4] [--jobs NAME ...] [--output FILE]

Tokens come out of thin air, blocks do not: admission, chunks, preemption, prefixes and windows are
the pinned vLLM's and the plugin's. Seconds are a guess (`Cost`), to plan GPU time with; they are
printed and not written to FILE, for which benchmarks/results/scheduler_<yyyymmdd>.json is the name.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from serve_jobs import GROUPS, VARIANTS, Group, Job
from serve_model import BATCHED_TOKENS, MAX_SEQUENCES, model_config
from serve_play import Delivery, Ledger, play, row
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_capacity,
    get_kv_cache_configs,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from quantmla.arguments import names, new_or_old_file, run_script
from quantmla.bench.results import write
from quantmla.errors import UsageError, require
from quantmla.quant.format import parse_format
from quantmla.serve.vllm.layer import PackedAttention, WindowCache
from quantmla.serve.vllm.plugin import install
from quantmla.serve.vllm.pool import pool_layout

PLENTY = 60 * 2**30
COUNTED = ("preemptions", "recomputed_tokens", "max_running", "steps", "scheduled_tokens")
COUNTED += ("reused_tokens", "peak_tokens", "peak_blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Rough seconds of one layer of DeepSeek-V2-Lite's shape on an H200."""

    step: float = 1e-3  # of a step, whatever is in it
    layer: float = 7e-5
    flops: float = 3.5e14  # that prefill reaches
    bandwidth: float = 3.3e12  # that decode reaches
    token_flops: float = 1.5e8  # of a layer's projections and experts
    pair_flops: float = 2 * 16 * 320  # of a query and a key
    row_bytes: float = 1152
    expert_bytes: float = 1.73e7
    other_bytes: float = 5e7

    def seconds(self, layers: int, chunks: list[tuple[int, int]]) -> float:
        """`chunks` are (new tokens, tokens before) of every request in the step."""
        prefill = [(n, c) for n, c in chunks if n > 1]
        work = sum(n * self.token_flops + n * (c + n / 2) * self.pair_flops for n, c in prefill)
        rows = sum(c for n, c in chunks if n == 1) * self.row_bytes
        experts = 64 * (1 - (1 - 6 / 64) ** sum(n for n, _ in chunks))
        weights = self.other_bytes + self.expert_bytes * experts
        each = self.layer + work / self.flops + (rows + weights) / self.bandwidth
        return self.step + layers * each


class SchedulerAlone:
    """An engine whose model answers with the same token, always."""

    def __init__(self, variant: str, layers: int, job: Job, folder: Path) -> None:
        install()
        config = _config(layers, job, folder)
        specs = _specs(variant, layers, config)
        budget = job.pool_bytes(layers) or PLENTY
        (found,) = get_kv_cache_configs(config, [specs], [budget])
        kv_cache = generate_scheduler_kv_cache_config([found])
        config.cache_config.num_gpu_blocks = kv_cache.num_blocks
        block_bytes = kv_cache.kv_cache_groups[0].kv_cache_spec.page_size_bytes * layers
        self.pool = {
            "pool_tokens": get_kv_cache_capacity(config, kv_cache)[0],
            "pool_bytes": kv_cache.num_blocks * block_bytes,
            "blocks": kv_cache.num_blocks,
        }
        block_size, hash_size = resolve_kv_cache_block_sizes(kv_cache, config)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=kv_cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=hash_size,
            log_stats=True,
        )
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(hash_size, sha256)
        self.layers, self.ledger, self.now = layers, Ledger(), 0.0
        self.requests: dict[str, Request] = {}

    def clock(self) -> float:
        return self.now

    def busy(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def add(self, request: str, prompt: list[int], output: int, prefix_caching: bool) -> None:
        self.requests[request] = Request(
            request_id=request,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(
                max_tokens=output,
                ignore_eos=True,
                skip_reading_prefix_cache=not prefix_caching,
            ),
            pooling_params=None,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(self.requests[request])

    def step(self) -> list[Delivery]:
        output = self.scheduler.schedule()
        self.ledger.observe(output, self.scheduler, 0)
        counts = output.num_scheduled_tokens
        known = {name: self.scheduler.requests[name] for name in counts}
        chunks = [(n, known[name].num_computed_tokens - n) for name, n in counts.items()]
        self.now += Cost().seconds(self.layers, chunks)
        sampled = [
            [5] if request.num_computed_tokens >= request.num_tokens else []
            for request in known.values()
        ]
        result = ModelRunnerOutput(
            req_ids=list(counts),
            req_id_to_index={name: i for i, name in enumerate(counts)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        self.scheduler.update_from_output(output, result)
        return [self._delivery(name, new) for name, new in zip(counts, sampled, strict=True) if new]

    def _delivery(self, name: str, new: list[int]) -> Delivery:
        request = self.requests[name]
        finished = request.is_finished()
        return Delivery(
            name, len(new), finished, list(request.output_token_ids) if finished else []
        )


def _config(layers: int, job: Job, folder: Path) -> VllmConfig:
    (folder / "config.json").write_text(json.dumps(model_config(layers, None)))
    longest = job.longest
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder),
            tokenizer=str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=longest,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=MAX_SEQUENCES,
            max_num_batched_tokens=BATCHED_TOKENS,
            max_model_len=longest,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        cache_config=CacheConfig(block_size=64, enable_prefix_caching=True),
        device_config=DeviceConfig(device="cpu"),
    )
    config.scheduler_config.disable_hybrid_kv_cache_manager = False  # as on a GPU
    return config


def _specs(variant: str, layers: int, config: VllmConfig) -> dict[str, KVCacheSpec]:
    if variant == "bf16":
        config.cache_config.block_size = 16
        spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
        return {str(i): spec for i in range(layers)}
    layer: Any = SimpleNamespace(layout=pool_layout(parse_format(variant), 512, 64))
    owner: Any = SimpleNamespace(window=layer)
    packed = PackedAttention.get_kv_cache_spec(owner, config)
    window = WindowCache.get_kv_cache_spec(layer, config)
    return {str(i): packed for i in range(layers)} | {f"{i}.window": window for i in range(layers)}


def run(variant: str, group: Group, job: Job) -> tuple[dict[str, Any], float]:
    """What was counted, and a guess of the seconds."""
    with tempfile.TemporaryDirectory() as folder:
        engine = SchedulerAlone(variant, group.layers, job, Path(folder))
        found = row(job, play(job, 0, engine, engine.clock), engine.ledger)
    head = {"job": job.name, "variant": variant, "layers": group.layers}
    head |= {"prefix_caching": job.prefix_caching}
    return head | engine.pool | {name: found[name] for name in COUNTED}, found["wall"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--variants", type=names, default=VARIANTS, metavar="A,B")
    parser.add_argument("--jobs", nargs="*", help="parts of jobs' names (default: all)")
    parser.add_argument("--output", type=new_or_old_file, help="result file to write")
    run_script(parser, simulate)


def check(options: argparse.Namespace) -> None:
    """UsageError for variants and parts of names that are of none."""
    jobs = [job.name for group in GROUPS for job in group.jobs]
    other = [name for name in options.variants if name not in VARIANTS]
    require(not other, f"--variants {other} are none of {', '.join(VARIANTS)}", UsageError)
    other = [part for part in options.jobs or () if not any(part in name for name in jobs)]
    require(not other, f"--jobs {other} are in no name of {', '.join(map(repr, jobs))}", UsageError)


def simulate(options: argparse.Namespace) -> None:
    check(options)
    rows = []
    for group in GROUPS:
        for job in group.jobs:
            if options.jobs and not any(part in job.name for part in options.jobs):
                continue
            for variant in options.variants:
                found, seconds = run(variant, group, job)
                rows.append(found)
                numbers = ", ".join(f"{name} {found[name]}" for name in COUNTED)
                print(f"{job.name:32}{variant:6}{numbers}, about {seconds:.1f} s", flush=True)
    if options.output is not None:
        write(options.output, rows)


if __name__ == "__main__":
    main()
