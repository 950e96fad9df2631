"""Runs the Triton kernels in the interpreter (a process with TRITON_INTERPRET=1) and checks them.

Prints one line per check. bf16 is cut off, not rounded, there: outputs are taken in float32, and
gathered rows are compared with rows that are cut off too.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from cases import SMALL, Case, all_tokens, build, empty_cache, format_of, random_rows  # noqa: E402
from compare import check  # noqa: E402

from quantmla.kernels import reference  # noqa: E402
from quantmla.kernels.problem import DecodeQuery, Tokens  # noqa: E402
from quantmla.kernels.triton import backend, launches  # noqa: E402
from quantmla.kernels.triton.launches import append_launch, decode_launches, gather_launch  # noqa: E402
from quantmla.kernels.triton.schedule import Device, schedule  # noqa: E402
from quantmla.kernels.triton.step import WindowRule, locate_launch, starts_launch  # noqa: E402
from quantmla.mla.partial import Partial  # noqa: E402
from quantmla.quant.format import parse_format  # noqa: E402
from quantmla.serve import pool  # noqa: E402
from quantmla.serve.pool import PagePool  # noqa: E402
from quantmla.serve.vllm.pool import pool_layout  # noqa: E402
from quantmla.serve.vllm.step import locate_decodes, window_entries, window_starts  # noqa: E402

reference_append = pool.append


def decode(case: Case, num_splits: int | None = None, step: int | None = None) -> None:
    query, view = build(case)
    batch, query_len, heads, _ = query.latent_BSNR.shape
    device = Device(4, 227 << 10)
    width = view.block_table_BJ.shape[1]
    plan = schedule(batch, query_len * heads, width, device, num_splits or case.num_splits)
    if step is not None:
        plan = plan._replace(step=step)
    launches, result = decode_launches(query, view, plan, (False, False))
    exact = torch.empty(result.out_BSNR.shape)
    launches[0].run()
    replace(launches[1], args={**launches[1].args, "out": exact}).run()
    print("decode", case.name, plan, check(Partial(exact, result.lse_BSN), query, view))


def append(case: Case) -> None:
    """Bytes equal those of the reference, whether rows come at once or in three calls."""
    generator = torch.Generator().manual_seed(1)
    view = empty_cache(case, generator)
    tokens = all_tokens(case.lengths)
    rows = random_rows(len(tokens.position_T), case, generator)
    wanted = replace(
        view, pages_JY=view.pages_JY.clone(), window_pages_JMC=view.window_pages_JMC.clone()
    )
    reference.append(rows, tokens, wanted)
    for part in (slice(0, -100), slice(-100, -37), slice(-37, None)):
        launch = append_launch(
            type(rows)(*(x[part] for x in rows)), Tokens(*(x[part] for x in tokens)), view
        )
        launch.run()
    assert torch.equal(view.pages_JY, wanted.pages_JY), "pages differ"
    bits = [v.window_pages_JMC.view(torch.int16) for v in (view, wanted)]
    assert torch.equal(*bits), "windows differ"
    print("append", case.name)


def gather(case: Case) -> None:
    _, view = build(case)
    tokens = all_tokens(case.lengths)
    tokens.sequence_T[::7] = -1
    out = torch.full((len(tokens.sequence_T), case.rank + case.rope), 7.0, dtype=torch.bfloat16)
    gather_launch(tokens, view, out).run()
    real = tokens.sequence_T >= 0
    wanted = reference.read_rows(Tokens(*(x[real] for x in tokens)), view)
    cut = (wanted.view(torch.int32) & -65536).view(torch.float32)
    assert torch.equal(out[real].float(), cut), "gathered rows differ"
    assert (out[~real] == 7).all(), "padding was written"
    print("gather", case.name)


def plans(case: Case) -> None:
    """One plan of each operation for two layers: the bits of each layer's own launches."""
    backend._device = lambda _: Device(4, 227 << 10)
    launches.decode_launches = lambda query, view, plan, _, out: decode_launches(
        query, view, plan, (False, False), out
    )
    generator = torch.Generator().manual_seed(9)
    empty, tokens = empty_cache(case, generator), all_tokens(case.lengths)
    rows = [random_rows(len(tokens.position_T), case, generator) for _ in range(2)]
    shape = (len(case.lengths), 1, case.heads)
    queries = [
        DecodeQuery(
            torch.randn(*shape, case.rank, generator=generator).bfloat16(),
            torch.randn(*shape, case.rope, generator=generator).bfloat16(),
            0.1,
        )
        for _ in range(2)
    ]
    out = torch.zeros(len(tokens.sequence_T), case.rank + case.rope, dtype=torch.bfloat16)
    append_run = backend.plan_append(rows[0], tokens, empty)
    gather_run = backend.plan_gather(tokens, empty, out)
    decode_run = backend.plan_decode(queries[0], empty, None)
    for layer in range(2):
        mine, wanted = ([empty.pages_JY.clone(), empty.window_pages_JMC.clone()] for _ in range(2))
        view = empty.with_pools(*wanted)
        append_run(rows[layer], *mine)
        append_launch(rows[layer], tokens, view).run()
        assert torch.equal(mine[0], wanted[0]), "pages differ"
        read = torch.zeros_like(out)
        gather_run(out, *mine)
        gather_launch(tokens, view, read).run()
        assert torch.equal(out, read), "gathered rows differ"
        part = decode_run(queries[layer], *mine)
        for got, want in zip(part, backend.decode(queries[layer], view), strict=True):
            assert torch.equal(got, want), "attention differs"
        room = torch.full((4, *shape[1:], case.rank), 7.0, dtype=torch.bfloat16)
        given = decode_run(queries[layer], *mine, room[1:3])
        assert given.out_BSNR.data_ptr() == room[1:3].data_ptr(), "the output lies elsewhere"
        assert torch.equal(room[1:3], part.out_BSNR), "what was written differs"
        assert torch.equal(given.lse_BSN, part.lse_BSN), "its LSE differs"
        assert (room[::3] == 7).all(), "more was written"
    launches.decode_launches = decode_launches
    print("plans", case.name)


