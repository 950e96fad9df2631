import pytest
import torch

from quantmla.errors import UsageError
from quantmla.evaluate.compare import Settings, bytes_per_token, compare, measure
from quantmla.evaluate.teacher_forced import latent_attentions, norm_weight
from quantmla.evaluate.variant import Variant
from quantmla.quant.format import paper_format, parse_format
from quantmla.quant.layout import page_layout
from quantmla.transform.layer import identity

SMALL = {"group_size": 16, "page_size": 16}
TEXT = " ".join(f"word{'abcdefghij'[i % 10]}{'klmnopqrst'[i // 10 % 10]}" for i in range(300))


def test_rows_are_the_baseline_and_every_variant_in_order(model, tokenizer):
    fmt = parse_format("c4r4", **SMALL).unprotected()
    transforms = {i: identity(norm_weight(m), 8) for i, m in latent_attentions(model).items()}
    variants = [
        Variant(name="rtn", fmt=paper_format("c4r4", **SMALL).unprotected()),
        Variant(name="page", fmt=fmt),
        Variant(name="simulated", fmt=fmt, transforms=transforms),
    ]
    rows = compare(model, tokenizer, variants, TEXT, Settings(context=80, limit=2))
    assert [r.method for r in rows] == ["bf16", "rtn", "page", "simulated"]
    assert [(r.format, r.sinks, r.recent) for r in rows] == [("bf16", 0, None)] + [
        ("c4r4", 0, None)
    ] * 3
    assert rows[0].kl_mean == pytest.approx(0, abs=1e-6)
    assert rows[0].bytes_per_token == 2 * (32 + 16)
    assert all(r.kl_mean > 1e-4 and r.tokens == 2 * 79 and r.recall is None for r in rows[1:])
    assert rows[3].kl_mean == pytest.approx(rows[2].kl_mean, rel=0.1)


def test_recall_is_the_mean_over_kinds(model, tokenizer):
    settings = Settings(
        context=80, limit=1, needles=1, needle_context=600, kinds=("single", "long")
    )
    found = measure(model, tokenizer, [], TEXT, settings)
    assert set(found[0].recall) == {"single", "long"}
    assert found[0].row.recall == 0  # random weights


def test_bytes_per_token_are_those_of_the_layout(model):
    assert bytes_per_token(model, Variant(name="bf16")) == 96
    fmt = parse_format("c4r4", **SMALL)
    assert (
        bytes_per_token(model, Variant(name="c4r4", fmt=fmt))
        == page_layout(32, 16, fmt).page_bytes / 16
    )


def test_unequal_protection_is_refused_before_any_work(tokenizer):
    fmt = parse_format("c4r4", **SMALL)
    variants = [Variant(name="a", fmt=fmt), Variant(name="b", fmt=fmt.unprotected())]
    with pytest.raises(UsageError, match="unequal protection"):
        compare(torch.nn.Identity(), tokenizer, variants, TEXT, Settings())
