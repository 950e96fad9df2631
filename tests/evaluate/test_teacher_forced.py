import pytest
import tiny
import torch

from quantmla.arch import adapter_for
from quantmla.checkpoint.source import open_source
from quantmla.errors import UnsupportedModel, UsageError
from quantmla.evaluate.teacher_forced import latent_attentions, norm_weight, teacher_forced
from quantmla.fuse.checkpoint import fuse_checkpoint
from quantmla.quant.format import paper_format, parse_format
from quantmla.quant.mixed import MixedFormat
from quantmla.serve.transformers import QuantMLACache
from quantmla.transform.layer import ContentTransform, LayerTransform, RopeTransform, identity

SMALL = {"group_size": 16, "page_size": 16}
FORMATS = [
    parse_format("c4r4", **SMALL, recent_window=32),
    parse_format("c2r4", **SMALL, recent_window=16, num_sink_tokens=2),
    parse_format("c8r8", **SMALL, recent_window=0),
    parse_format("c4r4", **SMALL).unprotected(),
    parse_format("c2r4", **SMALL).unprotected(),
    parse_format("c4r8", **SMALL).unprotected(),
    MixedFormat(
        default=parse_format("c4r4", **SMALL, recent_window=16),
        layers={1: parse_format("c2r8", **SMALL, recent_window=16)},
    ),
]


def text(batch: int, length: int) -> torch.Tensor:
    return torch.randint(2, 64, (batch, length), generator=torch.Generator().manual_seed(9))


def plain(model, ids, **kwargs):
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False, **kwargs).logits


def forced(model, fmt, ids, transforms=None, **kwargs):
    with teacher_forced(model, fmt, transforms):
        return plain(model, ids, **kwargs)


@pytest.mark.parametrize(
    "fmt", FORMATS, ids=lambda f: f"{f.name}-{f.num_sink_tokens}-{f.recent_window}"
)
def test_equals_token_by_token_decoding_of_a_left_padded_batch(model, fmt):
    # float64: no row is tipped over to the next bf16 value by another order of sums
    model, length, pad = model.double(), 75, 9
    ids = text(2, length)
    mask = torch.ones_like(ids)
    mask[1, :pad] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, steps = QuantMLACache(model.config, fmt, mask), []
    with torch.inference_mode():
        for t in range(length):
            out = model(
                input_ids=ids[:, t : t + 1],
                attention_mask=mask[:, : t + 1],
                position_ids=positions[:, t : t + 1],
                past_key_values=cache,
                use_cache=True,
            )
            steps.append(out.logits)
    decoded = torch.cat(steps, dim=1)
    for row, start in ((0, 0), (1, pad)):
        alone = ids[row : row + 1, start:]
        want = forced(model, fmt, alone)
        assert (want - plain(model, alone)).abs().max() > 1e-2
        torch.testing.assert_close(decoded[row : row + 1, start:], want, rtol=0, atol=1e-9)


def test_sixteen_bits_give_the_model_with_a_bf16_cache(model):
    ids = text(2, 50)
    # in bf16 the rows are bf16 anyhow: nothing may change but the order of sums
    half = model.to(torch.bfloat16)
    want = plain(half, ids).float()
    for fmt in (parse_format("c16r16", **SMALL), parse_format("c16r16", **SMALL).unprotected()):
        got = forced(half, fmt, ids).float()
        assert (got - want).abs().max() < 2**-6 * want.abs().max()
        assert (got - want).abs().mean() < 2**-9 * want.abs().max()


def test_sixteen_bits_change_a_float32_model_by_bf16_rounding_only(model):
    ids = text(1, 50)
    error = (forced(model, parse_format("c16r16", **SMALL), ids) - plain(model, ids)).abs().max()
    worse = (
        (forced(model, parse_format("c4r4", **SMALL).unprotected(), ids) - plain(model, ids))
        .abs()
        .max()
    )
    assert 0 < error < 0.1 * worse


def test_right_padded_rows_equal_rows_alone(model):
    fmt = FORMATS[3]
    ids = text(2, 60)
    mask = torch.ones_like(ids)
    mask[1, 40:] = 0
    both = forced(model, fmt, ids, attention_mask=mask)
    torch.testing.assert_close(both[:1], forced(model, fmt, ids[:1]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        both[1:, :40], forced(model, fmt, ids[1:, :40]), rtol=1e-4, atol=1e-4
    )


def test_everything_is_exact_while_it_fits_the_window(model):
    ids = text(1, 40)
    wide = forced(model, parse_format("c2r2", **SMALL, recent_window=64), ids)
    assert torch.equal(wide, forced(model, parse_format("c16r16", **SMALL, recent_window=64), ids))


def test_identity_transforms_are_no_transforms(model):
    ids = text(1, 60)
    fmt = parse_format("c4r4", **SMALL).unprotected()
    transforms = {i: identity(norm_weight(m), 8) for i, m in latent_attentions(model).items()}
    effect = (forced(model, fmt, ids) - plain(model, ids)).abs().max()
    # dividing by the norm weight and multiplying again can tip a bf16 rounding over
    error = (forced(model, fmt, ids, transforms) - forced(model, fmt, ids)).abs().max()
    assert error < 0.1 * effect


def random_transform(online: bool) -> LayerTransform:
    g = torch.Generator().manual_seed(4)

    def orthogonal(n):
        return torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64)).Q

    return LayerTransform(
        ContentTransform(orthogonal(32), torch.rand(32, generator=g, dtype=torch.float64) + 0.5),
        RopeTransform(
            torch.randn(8, generator=g, dtype=torch.float64),
            torch.rand(8, generator=g, dtype=torch.float64) + 0.5,
        ),
        orthogonal(16) if online else None,
    )


