"""Sizes of one layer's latent attention."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaGeometry:
    """All are counts, except where said. Letters are those of docs/notation.md."""

    hidden_size: int  # D
    num_heads: int  # N
    kv_lora_rank: int  # R
    qk_nope_head_dim: int  # P
    qk_rope_head_dim: int  # E, even
    v_head_dim: int  # V
    q_lora_rank: int | None  # None: queries are not compressed
    norm_eps: float  # of kv_a_layernorm
    softmax_scale: float  # YaRN's mscale squared already multiplied in
    rotated: bool = True  # False: NoPE, the "rope" channels are not rotated by position

    @property
    def query_width(self) -> int:
        """X: inputs of the projection that makes the heads' queries."""
        return self.q_lora_rank if self.q_lora_rank is not None else self.hidden_size
