"""What the Hopper backend says it cannot do, and why."""

from dataclasses import replace

import pytest
import torch

from quantmla.kernels.cuda.backend import why_not
from quantmla.kernels.problem import Problem
from quantmla.quant.format import parse_format

pytest.importorskip("cuda.bindings")

CAN = Problem(
    operation="decode",
    platform="cuda",
    capability=(9, 0),
    dtype=torch.bfloat16,
    fmt=parse_format("c4r4"),
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    window_page_size=64,
    num_heads=16,
    query_len=1,
)


def test_it_can():
    assert why_not(CAN) is None
    assert why_not(replace(CAN, operation="append")) is None
    assert why_not(replace(CAN, operation="gather")) is None
    assert why_not(replace(CAN, fmt=parse_format("c2r4"), dtype=torch.float16)) is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"operation": "append", "aligned": False}, "multiples of 16 bytes"),
        ({"capability": (8, 0)}, "(8, 0)"),
        ({"capability": None, "platform": "cpu"}, "on the CPU"),
        ({"capability": None, "platform": "rocm"}, "None"),
        ({"fmt": parse_format("c8r8")}, "content_bits 8"),
        ({"fmt": parse_format("c3r4")}, "content_bits 3"),
        ({"fmt": parse_format("c4r4", group_size=32)}, "group_size 32"),
        ({"fmt": parse_format("c4r4", rope_bands=1)}, "rope_bands 1"),
        ({"kv_lora_rank": 256}, "kv_lora_rank 256"),
        ({"dtype": torch.float32}, "torch.float32"),
    ],
)
def test_a_reason_names_what_is_in_the_way(changes, named):
    reason = why_not(replace(CAN, **changes))
    assert reason is not None
    assert named in reason
