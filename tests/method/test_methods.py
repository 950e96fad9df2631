"""What every method promises, on a synthetic layer."""

from dataclasses import asdict, dataclass
from types import SimpleNamespace

import pytest
import torch
from synthetic_layer import GEOMETRY, synthetic_layer

from quantmla import method as methods
from quantmla.errors import UsageError
from quantmla.fuse.layer import fuse_layer
from quantmla.method import METHODS, load_method, options_for
from quantmla.method.layer import (
    Fitted,
    content_output_loss,
    held_out_errors,
    off_device,
    on_device,
)
from quantmla.quant.format import parse_format
from quantmla.transform.layer import identity
from quantmla.transform.store import transforms_to_bytes
from quantmla.verify import attention_output, random_case, relative_error

LAYER = synthetic_layer()
FORMATS = {name: parse_format(name, group_size=16) for name in ("c4r4", "c2r4", "c4r16", "c16r4")}
FEW = {"steps": 40}  # of methods that learn
_fits: dict[tuple[str, str], Fitted] = {}


def fit(name: str, fmt: str = "c4r4") -> Fitted:
    if (name, fmt) not in _fits:
        _fits[name, fmt] = fresh(name, fmt)
    return _fits[name, fmt]


def fresh(
    name: str, fmt: str = "c4r4", generator: torch.Generator | None = None, seed: int = 0
) -> Fitted:
    method = load_method(name)
    known = asdict(method.Options())
    options = options_for(name, {k: v for k, v in FEW.items() if k in known})
    generator = torch.Generator().manual_seed(seed) if generator is None else generator
    return method.fit(LAYER, FORMATS[fmt], options, generator)


