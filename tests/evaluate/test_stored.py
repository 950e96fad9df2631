import pytest
import torch

from quantmla.errors import UsageError
from quantmla.evaluate.stored import coordinates
from quantmla.mla.rope import half_to_interleaved
from quantmla.transform.layer import ContentTransform, LayerTransform, RopeTransform


def transform(online: bool) -> LayerTransform:
    g = torch.Generator().manual_seed(0)

    def rand(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    return LayerTransform(
        ContentTransform(torch.linalg.qr(rand(16, 16)).Q, rand(16).exp()),
        RopeTransform(rand(4), rand(4).exp()),
        torch.linalg.qr(rand(8, 8)).Q if online else None,
    )


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize("order", ["half", "interleaved"])
def test_stored_rows_are_the_transforms_own_and_come_back(order, online):
    layer, norm = transform(online), torch.rand(16) + 0.5
    latent, k_rope = torch.randn(2, 7, 16), torch.randn(2, 7, 8)
    rows = coordinates(order, layer, norm)
    want = layer.content.apply(latent.double() / norm)
    inner = half_to_interleaved(k_rope) if order == "half" else k_rope
    rope = layer.rope.apply_key(inner.double())
    rope = rope @ layer.online_rope_EE if online else rope
    for stored, exact in ((rows.store_latent(latent), want), (rows.store_rope(k_rope), rope)):
        assert torch.equal(stored, stored.bfloat16().float())
        assert ((stored - exact).abs() <= 2**-8 * exact.abs() + 1e-5).all()
    # what comes back is off by bf16 rounding, stretched by the scales' spread
    spread = (layer.content.scale_R.max() / layer.content.scale_R.min()).item()
    error = (rows.restore_latent(rows.store_latent(latent)) - latent).norm() / latent.norm()
    assert error < 2**-8 * spread
    back = rows.restore_rope(rows.store_rope(k_rope))
    assert (back - k_rope).norm() / k_rope.norm() < 2**-8 * 20


def test_without_a_transform_rows_are_only_rounded():
    rows = coordinates("half", None, torch.ones(16))
    latent = torch.randn(1, 3, 16)
    assert torch.equal(rows.store_latent(latent), latent.bfloat16().float())
    assert torch.equal(rows.restore_latent(latent), latent)


def test_other_dtypes_and_zero_norms_are_refused():
    rows = coordinates("half", None, torch.ones(16))
    with pytest.raises(UsageError, match=r"torch\.float16"):
        rows.store_latent(torch.randn(1, 3, 16).half())
    with pytest.raises(UsageError, match="zeros"):
        coordinates("half", transform(False), torch.tensor([1.0] * 15 + [0.0]))
