"""Whether a checkpoint is a whole model, found out before any work: no layer runs."""

from typing import Any

from quantmla.arch.adapter import Adapter
from quantmla.capture.decoder import Skeleton, on_meta, open_skeleton
from quantmla.checkpoint.config import is_count, is_positive, shown
from quantmla.checkpoint.source import DTYPES, TensorSource, require_finite
from quantmla.errors import require

HEAD = "lm_head.weight"
COUNTS = {"vocab_size": 1, "first_k_dense_replace": 0}  # transformers takes None and 0 for them


def check_checkpoint(source: TensorSource, adapter: Adapter) -> None:
    """Refuses a config.json that gives no model, and tensors that are absent or of other shapes.

    The tensors of single layers are checked when the layers are read.
    """
    adapter.check(source)
    skeleton = open_skeleton(source, adapter, None)
    _check_counts(skeleton.config)
    _check_values(skeleton.config)
    _check_ends(skeleton)


def check_finite(source: TensorSource, adapter: Adapter) -> None:
    """Refuses NaN and infinity in what no layer's run reads: embedding, norm, head, MTP layers."""
    main = {s.layer for s in adapter.sites(source.config, source.names) if not s.mtp}
    prefix = open_skeleton(source, adapter, None).prefix
    layers = tuple(f"{prefix}layers.{i}." for i in range(max(main) + 1))
    for name, entry in source.entries.items():
        stored = DTYPES.get(entry.dtype)
        if stored is not None and stored.is_floating_point and not name.startswith(layers):
            require_finite(name, source.tensor(name))


def _check_counts(config: Any) -> None:
    for key, low in COUNTS.items():
        value = getattr(config, key, low)
        require(
            is_count(value, low),
            f"config.json gives {key} = {shown(value)}; a whole number of at least {low} is needed",
        )


def _check_values(config: Any) -> None:
    from transformers.activations import ACT2FN
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = getattr(config, "rope_parameters", None) or {}
    for key, value, known in (
        ("hidden_act", getattr(config, "hidden_act", "silu"), ACT2FN),
        ("rope_type", rope.get("rope_type", "default"), {"default", *ROPE_INIT_FUNCTIONS}),
    ):
        require(
            isinstance(value, str) and value in known,
            f"config.json gives {key} = {value!r}; known: {', '.join(sorted(known))}",
        )
    for key in ("rope_theta", "factor"):
        value = rope.get(key)
        require(
            value is None or is_positive(value),
            f"config.json gives rope parameters with {key} = {shown(value)}; it must be above 0",
        )


def _check_ends(skeleton: Skeleton) -> None:
    """What stands before and after the layers; a head tied to the embedding need not be there."""
    source, config = skeleton.source, skeleton.config
    model = on_meta(skeleton.model_class, config)
    shapes = {
        skeleton.prefix + name: tuple(x.shape)
        for name, x in model.state_dict().items()
        if not name.startswith("layers.")
    }
    head = _head(source)
    # a wrapper may say it for its language model
    tied = config.tie_word_embeddings or source.config.get("tie_word_embeddings")
    if head is not None or not tied:
        shapes[head or HEAD] = (config.vocab_size, config.hidden_size)
    for name, shape in shapes.items():
        require(name in source.entries, f"the checkpoint {source.path} lacks {name}")
        require(
            source.shape(name) == shape,
            f"{name} is {source.shape(name)}, but by config.json it is {shape}",
        )


def _head(source: TensorSource) -> str | None:
    """The head's name: a wrapper puts more before it, and MTP layers may have heads as well."""
    found = (name for name in source.names if name == HEAD or name.endswith(f".{HEAD}"))
    return next((name for name in found if "mtp" not in name.split(".")), None)
