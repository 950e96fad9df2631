"""Choosing a backend, and refusing what cannot be meant in one sentence."""

from dataclasses import replace

import pytest
import torch
from cases import Case, all_tokens, build, random_rows

from quantmla.cache.view import CacheView
from quantmla.errors import UsageError
from quantmla.kernels import BACKENDS, reference
from quantmla.kernels.api import append, choose, decode, gather
from quantmla.kernels.problem import (
    DecodeQuery,
    Problem,
    Rows,
    append_problem,
    decode_problem,
    gather_problem,
)
from quantmla.kernels.triton import backend as triton_backend
from quantmla.quant.format import parse_format


@pytest.fixture(scope="module")
def call() -> tuple[DecodeQuery, CacheView]:
    return build(Case(name="api", rank=128, rope=32, heads=3, lengths=(200, 7), window_page=16))


def problem(**changes: object) -> Problem:
    facts: dict = {
        "operation": "decode",
        "platform": "cuda",
        "capability": (9, 0),
        "dtype": torch.bfloat16,
        "fmt": parse_format("c4r4"),
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "window_page_size": 64,
        "num_heads": 16,
        "query_len": 1,
    }
    return Problem(**(facts | changes))


def test_auto_on_the_cpu_is_the_reference(call: tuple[DecodeQuery, CacheView]) -> None:
    query, view = call
    assert choose(decode_problem(query, view), "auto") is reference
    assert torch.equal(decode(query, view).out_BSNR, reference.decode(query, view).out_BSNR)


def test_a_named_backend_that_cannot_says_why(call: tuple[DecodeQuery, CacheView]) -> None:
    with pytest.raises(UsageError, match="'triton' cannot decode: Triton kernels need a GPU"):
        decode(*call, backend="triton")


def test_an_unknown_backend_names_the_known_ones(call: tuple[DecodeQuery, CacheView]) -> None:
    with pytest.raises(UsageError, match=r"'gluon' is not one of.*auto.*cuda.*triton.*reference"):
        decode(*call, backend="gluon")


def test_auto_on_a_gpu_gives_every_reason_instead_of_the_slow_reference() -> None:
    with pytest.raises(
        UsageError, match=r"triton: content_bits 8 is not one of.*reference: only when named"
    ):
        choose(problem(fmt=parse_format("c8r8")), "auto")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"capability": (7, 5)}, "below"),
        ({"dtype": torch.float16}, "query dtype torch.float16"),
        ({"kv_lora_rank": 448}, "kv_lora_rank 448"),
        ({"qk_rope_head_dim": 0}, "qk_rope_head_dim 0"),
        ({"fmt": parse_format("c4r4", page_size=128)}, "page_size 128"),
        ({"fmt": parse_format("c4r4", rope_centring="none")}, "rope_centring none"),
        ({"fmt": parse_format("c4r4", num_sink_tokens=64)}, "64 sink tokens"),
    ],
)
def test_triton_names_what_is_in_the_way(changes: dict, reason: str) -> None:
    assert reason in (triton_backend.why_not(problem(**changes)) or "")


def test_auto_takes_the_hopper_kernels_but_for_what_they_leave_to_triton() -> None:
    pytest.importorskip("cuda.bindings")
    from quantmla.kernels.cuda import backend as hopper_backend

    for operation in ("decode", "append", "gather"):
        usual = problem(operation=operation)
        assert choose(usual, "auto") is hopper_backend
    others = (
        {"capability": (8, 0)},
        {"kv_lora_rank": 256},
        {"operation": "append", "aligned": False},
        {"fmt": parse_format("c4r4", group_size=32)},
    )
    for changes in others:
        assert hopper_backend.why_not(problem(**changes)) is not None, changes
        assert choose(problem(**changes), "auto") is triton_backend, changes


def test_rows_that_start_anywhere_are_known_as_such(
    call: tuple[DecodeQuery, CacheView],
) -> None:
    _, view = call
    rows = random_rows(7, Case(name="rows", rank=128, rope=32, lengths=(7,)), torch.Generator())
    assert append_problem(rows, all_tokens((7,)), view).aligned
    wide = torch.zeros(7, 129, dtype=torch.bfloat16)
    for latent in (wide[:, 1:], wide[:, :128]):
        assert not append_problem(Rows(latent, rows.k_rope_TE), all_tokens((7,)), view).aligned
    out = torch.zeros(7, 161, dtype=torch.bfloat16)
    assert not gather_problem(all_tokens((7,)), view, out[:, 1:]).aligned


