"""Adapters against the modules of transformers themselves."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tiny import CASES, LATENT, build, load, random_tokens, rewrite_tensors

from quantmla.arch import Adapter, AttentionSite, adapter_for
from quantmla.checkpoint.overlay import overlay
from quantmla.checkpoint.source import TensorSource, open_source
from quantmla.errors import QuantMLAError, UnsupportedModel
from quantmla.mla.attention import attention_absorbed, attention_expanded, causal_mask
from quantmla.mla.rope import from_interleaved
from quantmla.verify import Case, attention_inputs, relative_error

Tiny = Callable[[str], Path]
# float32 modules against float64 arithmetic: products of up to 64 terms, three in a row
TOLERANCE = 1e-5


def opened(folder: Path) -> tuple[TensorSource, Adapter, list[AttentionSite]]:
    source = open_source(folder)
    adapter = adapter_for(source.config)
    return source, adapter, adapter.sites(source.config, source.names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_write_of_read_is_bit_exact(
    case: str, dtype: torch.dtype, tiny_checkpoint: Tiny, tmp_path: Path
):
    folder = tiny_checkpoint(case) if dtype == torch.float32 else build(case, tmp_path, dtype=dtype)
    source, adapter, sites = opened(folder)
    for site in sites:
        written = adapter.write(adapter.read(source, site), site, source)
        assert sorted(written) == sorted(adapter.fused_names(source, site))
        for name, x in written.items():
            assert x.dtype == source.dtype(name)
            assert torch.equal(x, source.tensor(name)), name


@pytest.mark.parametrize("case", CASES)
def test_geometry_is_that_of_the_module(case: str, tiny_checkpoint: Tiny):
    folder = tiny_checkpoint(case)
    source, adapter, sites = opened(folder)
    g = adapter.geometry(source.config)
    modules = dict(load(folder).named_modules())
    for site in sites:
        module = modules[site.prefix]
        assert g.softmax_scale == pytest.approx(module.scaling, rel=1e-12)
        assert g.norm_eps == module.kv_a_layernorm.variance_epsilon
        assert (g.num_heads, g.kv_lora_rank, g.q_lora_rank) == (
            module.num_heads,
            module.kv_lora_rank,
            module.q_lora_rank,
        )
        assert (g.qk_nope_head_dim, g.qk_rope_head_dim, g.v_head_dim) == (
            module.qk_nope_head_dim,
            module.qk_rope_head_dim,
            module.v_head_dim,
        )
        assert site.cache_index == module.layer_idx
        assert not site.mtp


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_reference_attention_is_that_of_the_module(case: str, tiny_checkpoint: Tiny):
    """Output after o_proj, and both cached tensors in the order that the cache gets them."""
    folder = tiny_checkpoint(case)
    source, adapter, sites = opened(folder)
    model = load(folder)
    modules = dict(model.named_modules())
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(prefix: str):
        def hook(module, args, kwargs, output):
            hidden = args[0] if args else kwargs["hidden_states"]
            seen[prefix] = hidden[0].double(), output[0][0].double()

        return hook

    for site in sites:
        modules[site.prefix].register_forward_hook(keep(site.prefix), with_kwargs=True)
    cache = model(input_ids=random_tokens()[:1], use_cache=True).past_key_values
    g = adapter.geometry(source.config)
    for site in sites:
        hidden_TD, expected_TD = seen[site.prefix]
        inputs = module_inputs(source, adapter, site, model, hidden_TD)
        weights = adapter.read(source, site)
        bias = f"{site.prefix}.o_proj.bias"
        offset = source.float_tensor(bias) if bias in source.entries else 0
        mask = causal_mask(len(hidden_TD), len(hidden_TD))
        for attention in (attention_absorbed, attention_expanded):
            out_TD = attention(weights, inputs, g.softmax_scale, mask) + offset
            assert relative_error(out_TD, expected_TD) < TOLERANCE
        layer = cache.layers[site.cache_index]
        cached_rope = from_interleaved(inputs.k_rope_TE, adapter.cache_rope_order)
        assert relative_error(layer.keys[0, 0].double(), inputs.latent_TR) < TOLERANCE
        assert relative_error(layer.values[0, 0].double(), cached_rope) < TOLERANCE


def module_inputs(source, adapter, site, model, hidden_TD):
    """Inputs of the site's attention, with the rotary embedding of the model itself."""
    down = adapter.read_query_down(source, site)
    query_TX = hidden_TD
    if down is not None:
        x = hidden_TD @ down.w_XD.T + (0 if down.b_X is None else down.b_X)
        query_TX = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * down.norm_X
    positions_T = torch.arange(len(hidden_TD))
    rotary = getattr(model.model, "rotary_emb", None)
    inv_freq_F = rotary.inv_freq.double() if rotary is not None else torch.zeros(8).double()
    case = Case(hidden_TD, query_TX, positions_T, inv_freq_F)
    inputs = attention_inputs(adapter.read(source, site), adapter.geometry(source.config), case)
    magnitude = getattr(rotary, "attention_scaling", 1.0)  # of cos and sin
    return inputs._replace(
        q_rope_SNE=magnitude * inputs.q_rope_SNE, k_rope_TE=magnitude * inputs.k_rope_TE
    )


