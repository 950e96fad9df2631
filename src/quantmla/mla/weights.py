"""One layer's latent attention, as the mathematics sees it."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaWeights:
    """Floating point, rows are outputs, rope rows as interleaved pairs (2i, 2i+1).

    A family's extra multipliers are already in here (LongCat's latent factor in `norm_R`, its
    query factor in `w_uq_NPX` and `w_qr_NEX`), so that the arithmetic is the same for all.
    """

    w_dkv_RD: Tensor  # kv_a_proj_with_mqa, first R rows
    b_dkv_R: Tensor | None  # its bias, where the family has one
    w_kr_ED: Tensor  # kv_a_proj_with_mqa, last E rows: the shared rope key
    b_kr_E: Tensor | None
    norm_R: Tensor  # kv_a_layernorm.weight
    w_uk_NPR: Tensor  # kv_b_proj, first P rows of each head
    w_uv_NVR: Tensor  # kv_b_proj, last V rows of each head
    w_uq_NPX: Tensor  # content rows of q_b_proj or q_proj
    w_qr_NEX: Tensor  # rope rows of the same
    b_uq_NP: Tensor | None = None
    b_qr_NE: Tensor | None = None
    w_o_DNV: Tensor  # o_proj.weight, columns split by head

    def to(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "MlaWeights":
        """Every tensor moved and converted."""
        moved = {
            f.name: value.to(device=device, dtype=dtype)
            for f in fields(self)
            if (value := getattr(self, f.name)) is not None
        }
        return replace(self, **moved)
