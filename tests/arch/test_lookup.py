import pytest

from quantmla.arch import FAMILIES, REFUSED, adapter_for
from quantmla.arch.families import WRAPPERS
from quantmla.errors import UnsupportedModel

LATENT = {"kv_lora_rank": 512}


@pytest.mark.parametrize("kind", FAMILIES)
def test_families_are_listed_under_their_model_type(kind: str):
    assert adapter_for({"model_type": kind, **LATENT}).model_type == kind


def test_rope_interleave_of_the_config_decides_where_the_family_reads_it():
    for kind in FAMILIES:
        follows = FAMILIES[kind].follows_rope_interleave
        half = adapter_for({"model_type": kind, "rope_interleave": False}).weight_rope_order
        default = adapter_for({"model_type": kind}).weight_rope_order
        assert default == FAMILIES[kind].weight_rope_order
        assert half == ("half" if follows else default)


@pytest.mark.parametrize("kind", REFUSED)
def test_known_but_unsupported_models_are_refused_with_the_reason(kind: str):
    with pytest.raises(UnsupportedModel, match=f"^{kind} is not supported: "):
        adapter_for({"model_type": kind, **LATENT})


def test_models_without_latent_attention():
    with pytest.raises(UnsupportedModel, match="llama has no latent attention"):
        adapter_for({"model_type": "llama"})


def test_unknown_latent_models_get_the_list_of_those_supported():
    supported = ", ".join(sorted((*FAMILIES, *WRAPPERS)))
    with pytest.raises(UnsupportedModel, match=f"'newcomer' is not known; supported: {supported}"):
        adapter_for({"model_type": "newcomer", **LATENT})


def test_wrapper_without_a_language_model():
    with pytest.raises(UnsupportedModel, match="'kimi_k25' but no text_config"):
        adapter_for({"model_type": "kimi_k25"})
