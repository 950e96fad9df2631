"""Hooks leave no trace."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import load, random_tokens

from quantmla.capture.record import SINK, attentions, norm_eps, recording, unit_latent
from quantmla.errors import UnsupportedModel


class Interrupted(Exception):
    pass


def test_everything_is_undone_even_after_an_error(tiny_checkpoint: Callable[[str], Path]) -> None:
    model = load(tiny_checkpoint("longcat_flash"))
    modules = {str(i): m for i, m in enumerate(attentions(model))}
    assert len(modules) == 4
    before = model.config._attn_implementation
    kept = []

    def interrupted() -> None:
        with recording(modules) as taken:
            kept.append(taken)
            model(input_ids=random_tokens(), use_cache=False)
            raise Interrupted

    with pytest.raises(Interrupted):
        interrupted()
    assert all(set(t) == {"unit_latent", "k_rope", "query"} for t in kept[0].values())
    assert model.config._attn_implementation == before
    for module in modules.values():
        assert not hasattr(module, SINK)
        assert "expand_kv" not in vars(module)
        assert not module.kv_a_layernorm._forward_pre_hooks


@torch.no_grad()
def test_recording_changes_nothing(tiny_checkpoint: Callable[[str], Path]) -> None:
    model = load(tiny_checkpoint("deepseek_v3"))
    tokens = random_tokens()
    plain = model(input_ids=tokens, use_cache=False).logits
    with recording({"one": attentions(model)[1]}):
        recorded = model(input_ids=tokens, use_cache=False).logits
    assert torch.equal(plain, recorded)


def test_unit_latent_is_the_norm_without_its_weight() -> None:
    x = torch.randn(2, 3, 8, dtype=torch.bfloat16)
    norm = torch.nn.RMSNorm(8, eps=1e-3)
    expected = norm.double()(x.double())
    assert unit_latent(x, norm_eps(norm)).dtype == torch.float32
    torch.testing.assert_close(unit_latent(x, 1e-3).double(), expected, rtol=1e-6, atol=1e-6)


def test_a_norm_without_epsilon_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="Linear"):
        norm_eps(torch.nn.Linear(2, 2))


def test_other_attention_implementations_are_refused(
    tiny_checkpoint: Callable[[str], Path],
) -> None:
    model = load(tiny_checkpoint("youtu"))
    model.config._attn_implementation = "flex_attention"
    with (
        pytest.raises(UnsupportedModel, match="flex_attention"),
        recording({"one": attentions(model)[0]}),
    ):
        pass
    assert not attentions(model)[0].kv_a_layernorm._forward_pre_hooks
