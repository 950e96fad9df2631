"""Proofs that fusing changed nothing: by layer in float64, and end to end on logits.

S = T tokens, D hidden size, X query input width, E rope channels (interleaved).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantmla.arch.adapter import Adapter
from quantmla.checkpoint.overlay import overlay
from quantmla.checkpoint.source import TensorSource, require_finite
from quantmla.errors import QualityGateFailed, QuantMLAError, UsageError, one_line, require
from quantmla.fuse.layer import fuse_layer
from quantmla.mla.attention import Inputs, attention_absorbed, causal_mask
from quantmla.mla.geometry import MlaGeometry
from quantmla.mla.rope import rotate
from quantmla.mla.weights import MlaWeights
from quantmla.transform.layer import LayerTransform

ROPE_BASE = 10_000.0
LATEST_POSITION = 4096
MAX_FOLD_ERROR = 1e-9  # relative, float64: a fold that is not exact is a bug or a broken checkpoint
STORED_FACTOR = 2  # of the rounding floor; on another machine single weights may round differently


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCheck:
    """Relative errors of one layer's attention output, caches not quantized.

    `fold_error` is that of the transform itself, in float64 (about 1e-12 or below).
    `rounding_error` adds the rounding of the fused weights to the checkpoint's dtype, made anew: a
    floor. `stored_error` is that of the weights that the fused checkpoint has, which should be at
    that floor.
    """

    prefix: str
    mtp: bool
    fold_error: float
    rounding_error: float
    stored_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsCheck:
    """The fused model against the original, both run by transformers."""

    relative_error: float  # Frobenius norm of the logits' change over that of the logits
    nll_before: float  # nats per token
    nll_after: float
    tokens: int  # that were predicted

    @property
    def nll_drift(self) -> float:
        return self.nll_after - self.nll_before


class Case(NamedTuple):
    """Inputs of one layer's attention."""

    hidden_TD: Tensor
    query_TX: Tensor  # of the projection that makes the heads' queries
    positions_T: Tensor
    inv_freq_F: Tensor


def random_case(g: MlaGeometry, tokens: int, seed: int) -> Case:
    """Normal hidden states at increasing random positions."""
    draw = torch.Generator().manual_seed(seed)
    hidden_TD = torch.randn(tokens, g.hidden_size, dtype=torch.float64, generator=draw)
    query_TX = hidden_TD
    if g.q_lora_rank is not None:  # the compression of queries is not touched, any input will do
        query_TX = torch.randn(tokens, g.query_width, dtype=torch.float64, generator=draw)
    positions_T = torch.randperm(LATEST_POSITION, generator=draw)[:tokens].sort().values
    pairs_F = torch.arange(0, g.qk_rope_head_dim, 2, dtype=torch.float64)
    return Case(hidden_TD, query_TX, positions_T, ROPE_BASE ** (-pairs_F / g.qk_rope_head_dim))


def attention_inputs(weights: MlaWeights, g: MlaGeometry, case: Case) -> Inputs:
    """What attention reads: queries, latents after their norm, rope parts after rotation."""
    w = weights

    def plus(x: Tensor, bias: Tensor | None) -> Tensor:
        return x if bias is None else x + bias

    def turned(x_TE: Tensor) -> Tensor:
        return rotate(x_TE, case.positions_T, case.inv_freq_F) if g.rotated else x_TE

    down_TR = plus(case.hidden_TD @ w.w_dkv_RD.T, w.b_dkv_R)
    unit_TR = down_TR * torch.rsqrt(down_TR.square().mean(-1, keepdim=True) + g.norm_eps)
    q_rope_TNE = plus(torch.einsum("tx,nex->tne", case.query_TX, w.w_qr_NEX), w.b_qr_NE)
    return Inputs(
        q_content_SNP=plus(torch.einsum("tx,npx->tnp", case.query_TX, w.w_uq_NPX), w.b_uq_NP),
        q_rope_SNE=turned(q_rope_TNE.transpose(0, 1)).transpose(0, 1),
        latent_TR=unit_TR * w.norm_R,
        k_rope_TE=turned(plus(case.hidden_TD @ w.w_kr_ED.T, w.b_kr_E)),
    )


def attention_output(weights: MlaWeights, g: MlaGeometry, case: Case) -> Tensor:
    """Causal attention after o_proj, without its bias, [T, D]."""
    tokens = case.hidden_TD.shape[0]
    x = attention_inputs(weights, g, case)
    return attention_absorbed(weights, x, g.softmax_scale, causal_mask(tokens, tokens))


def relative_error(x: Tensor, reference: Tensor) -> float:
    """Norm of the change over that of the reference; 0 for two zero tensors."""
    change, size = float((x - reference).norm()), float(reference.norm())
    return 0.0 if change == size == 0 else change / size if size else math.inf


