"""How one family names, stores and runs its latent attention. Data first.

R latent rank, E rope channels, N heads, P content head dim, V value head dim, D hidden size,
X query input width.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantmla.arch.scaling import rope_parameters, softmax_scale
from quantmla.arch.shapes import check_shapes
from quantmla.arch.sites import DOWN, AttentionSite, require_every, require_spoken_of
from quantmla.checkpoint.config import LARGEST, shown
from quantmla.checkpoint.encode import encode
from quantmla.checkpoint.source import TensorSource, require_finite
from quantmla.errors import UnsupportedModel, require
from quantmla.mla.geometry import MlaGeometry
from quantmla.mla.rope import RopeOrder, from_interleaved, to_interleaved
from quantmla.mla.weights import MlaWeights

# Every transformers module builds kv_a_layernorm and q_a_layernorm without config.rms_norm_eps.
LATENT_NORM_EPS = 1e-6
MAX_LAYERS = 10_000  # more is a typing error, of which lists are not to be made
ATTENTION = re.compile(r"(?P<root>.*?)layers\.(?P<layer>\d+)\.self_attn(?:\.(?P<sub>\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryDown:
    """The compression of queries, which fusing leaves alone: x = norm(w h + b)."""

    w_XD: Tensor
    b_X: Tensor | None
    norm_X: Tensor


def _tensor(source: TensorSource, name: str) -> Tensor:
    return require_finite(name, source.float_tensor(name, torch.float64))


def _weight_and_bias(source: TensorSource, prefix: str) -> tuple[Tensor, Tensor | None]:
    bias = f"{prefix}.bias"
    return (
        _tensor(source, f"{prefix}.weight"),
        _tensor(source, bias) if bias in source.entries else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A family of models, as `adapter_for` returns it for one config."""

    model_type: str
    weight_rope_order: RopeOrder = "interleaved"  # of the checkpoint's rope rows
    cache_rope_order: RopeOrder = "half"  # of the rope key that transformers hands to its cache
    follows_rope_interleave: bool = (
        False  # config's rope_interleave = false means half-split weights
    )
    rotated: bool = True  # False: the shared "rope" channels are not turned by position
    attentions_per_layer: int = 1
    latent_multipliers: bool = False  # sqrt(hidden / rank) on the normalized latent and on queries
    layers_key: str = "num_hidden_layers"
    every_layer: bool = True  # False: a hybrid, where only some layers have latent attention
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that config.json may lack

    def text_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The language model's part of config.json, defaults filled in."""
        text = config.get("text_config") or config
        return {**self.defaults, **text}

    def _size(self, text: Mapping[str, Any], key: str, most: int = LARGEST) -> int:
        value: Any = text.get(key)
        require(
            type(value) is int and value > 0,
            f"config.json gives {key} = {shown(value)}; {self.model_type} needs a positive integer",
            UnsupportedModel,
        )
        require(
            value <= most,
            f"config.json gives {key} = {shown(value)}; no model has more than {most}",
            UnsupportedModel,
        )
        return int(value)

    def num_layers(self, config: Mapping[str, Any]) -> int:
        """Decoder layers that ordinary generation runs. Raises UnsupportedModel for none."""
        return self._size(self.text_config(config), self.layers_key, MAX_LAYERS)

    def geometry(self, config: Mapping[str, Any]) -> MlaGeometry:
        """Sizes and softmax scale. Raises UnsupportedModel when config.json lacks a size."""
        text = self.text_config(config)
        size = partial(self._size, text)
        hidden, heads = size("hidden_size"), size("num_attention_heads")
        nope, rope = size("qk_nope_head_dim"), size("qk_rope_head_dim")
        require(
            rope % 2 == 0,
            f"qk_rope_head_dim {rope} is odd; rope channels are pairs",
            UnsupportedModel,
        )
        head_dim = size("qk_head_dim") if text.get("qk_head_dim") is not None else nope + rope
        return MlaGeometry(
            hidden_size=hidden,
            num_heads=heads,
            kv_lora_rank=size("kv_lora_rank"),
            qk_nope_head_dim=nope,
            qk_rope_head_dim=rope,
            v_head_dim=size("v_head_dim")
            if text.get("v_head_dim") is not None
            else hidden // heads,
            q_lora_rank=size("q_lora_rank") if text.get("q_lora_rank") is not None else None,
            norm_eps=LATENT_NORM_EPS,
            softmax_scale=softmax_scale(head_dim, rope_parameters(text) if self.rotated else {}),
            rotated=self.rotated,
        )

    def sites(self, config: Mapping[str, Any], names: Iterable[str]) -> list[AttentionSite]:
        """The latent attentions whose tensors are among `names`, in the order of their layers.

        Raises UnsupportedModel when there are none, when a layer that must have one has not, or
        when there is one in a layer that config.json does not speak of.
        """
        main = self.num_layers(config)
        found = []
        for name in names:
            if name.endswith(DOWN):
                match = ATTENTION.fullmatch(name.removesuffix(DOWN))
                require(
                    match is not None,
                    f"cannot tell which layer {name} belongs to",
                    UnsupportedModel,
                )
                assert match is not None
                found.append(self._site(match, main))
        require(bool(found), f"the checkpoint has no tensor *{DOWN}", UnsupportedModel)
        if self.every_layer:
            require_every(found, main, self.attentions_per_layer)
        require_spoken_of(found, self.text_config(config), main)
        return sorted(found, key=lambda site: (site.mtp, site.cache_index))

    def _site(self, match: re.Match[str], main: int) -> AttentionSite:
        layer, sub = int(match["layer"]), int(match["sub"] or 0)
        apart = "mtp" in match["root"].split(".")  # LongCat numbers these from 0 again
        index = (layer + main if apart else layer) * self.attentions_per_layer + sub
        return AttentionSite(
            prefix=match[0], layer=layer, cache_index=index, mtp=apart or layer >= main
        )

    def check(self, source: TensorSource) -> None:
        """Refuses tensors that are absent or of other shapes than config.json says."""
        g = self.geometry(source.config)
        for site in self.sites(source.config, source.names):
            check_shapes(source, site.prefix, self.query_name(source, site), g)

    def ignored(self, config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
        """Prefixes of attentions that are not latent (linear attention, vision), in file order."""
        names = list(names)
        latent = {site.prefix for site in self.sites(config, names)}
        other = (re.match(r".*?\.(?:self_attn|attn)(?:\.\d+)?(?=\.)", name) for name in names)
        return list(dict.fromkeys(m[0] for m in other if m is not None and m[0] not in latent))

    def query_name(self, source: TensorSource, site: AttentionSite) -> str:
        """Prefix of the projection that makes the heads' queries."""
        compressed = self.text_config(source.config).get("q_lora_rank") is not None
        return f"{site.prefix}.{'q_b_proj' if compressed else 'q_proj'}"

    def multipliers(self, geometry: MlaGeometry) -> tuple[float, float]:
        """Factors of the family on the latent and on the queries, applied outside the weights."""
        if not self.latent_multipliers:
            return 1.0, 1.0
        hidden = geometry.hidden_size
        return (hidden / geometry.kv_lora_rank) ** 0.5, (hidden / geometry.query_width) ** 0.5

    def read(
        self,
        source: TensorSource,
        site: AttentionSite,
        *,
        dtype: torch.dtype = torch.float64,
        with_output: bool = True,
    ) -> MlaWeights:
        """The site's weights. Without output, `w_o_DNV` is an empty shape on the meta device."""
        g = self.geometry(source.config)
        check_shapes(source, site.prefix, self.query_name(source, site), g)
        rank, nope = g.kv_lora_rank, g.qk_nope_head_dim
        down, b_down = _weight_and_bias(source, f"{site.prefix}.kv_a_proj_with_mqa")
        up = _tensor(source, f"{site.prefix}.kv_b_proj.weight").unflatten(0, (g.num_heads, -1))
        q, b_q = self._read_queries(source, site, g)
        norm = _tensor(source, f"{site.prefix}.kv_a_layernorm.weight")
        require(
            bool((norm != 0).all()),
            f"{site.prefix}.kv_a_layernorm.weight has zeros, by which no latent can be scaled back",
            UnsupportedModel,
        )

        def turned(x: Tensor, dim: int) -> Tensor:
            return to_interleaved(x, self.weight_rope_order, dim)

        weights = MlaWeights(
            w_dkv_RD=down[:rank],
            b_dkv_R=None if b_down is None else b_down[:rank],
            w_kr_ED=turned(down[rank:], 0),
            b_kr_E=None if b_down is None else turned(b_down[rank:], 0),
            norm_R=self.multipliers(g)[0] * norm,
            w_uk_NPR=up[:, :nope],
            w_uv_NVR=up[:, nope:],
            w_uq_NPX=q[:, :nope],
            w_qr_NEX=turned(q[:, nope:], 1),
            b_uq_NP=None if b_q is None else b_q[:, :nope],
            b_qr_NE=None if b_q is None else turned(b_q[:, nope:], 1),
            w_o_DNV=self._output(source, site, g, with_output),
        )
        return weights if dtype == torch.float64 else weights.to(dtype=dtype)

    def _read_queries(
        self, source: TensorSource, site: AttentionSite, g: MlaGeometry
    ) -> tuple[Tensor, Tensor | None]:
        """Weight [N, P + E, X] and bias [N, P + E] of the heads' queries, multiplier included."""
        weight, bias = _weight_and_bias(source, self.query_name(source, site))
        factor = self.multipliers(g)[1]
        heads = (g.num_heads, -1)
        scaled = None if bias is None else factor * bias.unflatten(0, heads)
        return factor * weight.unflatten(0, heads), scaled

    def _output(
        self, source: TensorSource, site: AttentionSite, g: MlaGeometry, wanted: bool
    ) -> Tensor:
        name = f"{site.prefix}.o_proj.weight"
        if not wanted:
            return torch.empty(g.hidden_size, g.num_heads, g.v_head_dim, device="meta")
        return _tensor(source, name).unflatten(1, (g.num_heads, g.v_head_dim))

    def read_query_down(self, source: TensorSource, site: AttentionSite) -> QueryDown | None:
        """The compression before the query projection, float64; None where there is none."""
        if self.query_name(source, site).endswith("q_proj"):
            return None
        weight, bias = _weight_and_bias(source, f"{site.prefix}.q_a_proj")
        norm = _tensor(source, f"{site.prefix}.q_a_layernorm.weight")
        return QueryDown(w_XD=weight, b_X=bias, norm_X=norm)

    def values(
        self, weights: MlaWeights, site: AttentionSite, source: TensorSource
    ) -> dict[str, Tensor]:
        """Inverse of `read`: float values of exactly the tensors that fusing may change."""
        g = self.geometry(source.config)
        latent_factor, query_factor = self.multipliers(g)
        query = self.query_name(source, site)

        def rows(x: Tensor, dim: int) -> Tensor:
            return from_interleaved(x, self.weight_rope_order, dim)

        w = weights
        out = {
            f"{site.prefix}{DOWN}": torch.cat((w.w_dkv_RD, rows(w.w_kr_ED, 0))),
            f"{site.prefix}.kv_a_layernorm.weight": w.norm_R / latent_factor,
            f"{site.prefix}.kv_b_proj.weight": torch.cat((w.w_uk_NPR, w.w_uv_NVR), 1).flatten(0, 1),
            f"{query}.weight": torch.cat((w.w_uq_NPX, rows(w.w_qr_NEX, 1)), 1).flatten(0, 1)
            / query_factor,
        }
        if w.b_dkv_R is not None and w.b_kr_E is not None:
            out[f"{site.prefix}.kv_a_proj_with_mqa.bias"] = torch.cat(
                (w.b_dkv_R, rows(w.b_kr_E, 0))
            )
        if w.b_uq_NP is not None and w.b_qr_NE is not None:
            out[f"{query}.bias"] = (
                torch.cat((w.b_uq_NP, rows(w.b_qr_NE, 1)), 1).flatten() / query_factor
            )
        return out

    def fused_names(self, source: TensorSource, site: AttentionSite) -> list[str]:
        """The checkpoint tensors that `write` returns."""
        query = self.query_name(source, site)
        down = f"{site.prefix}.kv_a_proj_with_mqa"
        names = [f"{down}.weight", f"{site.prefix}.kv_a_layernorm.weight"]
        names += [f"{site.prefix}.kv_b_proj.weight", f"{query}.weight"]
        names += [bias for bias in (f"{down}.bias", f"{query}.bias") if bias in source.entries]
        return names + [scale for name in names if (scale := source.scale_name(name)) is not None]

    def write(
        self, weights: MlaWeights, site: AttentionSite, source: TensorSource
    ) -> dict[str, Tensor]:
        """`values` stored as the checkpoint stores them; block FP8 brings its scales along."""
        out: dict[str, Tensor] = {}
        for name, x in self.values(weights, site, source).items():
            out |= encode(source, name, x)
        return out