def test_tiny_longcat_has_multipliers_other_than_one():
    config = transformers.LongcatFlashConfig(**(LATENT | CASES["longcat_flash"][2])).to_dict()
    adapter = adapter_for(config)
    assert 1 not in adapter.multipliers(adapter.geometry(config))


def test_read_in_another_dtype_and_without_output(tiny_checkpoint: Tiny):
    source, adapter, sites = opened(tiny_checkpoint("deepseek_v3"))
    full = adapter.read(source, sites[0])
    small = adapter.read(source, sites[0], dtype=torch.float32, with_output=False)
    assert small.w_uk_NPR.dtype == torch.float32
    assert torch.equal(small.w_uk_NPR, full.w_uk_NPR.float())
    assert small.w_o_DNV.device.type == "meta"
    assert small.w_o_DNV.shape == full.w_o_DNV.shape


def test_kv_b_rows_are_split_per_head(tiny_checkpoint: Tiny):
    source, adapter, sites = opened(tiny_checkpoint("glm4_moe_lite"))
    weights = adapter.read(source, sites[1])
    raw = source.tensor("model.layers.1.self_attn.kv_b_proj.weight").double()
    assert raw.shape[0] == 4 * (16 + 24)
    for head in range(4):
        first = head * (16 + 24)
        assert torch.equal(weights.w_uk_NPR[head], raw[first : first + 16])
        assert torch.equal(weights.w_uv_NVR[head], raw[first + 16 : first + 40])


def mtp_tensors(source: TensorSource, old: str, new: str) -> dict[str, torch.Tensor]:
    return {
        name.replace(old, new): source.tensor(name) for name in source.names if name.startswith(old)
    }


def test_mtp_layers_of_the_checkpoint_are_sites(tiny_checkpoint: Tiny, tmp_path: Path):
    source, _, _ = opened(tiny_checkpoint("deepseek_v3"))
    extra = mtp_tensors(source, "model.layers.1.", "model.layers.2.")
    folder = rewrite_tensors(source.path, tmp_path / "mtp", extra)
    sites = opened(folder)[2]
    assert [(s.prefix, s.cache_index, s.mtp) for s in sites] == [
        ("model.layers.0.self_attn", 0, False),
        ("model.layers.1.self_attn", 1, False),
        ("model.layers.2.self_attn", 2, True),
    ]


def test_mtp_layers_under_their_own_root(tiny_checkpoint: Tiny, tmp_path: Path):
    source, _, _ = opened(tiny_checkpoint("longcat_flash"))
    name = "model.layers.0.self_attn.1.kv_a_proj_with_mqa.weight"
    extra = {"model.mtp.layers.0.self_attn.kv_a_proj_with_mqa.weight": source.tensor(name)}
    sites = opened(rewrite_tensors(source.path, tmp_path / "mtp", extra))[2]
    assert (sites[-1].prefix, sites[-1].mtp) == ("model.mtp.layers.0.self_attn", True)
    assert sites[-1].cache_index not in {site.cache_index for site in sites[:-1]}


