"""The oracle itself: against attention over rows that never went through bytes."""

from dataclasses import replace

import pytest
import torch
from cases import (
    SMALL,
    Case,
    all_tokens,
    build,
    empty_cache,
    keep_all_rows,
    kill_unused,
    random_rows,
)
from compare import check, eager_bf16, oracle

from quantmla.cache.view import CacheView
from quantmla.kernels import reference
from quantmla.kernels.problem import DecodeQuery, Rows, Tokens
from quantmla.quant.roundtrip import read_content, read_rope


def rows_as_read(rows: Rows, length: int, view: CacheView) -> torch.Tensor:
    """float64 rows of one sequence by docs/flow.md, without pages or tables."""
    fmt = view.fmt
    recent, sinks = fmt.first_recent(length), fmt.num_sink_tokens
    latent = read_content(rows.latent_TR.float(), fmt)
    k_rope = torch.cat(
        (read_rope(rows.k_rope_TE.float()[:recent], fmt), rows.k_rope_TE.float()[recent:])
    )
    read = torch.cat((latent, k_rope), dim=-1)
    plain = torch.cat(rows, dim=-1).float()
    keep = torch.arange(length)
    keep = (keep < sinks) | (keep >= recent)
    return torch.where(keep[:, None], plain, read).double()


@pytest.mark.parametrize("length", [1, 4, 64, 191, 192, 193, 333])
@pytest.mark.parametrize("fmt", ["c4r4", "c2r4", "c8r8", "c3r16", "c16r16"])
def test_decode_is_attention_over_the_rows_as_read(fmt: str, length: int) -> None:
    case = Case(
        name="one",
        fmt=fmt,
        rank=128,
        rope=32,
        heads=3,
        query_len=3,
        lengths=(length,),
        window_page=16,
    )
    generator = torch.Generator().manual_seed(length)
    view = empty_cache(case, generator)
    rows = random_rows(length, case, generator)
    reference.append(rows, all_tokens(case.lengths), view)
    q = torch.randn(3, 3, 160, generator=generator, dtype=torch.float64)
    part = reference.decode(
        DecodeQuery(q[None, ..., :128], q[None, ..., 128:], 0.11), kill_unused(view)
    )
    read = rows_as_read(rows, length, view)
    for s in range(3):
        seen = read[: max(0, length - 3 + s + 1)]
        if not len(seen):
            assert (part.out_BSNR[0, s] == 0).all()
            assert (part.lse_BSN[0, s] == -torch.inf).all()
            continue
        scores = 0.11 * q[s] @ seen.T
        wanted = torch.softmax(scores, dim=-1) @ seen[:, :128]
        torch.testing.assert_close(part.out_BSNR[0, s], wanted, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(
            part.lse_BSN[0, s], torch.logsumexp(scores, -1), rtol=1e-9, atol=1e-11
        )


@pytest.mark.parametrize("cuts", [[1, 128], [64], [63, 64, 65, 127], list(range(1, 300, 7))])
def test_any_cut_of_a_prompt_gives_the_same_bytes(cuts: list[int]) -> None:
    """The ring, too: rows that left the window are overwritten."""
    case = Case(name="cut", rank=128, rope=32, lengths=(300,), ring=True, window_page=16)
    caches = []
    for parts in ([], cuts):
        view = empty_cache(case, torch.Generator().manual_seed(5))
        rows = random_rows(300, case, torch.Generator().manual_seed(6))
        tokens = all_tokens(case.lengths)
        if parts:  # every place of the ring is in use on the way
            view = keep_all_rows(view)
        for part in torch.arange(300).tensor_split(parts):
            reference.append(
                Rows(*(x[part] for x in rows)), Tokens(*(x[part] for x in tokens)), view
            )
        caches.append(view)
    assert torch.equal(caches[0].pages_JY, caches[1].pages_JY)
    whole, cut = (reference.read_rows(tokens, view) for view in caches)
    assert torch.equal(whole, cut)


def test_padding_touches_nothing() -> None:
    """Slot -1 is no Python index."""
    case = Case(name="pad", rank=128, rope=32, lengths=(70, 70), window_page=16)
    view = empty_cache(case, torch.Generator().manual_seed(0))
    rows = random_rows(64, case, torch.Generator().manual_seed(1))
    before = view.pages_JY.clone(), view.window_pages_JMC.clone().view(torch.int16)
    nowhere = Tokens(torch.full((64,), -1, dtype=torch.int32), torch.arange(64, dtype=torch.int32))
    reference.append(rows, nowhere, view)
    assert torch.equal(view.pages_JY, before[0])
    assert torch.equal(view.window_pages_JMC.view(torch.int16), before[1])
    out = torch.full((64, 160), 7.0, dtype=torch.bfloat16)
    reference.gather(nowhere, view, out)
    assert (out == 7).all()


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_gather_is_what_decode_reads(case: Case) -> None:
    _, view = build(case)
    tokens = all_tokens(case.lengths)
    out = torch.empty(len(tokens.position_T), case.rank + case.rope, dtype=torch.bfloat16)
    reference.gather(tokens, view, out)
    assert out.isfinite().all()
    assert torch.equal(out, reference.read_rows(tokens, view).to(torch.bfloat16))


def test_comparison_passes_eager_and_catches_one_percent_of_one_head() -> None:
    query, view = build(Case(name="mutation", rank=128, rope=32, heads=4, lengths=(600,)))
    check(eager_bf16(query, view), query, view)
    latent = query.latent_BSNR.clone().double()
    latent[:, :, 2] *= 1.01
    wrong = oracle(DecodeQuery(latent, query.rope_BSNE, query.softmax_scale), view)
    with pytest.raises(AssertionError, match="head 2"):
        check(wrong, query, view)


def test_no_sequences_have_no_attention() -> None:
    case = Case(name="none", rank=128, rope=32, heads=3, lengths=(10,), window_page=16)
    view = empty_cache(case, torch.Generator())
    names = ("block_table_BJ", "lengths_B", "window_table_BW", "sink_pages_B")
    view = replace(view, **{name: getattr(view, name)[:0] for name in names})
    query = DecodeQuery(torch.empty(0, 2, 3, 128).half(), torch.empty(0, 2, 3, 32).half(), 0.1)
    part = reference.decode(query, view)
    assert (part.out_BSNR.shape, part.out_BSNR.dtype) == ((0, 2, 3, 128), torch.float16)
    assert (part.lse_BSN.shape, part.lse_BSN.dtype) == ((0, 2, 3), torch.float32)
