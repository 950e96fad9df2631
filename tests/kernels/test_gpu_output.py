"""Decode on a GPU into a tensor that is given to it, by every backend that this GPU can run."""

from dataclasses import replace

import pytest
import torch
from cases import Case, build
from test_gpu import NAMES, same_bits, skip_unless_able

from quantmla.errors import UsageError
from quantmla.kernels.api import plan_decode
from quantmla.kernels.problem import DecodeQuery, decode_problem

pytestmark = pytest.mark.gpu

OUTPUTS = [
    Case(name="borders", lengths=(0, 1, 64, 133, 700), heads=16),
    Case(name="whole", lengths=(0, 900, 300), heads=16, num_splits=1),
    Case(name="parts", lengths=(3000, 0, 700), heads=5, query_len=3, num_splits=3),
    Case(name="wide", lengths=(3000, 129), heads=32),
    Case(name="widest", lengths=(3000, 0, 129), heads=128, query_len=4),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", OUTPUTS, ids=lambda case: case.name)
def test_an_output_that_is_given_is_written(name: str, case: Case) -> None:
    """Between rows of other calls, which keep what they hold; with and without partial results."""
    query, view = build(case, "cuda")
    skip_unless_able(name, decode_problem(query, view))
    plan = plan_decode(query, view, backend=name, num_splits=case.num_splits)
    pools = view.pages_JY, view.window_pages_JMC
    wanted = plan.run(query, *pools)
    batch, *row = wanted.out_BSNR.shape
    room = torch.full((batch + 2, *row), 7.0, dtype=torch.bfloat16, device="cuda")
    given = plan.run(query, *pools, room[1:-1])
    assert given.out_BSNR.data_ptr() == room[1:-1].data_ptr()
    assert same_bits(given, wanted)
    assert torch.equal(room[1:-1], wanted.out_BSNR)
    assert (room[[0, -1]] == 7).all()


@pytest.mark.parametrize("name", NAMES)
def test_an_output_that_is_given_is_no_new_memory(name: str) -> None:
    case = Case(name="large", lengths=(300,) * 8, heads=128, query_len=8)
    query, view = build(case, "cuda")
    skip_unless_able(name, decode_problem(query, view))
    plan = plan_decode(query, view, backend=name)
    pools = view.pages_JY, view.window_pages_JMC
    out = torch.empty_like(query.latent_BSNR, memory_format=torch.contiguous_format)
    size = out.numel() * out.element_size()

    def used(*given: torch.Tensor) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        plan.run(query, *pools, *given)
        return torch.cuda.max_memory_allocated() - before

    used()  # compiles
    assert used() - used(out) == size


@pytest.mark.parametrize("name", NAMES)
def test_calls_that_follow_one_another_write_to_one_tensor(name: str) -> None:
    """As in a mixed step: many calls without a pause, some of whose outputs are copied there."""
    case = Case(name="calls", lengths=(3000, 129, 700, 64, 1500, 0), heads=16, query_len=2)
    query, view = build(case, "cuda")
    skip_unless_able(name, decode_problem(query, view))
    pools = view.pages_JY, view.window_pages_JMC
    calls = []
    for b in range(6):
        one = DecodeQuery(*(x[b : b + 1] for x in query[:2]), query.softmax_scale)
        tables = ("block_table_BJ", "lengths_B", "window_table_BW", "sink_pages_B")
        part = replace(view, **{table: getattr(view, table)[b : b + 1] for table in tables})
        calls.append((one, plan_decode(one, part, backend=name, num_splits=2)))
    places = [torch.tensor([b], device="cuda") for b in range(6)]
    wanted = torch.cat([plan.run(one, *pools).out_BSNR for one, plan in calls])
    for _ in range(20):
        out = torch.full_like(wanted, torch.nan)
        for b, (one, plan) in enumerate(calls):
            if b % 2:
                out.index_copy_(0, places[b], plan.launch(one, *pools).out_BSNR)
            else:
                plan.launch(one, *pools, out[b : b + 1])
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_an_output_that_lies_unevenly_is_refused(name: str) -> None:
    query, view = build(Case(name="uneven", lengths=(100,)), "cuda")
    skip_unless_able(name, decode_problem(query, view))
    plan = plan_decode(query, view, backend=name)
    q = query.latent_BSNR
    uneven = torch.empty(q.numel() + 1, dtype=q.dtype, device="cuda")[1:].view(q.shape)
    with pytest.raises(UsageError, match="out_BSNR starts at address"):
        plan.run(query, view.pages_JY, view.window_pages_JMC, uneven)
