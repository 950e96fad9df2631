"""One latent attention in vLLM's real scheduler, cache manager, builders and layer, on the CPU.

Only the model around it is ours: a token's rows follow from its id and position, and the next token
from the attention's output. What attention should have read is computed again in float64, from the
rows themselves and the rule of `CacheView`, for every query of every step. Pools begin as NaN.
"""

import json
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import reorder_batch_to_split_decodes_and_prefills
from vllm.v1.core import kv_cache_utils
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.attn_utils import _reshape_attention_kv_cache
from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids

from quantmla.quant.format import CacheFormat
from quantmla.quant.page import pack_pages, unpack_pages
from quantmla.serve.vllm.backend import QuantMLABackend, WindowBackend
from quantmla.serve.vllm.layer import MLAAttention, pack_cache
from quantmla.serve.vllm.pool import pool_layout

RANK, ROPE, NOPE, VALUE, HEADS, HIDDEN, VOCABULARY = 128, 32, 16, 16, 2, 64, 512
# float32 sums of at most 4096 products, each relative to the largest: 4096 * 2**-24
TOLERANCE = 2.5e-4
NAME = "model.layers.0.self_attn.attn"


def model_config(folder, fmt: CacheFormat, layers: int = 1, **changes) -> ModelConfig:
    """A DeepSeek-V2 of the harness's sizes, without weights or tokenizer."""
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "kv_lora_rank": RANK,
        "q_lora_rank": None,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 1 << 18,
        "torch_dtype": "bfloat16",
        "quantmla_config": {"version": 1, "format": fmt.to_json(), "ignored_layers": []},
    } | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "-"}))
    return ModelConfig(
        model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, dtype="bfloat16"
    )


def vllm_config(model: ModelConfig, *, chunk=256, max_len=4096, drafts=0, caching=True, **more):
    """What `vllm serve` would make of it on a GPU; `more` is of the scheduler."""
    model.max_model_len = max_len
    scheduler = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": chunk,
        "max_model_len": max_len,
        "enable_chunked_prefill": True,
        "is_encoder_decoder": False,
        "async_scheduling": False,
    } | more
    config = VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(**scheduler),
        cache_config=CacheConfig(enable_prefix_caching=caching),
        device_config=DeviceConfig(device="cpu"),
        speculative_config=SpeculativeConfig(
            method="ngram_gpu" if more.get("async_scheduling") else "ngram",
            num_speculative_tokens=drafts,
            prompt_lookup_max=2,
            prompt_lookup_min=1,
            target_model_config=model,
            target_parallel_config=ParallelConfig(),
        )
        if drafts
        else None,
    )
    config.scheduler_config.disable_hybrid_kv_cache_manager = False  # as where there is a GPU
    config.cache_config.block_size = 64  # as Platform.update_block_size_for_backend has it
    return config


