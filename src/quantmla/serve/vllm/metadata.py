"""Metadata of a step for both groups of the pool, built once and read by every layer.

What a captured decode step reads lies in buffers that stay where they are; the engine's own tables,
lengths and slots do too.
"""

from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantmla.kernels.api import Tokens
from quantmla.serve.settings import MAX_DRAFTS
from quantmla.serve.vllm.backend import PAGE_SIZE
from quantmla.serve.vllm.engine import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
    VllmConfig,
    init_logger,
)
from quantmla.serve.vllm.plans import StepPlans
from quantmla.serve.vllm.pool import divided_chunk, short_chunk
from quantmla.serve.vllm.step import (
    Call,
    ContextChunk,
    FirstLayer,
    context_tokens,
    kept_only,
    locate_tokens,
    plan_calls,
    without_context,
    write_decodes,
    write_tokens,
    write_window_starts,
)
from quantmla.serve.vllm.warmup import describe, warm_up

# Query rows (tokens x heads) of short chunks in one call: in the Hopper kernel's tiles of 64 these
# are fewer partial results than it has room for in any decode.
CALL_ROWS = 1 << 14

logger = init_logger("vllm.quantmla")


@dataclass
class PackedMetadata(MLACommonMetadata):
    """vLLM's, and where every token of the step and of its context lies."""

    block_table: Tensor | None = None
    lengths: Tensor | None = None  # with the step's tokens
    tokens: Tokens | None = None  # of the step, once the first layer has begun
    first_layer: FirstLayer | None = None
    calls: tuple[Call, ...] | None = None  # of the decode kernel, where query lengths differ
    context_lengths: Tensor | None = None  # of prefills: tokens before the step
    context: list[ContextChunk] = field(default_factory=list)
    plans: StepPlans = field(default_factory=StepPlans)

    def __post_init__(self) -> None:
        """Any size of head: vLLM's list is of its own kernels."""


@dataclass
class WindowMetadata(AttentionMetadata):
    """Where the bf16 rows of every sequence lie; its first window page is never given back."""

    table: Tensor
    sink_pages: Tensor
    starts: Tensor  # see step.window_starts; once the first layer has begun
    first_layer: FirstLayer


