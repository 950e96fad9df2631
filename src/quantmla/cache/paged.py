"""The packed cache of one layer and B sequences, in torch, on the CPU or a GPU.

B sequences, S new tokens, T cached tokens, R latent channels, E rope channels (interleaved), Y page
bytes. Sequences may differ in length; where they are put side by side they end together.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantmla.cache.sequence import append, crop, empty_sequence, forget_past, read_unpacked
from quantmla.errors import UsageError, require
from quantmla.quant.format import CacheFormat
from quantmla.quant.layout import page_layout
from quantmla.quant.page import require_byte_layout, unpack_pages


class PagedCache:
    """Appends bf16 rows, packs whole pages as they leave the recent window, and reads all back.

    Refuses formats without a byte layout and any dtype but bf16.
    """

    def __init__(
        self,
        fmt: CacheFormat,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        batch: int,
        device: torch.device | str = "cpu",
    ):
        require_byte_layout(fmt)
        page_layout(kv_lora_rank, qk_rope_head_dim, fmt)  # refuses sizes that do not fit
        self.fmt, self.kv_lora_rank, self.qk_rope_head_dim = fmt, kv_lora_rank, qk_rope_head_dim
        self.device = torch.device(device)
        self.keep_past = False  # True: rows of packed tokens stay until the next crop
        self.sequences = [
            empty_sequence(kv_lora_rank, qk_rope_head_dim, self.device) for _ in range(batch)
        ]

    @property
    def lengths(self) -> list[int]:
        return [seq.length for seq in self.sequences]

    def append(
        self, latent_BSR: Tensor, k_rope_BSE: Tensor, counts: Sequence[int] | None = None
    ) -> None:
        """Adds to every sequence its last `counts[b]` rows of the chunk, by default all S.

        UsageError for another number of sequences, or counts that are not 0 to S.
        """
        batch, size = latent_BSR.shape[:2]
        require(
            batch == len(self.sequences) == k_rope_BSE.shape[0],
            f"a batch of {batch} cannot be appended to a cache of {len(self.sequences)} sequences",
            UsageError,
        )
        counts = [size] * batch if counts is None else counts
        require(
            len(counts) == batch and all(0 <= n <= size for n in counts),
            f"counts {list(counts)} are not {batch} numbers of 0 to {size}, the rows of the chunk",
            UsageError,
        )
        self.sequences = [
            append(
                seq, latent_BSR[b, size - n :], k_rope_BSE[b, size - n :], self.fmt, self.keep_past
            )
            for b, (seq, n) in enumerate(zip(self.sequences, counts, strict=True))
        ]

    def read(self) -> tuple[Tensor, Tensor]:
        """Latents [B, T, R] and rope keys [B, T, E] as decode sees them, float32, T the longest.

        Every token once: sinks and recent ones exact, the others from their bytes. Shorter
        sequences have zeros before their first token.
        """
        longest = max(self.lengths, default=0)
        shape = (len(self.sequences), longest)
        latent = torch.zeros(*shape, self.kv_lora_rank, device=self.device)
        k_rope = torch.zeros(*shape, self.qk_rope_head_dim, device=self.device)
        for b, (seq, packed) in enumerate(zip(self.sequences, self._unpacked(), strict=True)):
            begin = longest - seq.length
            rest = read_unpacked(seq, self.fmt)
            for out, old, new in zip((latent, k_rope), packed, rest, strict=True):
                out[b, begin : begin + seq.packed] = old
                out[b, begin + seq.packed :] = new
            latent[b, begin : begin + len(seq.sink_latent_TR)] = seq.sink_latent_TR.float()
            k_rope[b, begin : begin + len(seq.sink_k_rope_TE)] = seq.sink_k_rope_TE.float()
        return latent, k_rope

    def _unpacked(self) -> list[tuple[Tensor, Tensor]]:
        """Packed tokens of every sequence, dequantised in one go."""
        sizes = [seq.packed // self.fmt.page_size for seq in self.sequences]
        latent = torch.empty(0, self.kv_lora_rank, device=self.device)
        k_rope = torch.empty(0, self.qk_rope_head_dim, device=self.device)
        if any(sizes):
            pages = torch.cat([chunk for seq in self.sequences for chunk in seq.pages])
            rows = unpack_pages(pages, self.kv_lora_rank, self.qk_rope_head_dim, self.fmt)
            latent, k_rope = (x.flatten(0, 1) for x in rows)
        tokens = [n * self.fmt.page_size for n in sizes]
        return list(zip(latent.split(tokens), k_rope.split(tokens), strict=True))

    def pages(self, b: int) -> Tensor:
        """Bytes of sequence b's pages, uint8 [J, Y]."""
        width = page_layout(self.kv_lora_rank, self.qk_rope_head_dim, self.fmt).page_bytes
        none = torch.empty(0, width, dtype=torch.uint8, device=self.device)
        return torch.cat((none, *self.sequences[b].pages))

    def crop(self, tokens: int) -> None:
        """Takes the last `tokens` off every sequence, and lets go of the past kept for it."""
        cropped = [crop(seq, max(0, seq.length - tokens), self.fmt) for seq in self.sequences]
        self.sequences = [forget_past(seq) for seq in cropped]

    def select(self, indices: Sequence[int]) -> None:
        """Sequence i becomes what sequence indices[i] was; equal ones share their memory."""
        self.sequences = [self.sequences[i] for i in indices]

    def clear(self) -> None:
        none = empty_sequence(self.kv_lora_rank, self.qk_rope_head_dim, self.device)
        self.sequences = [none for _ in self.sequences]

    def allocated_bytes(self) -> int:
        """Memory held, shared tensors counted once."""
        storages = {
            x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
            for seq in self.sequences
            for x in seq.tensors
        }
        return sum(storages.values())