def test_language_model_inside_a_wrapper(tiny_checkpoint: Tiny, tmp_path: Path):
    """As Kimi-K2.5 has it: text_config of type kimi_k2, names under language_model."""
    source, adapter, sites = opened(tiny_checkpoint("deepseek_v3"))
    text = {**source.config, "model_type": "kimi_k2"}
    folder = tmp_path / "wrapped"
    folder.mkdir()
    save_file(
        {f"language_model.{name}": source.tensor(name) for name in source.names},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text}))
    inner, wrapped, inner_sites = opened(folder)
    assert [s.prefix for s in inner_sites] == [f"language_model.{s.prefix}" for s in sites]
    assert wrapped.geometry(inner.config) == adapter.geometry(source.config)
    assert torch.equal(
        wrapped.read(inner, inner_sites[0]).w_qr_NEX, adapter.read(source, sites[0]).w_qr_NEX
    )


def test_hybrids_have_sites_only_where_attention_is_latent(tiny_checkpoint: Tiny):
    source, adapter, sites = opened(tiny_checkpoint("kimi_linear"))
    assert [(s.prefix, s.cache_index) for s in sites] == [("model.layers.1.self_attn", 1)]
    assert adapter.ignored(source.config, source.names) == ["model.layers.0.self_attn"]
    assert not adapter.geometry(source.config).rotated


def test_non_finite_weights_are_named(tiny_checkpoint: Tiny, tmp_path: Path):
    source, _, _ = opened(tiny_checkpoint("youtu"))
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    bad = source.tensor(name).clone()
    bad[3, 5] = torch.nan
    folder = rewrite_tensors(source.path, tmp_path / "nan", {name: bad})
    broken, adapter, sites = opened(folder)
    with pytest.raises(QuantMLAError, match=f"{name} has 1 of {bad.numel()} values"):
        adapter.read(broken, sites[0])


def test_missing_layers_are_named(tiny_checkpoint: Tiny):
    source, adapter, _ = opened(tiny_checkpoint("youtu"))
    with pytest.raises(UnsupportedModel, match=r"says 3 layers.*cache index 2"):
        adapter.sites({**source.config, "num_hidden_layers": 3}, source.names)
    with pytest.raises(UnsupportedModel, match="no tensor"):
        adapter.sites(source.config, ["model.norm.weight"])


def test_missing_sizes_are_named(tiny_checkpoint: Tiny):
    source, adapter, _ = opened(tiny_checkpoint("youtu"))
    for key in ("kv_lora_rank", "qk_rope_head_dim"):
        config = {k: v for k, v in source.config.items() if k != key}
        with pytest.raises(UnsupportedModel, match=f"{key} = None; youtu needs a positive integer"):
            adapter.geometry(config)
    with pytest.raises(UnsupportedModel, match="qk_rope_head_dim 7 is odd"):
        adapter.geometry({**source.config, "qk_rope_head_dim": 7})
    for value, shown in ((0, "0"), (-2, "-2"), (True, "True"), (2.0, "2.0"), ("2", "'2'")):
        with pytest.raises(UnsupportedModel, match=f"q_lora_rank = {shown}; youtu needs a pos"):
            adapter.geometry({**source.config, "q_lora_rank": value})
    for key in ("hidden_size", "qk_nope_head_dim", "qk_head_dim", "kv_lora_rank"):
        with pytest.raises(UnsupportedModel, match=f"{key} = about 10.400; no model has more"):
            adapter.geometry({**source.config, key: 10**400})


@pytest.mark.parametrize("layers", [None, "2", 0, -1, 2.0, True, 10**9])
def test_a_number_of_layers_that_cannot_be_meant(layers, tiny_checkpoint):
    source = open_source(tiny_checkpoint("deepseek_v3"))
    config = dict(source.config) | {"num_hidden_layers": layers}
    with pytest.raises(UnsupportedModel, match=r"num_hidden_layers|layers, but there is no"):
        adapter_for(config).sites(config, source.names)


def test_a_latent_norm_of_zero_is_named(tiny_checkpoint):
    source = open_source(tiny_checkpoint("deepseek_v3"))
    adapter = adapter_for(source.config)
    site = adapter.sites(source.config, source.names)[1]
    name = f"{site.prefix}.kv_a_layernorm.weight"
    zeros = overlay(source, {name: torch.zeros_like(source.tensor(name))})
    with pytest.raises(UnsupportedModel, match=f"{name} has zeros"):
        adapter.read(zeros, site)
