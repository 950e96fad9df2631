"""What lm-eval is told: that every position and every new token saw the packed cache."""

from types import SimpleNamespace

import pytest
import torch
from lm_eval.models.huggingface import HFLM

from quantmla.evaluate.teacher_forced import latent_attentions, norm_weight
from quantmla.evaluate.variant import Variant
from quantmla.quant.format import paper_format, parse_format
from quantmla.serve.transformers import QuantMLACache, QuantMLALayer
from quantmla.tasks.model import BF16, PackedCacheLM, variant_cache
from quantmla.transform.layer import identity

C2R2 = parse_format("c2r2", recent_window=0, num_sink_tokens=1)  # packed as soon as pages are full
TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune "
CONTEXT, CONTINUATION = TEXT * 6, " must be in want of a wife."
BASE = Variant(name="bf16")


@pytest.fixture
def answer(nano, tokenizer):
    def scores(variant, *pairs):
        lm = PackedCacheLM(nano, tokenizer, variant, lambda count: None)
        return lm.loglikelihood([SimpleNamespace(args=pair) for pair in pairs])

    return scores


@pytest.fixture
def write(nano, tokenizer):
    def written(variant, *prompts, new=6):
        lm = PackedCacheLM(nano, tokenizer, variant, lambda count: None)
        options = {"until": [], "max_gen_toks": new, "do_sample": False}
        return lm.generate_until([SimpleNamespace(args=(p, options)) for p in prompts]), lm

    return written


def decoded(nano, tokenizer, fmt) -> float:
    """Log-probability of the continuation when everything is decoded token by token."""
    ids = tokenizer.encode(CONTEXT + CONTINUATION)
    first = len(tokenizer.encode(CONTEXT.rstrip()))
    cache, total = QuantMLACache(nano.config, fmt), 0.0
    with torch.inference_mode():
        for t in range(len(ids) - 1):
            out = nano(input_ids=torch.tensor([[ids[t]]]), past_key_values=cache, use_cache=True)
            if t + 1 >= first:
                total += float(out.logits[0, -1].log_softmax(-1)[ids[t + 1]])
    return total


def test_likelihoods_are_those_of_decoding_through_the_packed_cache(nano, tokenizer, answer):
    ((found, _),) = answer(Variant(name="x", fmt=C2R2), (CONTEXT, CONTINUATION))
    expected = decoded(nano, tokenizer, C2R2)
    # float32 sums in another order tip a few rows to the next bf16 value
    assert found == pytest.approx(expected, abs=0.02)
    ((base, _),) = answer(BASE, (CONTEXT, CONTINUATION))
    assert abs(base - expected) > 0.2  # what an unquantised forward pass would say


def test_the_baseline_is_the_stock_model_up_to_bf16_rows(nano, tokenizer, answer):
    stock = HFLM(pretrained=nano, tokenizer=tokenizer, batch_size=1)
    pairs = [(CONTEXT, CONTINUATION), ("A cat", " sat on the mat."), ("", "Once upon a time")]
    expected = stock.loglikelihood([SimpleNamespace(args=p) for p in pairs], disable_tqdm=True)
    for (found, greedy), (score, stock_greedy) in zip(answer(BASE, *pairs), expected, strict=True):
        assert found == pytest.approx(score, abs=0.1)
        assert greedy == stock_greedy


@pytest.mark.parametrize("protection", ["protected", "unprotected"])
def test_a_16_bit_cache_agrees_exactly(answer, write, protection):
    fmt = parse_format("c16r16")
    fmt = fmt if protection == "protected" else fmt.unprotected()
    sixteen, pairs = Variant(name="x", fmt=fmt), [(CONTEXT, CONTINUATION), ("A", " b")]
    assert answer(sixteen, *pairs) == answer(BASE, *pairs)
    assert write(sixteen, TEXT, "A")[0] == write(BASE, TEXT, "A")[0]


def test_texts_are_written_through_packed_bytes(nano, tokenizer, write):
    prompt = TEXT * 5
    (found,), lm = write(Variant(name="x", fmt=C2R2), prompt, new=8)
    ids = torch.tensor([tokenizer.encode(prompt)])
    cache, said = QuantMLACache(nano.config, C2R2), []
    with torch.inference_mode():
        step = ids
        for _ in range(8):
            step = nano(input_ids=step, past_key_values=cache, use_cache=True).logits[:, -1:]
            step = step.argmax(-1)
            said.append(int(step))
    assert found == tokenizer.decode(said)
    _, base = write(BASE, prompt, new=8)
    assert 0 < lm.cache_bytes < base.cache_bytes / 3


def test_batches_of_unequal_prompts_are_what_each_is_alone(write):
    variant = Variant(name="x", fmt=C2R2)
    both, _ = write(variant, TEXT * 3, "SQLite is")
    assert both == [write(variant, p)[0][0] for p in (TEXT * 3, "SQLite is")]


def test_what_has_no_bytes_is_simulated(nano):
    layers = latent_attentions(nano)
    same = {i: identity(norm_weight(m), 32) for i, m in layers.items()}
    packed = [BASE, Variant(name="x", fmt=C2R2)]
    simulated = [
        Variant(name="x", fmt=C2R2, transforms=same),
        Variant(name="x", fmt=paper_format("c4r4")),
    ]
    for variant in packed:
        cache = variant_cache(nano, variant, None)
        assert {type(layer) for layer in cache.layers} == {QuantMLALayer}
    for variant in simulated:
        cache = variant_cache(nano, variant, None)
        assert {type(layer).__name__ for layer in cache.layers} == {"SimulatedLayer"}
    assert packed[0].fmt is None
    assert (BF16.content_bits, BF16.rope_bits) == (16, 16)


def test_requests_that_do_not_fit_are_counted(nano, tokenizer):
    lm = PackedCacheLM(nano, tokenizer, BASE, lambda count: None)
    lm._max_length = 32
    lm.loglikelihood([SimpleNamespace(args=(TEXT * 3, " a")), SimpleNamespace(args=("b", " c"))])
    assert lm.truncated == 1
    options = {"until": [], "max_gen_toks": 4, "do_sample": False}
    lm.generate_until([SimpleNamespace(args=(TEXT * 3, options))])
    assert lm.truncated == 2
