"""The published method's settings and losses."""

from dataclasses import asdict, replace

import pytest
import torch
from synthetic_layer import synthetic_layer

from quantmla.method import paper
from quantmla.method.layer import content_output_loss, on_device
from quantmla.method.optimize import Schedule
from quantmla.method.rope_learning import ALPHAS
from quantmla.method.statistics import MAX_LOG_SCALE, content_magnitudes, log_scales
from quantmla.quant.format import paper_format
from quantmla.transform.layer import ContentTransform

LAYER = synthetic_layer()
FORMAT = paper_format("c4r4", group_size=16)


def fit(**options):
    return paper.fit(LAYER, FORMAT, paper.Options(**options), torch.Generator().manual_seed(0))


def test_table_7():
    assert asdict(paper.Options()) == {
        "steps": 300,
        "batch_size": 4,
        "rotation_rate": 3e-3,
        "scale_rate": 1e-3,
        "angle_rate": 1e-3,
        "gain_rate": 1e-3,
        "anchor": 1e-4,
    }
    assert paper.CALIBRATION == {
        "num_sequences": 128,
        "held_out_sequences": 32,
        "sequence_length": 2048,
    }
    schedule = Schedule(steps=300)
    assert (schedule.warm_up, schedule.max_norm, schedule.validate_every) == (0.1, 1.0, 20)
    assert ALPHAS == (0, 0.125, 0.25, 0.5, 0.75, 1)
    assert MAX_LOG_SCALE == 2.0
    assert paper.PUBLISHED_FORMAT


def test_validation_every_20_steps_of_each_path():
    history = fit(steps=50).history
    for path in ("content", "rope"):
        assert [v.step for v in history if v.path == path] == [0, 20, 40, 50]


def test_without_steps_the_start_is_the_best_exponent_of_equation_37():
    """Step 0: no rotation, statistical scales chosen by the held-out output error."""
    transform = fit(steps=0).transform
    eye = torch.eye(32)
    magnitude = content_magnitudes(LAYER.train)
    losses = {
        alpha: content_output_loss(
            LAYER, ContentTransform(eye, log_scales(magnitude, alpha).exp()), FORMAT, 4
        )
        for alpha in ALPHAS
    }
    best = min(losses, key=losses.__getitem__)
    assert torch.equal(transform.content.rotation_RR, eye.double())
    expected = log_scales(magnitude, best).exp().double()
    assert torch.allclose(transform.content.scale_R, expected, rtol=1e-6)
    assert not transform.rope.angle_F.any()
    moved = on_device(transform, LAYER.device).content
    assert content_output_loss(LAYER, moved, FORMAT, 4) == pytest.approx(losses[best], rel=1e-3)


def test_learning_improves_on_the_start():
    def held_out(steps: int) -> float:
        content = on_device(fit(steps=steps).transform, LAYER.device).content
        return content_output_loss(LAYER, content, FORMAT, 4)

    assert held_out(120) < 0.9 * held_out(0)


def test_a_strong_anchor_holds_the_start():
    def distance(anchor: float) -> float:
        rotation = fit(steps=40, anchor=anchor, rotation_rate=0.1).transform.content.rotation_RR
        return float((rotation - torch.eye(32, dtype=torch.float64)).norm())

    assert distance(1e6) < 0.5 * distance(0.0)


def test_log_scales_stay_within_two():
    layer = replace(
        LAYER,
        train=replace(
            LAYER.train, unit_latent_BSR=LAYER.train.unit_latent_BSR * torch.logspace(-4, 4, 32)
        ),
    )
    fitted = paper.fit(layer, FORMAT, paper.Options(steps=5), torch.Generator().manual_seed(0))
    assert fitted.transform.content.scale_R.log().abs().max() <= MAX_LOG_SCALE + 1e-6
