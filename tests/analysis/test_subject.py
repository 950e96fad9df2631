"""What studies see of a captured attention."""

import torch
from study_layer import PROTOCOL, study_layer

from quantmla.analysis.subject import quantiser_error, scaled_to
from quantmla.mla.attention import attention_expanded, causal_mask
from quantmla.objective import attention_output
from quantmla.quant.roundtrip import read_content, read_rope

LAYER = study_layer()


def test_points_are_the_first_sequences_of_each_cell():
    points = list(LAYER.points(1))
    assert len(points) == PROTOCOL.draws
    for cell, x in enumerate(points):
        row = cell * PROTOCOL.sequences
        assert torch.equal(x.k_rope_TE, LAYER.sample.k_rope_BSE[row])
        assert torch.equal(x.latent_TR, LAYER.sample.unit_latent_BSR[row] * LAYER.weights.norm_R)
    assert len(list(LAYER.points(99))) == len(LAYER.sample)


def test_cached_latents_and_weights_are_the_same_attention():
    (unit,), (cached,) = LAYER.batches(99), LAYER.cached_batches(99)
    one = attention_output(LAYER.weights, unit, LAYER.softmax_scale)
    two = attention_output(LAYER.cached_weights, cached, LAYER.softmax_scale)
    assert torch.equal(one, two)
    x = next(iter(LAYER.points(1)))
    length = len(x.latent_TR)
    readable = attention_expanded(
        LAYER.weights, x, LAYER.softmax_scale, causal_mask(length, length)
    )
    assert (readable - one[0]).abs().max() < 1e-4  # float32, outputs of unit size


def test_errors_are_those_of_the_reader_and_scale_to_any_share():
    x, fmt = next(iter(LAYER.points(1))), PROTOCOL.direction_format()
    for rows, path, read in (
        (x.latent_TR, "content", read_content),
        (x.k_rope_TE, "rope", read_rope),
    ):
        error = quantiser_error(rows, path, fmt)
        assert torch.equal(rows + error, rows + (read(rows, fmt) - rows))
        both = torch.stack((rows, 3 * rows))
        scaled = scaled_to(torch.stack((error, error)), both, 0.01)
        for one, whole in zip(scaled, both, strict=True):
            assert abs(float(one.square().sum() / whole.square().sum()) - 0.01) < 1e-6