class PackedBuilder(MLACommonMetadataBuilder):
    """Queries of up to 1 + drafts tokens and short chunks go to the decode kernel.

    Longer ones are prefills, which attend to their context apart, and all in one batch: a short
    chunk among them would put every prompt that begins in this step through that. Chunks of a few
    times a short one go to the decode kernel in pieces where one of them has a context.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        layers = vllm_config.compilation_config.static_forward_context
        layout = layers[layer_names[0]].window.layout
        self.reorder_batch_threshold = divided_chunk(layout.fmt)
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, PackedMetadata)
        speculation = vllm_config.speculative_config
        self.decode_length = 1 + (speculation.num_speculative_tokens if speculation else 0)
        self.piece = max(short_chunk(layout.recent_window), self.decode_length)
        most = vllm_config.scheduler_config.max_num_batched_tokens
        self.tokens = Tokens(*torch.full((2, most), -1, dtype=torch.int32, device=device))
        most_rows = max(most, self.chunked_prefill_workspace_size)
        self.rows = torch.arange(most_rows, dtype=torch.int32, device=device)
        kernels = warm_up(layout, self.num_heads, most, device)
        pages = vllm_config.cache_config.num_gpu_blocks
        logger.info_once(f"{describe(layout, pages, len(layer_names))}; {kernels}")

    @staticmethod
    def determine_chunked_prefill_workspace_size(vllm_config: VllmConfig) -> int:
        """vLLM's, for packed pages: each context of a step is gathered in whole ones.

        Once it knows the groups, vLLM puts the smallest page of any into its config. A worker in
        the engine's own process, which is how one GPU runs, would make room for window pages.
        """
        sizes = SimpleNamespace(
            model_config=vllm_config.model_config,
            scheduler_config=vllm_config.scheduler_config,
            cache_config=SimpleNamespace(block_size=PAGE_SIZE),
        )
        return MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size(sizes)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PackedMetadata:
        common, longest = common_attn_metadata, self.reorder_batch_threshold
        try:  # what vLLM divides the step by
            self.reorder_batch_threshold = self._longest_decode(common)
            metadata = super().build(common_prefix_len, common, fast_build)
        finally:
            self.reorder_batch_threshold = longest
        count = common.num_actual_tokens
        metadata.tokens = Tokens(*(x[:count] for x in self.tokens))
        metadata.first_layer = FirstLayer(partial(self._write_tokens, common, metadata.tokens))
        metadata.block_table = common.block_table_tensor
        metadata.lengths = common.seq_lens[: common.num_reqs]
        self._plan_decodes(metadata, common)
        if metadata.prefill is not None and metadata.prefill.chunked_context is not None:
            self._add_context(metadata, common)
        return metadata

    def _write_tokens(self, common: CommonAttentionMetadata, out: Tokens) -> None:
        count, batch = common.num_actual_tokens, common.num_reqs
        lengths, slots, rows = common.seq_lens[:batch], common.slot_mapping[:count], self.rows
        if count == batch * common.max_query_len:
            write_decodes(lengths, slots, rows[:count], common.max_query_len, out)
            return
        ends = common.query_start_loc[1 : batch + 1]
        write_tokens(locate_tokens(ends, lengths, slots, rows[:count]), out)

    def _longest_decode(self, common: CommonAttentionMetadata) -> int:
        """`piece`, or the longest chunk with a context that is not to be gathered.

        A longer one without a context stays a prompt: neither runner puts it before that chunk.
        """
        if common.max_query_len <= self.piece:
            return self.piece
        length_B = common.query_start_loc_cpu[: common.num_reqs + 1].diff()
        first_long = (length_B > self.reorder_batch_threshold).int()
        count = int(first_long.argmax()) if first_long.any() else len(length_B)
        length_B = length_B[:count]
        context_B = common.seq_lens_cpu_upper_bound[:count] - length_B
        return max([self.piece, *length_B[context_B > 0].tolist()])

    def _plan_decodes(self, metadata: PackedMetadata, common: CommonAttentionMetadata) -> None:
        """Nothing to do where all have the same number of tokens, as in every captured step."""
        count, rows = metadata.num_decodes, metadata.num_decode_tokens
        if count == rows:
            return
        bounds = common.query_start_loc_cpu[: count + 1]
        longest = int(bounds.diff().max())
        if longest > self.decode_length or count * longest != rows:
            most = CALL_ROWS // self.num_heads
            calls = plan_calls(bounds, self.decode_length, most, self.piece)
            metadata.calls = tuple(call.to(self.device) for call in calls)

    def _add_context(self, metadata: PackedMetadata, common: CommonAttentionMetadata) -> None:
        first, start = metadata.num_decodes, common.query_start_loc
        query_lengths = start[first + 1 : common.num_reqs + 1] - start[first : common.num_reqs]
        assert metadata.lengths is not None
        metadata.context_lengths = metadata.lengths[first:] - query_lengths
        context, prefill = metadata.prefill.chunked_context, metadata.prefill
        queries = self.rows[: metadata.num_actual_tokens - metadata.num_decode_tokens]
        # vLLM takes only so many rows' context, from the first one on; but the V2 runner orders
        # prompts by their tokens, and one that begins may come first. Its rows have empty_T below.
        context.prefill_tokens_with_context = None
        for i, count in enumerate(context.seq_tot):
            bounds, sequence = context.cu_seq_lens[i], context.token_to_seq[i][:count]
            tokens = context_tokens(sequence, context.starts[i], bounds[:-1], self.rows[:count])
            empty = None
            if context.has_empty_context[i]:
                empty = without_context(prefill.query_start_loc, bounds, queries)
            metadata.context.append(ContextChunk(tokens, context.workspace[:count], empty))


class WindowBuilder(AttentionMetadataBuilder):
    """Of the group of window pages, whose layers have no attention of their own."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold = None

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.layout = vllm_config.compilation_config.static_forward_context[layer_names[0]].layout
        most = vllm_config.scheduler_config.max_num_batched_tokens  # sequences are fewer
        self.starts = torch.zeros(most, dtype=torch.int32, device=device)
        # a new table would not be what a captured step of drafts reads, however small the window
        self.all_kept = max(divided_chunk(self.layout.fmt), 1 + MAX_DRAFTS)
        self.reuses_prefixes = vllm_config.cache_config.enable_prefix_caching

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> WindowMetadata:
        common, count = common_attn_metadata, common_attn_metadata.num_reqs
        table, starts = common.block_table_tensor, self.starts[:count]
        first_layer = FirstLayer(partial(self._write_starts, common, table, starts))
        if common.max_query_len > self.all_kept:  # some of a longer one's tokens have no page
            table = kept_only(table)
        return WindowMetadata(table, table[:, 0], starts, first_layer)

    def _write_starts(self, common: CommonAttentionMetadata, table: Tensor, starts: Tensor) -> None:
        if self.reuses_prefixes:  # else no window is ever lost
            count = common.num_reqs
            bounds, lengths = common.query_start_loc[: count + 1], common.seq_lens[:count]
            write_window_starts(lengths, bounds, table, self.layout, starts)
