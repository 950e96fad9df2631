"""The simulated cache against the packed one, and against teacher-forced evaluation."""

import pytest
import torch

from quantmla.evaluate.simulated_cache import simulated_cache
from quantmla.evaluate.teacher_forced import latent_attentions, norm_weight, teacher_forced
from quantmla.quant.format import paper_format, parse_format
from quantmla.quant.mixed import model_format
from quantmla.serve.transformers import QuantMLACache
from quantmla.transform.layer import ContentTransform, LayerTransform, RopeTransform

SMALL = {"group_size": 16, "page_size": 16}
FORMATS = [
    parse_format("c4r4", **SMALL, recent_window=16, num_sink_tokens=2),
    parse_format("c2r4", **SMALL).unprotected(),
]
IDS = torch.randint(2, 64, (2, 60), generator=torch.Generator().manual_seed(4))


def steps(model, cache, ids, mask=None, prompt: int = 1) -> torch.Tensor:
    """Logits after a prompt and then token by token."""
    mask = torch.ones_like(ids) if mask is None else mask
    positions, found = (mask.cumsum(-1) - 1).clamp(min=0), []
    ends = [prompt, *range(prompt + 1, ids.shape[1] + 1)]
    with torch.inference_mode():
        for start, end in zip([0, *ends], ends, strict=False):
            out = model(
                input_ids=ids[:, start:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, start:end],
                past_key_values=cache,
                use_cache=True,
            )
            found.append(out.logits)
    return torch.cat(found, dim=1)


MIXED = model_format(
    FORMATS[0], {1: parse_format("c2r4", **SMALL, recent_window=16, num_sink_tokens=2)}
)


@pytest.mark.parametrize("fmt", [*FORMATS, MIXED], ids=lambda f: f.name)
@pytest.mark.parametrize("prompt", [1, 37])
def test_without_a_transform_it_is_the_packed_cache(model, fmt, prompt):
    mask = torch.ones_like(IDS)
    mask[1, :9] = 0
    packed = steps(model, QuantMLACache(model.config, fmt, mask), IDS, mask, prompt)
    found = steps(model, simulated_cache(model, fmt, mask), IDS, mask, prompt)
    torch.testing.assert_close(found[:, 9:], packed[:, 9:], rtol=0, atol=0)


def transforms(model) -> dict[int, LayerTransform]:
    draw = torch.Generator().manual_seed(6)
    found = {}
    for index, module in latent_attentions(model).items():
        rank, pairs = int(module.kv_lora_rank), int(module.qk_rope_head_dim) // 2
        rotation = torch.linalg.qr(torch.randn(rank, rank, dtype=torch.float64, generator=draw)).Q
        scale = torch.rand(rank, dtype=torch.float64, generator=draw) + 0.5
        found[index] = LayerTransform(
            ContentTransform(rotation, scale),
            RopeTransform(
                torch.rand(pairs, dtype=torch.float64, generator=draw),
                torch.rand(pairs, dtype=torch.float64, generator=draw) + 0.5,
            ),
        )
    return found


@pytest.mark.parametrize(
    "fmt", [*FORMATS, paper_format("c4r4", **SMALL, recent_window=16)], ids=lambda f: f.range_rule
)
def test_with_a_transform_it_decodes_as_teacher_forced_evaluation_reads(model, fmt):
    model = model.double()
    learned = transforms(model)
    with teacher_forced(model, fmt, learned), torch.inference_mode():
        expected = model(input_ids=IDS, use_cache=False).logits
    found = steps(model, simulated_cache(model, fmt, transforms=learned), IDS)
    plain = steps(model, simulated_cache(model, fmt), IDS)
    # transforms run in float32, where another order of sums tips a few rows to the next bf16 value
    assert (found - expected).norm() < (plain - expected).norm() / 20
    assert float(((found - expected).abs() < 1e-4).double().mean()) > 0.9


def test_nothing_is_packed(model):
    cache = simulated_cache(model, FORMATS[0])
    steps(model, cache, IDS[:, :20])
    assert cache.allocated_bytes() == 0
    assert norm_weight(next(iter(latent_attentions(model).values()))).min() > 0