def test_triton_takes_what_it_is_for() -> None:
    for fmt in ("c4r4", "c2r4"):
        for rank in (128, 256, 512):
            assert triton_backend.why_not(problem(fmt=parse_format(fmt), kv_lora_rank=rank)) is None


def test_backends_have_the_four_functions() -> None:
    from importlib import import_module

    for path in BACKENDS.values():
        assert all(
            hasattr(import_module(path), name)
            for name in ("why_not", "plan_decode", "plan_append", "plan_gather")
        )


BAD_VIEWS = [
    ({"pages_JY": torch.zeros(4, 100, dtype=torch.uint8)}, r"pages_JY has shape \[4, 100\]"),
    ({"lengths_B": torch.zeros(3, dtype=torch.int32)}, "block_table_BJ has shape"),
    ({"lengths_B": torch.zeros(2, dtype=torch.int64)}, "lengths_B is torch.int64, not torch.int32"),
    ({"lengths_B": torch.zeros(4, dtype=torch.int32)[::2]}, "lengths_B has stride 2"),
    ({"sink_pages_B": torch.zeros(2)}, "sink_pages_B is torch.float32"),
    ({"window_pages_JMC": torch.zeros(4, 16, 160)}, "window_pages_JMC is torch.float32"),
    (
        {"window_pages_JMC": torch.zeros(4, 2, 160, dtype=torch.bfloat16)},
        "4 sink tokens do not fit",
    ),
    ({"fmt": parse_format("c4r4").unprotected()}, "evaluation only"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_VIEWS)
def test_bad_views_are_named(
    call: tuple[DecodeQuery, CacheView], changes: dict, message: str
) -> None:
    query, view = call
    with pytest.raises(UsageError, match=message):
        decode(query, replace(view, **changes))


def test_bad_queries_are_named(call: tuple[DecodeQuery, CacheView]) -> None:
    query, view = call
    with pytest.raises(UsageError, match=r"rope_BSNE is torch.float32, not torch.bfloat16"):
        decode(query._replace(rope_BSNE=query.rope_BSNE.float()), view)
    with pytest.raises(UsageError, match=r"latent_BSNR has shape \[1, 1, 3, 128\]"):
        decode(query._replace(latent_BSNR=query.latent_BSNR[:1]), view)
    with pytest.raises(UsageError, match="query length 200 is more than"):
        decode(DecodeQuery(*(x.expand(2, 200, -1, -1) for x in query[:2]), 1.0), view)
    with pytest.raises(UsageError, match="num_splits 0"):
        decode(query, view, num_splits=0)


def test_float16_rows_are_refused(call: tuple[DecodeQuery, CacheView]) -> None:
    """Bits are never reinterpreted."""
    _, view = call
    case = Case(name="half", rank=128, rope=32, lengths=(7,))
    rows = random_rows(7, case, torch.Generator())
    with pytest.raises(UsageError, match=r"latent_TR is torch.float16, not torch.bfloat16"):
        append(Rows(rows.latent_TR.half(), rows.k_rope_TE), all_tokens((7,)), view)
    with pytest.raises(UsageError, match=r"out_TC is torch.float32"):
        gather(all_tokens((7,)), view, torch.empty(7, 160))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("lengths_B", ()),
        ("sink_pages_B", ()),
        ("window_pages_JMC", ()),
        ("window_table_BW", (2, 0)),
    ],
)
def test_tensors_without_their_dimensions_are_refused(
    name: str, shape: tuple, call: tuple[DecodeQuery, CacheView]
) -> None:
    query, view = call
    wrong = torch.zeros(shape, dtype=getattr(view, name).dtype)
    with pytest.raises(UsageError, match=f"{name} has shape"):
        decode(query, replace(view, **{name: wrong}))


def test_a_query_in_fp8_is_refused(call: tuple[DecodeQuery, CacheView]) -> None:
    query, view = call
    narrow = (x.to(torch.float8_e4m3fn) for x in query[:2])
    with pytest.raises(UsageError, match="not a floating-point type of 2 bytes or more"):
        decode(DecodeQuery(*narrow, query.softmax_scale), view)
