import pytest
import torch
from synthetic_layer import OUTLIERS, synthetic_layer

from quantmla.method import smoothquant
from quantmla.method.layer import held_out_errors
from quantmla.method.statistics import content_magnitudes, log_scales, rope_magnitudes
from quantmla.quant.format import parse_format
from quantmla.transform.layer import ContentTransform, LayerTransform, RopeTransform

LAYER = synthetic_layer()
FORMAT = parse_format("c4r4", group_size=16)
FOUND = smoothquant.fit(LAYER, FORMAT, smoothquant.Options(), torch.Generator()).transform


def scales(alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    content, rope = content_magnitudes(LAYER.train), rope_magnitudes(LAYER.train)
    return log_scales(content, alpha).exp(), log_scales(rope, alpha).exp()


def test_the_published_exponents_are_searched():
    assert smoothquant.ALPHAS == (0.125, 0.25, 0.5, 0.75, 1.0)  # without 0


def test_each_path_takes_the_exponent_with_the_least_held_out_output_error():
    eye = torch.eye(32)
    errors = {}
    for alpha in smoothquant.ALPHAS:
        scale_R, gain_F = scales(alpha)
        rope = RopeTransform(torch.zeros_like(gain_F), gain_F)
        transform = LayerTransform(ContentTransform(eye, scale_R), rope)
        errors[alpha] = held_out_errors(LAYER, transform, FORMAT)
    best_content = min(errors, key=lambda a: errors[a].content_output)
    best_rope = min(errors, key=lambda a: errors[a].rope_output)
    assert len({e.content_output for e in errors.values()}) == len(errors)
    assert torch.equal(FOUND.content.scale_R, scales(best_content)[0].double())
    assert torch.equal(FOUND.rope.gain_F, scales(best_rope)[1].double())


def test_scales_lower_outliers_and_nothing_is_rotated():
    assert FOUND.content.scale_R[list(OUTLIERS)].max() < FOUND.content.scale_R.median()
    assert torch.equal(FOUND.content.rotation_RR, torch.eye(32, dtype=torch.float64))
    assert not FOUND.rope.angle_F.any()
    # equation 42: mean log scale 0 as long as nothing is clipped
    assert float(FOUND.content.scale_R.log().mean()) == pytest.approx(0, abs=1e-6)
