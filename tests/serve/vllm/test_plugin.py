"""What vLLM meets of the plugin in processes that serve other models, too."""

import logging
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from torch import nn

from quantmla.errors import QuantMLAError
from quantmla.quant.format import parse_format
from quantmla.serve.vllm import register

ROOT = Path(__file__).parents[3]


def test_the_entry_point_leads_to_register():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, name = project["entry-points"]["vllm.general_plugins"]["quantmla"].split(":")
    assert getattr(import_module(module), name) is register


def test_the_extra_and_the_tests_mean_the_release_that_the_plugin_is_for(cpu_vllm):
    import vllm

    from quantmla.serve.vllm.engine import RELEASES

    assert vllm.__version__.startswith(RELEASES)
    pinned = (Path(__file__).parent / "requirements.txt").read_text()
    assert f"vllm=={vllm.__version__}" in pinned
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert extras["vllm"][0].startswith(f"vllm=={vllm.__version__};")


def test_a_vllm_without_a_name_costs_one_line_of_the_log(monkeypatch, caplog):
    """As if a module of another release lacked something; vLLM goes on."""
    monkeypatch.setitem(sys.modules, "quantmla.serve.vllm.plugin", None)
    with caplog.at_level(logging.WARNING, logger="vllm.quantmla"):
        caplog.handler.setLevel(logging.WARNING)
        logging.getLogger("vllm.quantmla").addHandler(caplog.handler)
        register()
    logging.getLogger("vllm.quantmla").removeHandler(caplog.handler)
    messages = {record.getMessage() for record in caplog.records}
    assert len(messages) == 1
    assert "QuantMLA is not available here" in messages.pop()


def test_another_release_of_vllm_is_refused(cpu_vllm, monkeypatch):
    from quantmla.serve.vllm import plugin

    monkeypatch.setattr(plugin, "__version__", "0.99.0")
    with pytest.raises(QuantMLAError, match=r"vllm 0\.99\.0 is installed"):
        plugin.install.__wrapped__()


def test_every_process_may_register_again(cpu_vllm):
    from vllm.model_executor.custom_op import op_registry_oot

    from quantmla.serve.vllm.layer import BACKEND_PATH, QuantMLAWrapper

    register()
    register()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert AttentionBackendEnum.CUSTOM.get_path() == BACKEND_PATH
    assert op_registry_oot["MultiHeadLatentAttentionWrapper"] is QuantMLAWrapper


@pytest.fixture
def build(cpu_vllm, tmp_path, monkeypatch):
    """vLLM's layer as the plugin replaces it, with a stub in place of its insides."""
    from vllm.config import set_current_vllm_config
    from vllm_harness import model_config, vllm_config

    from quantmla.serve.vllm import layer

    def plain(self, *args, **kwargs):
        nn.Module.__init__(self)
        self.rotary_emb = SimpleNamespace(is_neox_style=False)
        self.mla_attn = layer.MLAAttention.__new__(layer.MLAAttention)
        nn.Module.__init__(self.mla_attn)
        bound = {}
        self.mla_attn.__dict__ |= {
            "layer_name": "model.layers.0.self_attn.attn",
            "impl": SimpleNamespace(bind=lambda *a: bound.update(to=a), bound=bound),
        }

    monkeypatch.setattr(layer.MultiHeadLatentAttentionWrapper, "__init__", plain)
    prefill = ModuleType("quantmla.serve.vllm.prefill")
    prefill.choose_prefill = lambda config: None
    monkeypatch.setitem(sys.modules, "quantmla.serve.vllm.prefill", prefill)

    def make(backend=None, **changes):
        config = vllm_config(model_config(tmp_path, parse_format("c4r4"), **changes))
        config.attention_config.backend = backend
        with set_current_vllm_config(config):
            wrapper = layer.MultiHeadLatentAttentionWrapper()
        return wrapper, config.compilation_config.static_forward_context

    return make


@pytest.mark.parametrize("fused", [True, False])
def test_other_starts_and_other_models_keep_vllms_own_cache(build, fused):
    from quantmla.serve.vllm.layer import MLAAttention

    wrapper, layers = build() if fused else build(quantmla_config="-")
    assert type(wrapper.mla_attn) is MLAAttention
    assert not layers


def test_custom_packs_the_cache_and_adds_a_window(build):
    from quantmla.serve.vllm.engine import AttentionBackendEnum
    from quantmla.serve.vllm.layer import PackedAttention, WindowCache

    wrapper, layers = build(AttentionBackendEnum.CUSTOM)
    name = "model.layers.0.self_attn.attn"
    assert type(wrapper.mla_attn) is PackedAttention
    window = layers[f"{name}.window"]
    assert isinstance(window, WindowCache)
    assert wrapper.mla_attn.impl.bound["to"] == (name, window)


def test_another_plugins_custom_backend_is_its_own(build, monkeypatch):
    from quantmla.serve.vllm import layer
    from quantmla.serve.vllm.engine import AttentionBackendEnum

    monkeypatch.setattr(layer, "BACKEND_PATH", "somewhere.Else")
    wrapper, layers = build(AttentionBackendEnum.CUSTOM)
    assert type(wrapper.mla_attn) is layer.MLAAttention
    assert not layers
