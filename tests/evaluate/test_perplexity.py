import math

import pytest
import torch

from quantmla.errors import UsageError
from quantmla.evaluate.perplexity import default_text, evaluate_text, measure_text, token_windows
from quantmla.evaluate.variant import Variant, require_equal_protection
from quantmla.quant.format import parse_format

TEXT = "".join(chr(33 + (7 * i * i + i // 3) % 62) for i in range(400))
FMT = parse_format("c4r4", group_size=16, page_size=16)


def test_windows_cut_the_text_in_order(tokenizer, begin_tokenizer):
    windows = token_windows(tokenizer, TEXT, 90)
    assert [tuple(w.shape) for w in windows] == [(1, 90)] * 4
    assert torch.cat(windows, dim=1)[0].tolist() == tokenizer.encode(TEXT)[:360]
    begun = token_windows(begin_tokenizer, TEXT, 101, limit=2)
    assert [w[0, 0].item() for w in begun] == [1, 1]
    assert torch.cat([w[:, 1:] for w in begun], dim=1)[0].tolist() == tokenizer.encode(TEXT)[:200]


@pytest.mark.parametrize(
    ("context", "limit", "said"),
    [(1, None, "at least 2"), (90, 0, "at least 1 window"), (401, None, "has 400 tokens")],
)
def test_windows_that_cannot_be_are_refused(tokenizer, context, limit, said):
    with pytest.raises(UsageError, match=said):
        token_windows(tokenizer, TEXT, context, limit)


def test_perplexity_is_that_of_the_plain_model(model, tokenizer):
    windows = token_windows(tokenizer, TEXT, 100, limit=3)
    (result,) = measure_text(model, [Variant(name="bf16")], windows)
    with torch.inference_mode():
        losses = [float(model(w, labels=w, use_cache=False).loss) for w in windows]
    assert result.overall.perplexity == pytest.approx(math.exp(sum(losses) / 3), rel=1e-5)
    assert result.overall.kl_max < 1e-5
    assert result.overall.top1 == 1
    assert result.overall.tokens == 3 * 99


def test_more_bits_diverge_less(model, tokenizer):
    kl = [
        evaluate_text(
            model,
            tokenizer,
            TEXT,
            Variant(name=name, fmt=parse_format(name, group_size=16, page_size=16).unprotected()),
            context=100,
            limit=2,
        ).overall.kl_mean
        for name in ("c16r16", "c8r8", "c4r4", "c2r2")
    ]
    assert kl == sorted(kl)
    assert kl[0] < 0.1 * kl[2]


def test_a_variant_may_be_another_model(model, tokenizer):
    import copy

    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[1].self_attn.o_proj.weight.mul_(1.2)
    windows = token_windows(tokenizer, TEXT, 60, limit=2)
    seen: list[tuple[str, int, int]] = []
    same, moved = measure_text(
        model,
        [Variant(name="a", model=copy.deepcopy(model)), Variant(name="b", model=other)],
        windows,
        lambda *step: seen.append(step),
    )
    assert same.overall.kl_max < 1e-6
    assert moved.overall.kl_mean > 1e-4
    assert seen == [("text", 1, 2), ("text", 2, 2)]


def test_the_model_keeps_its_mode(model, tokenizer):
    model.train()
    evaluate_text(model, tokenizer, TEXT, Variant(name="x", fmt=FMT), context=50, limit=1)
    assert model.training


def test_unequal_protection_is_refused():
    require_equal_protection(
        [Variant(name="bf16"), Variant(name="a", fmt=FMT), Variant(name="b", fmt=FMT)]
    )
    with pytest.raises(UsageError, match="unequal protection"):
        require_equal_protection(
            [Variant(name="a", fmt=FMT), Variant(name="b", fmt=FMT.unprotected())]
        )


def test_the_packaged_text_is_there():
    assert len(default_text()) > 50_000
