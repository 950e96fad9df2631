"""The families that are handled, and those that are known and refused: one entry each.

Facts are those of the model classes in transformers >= 5.15. A new family whose attention differs
only in what `Adapter`'s fields say is one more entry of FAMILIES.
"""

from quantmla.arch.adapter import Adapter

MISTRAL4_ROPE = {"type": "yarn", "factor": 128.0, "mscale_all_dim": 1.0}

FAMILIES: dict[str, Adapter] = {
    "deepseek_v2": Adapter(model_type="deepseek_v2", cache_rope_order="interleaved"),
    "deepseek_v3": Adapter(model_type="deepseek_v3", follows_rope_interleave=True),
    "kimi_k2": Adapter(model_type="kimi_k2", follows_rope_interleave=True),
    "glm4_moe_lite": Adapter(model_type="glm4_moe_lite", follows_rope_interleave=True),
    "longcat_flash": Adapter(
        model_type="longcat_flash",
        attentions_per_layer=2,
        latent_multipliers=True,
        layers_key="num_layers",
    ),
    "minicpm3": Adapter(model_type="minicpm3", weight_rope_order="half"),
    "youtu": Adapter(model_type="youtu", follows_rope_interleave=True),
    "mistral4": Adapter(
        model_type="mistral4",
        follows_rope_interleave=True,
        defaults={"rope_parameters": MISTRAL4_ROPE},
    ),
    "axk1": Adapter(model_type="axk1", follows_rope_interleave=True),
    "kimi_linear": Adapter(
        model_type="kimi_linear", cache_rope_order="interleaved", rotated=False, every_layer=False
    ),
}

# Configs that hold the language model's in `text_config`.
WRAPPERS = ("kimi_k25", "mistral3")

_GATE = "its attention output passes a learned gate before o_proj, which is not handled"
_INDEXER = "its sparse attention keeps an indexer's keys in the cache, which is not packed"

REFUSED: dict[str, str] = {
    "bailing_hybrid": _GATE,
    "axk2": _GATE,
    "hy_v4": _GATE,
    "hy_v4_vl": _GATE,
    "dots3_note": f"{_GATE}, and its rope key is normalized before rotation",
    "deepseek_v32": _INDEXER,
    "glm_moe_dsa": _INDEXER,
    "glm5_next": _INDEXER,
    "mistral_large4": "its layers share keys and values, so that one layer's cache serves several",
    "deepseek_v4": "its attention has no latent (no kv_lora_rank)",
    "deepseek_ocr2": "its attention has no latent (no kv_lora_rank)",
}
