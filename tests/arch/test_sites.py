"""Layers of the checkpoint against those of its config.json."""

import pytest

from quantmla.arch import adapter_for
from quantmla.arch.sites import DOWN
from quantmla.errors import UnsupportedModel

NAMES = [f"model.layers.{layer}.self_attn{DOWN}" for layer in range(3)]


@pytest.mark.parametrize("extra", [{}, {"num_nextn_predict_layers": 0}])
def test_a_layer_that_nothing_speaks_of_is_refused(extra):
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 2} | extra
    with pytest.raises(UnsupportedModel, match=r"has model.layers.2.self_attn, but .* 2 layers"):
        adapter_for(config).sites(config, NAMES)


def test_layers_of_multi_token_prediction_are_as_many_as_the_config_says():
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 1, "num_nextn_predict_layers": 2}
    sites = adapter_for(config).sites(config, NAMES)
    assert [site.mtp for site in sites] == [False, True, True]
    config["num_nextn_predict_layers"] = 1
    with pytest.raises(UnsupportedModel, match=r"layers.2.self_attn, but .* and 1 for multi-token"):
        adapter_for(config).sites(config, NAMES)


@pytest.mark.parametrize("extra", [-1, True, 1.0, "1", 2**31])
def test_a_number_of_mtp_layers_that_cannot_be_meant(extra):
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 3}
    config |= {"num_nextn_predict_layers": extra}
    with pytest.raises(UnsupportedModel, match=f"num_nextn_predict_layers = {extra!r}; a whole"):
        adapter_for(config).sites(config, NAMES)