def plain():
    return identity(LAYER.weights.norm_R, GEOMETRY.qk_rope_head_dim // 2)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", METHODS)
def test_a_transform_is_orthogonal_positive_and_float64(name: str, fmt: str):
    content, rope, online = fit(name, fmt).transform
    eye = torch.eye(GEOMETRY.kv_lora_rank, dtype=torch.float64)
    assert (content.rotation_RR.T @ content.rotation_RR - eye).abs().max() < 1e-12
    assert (content.scale_R > 0).all()
    assert (rope.gain_F > 0).all()
    for x in (content.rotation_RR, content.scale_R, rope.angle_F, rope.gain_F):
        assert x.dtype == torch.float64
        assert not x.requires_grad
    assert rope.angle_F.shape == rope.gain_F.shape == (GEOMETRY.qk_rope_head_dim // 2,)
    assert (online is None) == (load_method(name).why_not_fused(FORMATS[fmt]) is None)


@pytest.mark.parametrize("name", METHODS)
def test_the_seed_alone_decides(name: str):
    generator = torch.Generator().manual_seed(5)
    begun = generator.get_state()
    one = {"a": fresh(name, "c4r4", generator).transform}
    two, other = ({"a": fresh(name, seed=seed).transform} for seed in (5, 6))
    assert transforms_to_bytes(one) == transforms_to_bytes(two)
    drew = not torch.equal(generator.get_state(), begun)
    assert (transforms_to_bytes(one) != transforms_to_bytes(other)) == drew


@pytest.mark.parametrize("name", METHODS)
def test_the_fold_is_exact(name: str):
    folds = load_method(name).why_not_fused
    fmt = next(fmt for fmt in ("c4r4", "c4r16", "c16r4") if folds(FORMATS[fmt]) is None)
    weights = LAYER.weights.to(dtype=torch.float64)
    case = random_case(GEOMETRY, 32, 0)
    fused = fuse_layer(weights, fit(name, fmt).transform)
    before = attention_output(weights, GEOMETRY, case)
    assert relative_error(attention_output(fused, GEOMETRY, case), before) < 1e-12


@pytest.mark.parametrize("fmt", ["c4r4", "c2r4"])
@pytest.mark.parametrize("name", ["smoothquant", "paper", "quantmla"])
def test_no_method_that_chooses_is_worse_than_the_checkpoint_as_it_is(name: str, fmt: str):
    """Held out, each path alone. Outlier channels make a plain low-bit latent poor."""
    before = held_out_errors(LAYER, plain(), FORMATS[fmt])
    after = held_out_errors(LAYER, fit(name, fmt).transform, FORMATS[fmt])
    assert after.content_output < 0.9 * before.content_output
    if name != "smoothquant":  # which does not look at positional scores
        assert after.rope_scores <= 1.01 * before.rope_scores


@pytest.mark.parametrize("name", ["paper", "quantmla"])
def test_the_learned_transform_is_the_best_validated_one(name: str):
    fitted = fit(name)
    curve = [v.held_out for v in fitted.history if v.path == "content"]
    assert min(curve) < curve[0]
    size = load_method(name).Options().batch_size
    moved = on_device(fitted.transform, LAYER.device).content
    found = content_output_loss(LAYER, moved, FORMATS["c4r4"], size)
    # the rotation is made anew in float64, which moves single codes by one step
    assert found == pytest.approx(min(curve), rel=0.02)


@pytest.mark.parametrize("name", METHODS)
def test_paths_of_16_bits_cost_nothing(name: str):
    """What a transform and its inverse leave is float32 rounding, squared."""
    for fmt, error in (("c16r4", "content_output"), ("c4r16", "rope_output")):
        found = held_out_errors(LAYER, fit(name, fmt).transform, FORMATS[fmt])
        assert getattr(found, error) < 1e-10


@pytest.mark.parametrize("name", ["paper", "quantmla"])
def test_a_path_of_16_bits_is_not_learned(name: str):
    content = fit(name, "c16r4")
    assert {v.path for v in content.history} == {"rope"}
    assert torch.equal(content.transform.content.rotation_RR, plain().content.rotation_RR)
    assert torch.equal(content.transform.content.scale_R, plain().content.scale_R)
    rope = fit(name, "c4r16")
    assert {v.path for v in rope.history} == {"content"}
    assert torch.equal(rope.transform.rope.gain_F, plain().rope.gain_F)
    assert torch.equal(rope.transform.rope.angle_F, plain().rope.angle_F)


@pytest.mark.parametrize("name", METHODS)
def test_calibration_amounts_and_comparison_format_are_stated(name: str):
    method = load_method(name)
    assert set(method.CALIBRATION) == {"num_sequences", "held_out_sequences", "sequence_length"}
    assert all(amount >= 1 for amount in method.CALIBRATION.values())
    assert isinstance(method.PUBLISHED_FORMAT, bool)


def test_what_ours_learns_and_the_paper_s_can_be_fused():
    for name in ("rtn", "smoothquant", "paper", "identity", "quantmla"):
        assert load_method(name).why_not_fused(FORMATS["c4r4"]) is None
    for name in METHODS:
        assert load_method(name).why_not_fused(FORMATS["c4r16"]) is None


def test_off_device_gives_what_fusing_takes():
    single = off_device(fit("quarot").transform)
    assert single.online_rope_EE is not None
    assert single.online_rope_EE.dtype == torch.float64


def test_options_may_be_texts_and_switches(monkeypatch: pytest.MonkeyPatch):
    @dataclass(frozen=True)
    class Options:
        norm: str = "max"
        centred: bool = False

    monkeypatch.setattr(methods, "load_method", lambda name: SimpleNamespace(Options=Options))
    assert options_for("new", {"norm": "mean", "centred": True}) == Options("mean", True)
    with pytest.raises(UsageError, match="option norm of method new is 5; it must be a str"):
        options_for("new", {"norm": 5})


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("quantmIa", {}, "unknown method 'quantmIa'; known: rtn, smoothquant, quarot, paper"),
        ("rtn", {"steps": 1}, "method rtn has no option 'steps'; known: none"),
        ("paper", {"step": 1}, "method paper has no option 'step'; known: steps, batch_size"),
        ("paper", {"steps": 1.5}, "option steps of method paper is 1.5; it must be a int"),
        ("paper", {"steps": True}, "option steps of method paper is True; it must be a int"),
        ("paper", {"anchor": "x"}, "option anchor of method paper is 'x'; it must be a float"),
    ],
)
def test_options_that_cannot_be_meant(name: str, values: dict, words: str):
    with pytest.raises(UsageError) as error:
        options_for(name, values)
    assert words in str(error.value)


def test_options_are_set():
    assert options_for("paper", {"steps": 7, "anchor": 0}).steps == 7
    assert options_for("rtn", {}) == load_method("rtn").Options()


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("quantmla", {"steps": -1}),
        ("quantmla", {"batch_size": 0}),
        ("quantmla", {"scale_rate": float("nan")}),
        ("paper", {"gain_rate": float("inf")}),
        ("paper", {"anchor": -0.1}),
        ("paper", {"scale_rate": 1e23}),
        ("quantmla", {"steps": 10**23}),
        ("quantmla", {"gram_sequences": 2**31}),
    ],
)
def test_options_outside_their_range_are_refused(method, options):
    with pytest.raises(UsageError, match=r"must be at least \d and at most 2147483647"):
        options_for(method, options)
    assert options_for("quantmla", {"polish_steps": 0, "rope_steps": 0}).polish_steps == 0
