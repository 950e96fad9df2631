"""One plan for several layers, and what a run refuses; on the reference."""

from dataclasses import replace

import pytest
import torch
from cases import Case, all_tokens, build, empty_cache, keep_all_rows, random_rows

from quantmla.cache.view import CacheView
from quantmla.errors import UsageError
from quantmla.kernels import api, reference
from quantmla.kernels.problem import DecodeQuery, Rows

CASE = Case(name="plan", rank=128, rope=32, heads=3, lengths=(200, 7), window_page=16)


def layers(count: int = 3) -> list[tuple[DecodeQuery, CacheView]]:
    """With the tables of the first, and queries and pools of their own."""
    empty, tokens = empty_cache(CASE, torch.Generator().manual_seed(0)), all_tokens(CASE.lengths)
    found = []
    for seed in range(count):
        view = empty.with_pools(*(x.clone() for x in pools(empty)))
        rows = random_rows(207, CASE, torch.Generator().manual_seed(seed))
        reference.append(rows, tokens, view)
        found.append((build(CASE, seed=seed)[0], view))
    return found


def pools(view: CacheView) -> tuple[torch.Tensor, torch.Tensor]:
    return view.pages_JY, view.window_pages_JMC


def test_a_decode_plan_serves_all_layers() -> None:
    model = layers()
    plan = api.plan_decode(*model[0])
    parts = [plan.run(query, *pools(view)) for query, view in model]
    for (query, view), part in zip(model, parts, strict=True):
        for mine, wanted in zip(part, api.decode(query, view), strict=True):
            assert torch.equal(mine, wanted)
    assert not torch.equal(parts[1].out_BSNR, parts[2].out_BSNR)


def test_a_plan_reads_lengths_as_they_are() -> None:
    (query, view), *_ = layers(1)
    plan = api.plan_decode(query, view)
    before = plan.run(query, *pools(view))
    view.lengths_B.sub_(3)
    after = plan.run(query, *pools(view))
    assert not torch.equal(before.out_BSNR, after.out_BSNR)
    assert torch.equal(after.out_BSNR, reference.decode(query, view).out_BSNR)


def test_a_decode_writes_to_what_it_is_given() -> None:
    (query, view), *_ = layers(1)
    wanted = api.decode(query, view)
    plan = api.plan_decode(query, view)
    room = torch.full((4, *query.latent_BSNR.shape[1:]), torch.nan, dtype=torch.bfloat16)
    part = plan.run(query, *pools(view), room[1:3])
    assert part.out_BSNR.data_ptr() == room[1:3].data_ptr()
    assert torch.equal(room[1:3], wanted.out_BSNR)
    assert torch.equal(part.lse_BSN, wanted.lse_BSN)
    assert room[::3].isnan().all()


def test_a_decode_of_no_sequences_gives_back_what_it_is_given() -> None:
    (query, view), *_ = layers(1)
    tables = ("block_table_BJ", "lengths_B", "window_table_BW", "sink_pages_B")
    view = replace(view, **{table: getattr(view, table)[:0] for table in tables})
    query = query._replace(latent_BSNR=query.latent_BSNR[:0], rope_BSNE=query.rope_BSNE[:0])
    out = torch.empty_like(query.latent_BSNR)
    plan = api.plan_decode(query, view)
    assert plan.run(query, *pools(view), out).out_BSNR is out


BAD_OUT = [
    (lambda x: x[:1], r"out_BSNR has shape \[1, 1, 3, 128\], not \[2, 1, 3, 128\]"),
    (lambda x: x.float(), "out_BSNR is torch.float32, not torch.bfloat16"),
    (lambda x: x.to("meta"), "out_BSNR is on meta"),
    (lambda x: x.repeat(1, 1, 1, 2)[..., ::2], "out_BSNR has stride 2 in its last dimension"),
    (lambda x: x.repeat(1, 1, 2, 1)[:, :, :3], r"out_BSNR has strides .*: it must be contiguous"),
]


@pytest.mark.parametrize(("change", "message"), BAD_OUT)
def test_an_output_that_cannot_be_written_is_refused(change, message, monkeypatch) -> None:
    (query, view), *_ = layers(1)
    plan = api.plan_decode(query, view)
    monkeypatch.setattr(reference, "attend", lambda *_: pytest.fail("it was launched"))
    with pytest.raises(UsageError, match=message):
        plan.run(query, *pools(view), change(torch.empty_like(query.latent_BSNR)))


