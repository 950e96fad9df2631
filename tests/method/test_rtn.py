import torch
from synthetic_layer import synthetic_layer

from quantmla.method import rtn
from quantmla.quant.format import parse_format


def test_the_cache_keeps_the_checkpoints_own_coordinates():
    layer = synthetic_layer()
    fitted = rtn.fit(layer, parse_format("c4r4"), rtn.Options(), torch.Generator())
    content, rope, online = fitted.transform
    assert torch.equal(content.scale_R, layer.weights.norm_R.double())
    assert torch.equal(content.rotation_RR, torch.eye(32, dtype=torch.float64))
    assert not rope.angle_F.any()
    assert (rope.gain_F == 1).all()
    assert online is None
    assert fitted.history == ()
