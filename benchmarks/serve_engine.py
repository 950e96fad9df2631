"""A vLLM engine in this process whose pool can be made smaller between jobs."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from serve_jobs import Group, Job
from serve_model import BATCHED_TOKENS, MAX_SEQUENCES, model_config
from serve_play import Delivery, Ledger
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

CAPTURED = [*range(1, 9), 10, 12, 16, 24, 32, 48, 64]  # batch sizes of CUDA graphs


class VllmEngine:
    """Times are of whole steps: the scheduler, the model and the output processing."""

    def __init__(self, variant: str, group: Group) -> None:
        packed = variant != "bf16"
        if packed:
            from quantmla.serve.vllm import register

            register()
        self.folder = tempfile.TemporaryDirectory()
        config = model_config(group.layers, variant if packed else None)
        (Path(self.folder.name) / "config.json").write_text(json.dumps(config))
        self.llm = LLM(
            model=self.folder.name,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=max(job.longest for job in group.jobs),
            max_num_batched_tokens=BATCHED_TOKENS,
            max_num_seqs=MAX_SEQUENCES,
            enable_prefix_caching=True,
            gpu_memory_utilization=0.1,  # others may be there; the cache has its own size
            kv_cache_memory_bytes=group.cache_bytes,
            compilation_config={"cudagraph_capture_sizes": CAPTURED},
            **({"attention_backend": "CUSTOM"} if packed else {}),
        )
        self.config = self.llm.llm_engine.vllm_config
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.ledger, self.spare = Ledger(), []
        self.answers: dict[str, list[int]] = {}
        schedule = self.scheduler.schedule

        def observed(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.ledger.observe(output, self.scheduler, len(self.spare))
            return output

        self.scheduler.schedule = observed

    def limit(self, job: Job | None) -> dict[str, int]:
        """Forgets every prefix and leaves `job` its pool, all of it for None; says how large."""
        while self.core.batch_queue:  # a step without requests may still be on its way
            self.llm.llm_engine.step()
        self.pool.free_blocks(self.spare)
        assert self.scheduler.reset_prefix_cache()
        cache = self.scheduler.kv_cache_config
        groups = cache.kv_cache_groups
        layers = max(len(group.layer_names) for group in groups)
        block_bytes = groups[0].kv_cache_spec.page_size_bytes * layers
        wanted = None if job is None else job.pool_bytes(layers)
        blocks = self.pool.num_gpu_blocks if wanted is None else wanted // block_bytes
        assert 1 < blocks <= self.pool.num_gpu_blocks
        self.spare = self.pool.get_new_blocks(self.pool.num_gpu_blocks - blocks)
        longest = self.config.model_config.max_model_len if job is None else job.longest
        with self._context(longest):
            tokens, _ = get_kv_cache_capacity(self.config, replace(cache, num_blocks=blocks))
        return {"pool_tokens": tokens, "pool_bytes": blocks * block_bytes, "blocks": blocks}

    @contextmanager
    def _context(self, longest: int) -> Iterator[None]:
        """vLLM's figures are for requests of max_model_len tokens."""
        model = self.config.model_config
        kept = model.max_model_len
        model.max_model_len = longest
        yield
        model.max_model_len = kept

    def add(self, request: str, prompt: list[int], output: int, prefix_caching: bool) -> None:
        # without weights all tokens are about as likely: sampled ones differ, and so do the experts
        params = SamplingParams(
            temperature=1.0,
            max_tokens=output,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            skip_reading_prefix_cache=not prefix_caching,
        )
        self.answers[request] = []
        self.llm.llm_engine.add_request(request, {"prompt_token_ids": prompt}, params)

    def busy(self) -> bool:
        return self.llm.llm_engine.has_unfinished_requests()

    def step(self) -> list[Delivery]:
        deliveries = []
        for output in self.llm.llm_engine.step():
            name, new = output.request_id, output.outputs[0].token_ids
            self.answers[name] += new
            answer = self.answers.pop(name) if output.finished else []
            deliveries.append(Delivery(name, len(new), output.finished, answer))
        return deliveries
