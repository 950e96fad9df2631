"""Random layers in float64 whose scores have unit spread."""

import torch

from quantmla.mla.attention import Inputs
from quantmla.mla.geometry import MlaGeometry
from quantmla.mla.weights import MlaWeights

GEOMETRY = MlaGeometry(
    hidden_size=24,
    num_heads=3,
    kv_lora_rank=16,
    qk_nope_head_dim=6,
    qk_rope_head_dim=8,
    v_head_dim=5,
    q_lora_rank=None,
    norm_eps=1e-6,
    softmax_scale=14**-0.5,
)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def random_weights(seed: int, g: MlaGeometry = GEOMETRY) -> MlaWeights:
    random = generator(seed)

    def matrix(*shape: int, inputs: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64) / inputs**0.5

    d, n, r = g.hidden_size, g.num_heads, g.kv_lora_rank
    p, e, v, x = g.qk_nope_head_dim, g.qk_rope_head_dim, g.v_head_dim, g.query_width
    return MlaWeights(
        w_dkv_RD=matrix(r, d, inputs=d),
        b_dkv_R=None,
        w_kr_ED=matrix(e, d, inputs=d),
        b_kr_E=None,
        norm_R=torch.rand(r, generator=random, dtype=torch.float64) + 0.5,
        w_uk_NPR=matrix(n, p, r, inputs=r),
        w_uv_NVR=matrix(n, v, r, inputs=r),
        w_uq_NPX=matrix(n, p, x, inputs=x),
        w_qr_NEX=matrix(n, e, x, inputs=x),
        w_o_DNV=matrix(d, n, v, inputs=n * v),
    )


def random_inputs(seed: int, queries: int, keys: int, g: MlaGeometry = GEOMETRY) -> Inputs:
    n, r, p, e = g.num_heads, g.kv_lora_rank, g.qk_nope_head_dim, g.qk_rope_head_dim
    return Inputs(
        normal(seed, queries, n, p),
        normal(seed + 1, queries, n, e),
        normal(seed + 2, keys, r),
        normal(seed + 3, keys, e),
    )
