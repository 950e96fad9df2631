"""A layer as methods see it: latents with outlier channels, rope keys with a bias."""

import torch
from random_layer import random_weights

from quantmla.method.layer import Layer, Sample
from quantmla.mla.geometry import MlaGeometry
from quantmla.mla.rope import rotate

GEOMETRY = MlaGeometry(
    hidden_size=24,
    num_heads=3,
    kv_lora_rank=32,
    qk_nope_head_dim=8,
    qk_rope_head_dim=16,
    v_head_dim=8,
    q_lora_rank=None,
    norm_eps=1e-6,
    softmax_scale=24**-0.5,
)
OUTLIERS = (3, 17, 29)


def synthetic_sample(sequences: int, length: int, seed: int) -> Sample:
    """Sequences of one fixed distribution; `seed` draws other tokens of it."""
    g = GEOMETRY
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(sequences, length, *shape, generator=draw)

    channels = torch.linspace(0.3, 1.5, g.kv_lora_rank)
    channels[list(OUTLIERS)] = 8.0
    latent = normal(g.kv_lora_rank) * channels
    latent = latent * torch.rsqrt(latent.square().mean(-1, keepdim=True))
    bias = torch.linspace(-3, 3, g.qk_rope_head_dim)
    pairs = g.qk_rope_head_dim // 2
    inv_freq = 10_000.0 ** (-torch.arange(pairs) / pairs)
    positions = torch.arange(length)
    query = normal(g.num_heads, g.qk_rope_head_dim)
    return Sample(
        unit_latent_BSR=latent,
        k_rope_BSE=rotate(normal(g.qk_rope_head_dim) + bias, positions, inv_freq),
        q_content_BSNP=normal(g.num_heads, g.qk_nope_head_dim),
        q_rope_BSNE=rotate(query.transpose(1, 2), positions, inv_freq).transpose(1, 2),
    )


def synthetic_layer(seed: int = 0) -> Layer:
    """8 sequences to learn from and 4 held out, of 100 tokens: one page and a rest."""
    return Layer(
        weights=random_weights(seed, GEOMETRY).to(dtype=torch.float32),
        softmax_scale=GEOMETRY.softmax_scale,
        train=synthetic_sample(8, 100, 2 * seed),
        held_out=synthetic_sample(4, 100, 2 * seed + 1),
    )
