"""Whether a checkpoint's attention tensors have the shapes that its config.json promises."""

from quantmla.checkpoint.source import TensorSource
from quantmla.errors import UnsupportedModel, require
from quantmla.mla.geometry import MlaGeometry

UNHANDLED = ("kv_b_proj.bias", "kv_a_layernorm.bias")  # no family has them; folding would miss them


def check_shapes(source: TensorSource, prefix: str, query: str, g: MlaGeometry) -> None:
    """Raises UnsupportedModel for a tensor of another shape, or for one that folding would miss.

    `prefix` is the attention's, `query` that of the projection which makes the heads' queries.
    """
    heads, rank, rope = g.num_heads, g.kv_lora_rank, g.qk_rope_head_dim
    expected = {
        f"{prefix}.kv_a_proj_with_mqa.weight": (rank + rope, g.hidden_size),
        f"{prefix}.kv_a_layernorm.weight": (rank,),
        f"{prefix}.kv_b_proj.weight": (heads * (g.qk_nope_head_dim + g.v_head_dim), rank),
        f"{query}.weight": (heads * (g.qk_nope_head_dim + rope), g.query_width),
        f"{prefix}.o_proj.weight": (g.hidden_size, heads * g.v_head_dim),
    }
    for name, shape in expected.items():
        require(
            source.shape(name) == shape,
            f"{name} is {source.shape(name)}, but by config.json it is {shape}",
            UnsupportedModel,
        )
    for name in UNHANDLED:
        full = f"{prefix}.{name}"
        require(full not in source.entries, f"{full} is not handled", UnsupportedModel)
