"""Sizes of the cache's channels, against plain sums in float64."""

import torch
from synthetic_layer import OUTLIERS, synthetic_layer

from quantmla.method.spread import DIGITS, cached_spread
from quantmla.transform.layer import ContentTransform, LayerTransform, RopeTransform, identity


def test_the_plain_cache_holds_latents_times_the_norm_weight():
    layer = synthetic_layer(3)
    found = cached_spread(layer, identity(layer.weights.norm_R, 8))
    latent = layer.held_out.unit_latent_BSR.double() * layer.weights.norm_R.double()
    expected = latent.flatten(0, 1).square().mean(0).sqrt()
    close = {"rtol": 10.0 ** (1 - DIGITS), "atol": 0.0}
    torch.testing.assert_close(torch.tensor(found["content"]).double(), expected, **close)
    pairs = layer.held_out.k_rope_BSE.double().unflatten(-1, (-1, 2)).square().sum(-1)
    expected = pairs.flatten(0, 1).mean(0).sqrt()
    torch.testing.assert_close(torch.tensor(found["rope"]).double(), expected, **close)


def test_a_scale_that_evens_channels_out_is_seen():
    layer = synthetic_layer(4)
    size = layer.held_out.unit_latent_BSR.double().flatten(0, 1).square().mean(0).sqrt()
    content = ContentTransform(torch.eye(32).double(), 1 / size)
    gain = torch.linspace(1, 2, 8).double()
    transform = LayerTransform(content, RopeTransform(torch.zeros(8).double(), gain))
    found = cached_spread(layer, transform)
    assert size[list(OUTLIERS)].min() > 3 * size.median()
    assert max(found["content"]) / min(found["content"]) < 1.01
    plain = cached_spread(layer, identity(layer.weights.norm_R, 8))
    grown = torch.tensor(found["rope"]) / torch.tensor(plain["rope"])
    torch.testing.assert_close(grown.double(), gain, rtol=1e-2, atol=0)