def native(case: Case) -> None:
    """A pool whose kernels are these: the reference's bytes, through growth, crop and selection."""
    mine, wanted = (
        PagePool(format_of(case), case.rank, case.rope, 2, torch.device("cpu"), "reference")
        for _ in range(2)
    )
    generator = torch.Generator().manual_seed(7)
    pool.append = lambda rows, tokens, view, backend: append_launch(rows, tokens, view).run()
    for size in (150, 1, 1):
        rows = random_rows(2 * size, case, generator)
        chunk = [x.unflatten(0, (2, size)) for x in rows]
        mine.append(*chunk)
        pool.append, kernels = reference_append, pool.append
        wanted.append(*chunk)
        pool.append = kernels
        if size == 150:
            for each in (mine, wanted):
                each.crop(20)
                each.select([1, 0])
    for b in range(2):
        assert torch.equal(mine.pages(b), wanted.pages(b)), "pages differ"
    query = DecodeQuery(
        torch.randn(2, 1, 3, case.rank, generator=generator).bfloat16(),
        torch.randn(2, 1, 3, case.rope, generator=generator).bfloat16(),
        0.1,
    )
    plan = schedule(2, 3, mine.block_table_BJ.shape[1], Device(4, 227 << 10))
    launches, result = decode_launches(query, mine.view(), plan, (False, False))
    exact = torch.empty(result.out_BSNR.shape)
    launches[0].run()
    replace(launches[1], args={**launches[1].args, "out": exact}).run()
    print("native", case.name, check(Partial(exact, result.lse_BSN), query, wanted.view()))


def locate(queries: int) -> None:
    """More rows than a program has, some of them padding."""
    generator = torch.Generator().manual_seed(3)
    shape = (-(-300 // queries),)
    lengths = torch.randint(0, 1 << 20, shape, generator=generator, dtype=torch.int32)
    slots = torch.randint(-1, 2, (300,), generator=generator)
    mine = Tokens(*torch.full((2, 310), 77, dtype=torch.int32))
    locate_launch(lengths, slots, queries, Tokens(*(x[:300] for x in mine))).run()
    wanted = locate_decodes(lengths, slots, torch.arange(300, dtype=torch.int32), queries)
    for got, want in zip(mine, wanted, strict=True):
        assert torch.equal(got[:300], want), "rows are elsewhere"
        assert (got[300:] == 77).all(), "more was written"
    print("locate", int((mine.sequence_T < 0).sum()))


def starts(fmt: str) -> None:
    """Windows lost anywhere, queries of several lengths, contexts beyond the table's end."""
    layout = pool_layout(parse_format(fmt), 512, 64)
    generator = torch.Generator().manual_seed(4)
    size, batch, width = layout.window_page_size, 400, 64
    queries = torch.randint(1, 5, (batch,), generator=generator, dtype=torch.int32)
    context = torch.randint(0, width * size, (batch,), generator=generator, dtype=torch.int32)
    bounds = torch.cat((torch.zeros(1, dtype=torch.int32), queries.cumsum(0).int()))
    hit = torch.randint(0, 12, (batch,), generator=generator)[:, None] * 64 // size
    table = torch.randint(1, 99, (batch, width), generator=generator, dtype=torch.int32)
    table[torch.arange(width) < hit] = 0
    entries = window_entries(layout)
    rule = WindowRule(layout.recent_window, layout.fmt.page_size, size, entries)
    found = torch.full((batch + 3,), 77, dtype=torch.int32)
    starts_launch(context + queries, bounds, table, rule, found[:batch]).run()
    wanted = window_starts(context, table, layout)
    assert len(wanted.unique()) > 5
    assert torch.equal(found[:batch], wanted), "windows are lost elsewhere"
    assert (found[batch:] == 77).all(), "more was written"
    print("starts", fmt, len(wanted.unique()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for small in SMALL:
        decode(small)
    decode(SMALL[0], num_splits=3, step=2)
    whole = Case(name="whole", rank=128, rope=32, lengths=(130, 200), window_page=16)
    append(whole)
    append(replace(whole, fmt="c2r4", rope=64, lengths=(20, 140), row_scale=1e-3))
    native(whole)
    plans(replace(whole, lengths=(200, 7), heads=3))
    gather(SMALL[0])
    gather(SMALL[3])
    locate(1)
    locate(3)
    starts("c4r4")
    starts("c2r4")