@pytest.mark.parametrize("online", [False, True])
def test_transforms_cost_nothing_without_quantising(model, online):
    ids = text(1, 60)
    transforms = {0: random_transform(online), 1: random_transform(online)}
    for fmt in (parse_format("c16r16", **SMALL), parse_format("c16r16", **SMALL).unprotected()):
        error = (forced(model, fmt, ids, transforms) - plain(model, ids)).abs().max()
        rtn = (
            (forced(model, parse_format("c4r4", **SMALL).unprotected(), ids) - plain(model, ids))
            .abs()
            .max()
        )
        assert error < 0.1 * rtn


def test_transforms_change_what_quantising_does(model):
    ids = text(1, 60)
    fmt = paper_format("c4r4", **SMALL).unprotected()
    transforms = {0: random_transform(True), 1: random_transform(True)}
    changed = forced(model, fmt, ids, transforms) - forced(model, fmt, ids)
    assert changed.abs().max() > 1e-2


def test_rope_order_matters_for_bands(model):
    ids = text(1, 60)
    fmt = parse_format("c16r2", **SMALL).unprotected()
    family = forced(model, fmt, ids)
    other = "half" if model.config.model_type == "deepseek_v2" else "interleaved"
    with teacher_forced(model, fmt, rope_order=other):
        wrong = plain(model, ids)
    assert (family - wrong).abs().max() > 1e-2


def test_the_model_is_as_before_afterwards(model):
    ids = text(1, 20)
    before, implementation = plain(model, ids), model.config._attn_implementation
    with pytest.raises(RuntimeError), teacher_forced(model, FORMATS[0]):
        raise RuntimeError
    assert model.config._attn_implementation == implementation
    assert torch.equal(plain(model, ids), before)


def test_what_cannot_be_meant_is_refused(model):
    ids = text(1, 20)
    fmt = FORMATS[0]
    with (
        pytest.raises(UsageError, match=r"layers \[7\]"),
        teacher_forced(model, fmt, {7: random_transform(False)}),
    ):
        pass
    with teacher_forced(model, fmt):
        with (
            pytest.raises(UsageError, match="already under evaluation"),
            teacher_forced(model, fmt),
        ):
            pass
        with pytest.raises(UsageError, match="reads no cache"):
            model(input_ids=ids, past_key_values=QuantMLACache(model.config, fmt))
        with pytest.raises(UsageError, match="right-padded"):
            model(input_ids=ids, attention_mask=torch.tensor([[0] * 5 + [1] * 15]), use_cache=False)
    with pytest.raises(UsageError, match="float16"), teacher_forced(model.half(), fmt):
        plain(model, ids)
    with (
        pytest.raises(UnsupportedModel, match="no latent attention"),
        teacher_forced(torch.nn.Linear(2, 2), fmt),
    ):
        pass


def test_norm_weights_of_zero_are_refused(model):
    with torch.no_grad():
        model.model.layers[0].self_attn.kv_a_layernorm.weight[3] = 0
    with (
        pytest.raises(UsageError, match="zeros"),
        teacher_forced(model, FORMATS[0], {0: random_transform(False)}),
    ):
        pass


@pytest.mark.parametrize("case", tiny.CASES)
def test_a_method_simulated_on_its_base_is_its_fused_checkpoint(case, tiny_checkpoint, tmp_path):
    source = open_source(tiny_checkpoint(case))
    adapter = adapter_for(source.config)
    sizes = adapter.geometry(source.config)
    by_site = {
        site: tiny.random_transform(sizes.kv_lora_rank, sizes.qk_rope_head_dim // 2, 7 + i)
        for i, site in enumerate(adapter.sites(source.config, source.names))
    }
    fuse_checkpoint(
        source,
        adapter,
        {site.prefix: transform for site, transform in by_site.items()},
        tmp_path / "fused",
        quantmla_config={"version": 1},
        extra_files={},
    )
    base, fused = tiny.load(tiny_checkpoint(case)), tiny.load(tmp_path / "fused")
    ids = tiny.random_tokens(length=40)[:1]
    fmt = parse_format("c4r4", group_size=16, page_size=8).unprotected()
    transforms = {site.cache_index: transform for site, transform in by_site.items()}
    simulated, real = forced(base, fmt, ids, transforms), forced(fused, fmt, ids)
    # float32 weights folded and not folded tip some bf16 roundings and codes over
    effect = (real - plain(base, ids)).norm()
    assert (simulated - real).norm() < 0.25 * effect
    assert (forced(base, fmt, ids) - real).norm() > 0.5 * effect


def test_a_layer_of_its_own_format_is_read_in_it_and_no_other(model):
    """One narrow layer costs less than two, and as much as a model in which it alone is cached."""
    exact, narrow = (parse_format(n, **SMALL).unprotected() for n in ("c16r16", "c2r2"))
    ids = text(1, 60)
    want = plain(model, ids)
    errors = [
        (forced(model, fmt, ids) - want).square().mean()
        for fmt in (MixedFormat(default=exact, layers={0: narrow}), narrow, exact)
    ]
    assert errors[1] > errors[0] > 100 * errors[2]
    with pytest.raises(UsageError, match=r"\[5\]"):
        forced(model, MixedFormat(default=exact, layers={5: narrow}), ids)
