import pytest
import torch
from random_layer import normal
from synthetic_layer import GEOMETRY, synthetic_layer
from tiny import random_transform

from quantmla.method.layer import content_output_loss, held_out_errors, off_device, on_device
from quantmla.mla.attention import Inputs, attention_absorbed, causal_mask
from quantmla.quant.format import parse_format
from quantmla.transform.layer import identity, read_rope_key, read_unit_latent

LAYER = synthetic_layer()
FORMAT = parse_format("c3r3", group_size=16)
TRANSFORM = random_transform(GEOMETRY.kv_lora_rank, GEOMETRY.qk_rope_head_dim // 2, 0)


def test_held_out_errors_are_those_of_the_readable_attention():
    """In float64, one sequence after the other, with absorbed instead of expanded attention."""
    weights = LAYER.weights.to(dtype=torch.float64)
    mask = causal_mask(100, 100)
    sums = torch.zeros(5, dtype=torch.float64)
    for b in range(len(LAYER.held_out)):
        unit, key, content, rope = (x[b].double() for x in LAYER.held_out)
        read = read_unit_latent(TRANSFORM.content, unit, FORMAT)
        key_read = read_rope_key(TRANSFORM, key, FORMAT)

        def output(unit_TR, key_TE, content=content, rope=rope):
            x = Inputs(content, rope, unit_TR * weights.norm_R, key_TE)
            return attention_absorbed(weights, x, LAYER.softmax_scale, mask)

        target = output(unit, key)
        sums[0] += (output(read, key) - target).square().sum()
        sums[1] += (output(unit, key_read) - target).square().sum()
        sums[2] += target.square().sum()
        for index, rows in ((3, key - key_read), (4, key)):
            scores = torch.einsum("sne,te->nst", rope, rows)
            mean = (scores * mask).sum(-1, keepdim=True) / mask.sum(-1)[:, None]
            sums[index] += ((scores - mean) * mask).square().sum()
    expected = [*(sums[:2] / sums[2]).tolist(), float(sums[3] / sums[4])]
    # codes near a rounding boundary fall otherwise in float32, a few of thousands
    found = held_out_errors(LAYER, TRANSFORM, FORMAT)
    assert list(found) == pytest.approx(expected, rel=0.01)


def test_batches_cover_every_sequence_once():
    sizes = [len(x.unit_latent_BSR) for x in LAYER.batches(LAYER.train, 3)]
    assert sizes == [3, 3, 2]
    joined = torch.cat([x.k_rope_BSE for x in LAYER.batches(LAYER.train, 3)])
    assert torch.equal(joined, LAYER.train.k_rope_BSE)


def test_the_content_loss_is_the_mean_over_batches():
    content = on_device(TRANSFORM, LAYER.device).content
    one = [content_output_loss(LAYER, content, FORMAT, size) for size in (1, 4)]
    ours = held_out_errors(LAYER, TRANSFORM, FORMAT).content_output
    assert one[1] == pytest.approx(ours, rel=1e-4)  # one batch: the same quotient of sums
    assert one[0] == pytest.approx(ours, rel=0.2)
    plain = on_device(identity(LAYER.weights.norm_R, 8), LAYER.device).content
    assert content_output_loss(LAYER, plain, parse_format("c16r4"), 4) < 1e-10


def test_moving_a_transform_keeps_it():
    turned = TRANSFORM._replace(online_rope_EE=normal(0, 16, 16))
    there = on_device(turned, torch.device("cpu"))
    assert there.content.rotation_RR.dtype == torch.float32
    back = off_device(there)
    assert back.online_rope_EE is not None
    assert back.online_rope_EE.dtype == torch.float64
    assert torch.allclose(back.content.rotation_RR, TRANSFORM.content.rotation_RR, atol=1e-7)
    assert torch.allclose(back.rope.gain_F, TRANSFORM.rope.gain_F)
