"""Where baselines are found, and that torch's own is attention."""

import pytest
import torch

from quantmla.bench.able import able
from quantmla.bench.baselines import TORCH, Bf16Cache, find_libraries, load, torch_products
from quantmla.errors import UsageError
from quantmla.kernels.problem import DecodeQuery, Problem
from quantmla.quant.format import parse_format


def test_libraries_are_found_anywhere_below_a_folder(tmp_path):
    (tmp_path / "vllm" / "inner").mkdir(parents=True)
    flash = tmp_path / "vllm" / "_flashmla_C.abi3.so"
    fa3 = tmp_path / "vllm" / "inner" / "_vllm_fa3_C.cpython-312.so"
    for path in (flash, fa3, tmp_path / "vllm" / "_flashmla_extension_C.abi3.so"):
        path.write_bytes(b"")
    assert find_libraries(tmp_path) == [flash, fa3]
    with pytest.raises(UsageError, match="_flashmla_C"):
        find_libraries(tmp_path / "vllm" / "inner" / "nothing")
    with pytest.raises(UsageError, match="does not fit this torch"):
        load([flash])
    with pytest.raises(UsageError, match="no shared object at"):
        load([tmp_path / "none.so"])


def test_without_libraries_the_baseline_is_named_for_torch():
    assert load([]) == [TORCH] == ["torch_products"]


def test_torch_products_are_causal_attention(monkeypatch):
    arange = torch.arange
    monkeypatch.setattr(torch, "arange", lambda *a, device=None, **k: arange(*a, **k))
    g = torch.Generator().manual_seed(0)
    pages = torch.randn(4, 64, 576, generator=g)
    lengths = torch.tensor([100, 128], dtype=torch.int32)
    cache = Bf16Cache(pages_JLC=pages, block_table_BJ=arange(4).view(2, 2), lengths_B=lengths)
    q = torch.randn(2, 3, 5, 576, generator=g)
    got = torch_products(DecodeQuery(q[..., :512], q[..., 512:], 0.05), cache)()
    for b, s, n in ((0, 0, 0), (0, 2, 4), (1, 1, 2)):
        rows = pages.double().view(2, 128, 576)[b, : int(lengths[b]) - 2 + s]
        p = torch.softmax(0.05 * rows @ q[b, s, n].double(), 0)
        assert torch.allclose(got[b, s, n].double(), p @ rows[:, :512], atol=1e-5)


def test_backends_that_cannot_are_left_out_unless_they_are_named():
    problem = Problem(
        operation="decode",
        platform="cuda",
        capability=(8, 0),
        dtype=torch.bfloat16,
        fmt=parse_format("c4r4"),
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        window_page_size=64,
        num_heads=16,
        query_len=1,
    )
    assert able(problem, None) == ["triton"]
    assert able(problem, ["reference"]) == ["reference"]
    with pytest.raises(UsageError, match=r"'cuda' cannot decode: .*\(8, 0\)"):
        able(problem, ["cuda", "triton"])