def test_append_and_gather_plans_serve_all_layers() -> None:
    generator = torch.Generator().manual_seed(1)
    view = keep_all_rows(empty_cache(CASE, generator))
    tokens = all_tokens(CASE.lengths)
    model = [random_rows(207, CASE, generator) for _ in range(3)]
    mine, wanted = ([[x.clone() for x in pools(view)] for _ in model] for _ in range(2))
    out = torch.zeros(207, 160, dtype=torch.bfloat16)
    append = api.plan_append(model[0], tokens, view)
    gather = api.plan_gather(tokens, view, out)
    for rows, ours, theirs in zip(model, mine, wanted, strict=True):
        append.run(rows, *ours)
        gather.run(out, *ours)
        reference.append(rows, tokens, view.with_pools(*theirs))
        read = torch.zeros_like(out)
        reference.gather(tokens, view.with_pools(*theirs), read)
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(out, read)
    assert not torch.equal(mine[0][0], mine[1][0])


BAD = [
    (0, lambda x: x[:, :, :2], r"latent_BSNR has shape \[2, 1, 2, 128\], the plan is for \[2, 1,"),
    (0, lambda x: x.float(), "latent_BSNR is torch.float32, the plan is for torch.bfloat16"),
    (1, lambda x: x.repeat(1, 1, 1, 2)[..., :32], r"rope_BSNE has strides \[192, 192, 64, 1\]"),
    (2, lambda x: x[:1], "pages_JY has shape"),
    (2, lambda x: x.view(torch.int8), "pages_JY is torch.int8, the plan is for torch.uint8"),
    (2, lambda x: x.to("meta"), "pages_JY is on meta, the plan is for cpu"),
    (3, lambda x: x[:, :, :100], "window_pages_JMC has shape"),
    (3, lambda x: x.repeat(1, 2, 1)[:, :16], "window_pages_JMC has strides"),
]


@pytest.mark.parametrize(("which", "change", "message"), BAD)
def test_a_run_with_something_else_is_refused(which, change, message, monkeypatch) -> None:
    (query, view), *_ = layers(1)
    plan = api.plan_decode(query, view)
    tensors = [query.latent_BSNR, query.rope_BSNE, *pools(view)]
    tensors[which] = change(tensors[which])
    inputs = DecodeQuery(*tensors[:2], query.softmax_scale), *tensors[2:]
    monkeypatch.setattr(reference, "decode", lambda *_: pytest.fail("it was launched"))
    assert not plan.takes(*inputs)
    with pytest.raises(UsageError, match=message):
        plan.run(*inputs)


def test_another_scale_is_refused() -> None:
    (query, view), *_ = layers(1)
    plan = api.plan_decode(query, view)
    other = query._replace(softmax_scale=3.0)
    assert not plan.takes(other, *pools(view))
    with pytest.raises(UsageError, match=r"softmax_scale is 3.0, the plan is for"):
        plan.run(other, *pools(view))


def at_address(x: torch.Tensor, offset: int) -> torch.Tensor:
    """The same values `offset` elements after a multiple of 64 bytes."""
    room = torch.zeros(x.numel() + 64, dtype=x.dtype)
    start = -room.data_ptr() % 64 // x.element_size() + offset
    return room[start : start + x.numel()].view(x.shape).copy_(x)


def test_rows_that_lie_less_evenly_are_refused() -> None:
    """Kernels that load 16 bytes at a time were chosen for rows that allow it."""
    generator = torch.Generator().manual_seed(1)
    view = keep_all_rows(empty_cache(CASE, generator))
    latent, k_rope = random_rows(207, CASE, generator)
    even, odd = (Rows(at_address(latent, offset), k_rope) for offset in (0, 1))
    tokens = all_tokens(CASE.lengths)
    plan = api.plan_append(even, tokens, view)
    assert plan.takes(even, *pools(view))
    assert not plan.takes(odd, *pools(view))
    with pytest.raises(UsageError, match=r"latent_TR starts at address .* for multiples of 16"):
        plan.run(odd, *pools(view))
    assert api.plan_append(odd, tokens, view).takes(even, *pools(view))


def test_a_gather_into_other_rows_is_refused() -> None:
    _, view = layers(1)[0]
    out = torch.zeros(207, 160, dtype=torch.bfloat16)
    plan = api.plan_gather(all_tokens(CASE.lengths), view, out)
    assert not plan.takes(out[:5], *pools(view))
    with pytest.raises(UsageError, match=r"out_TC has shape \[5, 160\]"):
        plan.run(out[:5], *pools(view))


def test_what_a_call_refuses_a_plan_refuses_before_it_is_made() -> None:
    (query, view), *_ = layers(1)
    with pytest.raises(UsageError, match="num_splits 0 must be at least 1"):
        api.plan_decode(query, view, num_splits=0)
    with pytest.raises(UsageError, match=r"lengths_B is torch.int64, not torch.int32"):
        api.plan_decode(query, replace(view, lengths_B=view.lengths_B.long()))
    with pytest.raises(UsageError, match="'triton' cannot decode"):
        api.plan_decode(query, view, backend="triton")
