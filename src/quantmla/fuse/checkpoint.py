"""Folding of transforms into a whole checkpoint, streamed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantmla.arch.adapter import Adapter, AttentionSite
from quantmla.checkpoint.encode import decode, encode
from quantmla.checkpoint.rewrite import Rewritten, rewrite_checkpoint
from quantmla.checkpoint.source import TensorSource
from quantmla.errors import UsageError, require
from quantmla.fuse.layer import fuse_layer
from quantmla.transform.layer import LayerTransform

CONFIG_KEY = "quantmla_config"  # the one key that config.json gains


@dataclass(frozen=True, slots=True, kw_only=True)
class FuseReport:
    """What was folded, what was copied, and what storing the fused weights cost."""

    written: Rewritten
    fused: tuple[str, ...]  # attention prefixes, in the order of their layers
    copied: tuple[str, ...]  # latent attentions without a transform, such as MTP layers
    ignored: tuple[str, ...]  # attentions that are not latent
    rounding: Mapping[str, Mapping[str, float]]  # prefix -> tensor -> NMSE of the stored dtype


def nmse(x: Tensor, reference: Tensor) -> float:
    """Squared error over the reference's squared norm; 0 for two zero tensors."""
    error = float((x.double() - reference.double()).square().sum())
    energy = float(reference.double().square().sum())
    return error / energy if energy else (0.0 if error == 0 else float("inf"))


def fuse_checkpoint(  # noqa: PLR0913
    source: TensorSource,
    adapter: Adapter,
    transforms: Mapping[str, LayerTransform],
    out: Path,
    *,
    quantmla_config: Mapping[str, Any],
    extra_files: Mapping[str, bytes | str],
    overwrite: bool = False,
) -> FuseReport:
    """Writes the folder `out`: the checkpoint with each transform folded into its attention.

    `transforms` is keyed by attention prefix. Names, shapes, dtypes and order of all tensors stay;
    latent attentions without a transform are copied and reported. `quantmla_config` is the one key
    added to config.json. One layer's tensors are in memory at a time.
    """
    sites = adapter.sites(source.config, source.names)
    chosen = {site.prefix: site for site in sites if site.prefix in transforms}
    _check(source, transforms, chosen)
    rounding: dict[str, Mapping[str, float]] = {}
    replace = _replacements(source, adapter, transforms, chosen, rounding)
    written = rewrite_checkpoint(
        source,
        replace,
        out,
        config_update={CONFIG_KEY: dict(quantmla_config)},
        extra_files=extra_files,
        overwrite=overwrite,
    )
    return FuseReport(
        written=written,
        fused=tuple(chosen),
        copied=tuple(site.prefix for site in sites if site.prefix not in chosen),
        ignored=tuple(adapter.ignored(source.config, source.names)),
        rounding={prefix: rounding[prefix] for prefix in chosen},
    )


def _replacements(
    source: TensorSource,
    adapter: Adapter,
    transforms: Mapping[str, LayerTransform],
    chosen: Mapping[str, AttentionSite],
    rounding: dict[str, Mapping[str, float]],
) -> dict[str, Callable[[], Tensor]]:
    """How to make each tensor that folding changes; fills `rounding` on the way."""

    @lru_cache(maxsize=1)  # tensors of one layer follow one another in the files
    def fused(prefix: str) -> dict[str, Tensor]:
        stored, rounding[prefix] = _fuse_site(source, adapter, chosen[prefix], transforms[prefix])
        return stored

    def make(prefix: str, name: str) -> Tensor:
        return fused(prefix)[name]

    return {
        name: partial(make, prefix, name)
        for prefix, site in chosen.items()
        for name in adapter.fused_names(source, site)
    }


def _check(
    source: TensorSource,
    transforms: Mapping[str, LayerTransform],
    chosen: Mapping[str, AttentionSite],
) -> None:
    unknown = sorted(set(transforms) - set(chosen))
    require(
        not unknown, f"{source.path} has no latent attention {', '.join(unknown[:3])}", UsageError
    )
    for prefix, transform in transforms.items():
        require(
            transform.online_rope_EE is None,
            f"the transform of {prefix} rotates rope keys online, which cannot be fused",
            UsageError,
        )


@torch.no_grad()
def _fuse_site(
    source: TensorSource, adapter: Adapter, site: AttentionSite, transform: LayerTransform
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Tensors to store, and the NMSE of storing each."""
    weights = fuse_layer(adapter.read(source, site, with_output=False), transform)
    stored: dict[str, Tensor] = {}
    rounding = {}
    for name, values in adapter.values(weights, site, source).items():
        made = encode(source, name, values)
        rounding[name] = nmse(decode(source, name, made), values)
        stored |= made
    return stored, rounding
