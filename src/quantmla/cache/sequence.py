"""One sequence in one layer: packed pages, bf16 sinks, and the bf16 rows that no page holds yet.

T tokens, R latent channels, E rope channels (interleaved), Y page bytes. A sequence never changes:
`append` and `crop` return another one that shares the pages, so beams share what they have in
common. Pages are numbered from the sequence's own first token and are written whole, once, from
bf16 rows; their bytes do not depend on how the tokens arrived.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantmla.errors import UsageError, require
from quantmla.quant.format import CacheFormat
from quantmla.quant.page import pack_pages
from quantmla.quant.roundtrip import read_content, read_rope


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSequence:
    """Tokens [0, packed) lie in pages, [first, length) as bf16 rows; first <= packed."""

    length: int
    packed: int
    first: int
    pages: tuple[Tensor, ...]  # uint8 [j, Y] each, in order
    latent_TR: Tensor  # bf16, tokens first..length
    k_rope_TE: Tensor
    sink_latent_TR: Tensor  # bf16, the first tokens, at most num_sink_tokens
    sink_k_rope_TE: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is allocated."""
        return (
            *self.pages,
            self.latent_TR,
            self.k_rope_TE,
            self.sink_latent_TR,
            self.sink_k_rope_TE,
        )


def empty_sequence(
    kv_lora_rank: int, qk_rope_head_dim: int, device: torch.device
) -> PackedSequence:
    latent = torch.empty(0, kv_lora_rank, dtype=torch.bfloat16, device=device)
    k_rope = torch.empty(0, qk_rope_head_dim, dtype=torch.bfloat16, device=device)
    return PackedSequence(
        length=0,
        packed=0,
        first=0,
        pages=(),
        latent_TR=latent,
        k_rope_TE=k_rope,
        sink_latent_TR=latent,
        sink_k_rope_TE=k_rope,
    )


def packed_tokens(fmt: CacheFormat, length: int) -> int:
    """How many of `length` tokens are in pages: whole pages older than the recent window."""
    if fmt.recent_window is None:
        return length // fmt.page_size * fmt.page_size
    return fmt.first_recent(length)


def append(
    seq: PackedSequence,
    latent_TR: Tensor,
    k_rope_TE: Tensor,
    fmt: CacheFormat,
    keep_past: bool = False,
) -> PackedSequence:
    """The sequence with more tokens. `keep_past` keeps rows that were packed, for `crop`."""
    for name, x in (("latent", latent_TR), ("k_rope", k_rope_TE)):
        require(
            x.dtype == torch.bfloat16,
            f"{name} is {x.dtype}; the cache takes torch.bfloat16",
            UsageError,
        )
    for name, x, held in (
        ("latent", latent_TR, seq.latent_TR),
        ("k_rope", k_rope_TE, seq.k_rope_TE),
    ):
        require(
            x.shape == (latent_TR.shape[0], held.shape[1]),
            f"{name} has shape {list(x.shape)}, not [{latent_TR.shape[0]}, {held.shape[1]}]",
            UsageError,
        )
    length = seq.length + latent_TR.shape[0]
    latent = torch.cat((seq.latent_TR, latent_TR))
    k_rope = torch.cat((seq.k_rope_TE, k_rope_TE))
    packed = packed_tokens(fmt, length)
    pages = seq.pages
    if packed > seq.packed:
        ripe = slice(seq.packed - seq.first, packed - seq.first)
        shape = (-1, fmt.page_size)
        pages += (
            pack_pages(latent[ripe].unflatten(0, shape), k_rope[ripe].unflatten(0, shape), fmt),
        )
    missing = max(0, fmt.num_sink_tokens - seq.length)
    grown = PackedSequence(
        length=length,
        packed=packed,
        first=seq.first,
        pages=pages,
        latent_TR=latent,
        k_rope_TE=k_rope,
        sink_latent_TR=torch.cat((seq.sink_latent_TR, latent_TR[:missing]))
        if missing
        else seq.sink_latent_TR,
        sink_k_rope_TE=torch.cat((seq.sink_k_rope_TE, k_rope_TE[:missing]))
        if missing
        else seq.sink_k_rope_TE,
    )
    return grown if keep_past else forget_past(grown)


def forget_past(seq: PackedSequence) -> PackedSequence:
    """Lets go of the bf16 rows of tokens that are in pages."""
    drop = seq.packed - seq.first
    if drop == 0:
        return seq
    # cloned: a slice would keep the whole chunk alive
    return replace(
        seq,
        first=seq.packed,
        latent_TR=seq.latent_TR[drop:].clone(),
        k_rope_TE=seq.k_rope_TE[drop:].clone(),
    )


def crop(seq: PackedSequence, length: int, fmt: CacheFormat) -> PackedSequence:
    """The sequence as it was with its first `length` tokens, if the bf16 rows it needs are left."""
    require(0 <= length <= seq.length, f"cannot crop {seq.length} tokens to {length}", UsageError)
    packed = packed_tokens(fmt, length)
    require(
        packed >= seq.first,
        f"cropping {seq.length} tokens to {length} needs bf16 rows from token {packed} on, and "
        f"those before {seq.first} are packed: keep the past (activate_past_recording) before "
        "appending what may be undone",
        UsageError,
    )
    held, sinks = length - seq.first, min(length, fmt.num_sink_tokens)
    return replace(
        seq,
        length=length,
        packed=packed,
        pages=_first_pages(seq.pages, packed // fmt.page_size),
        latent_TR=seq.latent_TR[:held].clone(),  # a slice would keep all rows alive
        k_rope_TE=seq.k_rope_TE[:held].clone(),
        sink_latent_TR=seq.sink_latent_TR[:sinks].clone(),
        sink_k_rope_TE=seq.sink_k_rope_TE[:sinks].clone(),
    )


def _first_pages(pages: tuple[Tensor, ...], count: int) -> tuple[Tensor, ...]:
    kept: list[Tensor] = []
    for chunk in pages:
        if count <= 0:
            break
        kept.append(chunk if chunk.shape[0] <= count else chunk[:count].clone())
        count -= chunk.shape[0]
    return tuple(kept)


def read_unpacked(seq: PackedSequence, fmt: CacheFormat) -> tuple[Tensor, Tensor]:
    """Tokens [packed, length) as decode sees them, float32; quantised when unprotected."""
    at = seq.packed - seq.first
    latent, k_rope = seq.latent_TR[at:].float(), seq.k_rope_TE[at:].float()
    if fmt.recent_window is not None or not len(latent):
        return latent, k_rope
    return read_content(latent, fmt), read_rope(k_rope, fmt)
