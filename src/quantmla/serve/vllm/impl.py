"""Reads and writes of the packed cache in vLLM's latent attention.

B sequences, S query tokens of each, N heads, R latent channels, E rope channels, T tokens.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantmla.cache.view import CacheView
from quantmla.kernels import api
from quantmla.serve.vllm.engine import (
    MLACommonImpl,
    get_forward_context,
    mask_empty_context,
    merge_attn_states,
)
from quantmla.serve.vllm.metadata import PackedMetadata, WindowMetadata
from quantmla.serve.vllm.step import Call

if TYPE_CHECKING:
    from quantmla.serve.vllm.layer import WindowCache


class QuantMLAImpl(MLACommonImpl):
    """Append, decode and gather through quantmla.kernels; the chunk itself as vLLM does it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.supports_quant_query_input = False

    def bind(self, layer_name: str, window: "WindowCache") -> None:
        self.layer_name, self.window = layer_name, window

    def _metadata(self) -> tuple[PackedMetadata, WindowMetadata] | None:
        """Of this layer in the current step; None in a dummy run without attention."""
        by_layer = get_forward_context().attn_metadata
        if by_layer is None:
            return None
        return by_layer[self.layer_name], by_layer[self.window.prefix]

    def _view(
        self,
        pages: Tensor,
        metadata: tuple[PackedMetadata, WindowMetadata],
        sequences: slice | Tensor,
        lengths: Tensor,
    ) -> CacheView:
        packed, window = metadata
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
        metadata = self._metadata()
        if metadata is None or kv_cache.numel() == 0:
            return
        tokens, lengths = metadata[0].tokens, metadata[0].lengths
        assert tokens is not None
        assert lengths is not None
        count = len(tokens.sequence_T)
        rows = api.Rows(kv_c_normed[:count], k_pe[:count].flatten(1))
        api.append(rows, tokens, self._view(kv_cache, metadata, slice(len(lengths)), lengths))

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: PackedMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The last tokens of every decode over its whole cache; drafts and short chunks too.

        All queries of a sequence read packed what the last of them does: a token that is packed
        as this step ends is read packed up to S - 1 tokens early.
        """
        metadata = self._metadata()
        assert metadata is not None
        assert isinstance(q, tuple), "queries are joined for fp8 and context parallelism only"
        batch = attn_metadata.num_decodes
        if attn_metadata.calls is None:
            call = Call(slice(batch), slice(attn_metadata.num_decode_tokens), batch)
            return self._decode(q, kv_c_and_k_pe_cache, metadata, call), None
        calls, query_T = attn_metadata.calls
        parts = [self._decode(q, kv_c_and_k_pe_cache, metadata, call) for call in calls]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return (out if query_T is None else out[query_T]), None

    def _decode(
        self,
        q: tuple[Tensor, Tensor],
        pages: Tensor,
        metadata: tuple[PackedMetadata, WindowMetadata],
        call: Call,
    ) -> Tensor:
        """[B * S, N, R]."""
        latent, rope = (x[call.rows].unflatten(0, (call.batch, -1)) for x in q)
        assert metadata[0].lengths is not None
        lengths = metadata[0].lengths[call.sequences]
        view = self._view(pages, metadata, call.sequences, lengths)
        return api.decode(api.DecodeQuery(latent, rope, self.scale), view).out_BSNR.flatten(0, 1)

    def _compute_prefill_context(
        self, q: Tensor, kv_c_and_k_pe_cache: Tensor, attn_metadata: PackedMetadata, k_scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attention of the chunk's queries over what was cached before it, a part at a time."""
        metadata = self._metadata()
        assert metadata is not None
        assert attn_metadata.context_lengths is not None
        prefills = slice(attn_metadata.num_decodes, attn_metadata.num_reqs)
        view = self._view(kv_c_and_k_pe_cache, metadata, prefills, attn_metadata.context_lengths)
        total: tuple[Tensor, Tensor] | None = None
        for i, tokens in enumerate(attn_metadata.context_tokens):
            rows = attn_metadata.prefill.chunked_context.workspace[: len(tokens.position_T)]
            api.gather(tokens, view, rows)
            part = self._attend_context(q, rows, attn_metadata.prefill, i)
            total = part if total is None else _merge(total, part)
        assert total is not None
        return total

    def _attend_context(
        self, q: Tensor, rows_TC: Tensor, prefill: Any, chunk: int
    ) -> tuple[Tensor, Tensor]:
        latent, k_rope = rows_TC.split((self.kv_lora_rank, self.qk_rope_head_dim), dim=-1)
        kv = self.kv_b_proj(latent)[0].view(
            -1, self.num_heads, self.qk_nope_head_dim + self.v_head_dim
        )
        k_nope, v = kv.split((self.qk_nope_head_dim, self.v_head_dim), dim=-1)
        out, lse = prefill.prefill_backend.run_prefill_context_chunk(
            chunk_idx=chunk, q=q, k=self._concat_k_nope_k_pe(k_nope, k_rope[:, None]), v=v
        )
        context = prefill.chunked_context
        if context.has_empty_context[chunk]:
            mask_empty_context(lse, out, prefill.query_start_loc, context.cu_seq_lens[chunk])
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
