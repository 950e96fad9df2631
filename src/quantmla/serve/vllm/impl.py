"""Reads and writes of the packed cache in vLLM's latent attention.

B sequences, S query tokens of each, N heads, R latent channels, E rope channels, T tokens.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from quantmla.cache.view import CacheView
from quantmla.kernels import api
from quantmla.serve.vllm.engine import (
    MLACommonImpl,
    get_forward_context,
    merge_attn_states,
)
from quantmla.serve.vllm.metadata import PackedMetadata, WindowMetadata
from quantmla.serve.vllm.plans import P
from quantmla.serve.vllm.pool import PoolLayout
from quantmla.serve.vllm.step import Call, ContextChunk

if TYPE_CHECKING:
    from quantmla.serve.vllm.layer import WindowCache


class Step(NamedTuple):
    """Metadata of both groups of the pool."""

    packed: PackedMetadata
    window: WindowMetadata


@cache
def layer_kind(layout: PoolLayout) -> object:
    """One object for all layers of a layout: its hash costs nothing."""
    return object()


class QuantMLAImpl(MLACommonImpl):
    """Append, decode and gather through quantmla.kernels; the chunk itself as vLLM does it.

    In a step that is no CUDA graph the host's time counts, and this runs in every layer: what the
    layers of a step share is in the step's plans.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.supports_quant_query_input = False

    def bind(self, layer_name: str, window: "WindowCache") -> None:
        self.layer_name, self.window = layer_name, window
        self.kind = layer_kind(window.layout)

    def _step(self) -> Step | None:
        """Of this layer in the current step; None in a dummy run without attention."""
        by_layer = get_forward_context().attn_metadata
        if by_layer is None:
            return None
        return Step(by_layer[self.layer_name], by_layer[self.window.prefix])

    def _plan(
        self, step: Step, what: tuple[str, int], inputs: tuple[Any, ...], make: Callable[[], P]
    ) -> P:
        """`what`: the operation, and which of the step's calls of it."""
        packed, window = step
        tables = (packed.block_table, packed.lengths, packed.tokens, window)
        return packed.plans.find(tables, (what, self.kind), inputs, make)

    def _view(
        self, pages: Tensor, step: Step, sequences: slice | Tensor, lengths: Tensor
    ) -> CacheView:
        packed, window = step
        assert packed.block_table is not None
        return CacheView(
            fmt=self.window.layout.fmt,
            kv_lora_rank=self.kv_lora_rank,
            pages_JY=pages,
            block_table_BJ=packed.block_table[sequences],
            lengths_B=lengths,
            window_pages_JMC=self.window.kv_cache,
            window_table_BW=window.table[sequences],
            sink_pages_B=window.sink_pages[sequences],
            window_start_B=window.starts[sequences],
        )

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
    ) -> None:
        """Writes the step's rows to the window and packs the pages that they complete."""
        step = self._step()
        if step is None or kv_cache.numel() == 0:
            return
        tokens, lengths = step.packed.tokens, step.packed.lengths
        assert tokens is not None
        assert lengths is not None
        assert step.packed.first_layer is not None
        for first_layer in (step.packed.first_layer, step.window.first_layer):
            first_layer.enter(self.layer_name)
        count = tokens.sequence_T.shape[0]
        rows = api.Rows(kv_c_normed[:count], k_pe[:count].flatten(1))
        inputs = rows, kv_cache, self.window.kv_cache

        def make() -> api.AppendPlan:
            view = self._view(kv_cache, step, slice(len(lengths)), lengths)
            return api.plan_append(rows, tokens, view)

        self._plan(step, ("append", 0), inputs, make).launch(*inputs)

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: PackedMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The last tokens of every decode over its whole cache; drafts and short chunks too.

        All queries of a sequence, or of a piece of it, read packed what the last of them does: a
        token that is packed as this step ends is read packed up to S - 1 tokens early.

        Returns [T, N, R] and no LSE. Calls of a mixed step write to one tensor of all its rows: the
        kernel does where a call's rows lie side by side there, else what it gives is copied.
        """
        step = self._step()
        assert step is not None
        assert isinstance(q, tuple), "queries are joined for fp8 and context parallelism only"
        batch = attn_metadata.num_decodes
        if attn_metadata.calls is None:
            call = Call(slice(batch), slice(attn_metadata.num_decode_tokens), batch)
            return self._decode(q, kv_c_and_k_pe_cache, step, 0, call), None
        count, latent = attn_metadata.num_decode_tokens, q[0]
        out_TNR = latent.new_empty(count + 1, *latent.shape[1:])  # the last: what is made up
        for i, call in enumerate(attn_metadata.calls):
            if call.places is None:
                self._decode(q, kv_c_and_k_pe_cache, step, i, call, out_TNR[call.rows])
            else:  # what one call gives is not kept while the next one runs
                out_TNR.index_copy_(
                    0, call.places, self._decode(q, kv_c_and_k_pe_cache, step, i, call)
                )
        return out_TNR[:count], None

    def _decode(
        self,
        q: tuple[Tensor, Tensor],
        pages: Tensor,
        step: Step,
        number: int,
        call: Call,
        out_TNR: Tensor | None = None,
    ) -> Tensor:
        """[B * S, N, R]: `out_TNR`, or a new tensor where that is None."""
        latent, rope = (x[call.rows].view(call.batch, -1, *x.shape[1:]) for x in q)
        query = api.DecodeQuery(latent, rope, self.scale)
        inputs = query, pages, self.window.kv_cache

        def make() -> api.DecodePlan:
            assert step.packed.lengths is not None
            lengths = step.packed.lengths[call.sequences]
            if call.after is not None:
                lengths = lengths - call.after
            return api.plan_decode(query, self._view(pages, step, call.sequences, lengths))

        plan = self._plan(step, ("decode", number), inputs, make)
        if out_TNR is None:
            return plan.launch(*inputs).out_BSNR.flatten(0, 1)
        plan.launch(*inputs, out_TNR.view(latent.shape))
        return out_TNR

    def _compute_prefill_context(
        self, q: Tensor, kv_c_and_k_pe_cache: Tensor, attn_metadata: PackedMetadata, k_scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attention of the chunk's queries over what was cached before it, a part at a time."""
        step = self._step()
        assert step is not None
        total: tuple[Tensor, Tensor] | None = None
        for i, chunk in enumerate(attn_metadata.context):
            self._gather(chunk, kv_c_and_k_pe_cache, step, i)
            part = self._attend_context(q, chunk, attn_metadata.prefill, i)
            total = part if total is None else _merge(total, part)
        assert total is not None
        return total

    def _gather(self, chunk: ContextChunk, pages: Tensor, step: Step, number: int) -> None:
        packed = step.packed
        inputs = chunk.rows_TC, pages, self.window.kv_cache

        def make() -> api.GatherPlan:
            assert packed.context_lengths is not None
            prefills = slice(packed.num_decodes, packed.num_reqs)
            view = self._view(pages, step, prefills, packed.context_lengths)
            return api.plan_gather(chunk.tokens, view, chunk.rows_TC)

        self._plan(step, ("gather", number), inputs, make).launch(*inputs)

    def _attend_context(
        self, q: Tensor, chunk: ContextChunk, prefill: Any, number: int
    ) -> tuple[Tensor, Tensor]:
        latent, k_rope = chunk.rows_TC.split((self.kv_lora_rank, self.qk_rope_head_dim), dim=-1)
        kv = self.kv_b_proj(latent)[0].view(
            -1, self.num_heads, self.qk_nope_head_dim + self.v_head_dim
        )
        k_nope, v = kv.split((self.qk_nope_head_dim, self.v_head_dim), dim=-1)
        out, lse = prefill.prefill_backend.run_prefill_context_chunk(
            chunk_idx=number, q=q, k=self._concat_k_nope_k_pe(k_nope, k_rope[:, None]), v=v
        )
        if chunk.empty_T is not None:  # what was written there is undefined
            lse.masked_fill_(chunk.empty_T, -torch.inf)
            out.masked_fill_(chunk.empty_T[:, None, None], 0.0)
        return out, lse


def _merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over both of two sets of keys."""
    out, lse = torch.empty_like(one[0]), torch.empty_like(one[1])
    merge_attn_states(
        output=out,
        output_lse=lse,
        prefix_output=one[0],
        prefix_lse=one[1],
        suffix_output=other[0],
        suffix_lse=other[1],
    )
    return out, lse
