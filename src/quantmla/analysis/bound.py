"""How far below its bound the damage of rope errors stays (paper, Proposition 2; docs/maths.md, 6).

B sequences, S tokens, N heads, V value channels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantmla.analysis.protocol import Protocol
from quantmla.analysis.subject import StudyLayer, quantiser_error
from quantmla.mla.weights import MlaWeights
from quantmla.objective import (
    Activations,
    attention_output,
    positional_energy,
    summarize_queries,
)
from quantmla.quant.format import paper_format

BITS = (2, 3, 4)  # of the rope errors that are held against the bound


class Bounds(NamedTuple):
    """Squared norms that the output's change cannot exceed, [B]."""

    published: Tensor  # tau^2 / 4 sum_h ||V_h||^2 ||dZ||^2
    centred: Tensor  # the same with values centred over tokens and dZ over each row


def value_norms(weights: MlaWeights, latent_BSR: Tensor, *, centred: bool) -> Tensor:
    """Sum over heads of the squared spectral norms of the values after o_proj, [B].

    The largest eigenvalue of a V x V matrix for each head, whatever the hidden size.
    """
    value_BNSV = torch.einsum("bsr,nvr->bnsv", latent_BSR, weights.w_uv_NVR)
    if centred:
        value_BNSV = value_BNSV - value_BNSV.mean(-2, keepdim=True)
    gram_NVU = torch.einsum("dnv,dnu->nvu", weights.w_o_DNV, weights.w_o_DNV)
    size, axes = torch.linalg.eigh(gram_NVU)
    root_NVU = axes * size.clamp(min=0).sqrt()[:, None]
    turned = value_BNSV @ root_NVU
    return torch.linalg.eigvalsh(turned.mT @ turned)[..., -1].sum(-1)


def output_bounds(
    weights: MlaWeights, x: Activations, error_BSE: Tensor, softmax_scale: float
) -> Bounds:
    """For rope keys read with `error_BSE`, causal attention, and any size of error."""
    latent_BSR = x.unit_latent_BSR * weights.norm_R
    bounds = []
    for centred in (False, True):
        energy_B = _score_energies(error_BSE, x.q_rope_BSNE, centred=centred)
        norms_B = value_norms(weights, latent_BSR, centred=centred)
        bounds.append(softmax_scale**2 / 4 * norms_B * energy_B)
    return Bounds(*bounds)


def _score_energies(error_BSE: Tensor, q_rope_BSNE: Tensor, *, centred: bool) -> Tensor:
    """Unscaled squared errors of the positional scores of each sequence, [B]."""

    def energy(error_SE: Tensor, q_rope_SNE: Tensor) -> Tensor:
        queries = summarize_queries(q_rope_SNE[None])
        return positional_energy(error_SE[None], queries, row_centred=centred)

    return torch.vmap(energy)(error_BSE, q_rope_BSNE)


def distortion(
    weights: MlaWeights, x: Activations, error_BSE: Tensor, softmax_scale: float
) -> Tensor:
    """Squared norm of the output's change, [B]."""
    before = attention_output(weights, x, softmax_scale)
    read = x._replace(k_rope_BSE=x.k_rope_BSE + error_BSE)
    return (attention_output(weights, read, softmax_scale) - before).square().sum((-2, -1))


@torch.no_grad()
def measure(layer: StudyLayer, protocol: Protocol, generator: torch.Generator) -> dict[str, Any]:
    """In float64, for rope errors of every width in BITS at every point."""
    del generator  # nothing is drawn
    weights = layer.weights.to(dtype=torch.float64)
    plain = replace(weights, norm_R=torch.ones_like(weights.norm_R))
    by_bits: dict[str, dict[str, float]] = {}
    violations = cases = 0
    for bits in BITS:
        fmt = paper_format(f"c16r{bits}").unprotected()
        ratios: dict[str, list[float]] = {"published": [], "centred": []}
        for point in layer.points(protocol.points):
            x = Activations(
                *(part[None].double() for part in (point.latent_TR, point.k_rope_TE)),
                *(part[None].double() for part in (point.q_content_SNP, point.q_rope_SNE)),
            )
            error = quantiser_error(point.k_rope_TE, "rope", fmt)[None].double()
            changed = distortion(plain, x, error, layer.softmax_scale)
            bounds = output_bounds(plain, x, error, layer.softmax_scale)
            for name, bound in bounds._asdict().items():
                ratios[name].append(float(changed / bound))
        by_bits[f"r{bits}"] = {name: fmean(values) for name, values in ratios.items()}
        every = [value for values in ratios.values() for value in values]
        violations, cases = violations + sum(v > 1 for v in every), cases + len(every)
    return {"violations": violations, "cases": cases, "ratio": by_bits}


def summarize(layers: Sequence[Mapping[str, Any]], protocol: Protocol) -> dict[str, Any]:
    """Counts over all layers, and the mean share of the bound that is reached."""
    del protocol
    ratio = {
        bits: {name: fmean(layer["ratio"][bits][name] for layer in layers) for name in of}
        for bits, of in layers[0]["ratio"].items()
    }
    return {key: sum(layer[key] for layer in layers) for key in ("violations", "cases")} | {
        "ratio": ratio
    }
