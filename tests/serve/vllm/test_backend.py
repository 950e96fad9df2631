"""What vLLM asks both backends before it divides the pool into blocks."""

import pytest
import torch

from quantmla.quant.format import parse_format
from quantmla.serve.vllm.pool import pool_layout


@pytest.mark.parametrize("fmt", ["c4r4", "c2r4"])
def test_pages_are_not_divided(cpu_vllm, fmt):
    """A kernel's block that is smaller than a page would divide every table's entries."""
    from vllm.v1.worker.utils import select_common_block_size

    from quantmla.serve.vllm.backend import QuantMLABackend, WindowBackend

    layout = pool_layout(parse_format(fmt), 512, 64)
    assert QuantMLABackend.get_preferred_block_size(16) == 64
    assert select_common_block_size(64, [QuantMLABackend]) == 64
    window = layout.window_page_size
    assert select_common_block_size(window, [WindowBackend]) == window


def refused(head_size=576, dtype="auto", block_size=64, sparse=False):
    from vllm.platforms.interface import DeviceCapability

    from quantmla.serve.vllm.backend import QuantMLABackend

    return QuantMLABackend.validate_configuration(
        head_size=head_size,
        dtype=torch.bfloat16,
        kv_cache_dtype=dtype,
        block_size=block_size,
        use_mla=True,
        has_sink=False,
        use_sparse=sparse,
        use_mm_prefix=False,
        use_per_head_quant_scales=False,
        device_capability=DeviceCapability(9, 0),
        attn_type="decoder",
    )


@pytest.mark.parametrize("head_size", [96 + 64, 512 + 64])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_latents_of_any_width_are_taken(cpu_vllm, head_size, dtype):
    assert refused(head_size, dtype) == []


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"dtype": "fp8"}, "kv_cache_dtype"),
        ({"block_size": 16}, "block_size"),
        ({"sparse": True}, "sparse"),
    ],
)
def test_what_no_kernel_reads_is_refused(cpu_vllm, asked, word):
    (reason,) = refused(**asked)
    assert word in reason.replace(" ", "_")