class Pool:
    """Specs of the layers as given, the pool of `num_pages` pages, and the scheduler over it."""

    def __init__(self, config: VllmConfig, specs: dict, num_pages: int) -> None:
        self.config = config
        config.cache_config.num_gpu_blocks_override = num_pages
        found = kv_cache_utils.get_kv_cache_configs(config, [specs], [1 << 40])
        self.kv = kv_cache_utils.generate_scheduler_kv_cache_config(found)
        config.cache_config.num_gpu_blocks = num_pages
        block, hashed = kv_cache_utils.resolve_kv_cache_block_sizes(self.kv, config)
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=self.kv,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block,
            hash_block_size=hashed,
            log_stats=True,
        )
        kv_cache_utils.init_none_hash(sha256)
        caching = config.cache_config.enable_prefix_caching
        self.hasher = kv_cache_utils.get_request_block_hasher(hashed, sha256) if caching else None

    def add(self, name: str, prompt: list[int], new: int) -> Request:
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=new, ignore_eos=True, temperature=0.0),
            pooling_params=None,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(request)
        return request

    @property
    def window_blocks(self):
        return self.scheduler.kv_cache_manager.coordinator.single_type_managers[1]

    def finish(self, output, sampled: dict[str, list[int]]) -> None:
        ids = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={r: i for i, r in enumerate(ids)},
            sampled_token_ids=[sampled[r] for r in ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        self.scheduler.update_from_output(output, result)


class Projection(nn.Module):
    """kv_b_proj without tensor parallelism, in float32 whatever comes in."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.quant_method = None

    def forward(self, x):
        return x.to(self.weight.dtype) @ self.weight.T, None


def make_layer(config: VllmConfig):
    """A real MLAAttention with the packed cache, and the window's layer."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(HEADS * (NOPE + VALUE), RANK, generator=generator) / RANK**0.5
    model = config.model_config
    layout = pool_layout(
        CacheFormat.from_json(dict(model.hf_config.quantmla_config["format"])), RANK, ROPE
    )
    with set_current_vllm_config(config):
        layer = MLAAttention(
            num_heads=HEADS,
            scale=(NOPE + ROPE) ** -0.5,
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=ROPE,
            v_head_dim=VALUE,
            q_lora_rank=None,
            kv_lora_rank=RANK,
            kv_b_proj=Projection(weight),
            cache_config=config.cache_config,
            prefix=NAME,
            attn_backend=QuantMLABackend,
        )
        window = pack_cache(layer, layout)
    layer.impl.dcp_world_size = 1
    w_uk, w_uv = weight.T.view(RANK, HEADS, NOPE + VALUE).split((NOPE, VALUE), dim=-1)
    layer.W_UK_T, layer.W_UV = w_uk.permute(1, 2, 0), w_uv.transpose(0, 1)
    return layer, window


class Batch:
    """What vLLM's first runner orders: names, tokens computed before, tokens of the prompt."""

    def __init__(self, before: list[str], done: dict[str, int], requests: dict) -> None:
        """In their places of the step `before`; new ones and then the last ones fill the gaps."""
        places: list = [n if n in done else None for n in before]
        for name in (n for n in done if n not in before):
            if None in places:
                places[places.index(None)] = name
            else:
                places.append(name)
        while None in places:
            if (last := places.pop()) is not None:
                places[places.index(None)] = last
        self.req_ids = names = places
        self.num_computed_tokens_cpu = np.array([done[n] for n in names])
        self.num_prompt_tokens = np.array([requests[n].num_prompt_tokens for n in names])

    def swap_states(self, a: int, b: int) -> None:
        for x in (self.req_ids, self.num_computed_tokens_cpu, self.num_prompt_tokens):
            x[a], x[b] = x[b], x[a]


@dataclass
class Sequence:
    """What the worker knows of a request, and what the oracle needs."""

    tokens: list[int]
    tables: list[list[int]]
    window_start: int = 0
    drafts: list[int] = field(default_factory=list)
    known: list[int] = field(default_factory=list)  # prompt and answer; the scheduler lags behind


class Engine:
    """Runs requests to their end; `outputs[name][position]` is what attention gave."""

    def __init__(self, config: VllmConfig, num_pages: int, runner: int = 2) -> None:
        self.runner = runner  # of vLLM's two, whose order of sequences differs
        self.layer, self.window = make_layer(config)
        self.layout = self.window.layout
        specs = {
            NAME: self.layer.get_kv_cache_spec(config),
            self.window.prefix: self.window.get_kv_cache_spec(config),
        }
        self.pool = Pool(config, specs, num_pages)
        groups = [group.kv_cache_spec for group in self.pool.kv.kv_cache_groups]
        self.raw = raw = torch.full((num_pages * self.layout.page_bytes,), -1, dtype=torch.int8)
        with set_current_vllm_config(config):
            for layer, backend, spec in zip(
                (self.layer, self.window), (QuantMLABackend, WindowBackend), groups, strict=True
            ):
                shape = backend.get_kv_cache_shape(num_pages, spec.block_size, 1, spec.head_size)
                order = backend.get_kv_cache_stride_order()
                layer.kv_cache = _reshape_attention_kv_cache(
                    raw, spec, shape, order, num_pages, None
                )
            self.builders = [
                backend.get_builder_cls()(spec, [layer], config, torch.device("cpu"))
                for backend, spec, layer in zip(
                    (QuantMLABackend, WindowBackend), groups, specs, strict=True
                )
            ]
        generator = torch.Generator().manual_seed(4)
        draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        self.latent, self.turn = draw(VOCABULARY, RANK), draw(4096, RANK) / 2
        self.rope, self.query = draw(VOCABULARY, ROPE), draw(VOCABULARY, HEADS * (NOPE + ROPE))
        self.head = draw(HEADS * VALUE, VOCABULARY)
        self.sequences: dict[str, Sequence] = {}
        self.outputs: dict[str, dict[int, torch.Tensor]] = {}
        self.worst = 0.0  # error, relative to the largest output
        self.hits: dict[str, int] = {}
        self.decoded = self.prefilled = 0  # queries by path
        self.taken = 0  # drafts that were right
        self.steps = []  # of each: metadata, and tokens by sequence in the runner's order
        self.draft = None  # gives a request's drafts
        self.lag = config.max_concurrent_batches - 1  # with async scheduling, of what is sampled
        self.flight: list = []  # steps whose results the scheduler has not seen
        self.order: list[str] = []  # of the first runner's batch
        self.random = torch.Generator().manual_seed(5)
        self.graphs: dict[int, list] = {}  # metadata that a graph of so many sequences has read
        pages, most = num_pages, config.scheduler_config.max_num_batched_tokens
        ints = lambda *shape: torch.zeros(*shape, dtype=torch.int32)  # noqa: E731
        self.starts, self.lengths = ints(most + 1), ints(most)
        self.tables, self.slots = [], torch.full((2, most + 8), -1)
        for group in groups:  # beyond a row's end: whatever it or another row had there before
            shape = most, group.max_num_blocks_per_req(config, config.model_config.max_model_len)
            table = torch.randint(pages, shape, generator=self.random, dtype=torch.int32)
            self.tables.append(table)

    def rows(self, tokens: list[int]) -> torch.Tensor:
        """What is cached of a sequence, bf16 [T, R + E]."""
        ids, position = torch.tensor(tokens), torch.arange(len(tokens)) % 4096
        latent = self.latent[ids] + self.turn[position]
        return torch.cat((latent, self.rope[(ids + position) % VOCABULARY]), dim=1).bfloat16()

    def run(self) -> None:
        while self.pool.scheduler.has_unfinished_requests():
            self.step()

    def step(self) -> None:
        output = self.pool.scheduler.schedule()
        counts = output.num_scheduled_tokens
        assert counts or self.flight, "nothing could be scheduled"
        if counts:
            self._update(output)
            done = {name: self._computed[name] for name in counts}
            names = self._ordered(output, done)
            for name in names:
                sequence = self.sequences[name]
                # a GPU knows which drafts were wrong before the scheduler does
                done[name] = min(done[name], len(sequence.known) - 1)
                planned = output.scheduled_spec_decode_tokens.get(name, [])
                if self.lag and planned:  # placeholders
                    planned = [*self._proposed(name), *planned][: len(planned)]
                sequence.drafts = planned  # -1 where vLLM pads a request's first step
                sequence.tokens = sequence.known + planned
            out = self._attend(names, counts, done)
            self._check_pages(names, counts, done)
            sampled = self._sample(names, counts, done, out)
            for name in names:
                self.sequences[name].known += sampled[name]
            self.flight.append((output, sampled))
        if len(self.flight) > (self.lag if counts else 0):
            self.pool.finish(*self.flight.pop(0))
        if self.draft is not None and not self.lag:
            running = [r.request_id for r in self.pool.scheduler.running]
            proposed = [self._proposed(name) for name in running]
            self.pool.scheduler.update_draft_token_ids(DraftTokenIds(running, proposed))

    def _proposed(self, name: str) -> list[int]:
        return self.draft(self.pool.scheduler.requests[name])

    def _ordered(self, output, done: dict[str, int]) -> list[str]:
        """By vLLM's own functions: decodes first, then short chunks, then longer ones."""
        speculation = self.pool.config.speculative_config
        if self.runner == 2:
            drafts = speculation.num_speculative_tokens if speculation else 0
            return sort_batch_req_ids(output.num_scheduled_tokens, 1 + drafts)
        batch = Batch(self.order, done, self.pool.scheduler.requests)
        of_groups = (builder.reorder_batch_threshold for builder in self.builders)
        threshold = min(each for each in of_groups if each is not None)
        reorder_batch_to_split_decodes_and_prefills(batch, output, threshold)
        self.order = batch.req_ids
        return batch.req_ids

    def _update(self, output) -> None:
        """Block tables as a worker keeps them."""
        self._computed = {}
        for new in output.scheduled_new_reqs:
            self.sequences[new.req_id] = Sequence([], [list(ids) for ids in new.block_ids])
            self._admit(new.req_id, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            sequence, ids = self.sequences[name], cached.new_block_ids[i]
            self._computed[name] = cached.num_computed_tokens[i]
            if name in cached.resumed_req_ids:
                sequence.tables = [list(group) for group in ids]
                self._admit(name, cached.num_computed_tokens[i])
            elif ids is not None:
                for table, group in zip(sequence.tables, ids, strict=True):
                    table.extend(group)

    def _admit(self, name: str, hit: int) -> None:
        sequence = self.sequences[name]
        sequence.known = list(self.pool.scheduler.requests[name].all_token_ids)
        self._computed[name] = self.hits[name] = hit
        last = hit // self.layout.window_page_size - 1
        lost = hit > 0 and sequence.tables[1][last] == 0
        sequence.window_start = hit if lost else 0

    def _is_graph(self, names, counts) -> bool:
        return {counts[n] for n in names} == {self.builders[0].decode_length}

    def _padded(self, names, counts) -> tuple[int, int, int]:
        """Sequences, rows, and how many of these the metadata counts.

        A step of decodes is a whole CUDA graph, of sizes that were captured; in others only what
        lies around attention is.
        """
        total = sum(counts[n] for n in names)
        if self._is_graph(names, counts):
            batch = 1 << (len(names) - 1).bit_length()
            return batch, batch * counts[names[0]], batch * counts[names[0]]
        return len(names), -(-total // 8) * 8, total

    def _common(self, names, counts, done, group: int) -> CommonAttentionMetadata:
        size = self.builders[group].kv_cache_spec.block_size
        batch, rows, counted = self._padded(names, counts)
        padding = [0] * (batch - len(names))
        ends = np.cumsum([0, *(counts[n] for n in names), *padding])
        starts, lengths = self.starts[: batch + 1], self.lengths[:batch]
        starts.copy_(torch.from_numpy(ends))
        lengths.copy_(torch.tensor([done[n] + counts[n] for n in names] + padding))
        # what the CPU knows holds drafts of the step before that were wrong
        most = torch.tensor([self._computed[n] + counts[n] for n in names] + padding)
        table, slots = self.tables[group][:batch], self.slots[group][:rows]
        table[len(names) :] = 0
        slots.fill_(-1)
        at = 0
        for i, name in enumerate(names):
            ids = self.sequences[name].tables[group]
            table[i, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
            for t in range(done[name], int(lengths[i])):
                slots[at] = ids[t // size] * size + t % size
                at += 1
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts.clone(),
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=most.int(),
            num_reqs=batch,
            num_actual_tokens=counted,
            max_query_len=max(counts[n] for n in names),
            max_seq_len=int(most.max()),
            block_table_tensor=table,
            slot_mapping=slots,
            is_prefilling=torch.zeros(batch, dtype=torch.bool),
        )

    def _attend(self, names, counts, done) -> torch.Tensor:
        common = [self._common(names, counts, done, group) for group in (0, 1)]
        metadata = [b.build(0, c) for b, c in zip(self.builders, common, strict=True)]
        self.steps.append((metadata, [counts[n] for n in names]))
        if self._is_graph(names, counts):  # reads where the first one of its size did
            metadata = self.graphs.setdefault(common[0].num_reqs, metadata)
        rows = torch.cat(
            [self.rows(self.sequences[n].tokens)[done[n] : done[n] + counts[n]] for n in names]
        )
        ids = [t for n in names for t in self.sequences[n].tokens[done[n] : done[n] + counts[n]]]
        query = self.query[torch.tensor(ids)].view(-1, HEADS, NOPE + ROPE)
        more = len(common[0].slot_mapping) - len(rows)
        rows = nn.functional.pad(rows, (0, 0, 0, more), value=torch.nan)
        query = nn.functional.pad(query, (0, 0, 0, 0, 0, more), value=torch.nan)
        latent, k_rope = rows.split((RANK, ROPE), dim=1)
        out = torch.empty(len(rows), HEADS * VALUE)
        layers = dict(zip((NAME, self.window.prefix), metadata, strict=True))
        slots = dict(zip(layers, (c.slot_mapping for c in common), strict=True))
        context = ForwardContext(no_compile_layers={}, attn_metadata=layers, slot_mapping=slots)
        with override_forward_context(context):
            cache = self.layer.kv_cache
            self.layer.impl.do_kv_cache_update(
                latent, k_rope[:, None], cache, slots[NAME], "auto", torch.ones(1)
            )
            self.layer.forward_impl(
                query, latent.float(), k_rope[:, None].float(), cache, metadata[0], output=out
            )
        self._compare(names, counts, done, (query, out, metadata[0].num_decodes))
        return out

    def _compare(self, names, counts, done, result) -> None:
        query, out, num_decodes = result
        at = 0
        for i, name in enumerate(names):
            count, before = counts[name], done[name]
            decode = i < num_decodes
            self.decoded, self.prefilled = (
                self.decoded + decode * count,
                self.prefilled + (not decode) * count,
            )
            want = self.expected(name, query[at : at + count], before, count, decode)
            got = out[at : at + count].double()
            error = (got - want).abs().max() / want.abs().max()
            self.worst = max(self.worst, float(error)) if not error.isnan() else float("nan")
            assert error < TOLERANCE, f"{name}, {count} tokens after {before}: {error}"
            for s in range(count):
                self.outputs.setdefault(name, {})[before + s] = out[at + s].clone()
            at += count

    def expected(self, name, query, before: int, count: int, decode: bool) -> torch.Tensor:
        """Attention in float64 over rows as the cache's rule has them."""
        piece = self.builders[0].piece
        if decode and count > piece:
            pieces = [range(at, min(at + piece, count)) for at in range(0, count, piece)]
            parts = [
                self.expected(name, query[p.start : p.stop], before + p.start, len(p), True)
                for p in pieces
            ]
            return torch.cat(parts)
        sequence, length = self.sequences[name], before + count
        rows = self.rows(sequence.tokens[:length])
        seen = self.read(rows, length if decode else before, sequence.window_start)
        if not decode:
            seen = seen.bfloat16().double()  # as gather hands it to the prefill kernel
        seen = torch.cat((seen, rows[len(seen) :].double()))
        kv = seen[:, :RANK] @ self.layer.kv_b_proj.weight.double().T
        k, v = kv.view(length, HEADS, NOPE + VALUE).split((NOPE, VALUE), dim=-1)
        k = torch.cat((k, seen[:, None, RANK:].expand(-1, HEADS, -1)), dim=-1)
        scores = torch.einsum("shc,thc->hst", query.double(), k) * self.layer.scale
        late = torch.arange(length)[None] > before + torch.arange(count)[:, None]
        weights = scores.masked_fill(late, -torch.inf).softmax(dim=-1)
        return torch.einsum("hst,thv->shv", weights, v).flatten(1)

    def read(self, rows: torch.Tensor, length: int, window_start: int) -> torch.Tensor:
        """The first `length` rows as decode reads them then, float64."""
        fmt = self.layout.fmt
        packed = max(fmt.first_recent(length), min(window_start, length))
        seen = rows[:length].double()
        if packed:
            pages = rows[:packed].unflatten(0, (-1, fmt.page_size))
            latent, k_rope = pages.split((RANK, ROPE), dim=-1)
            bytes_ = pack_pages(latent, k_rope, fmt)
            read = torch.cat(unpack_pages(bytes_, RANK, ROPE, fmt), dim=-1).flatten(0, 1)
            seen[fmt.num_sink_tokens : packed] = read[fmt.num_sink_tokens :].double()
        return seen

    def _check_pages(self, names, counts, done) -> None:
        """Pages that this step completed hold their own tokens' bytes, however these arrived.

        And the page that stands for none is as it was.
        """
        assert (self.raw[: self.layout.page_bytes] == -1).all()
        size = self.layout.fmt.page_size
        for name in names:
            sequence, end = self.sequences[name], done[name] + counts[name]
            rows = self.rows(sequence.tokens[:end])
            for page in range(done[name] // size, end // size):
                latent, k_rope = rows[page * size :][:size].split((RANK, ROPE), dim=1)
                want = pack_pages(latent[None], k_rope[None], self.layout.fmt)[0]
                assert torch.equal(self.layer.kv_cache[sequence.tables[0][page]], want)

    def _sample(self, names, counts, done, out) -> dict[str, list[int]]:
        """Greedy; of drafts, those that are what would have been sampled, and one token more."""
        sampled, at = {}, 0
        for name in names:
            count, sequence = counts[name], self.sequences[name]
            drafts, end = sequence.drafts, done[name] + count
            best = (out[at : at + count] @ self.head).argmax(dim=1).tolist()
            at += count
            if end - len(drafts) < len(sequence.known):
                sampled[name] = []  # not the whole prompt yet
                continue
            taken = best[count - len(drafts) - 1 :]
            right = 0
            while right < len(drafts) and drafts[right] == taken[right]:
                right += 1
            self.taken += right
            sampled[name] = taken[: right + 1]
        return sampled
