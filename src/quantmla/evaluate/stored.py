"""Between a layer's own rows and what its cache stores.

B sequences, T tokens, R latent channels, E rope channels (interleaved inside, the model's order
outside). Rows are rounded to bf16 where they enter the cache, as a real one does.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantmla.errors import UsageError, require
from quantmla.mla.rope import RopeOrder, from_interleaved, to_interleaved
from quantmla.transform.layer import ContentTransform, LayerTransform, RopeTransform


def as_bf16(x: Tensor) -> Tensor:
    """Float32 rows that hold bf16 values."""
    require(
        x.dtype in (torch.bfloat16, torch.float32, torch.float64),
        f"the model caches {x.dtype}; a bf16 cache takes torch.bfloat16, or torch.float32 and "
        "torch.float64 to be rounded",
        UsageError,
    )
    return x.to(torch.bfloat16).float()


@dataclass(frozen=True, slots=True)
class StoredCoordinates:
    """How one layer's rows become stored rows. Without a transform they are stored as they are."""

    order: RopeOrder
    transform: LayerTransform | None = None
    norm_R: Tensor | None = None  # latent / norm_R is the unit latent; needed with a transform

    def store_latent(self, latent_BTR: Tensor) -> Tensor:
        if self.transform is None or self.norm_R is None:
            return as_bf16(latent_BTR)
        return as_bf16(self.transform.content.apply(latent_BTR.float() / self.norm_R))

    def restore_latent(self, stored_BTR: Tensor) -> Tensor:
        if self.transform is None or self.norm_R is None:
            return stored_BTR
        return self.transform.content.invert(stored_BTR) * self.norm_R

    def store_rope(self, k_rope_BTE: Tensor) -> Tensor:
        rows = to_interleaved(k_rope_BTE, self.order)
        if self.transform is None:
            return as_bf16(rows)
        rows = self.transform.rope.apply_key(rows.float())
        online = self.transform.online_rope_EE
        return as_bf16(rows if online is None else rows @ online)

    def restore_rope(self, stored_BTE: Tensor) -> Tensor:
        rows = stored_BTE
        if self.transform is not None:
            online = self.transform.online_rope_EE
            rows = self.transform.rope.invert_key(rows if online is None else rows @ online.T)
        return from_interleaved(rows, self.order)


def coordinates(
    order: RopeOrder, transform: LayerTransform | None, norm_R: Tensor
) -> StoredCoordinates:
    """Coordinates on `norm_R`'s device in float32; refuses norm weights that hold zeros."""
    if transform is None:
        return StoredCoordinates(order)
    require(
        bool((norm_R != 0).all()),
        "kv_a_layernorm.weight holds zeros, so unit latents cannot be recovered from latents",
        UsageError,
    )

    def ready(x: Tensor) -> Tensor:
        return x.detach().to(device=norm_R.device, dtype=torch.float32)

    content, rope, online = transform
    moved = LayerTransform(
        ContentTransform(ready(content.rotation_RR), ready(content.scale_R)),
        RopeTransform(ready(rope.angle_F), ready(rope.gain_F)),
        None if online is None else ready(online),
    )
    return StoredCoordinates(order, moved, ready(norm_R))
