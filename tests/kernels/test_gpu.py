"""Every backend that this GPU can run, against the reference, over the whole list of cases."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from cases import (
    CASES,
    LONG,
    Case,
    all_tokens,
    build,
    empty_cache,
    format_of,
    keep_all_rows,
    random_rows,
    to_device,
)
from compare import check

from quantmla.cache.view import CacheView
from quantmla.errors import UsageError
from quantmla.kernels import BACKENDS, reference
from quantmla.kernels.api import append, choose, decode, gather
from quantmla.kernels.problem import DecodeQuery, Rows, Tokens, append_problem, decode_problem
from quantmla.mla.partial import Partial
from quantmla.quant.layout import page_layout

pytestmark = pytest.mark.gpu

NAMES = [name for name in BACKENDS if name != "reference"]
# Relative error that one fused multiply-add per dequantised value adds, whose constant
# scale * (64 + zero point) is rounded to float16; 0 for backends that dequantise exactly.
ALLOWANCE = {"triton": 0.0}
# Operands in float16 keep 11 bits of three terms of a score: the query, its sums for zero points,
# and scale * zero point. Scores of these cases stay below 8.
LSE_ALLOWANCE = {"cuda": 3 * 8 * 2.0**-12}


def skip_unless_able(name: str, problem: object) -> None:
    reason = import_module(BACKENDS[name]).why_not(problem)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")


def allowances(name: str) -> tuple[float, float]:
    return ALLOWANCE.get(name, 0.0), LSE_ALLOWANCE.get(name, 0.0)


def on_gpu(tokens: tuple) -> list:
    return [x.cuda() for x in tokens]


def same_bits(a: Partial, b: Partial) -> bool:
    return torch.equal(a.out_BSNR, b.out_BSNR) and torch.equal(a.lse_BSN, b.lse_BSN)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES + LONG, ids=lambda case: case.name)
def test_decode(name: str, case: Case) -> None:
    query, view = build(case, "cuda")
    skip_unless_able(name, decode_problem(query, view))
    part = decode(query, view, backend=name, num_splits=case.num_splits)
    print(name, case.name, check(part, query, view, *allowances(name)))


@pytest.mark.parametrize("name", NAMES)
def test_permuted_batch_has_the_same_bits(name: str) -> None:
    query, view = build(Case(name="permuted", lengths=(300, 0, 4096, 777, 64), query_len=2), "cuda")
    skip_unless_able(name, decode_problem(query, view))
    order = torch.tensor([3, 0, 4, 2, 1], device="cuda")
    first = decode(query, view, backend=name)
    tables = ("block_table_BJ", "lengths_B", "window_table_BW", "sink_pages_B")
    moved = replace(view, **{table: getattr(view, table)[order] for table in tables})
    query = DecodeQuery(query.latent_BSNR[order], query.rope_BSNE[order], query.softmax_scale)
    second = decode(query, moved, backend=name)
    assert same_bits(Partial(*(x[order] for x in first)), second)
    assert same_bits(second, decode(query, moved, backend=name)), "a second run differs"


@pytest.mark.parametrize("name", NAMES)
def test_strided_queries(name: str) -> None:
    """As a batched product over heads leaves them: heads outside, sequences inside."""
    query, view = build(Case(name="strided", heads=6, query_len=2), "cuda")
    skip_unless_able(name, decode_problem(query, view))
    turned = [x.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3) for x in query[:2]]
    assert not turned[0].is_contiguous()
    strided = decode(DecodeQuery(*turned, query.softmax_scale), view, backend=name)
    assert same_bits(strided, decode(query, view, backend=name))


@pytest.mark.parametrize("name", NAMES)
def test_graph_replay_with_other_lengths(name: str) -> None:
    """Replayed after lengths, tables and contents changed in place."""
    case = Case(name="graph", lengths=(3000, 3000, 3000))
    query, view = build(case, "cuda")
    skip_unless_able(name, decode_problem(query, view))
    decode(query, view, backend=name)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        part = decode(query, view, backend=name)
    for seed, lengths in enumerate(((3000, 129, 700), (2048, 5, 64), (0, 193, 2900))):
        _, other = build(replace(case, lengths=lengths), "cuda", seed)
        _copy_into(view, other)
        graph.replay()
        check(part, query, view, *allowances(name))


def _copy_into(view: CacheView, other: CacheView) -> None:
    """`other`'s contents in `view`'s memory, which is larger."""
    view.pages_JY[: other.pages_JY.shape[0]] = other.pages_JY
    view.window_pages_JMC[: other.window_pages_JMC.shape[0]] = other.window_pages_JMC
    for table in ("block_table_BJ", "window_table_BW"):
        mine, theirs = getattr(view, table), getattr(other, table)
        mine.fill_(2**30)
        mine[:, : theirs.shape[1]] = theirs
    view.sink_pages_B.copy_(other.sink_pages_B)
    view.lengths_B.copy_(other.lengths_B)


@pytest.mark.parametrize("name", NAMES)
def test_one_percent_in_one_heads_weight_is_caught(name: str) -> None:
    """w_uk of one head times 1.01 is its absorbed query times 1.01."""
    query, view = build(Case(name="mutation", lengths=(4096,), heads=8), "cuda")
    skip_unless_able(name, decode_problem(query, view))
    latent = query.latent_BSNR.float()
    latent[:, :, 3] *= 1.01
    wrong = DecodeQuery(latent.to(torch.bfloat16), query.rope_BSNE, query.softmax_scale)
    check(decode(query, view, backend=name), query, view, *allowances(name))
    with pytest.raises(AssertionError, match="head 3"):
        check(decode(wrong, view, backend=name), query, view, *allowances(name))


APPENDS = [
    Case(name="prompt", lengths=(1000, 64, 0, 63, 300)),
    Case(name="prompt_c2r4", lengths=(1000, 64), fmt="c2r4", window_page=8),
    Case(name="prompt_256_32", lengths=(500, 130), rank=256, rope=32, window_page=16),
    Case(name="tiny_values", lengths=(200,), row_scale=1e-6),
    Case(name="huge_values", lengths=(200,), row_scale=1e5),
    Case(name="no_sinks", lengths=(200,), sinks=0),
    Case(name="strided", lengths=(200,), pool_stride=3),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunks", [1, 7])
@pytest.mark.parametrize("case", APPENDS, ids=lambda case: case.name)
def test_append_writes_the_references_bytes(name: str, chunks: int, case: Case) -> None:
    """Padding, and any way to cut a prompt."""
    generator = torch.Generator().manual_seed(2)
    view = keep_all_rows(empty_cache(case, generator))
    tokens = all_tokens(case.lengths)
    rows = random_rows(len(tokens.position_T), case, generator)
    mine = to_device(view, "cuda")
    skip_unless_able(name, append_problem(Rows(*on_gpu(rows)), Tokens(*on_gpu(tokens)), mine))
    reference.append(rows, tokens, view)
    for b, length in enumerate(case.lengths):
        chosen = tokens.sequence_T == b
        for part in torch.arange(length).tensor_split(chunks):
            pad = torch.full((1,), -1, dtype=torch.int32)
            which = [torch.cat((x[chosen][part], pad)) for x in tokens]
            padded = [torch.cat((x[chosen][part], torch.full_like(x[:1], torch.nan))) for x in rows]
            append(Rows(*on_gpu(padded)), Tokens(*on_gpu(which)), mine, backend=name)
    assert torch.equal(mine.pages_JY.cpu(), view.pages_JY)
    assert torch.equal(
        mine.window_pages_JMC.cpu().view(torch.int16), view.window_pages_JMC.view(torch.int16)
    )


@pytest.mark.parametrize("name", NAMES)
def test_decode_step_by_step(name: str) -> None:
    """200 single-token appends of three requests give the bytes of one call."""
    case = Case(name="steps", lengths=(200, 200, 200), ring=True)
    generator = torch.Generator().manual_seed(3)
    view = keep_all_rows(empty_cache(case, generator))
    tokens = all_tokens(case.lengths)
    rows = random_rows(600, case, generator)
    mine = to_device(view, "cuda")
    skip_unless_able(name, append_problem(Rows(*on_gpu(rows)), Tokens(*on_gpu(tokens)), mine))
    reference.append(rows, tokens, view)
    rows, tokens = Rows(*on_gpu(rows)), Tokens(*on_gpu(tokens))
    for step in range(200):
        now = torch.arange(step, 600, 200, device="cuda")
        append(Rows(*(x[now] for x in rows)), Tokens(*(x[now] for x in tokens)), mine, backend=name)
    assert torch.equal(mine.pages_JY.cpu(), view.pages_JY)


@pytest.mark.parametrize("name", NAMES)
def test_append_in_a_graph(name: str) -> None:
    """One graph of a step of three requests, replayed with other rows, places and padding."""
    case = Case(name="graph", lengths=(200, 150, 130))
    generator = torch.Generator().manual_seed(5)
    view = keep_all_rows(empty_cache(case, generator))
    rows = Rows(*on_gpu(random_rows(3, case, generator)))
    tokens = Tokens(*(torch.full((3,), -1, dtype=torch.int32, device="cuda") for _ in range(2)))
    mine = to_device(view, "cuda")
    skip_unless_able(name, append_problem(rows, tokens, mine))
    append(rows, tokens, mine, backend=name)  # compiles; touches nothing
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append(rows, tokens, mine, backend=name)
    for step in range(200):
        live = [b for b, length in enumerate(case.lengths) if step < length]
        where = [torch.tensor(x, dtype=torch.int32) for x in (live, [step] * len(live))]
        now = random_rows(len(live), case, generator)
        reference.append(now, Tokens(*where), view)
        tokens.sequence_T.fill_(-1)
        for mine_x, x in ((rows, now), (tokens, where)):
            for to, new in zip(mine_x, x, strict=True):
                to[: len(live)] = new.cuda()
        graph.replay()
    assert torch.equal(mine.pages_JY.cpu(), view.pages_JY)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "case",
    [
        Case(name="borders", lengths=(0, 1, 64, 133, 700)),
        Case(name="c2r4", fmt="c2r4", rank=256, rope=32, lengths=(700, 64)),
        Case(name="lost", lost_window=True, lost_sinks=True, lengths=(900, 300), window_page=16),
    ],
    ids=lambda case: case.name,
)
def test_gather_is_exact(name: str, case: Case) -> None:
    query, view = build(case, "cuda")
    skip_unless_able(name, decode_problem(query, view))
    tokens = Tokens(*on_gpu(all_tokens(case.lengths)))
    tokens.sequence_T[::5] = -1
    out = torch.full((len(tokens.position_T), case.rank + case.rope), 7.0, device="cuda").to(
        torch.bfloat16
    )
    wanted = out.clone()
    gather(tokens, view, out, backend=name)
    reference.gather(tokens, view, wanted)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_pool_beyond_two_to_the_31(name: str) -> None:
    """The last pages of a pool of 2.3e9 bytes and of a window of 2.2e9 elements."""
    case = Case(name="far", lengths=(700,))
    query, view = build(case, "cuda")
    skip_unless_able(name, decode_problem(query, view))
    page_bytes = page_layout(512, 64, format_of(case)).page_bytes
    count = 2_300_000_000 // page_bytes
    pool = torch.empty(count, page_bytes, dtype=torch.uint8, device="cuda")
    pool[-view.pages_JY.shape[0] :] = view.pages_JY
    rows = view.window_pages_JMC.shape[0]
    window = torch.empty(2_200_000_000 // (64 * 576), 64, 576, dtype=torch.bfloat16, device="cuda")
    window[-rows:] = view.window_pages_JMC
    far = replace(
        view,
        pages_JY=pool,
        window_pages_JMC=window,
        block_table_BJ=(view.block_table_BJ + count - view.pages_JY.shape[0]),
        window_table_BW=(view.window_table_BW + window.shape[0] - rows),
        sink_pages_B=(view.sink_pages_B + window.shape[0] - rows),
    )
    near = decode(query, view, backend=name)
    assert same_bits(near, decode(query, far, backend=name))
    tokens = Tokens(*on_gpu(all_tokens(case.lengths)))
    out, wanted = (torch.empty(700, 576, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    gather(tokens, far, out, backend=name)
    gather(tokens, view, wanted, backend=name)
    assert torch.equal(out, wanted)
    # the second page again, from new rows
    which = Tokens(torch.zeros_like(tokens.sequence_T[:64]), tokens.position_T[64:128])
    rows = Rows(*on_gpu(random_rows(64, case, torch.Generator().manual_seed(6))))
    keep_nowhere = torch.full_like(view.window_table_BW, -1)
    for cache in (view, far):
        append(rows, which, replace(cache, window_table_BW=keep_nowhere), backend=name)
    assert torch.equal(far.pages_JY[view.block_table_BJ[0, 1] + count - len(view.pages_JY)],
                       view.pages_JY[view.block_table_BJ[0, 1]])  # fmt: skip


def test_auto_never_takes_the_reference_on_a_gpu() -> None:
    query, view = build(Case(name="wide", fmt="c8r8", rank=128, rope=32, lengths=(100,)), "cuda")
    with pytest.raises(UsageError, match="reference: only when named"):
        decode(query, view)
    check(decode(query, view, backend="reference"), query, view)
    query, view = build(Case(name="usual", lengths=(100,)), "cuda")
    assert choose(decode_problem(query, view), "auto") is import_module(
        BACKENDS[next(iter(BACKENDS))]
    )
