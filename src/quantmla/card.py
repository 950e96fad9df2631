"""The model card of a fused checkpoint."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quantmla.layer_log import LayerLog
from quantmla.quant.mixed import describe, format_from_json, uniform_format

TEMPLATE = """---
base_model: {quoted_base}
base_model_relation: quantized
library_name: transformers
tags: [quantmla, kv-cache, mla]
---

# {base_model}, fused by QuantMLA for a {name} cache

An ordinary checkpoint: names, shapes and dtypes of all tensors are those of `{base_model}`, and any
engine runs it with the same results up to the rounding of its weights. {changed}

* method: {method}; cache format: {described}, groups of {group_size},
  {num_sink_tokens} sink tokens and at least {recent_window} recent tokens in bf16
* base checkpoint: sha256 {base_sha256}
* files: `quantmla_transforms.sft` (what was folded), `recipe.yaml` (how to make it again),
  `quantmla_log.csv` and `.json` (errors, times and learning curves by layer)

Check it against the original with `quantmla verify FOLDER`, measure it with `quantmla eval FOLDER`.

| layer | content output error | rope score error |
|---|---|---|
{rows}

Errors are on held-out calibration text, each path quantised alone, nothing kept in bf16: content is
the normalised error of the attention output, rope that of the positional scores, row-centred.
"""


def model_card(config: Mapping[str, Any], logs: Sequence[LayerLog]) -> str:
    """Markdown with the front matter that model hubs read."""
    fmt = config["format"]
    rows = "\n".join(
        f"| {log.prefix} | {log.before.content_output:.2e} → {log.after.content_output:.2e} "
        f"| {log.before.rope_scores:.2e} → {log.after.rope_scores:.2e} |"
        for log in logs
    )
    cache = format_from_json(fmt)
    one = uniform_format(cache)
    widths, described = "other widths in each layer", describe(cache)
    if one is not None:
        widths = f"{one.content_bits}-bit latents and {one.rope_bits}-bit rope keys"
        described = f"{one.name}, rope centring {one.rope_centring}"
    facts = {key: config[key] for key in _FROM_CONFIG}
    quoted = json.dumps(config["base_model"], ensure_ascii=False)  # a folder may be called anything
    return TEMPLATE.format(
        name=cache.name,
        changed=_changed(logs, widths),
        described=described,
        rows=rows,
        quoted_base=quoted,
        **fmt,
        **facts,
    )


def _changed(logs: Sequence[LayerLog], widths: str) -> str:
    """Which bases changed: errors that are equal to the last bit are those of the same basis."""
    pairs = [(log.before, log.after) for log in logs]
    content = any(before.content_output != after.content_output for before, after in pairs)
    rope = any(before[1:] != after[1:] for before, after in pairs)
    if not content and not rope:
        return (
            "No basis changed: the weights\nkeep their values, and a cache of "
            f"{widths}\nloses what it does with the original."
        )
    both = content and rope
    paths = "two cached paths" if both else "cached latents" if content else "cached rope keys"
    return f"What changed is the basis of\nits {paths}, so that a cache of {widths}\nloses less."


_FROM_CONFIG = ("base_model", "base_sha256", "method")
