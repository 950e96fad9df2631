import torch

from quantmla.cache.sequence import append, crop, empty_sequence, packed_tokens
from quantmla.quant.format import parse_format

FMT = parse_format("c4r4", group_size=16, page_size=16, recent_window=32)


def grown(tokens: int):
    g = torch.Generator().manual_seed(1)
    latent = torch.randn(tokens, 32, generator=g).bfloat16()
    k_rope = torch.randn(tokens, 16, generator=g).bfloat16()
    return append(empty_sequence(32, 16, torch.device("cpu")), latent, k_rope, FMT)


def test_pages_are_whole_and_older_than_the_window():
    for length in range(0, 120):
        packed = packed_tokens(FMT, length)
        assert packed % 16 == 0
        assert length - packed >= min(length, 32)
        assert length - packed < 32 + 16
        assert packed_tokens(FMT.unprotected(), length) == length - length % 16


def test_append_leaves_the_shorter_sequence_as_it_was():
    before = grown(50)
    rows, pages = before.latent_TR.clone(), [p.clone() for p in before.pages]
    append(before, torch.ones(40, 32).bfloat16(), torch.ones(40, 16).bfloat16(), FMT)
    assert before.length == 50
    assert torch.equal(before.latent_TR, rows)
    assert all(torch.equal(a, b) for a, b in zip(before.pages, pages, strict=True))


def test_crop_within_the_window_then_append_is_as_if_nothing_had_happened():
    whole = grown(60)
    cut = crop(whole, 50, FMT)
    again = append(
        cut, whole.latent_TR[50 - whole.first :], whole.k_rope_TE[50 - whole.first :], FMT
    )
    assert again.length == 60
    assert torch.equal(again.latent_TR, whole.latent_TR)
    assert torch.equal(torch.cat(again.pages), torch.cat(whole.pages))


def test_crop_into_the_sinks_forgets_them():
    cut = crop(grown(20), 2, FMT)
    assert len(cut.sink_latent_TR) == 2
    refilled = append(cut, torch.full((5, 32), 7.0).bfloat16(), torch.zeros(5, 16).bfloat16(), FMT)
    assert len(refilled.sink_latent_TR) == 4
    assert (refilled.sink_latent_TR[2:] == 7).all()