@torch.no_grad()
def verify_layers(
    source: TensorSource,
    fused_source: TensorSource,
    adapter: Adapter,
    transforms: Mapping[str, LayerTransform],
    *,
    tokens: int = 64,
    seed: int = 0,
) -> tuple[LayerCheck, ...]:
    """Attention outputs of every transformed layer on random hidden states at random positions.

    Raises QuantMLAError when a checkpoint lacks a layer that has a transform.
    """
    sites = {site.prefix: site for site in adapter.sites(source.config, source.names)}
    absent = sorted(set(transforms) - set(sites))
    require(not absent, f"{source.path} has no latent attention {', '.join(absent[:3])}")
    g = adapter.geometry(source.config)
    checks = []
    for number, (prefix, site) in enumerate(sites.items()):
        if prefix not in transforms:
            continue
        case = random_case(g, tokens, seed + number)
        original = adapter.read(source, site)
        before = attention_output(original, g, case)
        try:
            weights = fuse_layer(original, transforms[prefix])
        except UsageError as error:  # of who made the transform; here it is in a file
            raise QuantMLAError(f"the transform of {prefix} cannot be folded: {error}") from error
        folded = attention_output(weights, g, case)
        made = overlay(source, adapter.write(weights, site, source))
        rounded = attention_output(adapter.read(made, site), g, case)
        stored = attention_output(adapter.read(fused_source, site), g, case)
        checks.append(
            LayerCheck(
                prefix=prefix,
                mtp=site.mtp,
                fold_error=relative_error(folded, before),
                rounding_error=relative_error(rounded, before),
                stored_error=relative_error(stored, before),
            )
        )
    return tuple(checks)


def require_exact(checks: tuple[LayerCheck, ...]) -> None:
    """Gates both errors of every layer: the fold's own, and that of the weights on disk."""
    for check in checks:
        require(
            check.fold_error <= MAX_FOLD_ERROR,
            f"fusing changed {check.prefix} by {check.fold_error:.1e} in float64, more than "
            f"{MAX_FOLD_ERROR:.0e}",
            QualityGateFailed,
        )
        require(
            check.stored_error <= STORED_FACTOR * check.rounding_error + MAX_FOLD_ERROR,
            f"the stored weights of {check.prefix} change its output by {check.stored_error:.1e}, "
            f"but rounding to their dtype explains {check.rounding_error:.1e}",
            QualityGateFailed,
        )


@torch.no_grad()
def verify_logits(
    model_path: Path,
    fused_path: Path,
    tokens_BS: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> LogitsCheck:
    """Logits and next-token NLL of both checkpoints in `dtype`, one row at a time.

    Both models are in memory one after the other; the first one's logits wait on the CPU.
    """
    require(
        tokens_BS.dim() == 2 and tokens_BS.shape[1] >= 2,
        f"tokens of shape {tuple(tokens_BS.shape)}: rows of at least two tokens are needed",
    )
    before = _logits(model_path, tokens_BS, dtype, device)
    after = _logits(fused_path, tokens_BS, dtype, device)
    return LogitsCheck(
        relative_error=relative_error(after, before),
        nll_before=_nll(before, tokens_BS),
        nll_after=_nll(after, tokens_BS),
        tokens=tokens_BS.shape[0] * (tokens_BS.shape[1] - 1),
    )


def _logits(path: Path, tokens_BS: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    model = load_model(path, dtype).to(device)
    rows = [
        model(input_ids=row[None].to(device), use_cache=False).logits.cpu() for row in tokens_BS
    ]
    return require_finite(f"the output of {path} on sample text", torch.cat(rows).float())


def load_model(path: Path, dtype: torch.dtype) -> Any:
    """The checkpoint as transformers runs it, on the CPU, without a bar on stderr."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, output_loading_info=True
        )
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # a config or a tensor that does not fit fails in many ways
        raise QuantMLAError(f"transformers cannot load {path}: {one_line(error)}") from error
    finally:
        if shown:
            logging.enable_progress_bar()
    missing = sorted(info["missing_keys"])  # transformers fills them with random numbers
    require(not missing, f"{path} lacks {len(missing)} parameters, such as {missing[:1]}")
    for name, x in model.named_parameters():
        require_finite(f"{name} of {path}", x.detach())
    return model.eval()


def _nll(logits_BSV: Tensor, tokens_BS: Tensor) -> float:
    loss = torch.nn.functional.cross_entropy(
        logits_BSV[:, :-1].flatten(0, 1), tokens_BS[:, 1:].flatten().cpu()
    )
    return float(loss)
