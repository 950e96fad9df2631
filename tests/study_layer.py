"""A layer as the studies of cache errors see it: two cells of two sequences."""

import torch
from random_layer import normal, random_weights

from quantmla.analysis.protocol import Protocol
from quantmla.analysis.subject import StudyLayer
from quantmla.method.layer import Sample
from quantmla.mla.geometry import MlaGeometry

GEOMETRY = MlaGeometry(
    hidden_size=24,
    num_heads=3,
    kv_lora_rank=64,
    qk_nope_head_dim=8,
    qk_rope_head_dim=16,
    v_head_dim=8,
    q_lora_rank=None,
    norm_eps=1e-6,
    softmax_scale=24**-0.5,
)
LENGTH = 70  # one page and a rest
PROTOCOL = Protocol(draws=2, sequences=2, length=LENGTH, batch_size=3, repetitions=3, resamples=100)


def study_layer(seed: int = 0, dtype: torch.dtype = torch.float32) -> StudyLayer:
    """Unit latents with outlier channels, rope keys with a bias."""
    g, count = GEOMETRY, PROTOCOL.draws * PROTOCOL.sequences
    latent = normal(seed, count, LENGTH, g.kv_lora_rank) * torch.linspace(0.3, 3, g.kv_lora_rank)
    latent = latent * latent.square().mean(-1, keepdim=True).rsqrt()
    bias = torch.linspace(-3, 3, g.qk_rope_head_dim)
    parts = (
        latent,
        normal(seed + 1, count, LENGTH, g.qk_rope_head_dim) + bias,
        normal(seed + 2, count, LENGTH, g.num_heads, g.qk_nope_head_dim),
        normal(seed + 3, count, LENGTH, g.num_heads, g.qk_rope_head_dim),
    )
    weights = random_weights(seed, g)
    return StudyLayer(
        prefix=f"layer {seed}",
        weights=weights.to(dtype=dtype),
        softmax_scale=g.softmax_scale,
        sample=Sample(*(x.to(dtype) for x in parts)),
        sequences=PROTOCOL.sequences,
    )


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
