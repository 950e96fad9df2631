"""The families that are tried in vLLM are those that `quantmla serve` and the plugin take."""

import serve_families

from quantmla.arch import adapter_for
from quantmla.serve.settings import NOT_COMPILED, SERVED_FAMILIES


def test_every_served_family_is_tried():
    assert set(serve_families.FAMILIES) == set(SERVED_FAMILIES)
    assert set(NOT_COMPILED) <= set(SERVED_FAMILIES)
    for family in SERVED_FAMILIES:
        config = serve_families.config_of(family, "c4r4")
        assert adapter_for(config).model_type == family
