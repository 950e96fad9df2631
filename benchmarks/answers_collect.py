"""Answers of a checkpoint served by vLLM in this process, with the steps that computed them."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams

from quantmla.bench.results import environment
from quantmla.checkpoint.locate import locate
from quantmla.quant.format import CacheFormat
from quantmla.quant.page import pack_pages
from quantmla.serve.settings import CONFIG_KEY
from quantmla.serve.vllm import register

CHUNKS = (1, 63, 64, 127, 300)
PREEMPTED = (160, 224)  # tokens of a prompt and of its answer
BATCHED_TOKENS = 512
LAYER = "model.layers.0.self_attn.attn"


@dataclass
class Answer:
    """One request: what it was asked, what came out, and how it was computed."""

    case: str
    name: str
    prompt: list[int]
    answer: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)  # first token, tokens
    pages: dict[str, Any] | None = None  # bytes of its packed pages


class Ask(NamedTuple):
    name: str
    prompt: list[int]
    output: int


def served_copy(checkpoint: str, folder: Path) -> Path:
    """A copy that vLLM can load: its DeepSeek classes do not tie the head to the embeddings."""
    source = locate(checkpoint)
    config = json.loads((source / "config.json").read_text())
    if not config.get("tie_word_embeddings"):
        return source
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        if path.name.startswith("model"):
            weights |= load_file(path)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    for path in source.glob("*.json"):
        if not path.name.endswith("index.json"):
            shutil.copy(path, folder)
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Served:
    """The engine, and what its scheduler decided for every request."""

    def __init__(self, model: Path, drafts: int, tensor_parallel: int) -> None:
        register()
        extra: dict[str, Any] = {}
        if drafts:
            extra["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": drafts,
                "prompt_lookup_max": 4,
            }
        self.llm = LLM(
            model=str(model),
            dtype="bfloat16",
            attention_backend="CUSTOM",
            skip_tokenizer_init=True,
            max_model_len=4096,
            max_num_batched_tokens=BATCHED_TOKENS,
            max_num_seqs=8,
            enable_prefix_caching=True,
            gpu_memory_utilization=0.1,  # others may run beside it
            kv_cache_memory_bytes=2**28,
            tensor_parallel_size=tensor_parallel,
            disable_custom_all_reduce=True,  # one GPU's memory need not be open to the other
            compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]},
            **extra,
        )
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.preemptions = 0
        self.spare: list[Any] = []
        self.steps: dict[str, list[tuple[int, int]]] = {}
        self.blocks: dict[str, list[list[int]]] = {}
        schedule = self.scheduler.schedule

        def observed(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._observe(output)
            return output

        self.scheduler.schedule = observed

    def _observe(self, output: Any) -> None:
        self.preemptions += len(output.preempted_req_ids or ())
        cached = output.scheduled_cached_reqs
        starts = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for internal, start in starts.items():
            name = internal.rsplit("-", 1)[0]
            step = (start, output.num_scheduled_tokens[internal])
            self.steps.setdefault(name, []).append(step)
            blocks = self.scheduler.kv_cache_manager.get_block_ids(internal)
            self.blocks[name] = [list(group) for group in blocks]

    def limit(self, blocks: int | None) -> None:
        """Forgets every prefix and leaves so many blocks in the pool, all for None."""
        while self.core.batch_queue:
            self.engine.step()
        self.pool.free_blocks(self.spare)
        assert self.scheduler.reset_prefix_cache()
        taken = 0 if blocks is None else self.pool.num_gpu_blocks - blocks
        self.spare = self.pool.get_new_blocks(taken)

    def answer(self, case: str, asks: list[Ask], chunk: int = 0) -> list[Answer]:
        """All at once; prompts are computed in chunks of `chunk` tokens where it is not 0."""
        self.scheduler.scheduler_config.long_prefill_token_threshold = chunk
        found = {ask.name: Answer(case, ask.name, ask.prompt) for ask in asks}
        for ask in asks:
            params = SamplingParams(
                temperature=0.0,
                max_tokens=ask.output,
                ignore_eos=True,
                detokenize=False,
                logprobs=1,
            )
            self.engine.add_request(ask.name, {"prompt_token_ids": ask.prompt}, params)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    best = output.outputs[0]
                    kept = found[output.request_id]
                    kept.answer = list(best.token_ids)
                    kept.logprobs = [
                        float(step[token].logprob)
                        for token, step in zip(best.token_ids, best.logprobs, strict=True)
                    ]
                    kept.steps = self.steps.pop(output.request_id)
        self.scheduler.scheduler_config.long_prefill_token_threshold = 0
        return list(found.values())

    def pages_of(self, request: Answer, fmt: CacheFormat, latent_rank: int) -> dict[str, Any]:
        """Digest of the first layer's finished pages; those still in the window packed again."""
        layers = self.engine.vllm_config.compilation_config.static_forward_context
        packed, window = layers[LAYER].kv_cache, layers[f"{LAYER}.window"].kv_cache
        pages, rows = self.blocks[request.name]
        finished = (len(request.prompt) + len(request.answer) - 1) // fmt.page_size
        bytes_JY = packed[torch.tensor(pages[:finished], device=packed.device)].cpu()
        size, again = window.shape[1], 0
        for page in range(finished):
            held = rows[page * fmt.page_size // size : (page + 1) * fmt.page_size // size]
            if 0 in held:  # vLLM's page that holds nothing
                continue
            row_TC = window[torch.tensor(held, device=window.device)].flatten(0, 1).cpu()
            latent, k_rope = row_TC[:, :latent_rank], row_TC[:, latent_rank:]
            expected = pack_pages(latent[None], k_rope[None], fmt)[0]
            assert torch.equal(bytes_JY[page], expected.flatten()), f"page {page} differs"
            again += 1
        assert again, f"{request.name}: no finished page is still in the window"
        digests = [hashlib.sha256(page.numpy().tobytes()).hexdigest()[:16] for page in bytes_JY]
        return {"digests": digests, "packed_again": again}


def collect(
    checkpoint: str, text: list[int], drafts: int = 0, tensor_parallel: int = 1
) -> Iterator[dict[str, Any]]:
    """After every case all requests so far; with drafts those alone that n-grams can help."""
    with tempfile.TemporaryDirectory() as folder:
        model = served_copy(checkpoint, Path(folder))
        config = json.loads((model / "config.json").read_text())
        served = Served(model, drafts, tensor_parallel)
    fmt = CacheFormat.from_json(config[CONFIG_KEY]["format"])
    v2 = served.engine.vllm_config.use_v2_model_runner
    found: dict[str, Any] = {
        "checkpoint": checkpoint,
        "format": fmt.name,
        "runner": "V2" if v2 else "V1",
        "drafts": drafts,
        "tensor_parallel": tensor_parallel,
        "requests": [],
    }
    cases = repeated_text(served, text) if drafts else every_case(served, text)
    if tensor_parallel == 1 and not drafts:
        cases = chain(cases, _pages(served, text, fmt, config["kv_lora_rank"]))
    for answers in cases:
        found["requests"] += [asdict(answer) for answer in answers]
        yield found | {"environment": environment(), "preemptions": served.preemptions}


def repeated_text(served: Served, text: list[int]) -> Iterator[list[Answer]]:
    """Prompts that say the same again and again, of which drafts guess a part."""
    asks = [Ask(f"drafts{i}", text[i * 97 :][:90] * 4 + text[i * 97 :][:30], 64) for i in range(4)]
    yield served.answer("drafts", asks)


def every_case(served: Served, text: list[int]) -> Iterator[list[Answer]]:
    for chunk in CHUNKS:
        served.limit(None)
        yield served.answer(f"chunks of {chunk}", [Ask(f"chunk{chunk}", text[:420], 24)], chunk)
    served.limit(None)
    sizes = (5, 64, 65, 300, 777, 1500)
    yield served.answer("ragged", [Ask(f"ragged{n}", text[3000 + n :][:n], 24) for n in sizes])
    yield from _chats(served, text[6000:])
    yield from _shared(served, text[9000:])
    yield _preempted(served, text[12_000:])


def _pages(
    served: Served, text: list[int], fmt: CacheFormat, latent_rank: int
) -> Iterator[list[Answer]]:
    """The same tokens in chunks of all sizes: their pages must have the same bytes."""
    for chunk in CHUNKS:
        served.limit(None)
        (request,) = served.answer("pages", [Ask(f"pages{chunk}", text[:640], 2)], chunk)
        request.pages = served.pages_of(request, fmt, latent_rank)
        yield [request]


def _chats(served: Served, text: list[int]) -> Iterator[list[Answer]]:
    """Two chats of three turns; every turn begins with all that was said."""
    served.limit(None)
    past: list[list[int]] = [[], []]
    for turn in range(3):
        asks = [
            Ask(f"chat{i}.{turn}", past[i] + text[(3 * i + turn) * 200 :][:200], 40)
            for i in range(2)
        ]
        answers = served.answer("chat", asks)
        past = [a.prompt + a.answer for a in answers]
        yield answers


def _shared(served: Served, text: list[int]) -> Iterator[list[Answer]]:
    """A first request misses, two others hit what they share with it.

    It is computed in chunks that end at 512 tokens: there the window's rows are kept. A prefix of
    448 tokens has lost them, so that the hit is shorter.
    """
    for shared, case in ((512, "shared prefix, hit"), (448, "shared prefix, shortened hit")):
        served.limit(None)
        prefix, rest = text[:shared], text[600:]
        asks = [Ask(f"shared{shared}.{i}", prefix + rest[120 * i :][:100], 24) for i in range(3)]
        yield served.answer("shared prefix, miss", asks[:1])
        hits = served.answer(case, asks[1:])
        assert all(0 < hit.steps[0][0] <= shared for hit in hits), "nothing was reused"
        yield hits


def _preempted(served: Served, text: list[int]) -> list[Answer]:
    """Four prompts fit, their answers do not: the youngest requests have to make room."""
    before = served.preemptions
    prompt, answer = PREEMPTED
    asks = [Ask(f"preempted{i}", text[i * 400 :][:prompt], answer) for i in range(4)]
    window = served.scheduler.kv_cache_manager.coordinator.single_type_managers[1]
    served.limit(blocks_to_preempt(window.block_size))
    found = served.answer("preempted", asks)
    assert served.preemptions > before, "no request was preempted: the pool was large enough"
    return found


def blocks_to_preempt(window_page: int) -> int:
    """A pool a little smaller than four requests need at their end; vLLM keeps a block for none.

    Prompts are shorter than the window: vLLM lets them in where they fit, not where more do that
    a prompt in chunks holds on its way.
    """
    at_end = -(-sum(PREEMPTED) // 64) + 192 // window_page + 1  # packed, window, sinks
    return 4 * at_end + 1 - 8
