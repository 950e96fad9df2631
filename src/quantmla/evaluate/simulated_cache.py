"""A cache that decodes as a packed one would, where there are no bytes to pack.

That is: with a transform that has not been fused into the weights, and in the published quantiser,
which has no byte layout. Rows go through the transform, are rounded to bf16 and kept; what a packed
cache would hold in pages is read as its pages would give it. It saves no memory.
B sequences, S new tokens, T cached tokens, R latent channels, E rope channels (interleaved).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quantmla.cache.sequence import packed_tokens
from quantmla.evaluate.stored import StoredCoordinates, coordinates
from quantmla.evaluate.teacher_forced import Transforms, latent_attentions, norm_weight
from quantmla.mla.rope import RopeOrder, from_interleaved, to_interleaved
from quantmla.quant.format import CacheFormat
from quantmla.quant.mixed import ModelFormat, each_layer
from quantmla.quant.roundtrip import read_content, read_rope
from quantmla.serve.families import cached_rope_order
from quantmla.serve.transformers import QuantMLACache, QuantMLALayer


class _Sequence:
    """Stored rows of one sequence, and those of whole packed pages as they are read."""

    def __init__(self, latent_rank: int, rope_dim: int, device: torch.device):
        self.rows = torch.empty(0, latent_rank + rope_dim, device=device)
        self.read_rows = self.rows
        self.latent_rank = latent_rank

    def append(self, rows_SC: Tensor, fmt: CacheFormat) -> None:
        self.rows = torch.cat((self.rows, rows_SC))
        packed, done = packed_tokens(fmt, len(self.rows)), len(self.read_rows)
        if packed > done:
            fresh = self._as_read(self.rows[done:packed], fmt)
            self.read_rows = torch.cat((self.read_rows, fresh))

    def read(self, fmt: CacheFormat) -> Tensor:
        """[T, R + E], every token as decode sees it."""
        rest = self.rows[len(self.read_rows) :]
        if fmt.recent_window is None and len(rest):
            rest = self._as_read(rest, fmt)
        whole = torch.cat((self.read_rows, rest))
        whole[: fmt.num_sink_tokens] = self.rows[: fmt.num_sink_tokens]
        return whole

    def _as_read(self, rows_TC: Tensor, fmt: CacheFormat) -> Tensor:
        latent, k_rope = rows_TC[:, : self.latent_rank], rows_TC[:, self.latent_rank :]
        return torch.cat((read_content(latent, fmt), read_rope(k_rope, fmt)), dim=1)


class SimulatedRows:
    """What a PagedCache is to a layer, without pages."""

    def __init__(self, fmt: CacheFormat, sizes: tuple[int, int], batch: int, device: torch.device):
        self.fmt, self.sizes, self.device = fmt, sizes, device
        self.keep_past = False
        self.sequences = [_Sequence(*sizes, device) for _ in range(batch)]

    def append(self, latent_BSR: Tensor, k_rope_BSE: Tensor, counts: Sequence[int]) -> None:
        """Adds to every sequence its last `counts[b]` rows of the chunk."""
        rows_BSC = torch.cat((latent_BSR, k_rope_BSE), dim=-1).float()
        for sequence, rows, count in zip(self.sequences, rows_BSC, counts, strict=True):
            sequence.append(rows[len(rows) - count :], self.fmt)

    def read(self) -> tuple[Tensor, Tensor]:
        """Latents [B, T, R] and rope keys [B, T, E]; zeros before a shorter sequence."""
        longest = max(len(sequence.rows) for sequence in self.sequences)
        out = torch.zeros(len(self.sequences), longest, sum(self.sizes), device=self.device)
        for rows, sequence in zip(out, self.sequences, strict=True):
            if len(sequence.rows):
                rows[longest - len(sequence.rows) :] = sequence.read(self.fmt)
        return out[..., : self.sizes[0]], out[..., self.sizes[0] :]

    def allocated_bytes(self) -> int:
        """Nothing is packed."""
        return 0


class SimulatedLayer(QuantMLALayer):
    """One latent attention's rows in the coordinates of its transform."""

    def __init__(self, like: QuantMLALayer, fmt: CacheFormat, stored: StoredCoordinates):
        super().__init__(fmt, like.rope_order, like.padding, like.mask_width)
        self.stored = stored

    def new_pages(
        self, latent_rank: int, rope_dim: int, batch: int, device: torch.device
    ) -> Any:  # all of a PagedCache that decoding needs
        return SimulatedRows(self.fmt, (latent_rank, rope_dim), batch, device)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Caches latents [B, 1, S, R] and rope keys [B, 1, S, E]; returns the whole context so."""
        latent, k_rope = super().update(
            self.stored.store_latent(key_states),
            from_interleaved(self.stored.store_rope(value_states), self.rope_order),
            *args,
            **kwargs,
        )
        back = self.stored.restore_rope(to_interleaved(k_rope, self.rope_order))
        return self.stored.restore_latent(latent).to(key_states.dtype), back.to(value_states.dtype)


def simulated_cache(
    model: nn.Module,
    fmt: ModelFormat,
    attention_mask: Tensor | None = None,
    transforms: Transforms | None = None,
    rope_order: RopeOrder | None = None,
) -> QuantMLACache:
    """An empty cache for `model`; `transforms` by cache index. Greedy and sampled decoding only."""
    config: Any = model.config
    like = each_layer(fmt, lambda one: replace(one, range_rule="hold_zero"))
    cache = QuantMLACache(config, like, attention_mask, rope_order)
    attentions = latent_attentions(model)
    order = rope_order or cached_rope_order(next(iter(attentions.values())).config)
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, QuantMLALayer):
            transform = (transforms or {}).get(index)
            stored = coordinates(order, transform, norm_weight(attentions[index]))
            cache.layers[index] = SimulatedLayer(layer, fmt.for_layer(index), stored)
    return cache
