"""The Hopper kernels, run on a CPU by an emulator, against the reference in float64."""

import ctypes
import dataclasses

import pytest
import torch
from emulation import RANK, emulate, library, random_case, run_emulated
from torch import Tensor

from quantmla.cache.view import CacheView
from quantmla.kernels import reference
from quantmla.kernels.cuda.arguments import Arguments, DecodeArguments, shared_bytes
from quantmla.kernels.cuda.build import Variant
from quantmla.kernels.problem import DecodeQuery, Tokens
from quantmla.mla.attention import causal_mask
from quantmla.quant.format import parse_format

C4, C2 = parse_format("c4r4"), parse_format("c2r4")
NARROW = Variant(columns=16, warpgroups=3, stages=2)
SINGLE = Variant(columns=16, warpgroups=1, stages=2)
WIDE = Variant(columns=32, warpgroups=2, stages=2)
WIDEST = Variant(columns=64, warpgroups=2, stages=4)


def _relative(out: Tensor, exact: Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


def _exact(query: DecodeQuery, view: CacheView):
    latent, rope, scale = query
    return reference.decode(DecodeQuery(latent.double(), rope.double(), scale), view)


def _tolerance(query: DecodeQuery, view: CacheView, exact: Tensor) -> float:
    """Twice the error of eager bf16, and four standard deviations of the values' one-FMA rounding.

    scale * (M + zero), M + zero < 80, is rounded to float16: an error uniform within 2^-11 of it,
    the same for the channels of a group and independent for tokens.
    """
    q = torch.cat((query.latent_BSNR, query.rope_BSNE), dim=-1)
    eager, fma = torch.zeros_like(exact), 0.0
    largest_scale = float(
        view.pages_JY[:, view.layout.scales].contiguous().view(torch.float16).max()
    )
    for b, length in enumerate(view.lengths_B.tolist()):
        position = torch.arange(length)
        k = reference.read_rows(Tokens(torch.full_like(position, b), position), view).bfloat16()
        scores = torch.einsum("snc,tc->snt", q[b].float(), k.float()) * query.softmax_scale
        p = torch.softmax(
            scores.masked_fill(~causal_mask(q.shape[1], length, q.device)[:, None], -torch.inf), -1
        )
        eager[b] = (p.bfloat16().float() @ k[:, :RANK].float()).bfloat16().nan_to_num(0)
        fma += (
            float((p**2).nan_to_num(0).sum()) * RANK * (80 * 2**-11 / 3**0.5 * largest_scale) ** 2
        )
    return 2 * _relative(eager, exact) + 4 * fma**0.5 / float(exact.norm())


@pytest.mark.parametrize(
    ("fmt", "variant", "lengths", "rows", "splits"),
    [
        (C4, NARROW, [0, 1, 63, 64, 65, 300], (1, 16), None),
        (C4, NARROW, [127, 128, 129, 191, 192, 193], (1, 5), None),
        (C4, NARROW, [700], (1, 16), 3),
        (C4, SINGLE, [450, 260], (4, 4), None),
        (C4, WIDE, [600, 131], (2, 20), None),
        (C4, WIDE, [600, 131, 0, 65], (2, 15), None),
        (C4, WIDE, [900], (1, 32), 1),
        (C4, WIDE, [1500, 200], (40, 1), 3),
        (C2, NARROW, [0, 1, 192, 700], (1, 16), None),
        (C2, SINGLE, [450, 260], (3, 7), 2),
        (C2, WIDE, [600], (1, 32), 1),
        (C4, WIDEST, [0, 1, 63, 64, 65, 300], (1, 64), None),
        (C4, WIDEST, [127, 193, 450], (1, 33), None),
        (C4, WIDEST, [900], (2, 64), 2),
        (C4, WIDEST, [131, 500], (4, 9), None),
        (C2, WIDEST, [0, 192, 700], (1, 64), None),
        (C2, WIDEST, [450, 129], (2, 40), 2),
    ],
)
def test_agrees_with_the_reference(tmp_path_factory, fmt, variant, lengths, rows, splits):
    kernels = library(tmp_path_factory, fmt, variant)
    query, view = random_case(lengths, rows, fmt, seed=sum(lengths))
    out, lse = emulate(kernels, variant.columns, query, view, splits)
    exact = _exact(query, view)
    assert _relative(out, exact.out_BSNR) < _tolerance(query, view, exact.out_BSNR)
    assert torch.equal(lse.isinf(), exact.lse_BSN.isinf())
    finite = lse.isfinite()
    # |score| < 20 and float16 keeps 11 bits of the query, of the sums and of scale * zero
    assert (lse.double() - exact.lse_BSN)[finite].abs().max() < 3 * 20 * 2**-11


def test_a_permuted_batch_gives_the_same_bits(tmp_path_factory):
    kernels = library(tmp_path_factory, C4, NARROW)
    query, view = random_case([150, 900, 64, 400], (1, 16), C4, seed=5)
    order = torch.tensor([2, 0, 3, 1])
    moved = dataclasses.replace(
        view,
        block_table_BJ=view.block_table_BJ[order],
        lengths_B=view.lengths_B[order],
        window_table_BW=view.window_table_BW[order],
        sink_pages_B=view.sink_pages_B[order],
    )
    out, lse = emulate(kernels, 16, query, view)
    again = emulate(kernels, 16, DecodeQuery(query[0][order], query[1][order], query[2]), moved)
    assert torch.equal(out[order], again.out_BSNR)
    assert torch.equal(lse[order], again.lse_BSN)


def layers(lengths: list[int], rows: tuple[int, int]) -> list[tuple[DecodeQuery, CacheView]]:
    """With the tables of the first, and queries and pools of their own."""
    query, view = random_case(lengths, rows, C4, seed=1)
    other = DecodeQuery(query[0].flip(2), query[1].flip(2), query[2])
    pages, window = view.pages_JY.roll(1, 0), view.window_pages_JMC.roll(1, 0).nan_to_num(0.5)
    return [(query, view), (other, view.with_pools(pages, window))]


@pytest.mark.parametrize(("variant", "rows"), [(NARROW, (1, 5)), (WIDEST, (2, 20))])
def test_prepared_arguments_serve_all_layers(tmp_path_factory, variant, rows):
    kernels = library(tmp_path_factory, C4, variant)
    model = layers([150, 500], rows)
    arguments = DecodeArguments(*model[0], None, 4, variant.columns)
    found = [run_emulated(kernels, arguments, *layer) for layer in model]
    for layer, part in zip(model, found, strict=True):
        for got, want in zip(part, emulate(kernels, variant.columns, *layer), strict=True):
            assert torch.equal(got, want)
    assert not torch.equal(found[0].out_BSNR, found[1].out_BSNR)


@pytest.mark.parametrize("offset", [0, 1])
def test_queries_that_lie_unevenly_are_copied(tmp_path_factory, offset):
    """Rows 520 elements apart are even, those of 513 are not, nor any that begin at the second."""
    kernels = library(tmp_path_factory, C4, NARROW)
    query, view = random_case([150, 500], (2, 5), C4, seed=2)
    wanted = emulate(kernels, 16, query, view)
    for width in (513, 520):
        wide = torch.zeros(2, 2, 5, width, dtype=torch.bfloat16)
        uneven = wide[..., offset : offset + RANK].copy_(query.latent_BSNR)
        arguments = DecodeArguments(query._replace(latent_BSNR=uneven), view, None, 4, 16)
        assert arguments.copied == [width == 513 or offset == 1, False]
        part = run_emulated(kernels, arguments, query._replace(latent_BSNR=uneven), view)
        assert torch.equal(part.out_BSNR, wanted.out_BSNR)


def test_what_a_run_gives_is_its_own():
    query, view = random_case([150], (1, 5), C4, seed=2)
    arguments = DecodeArguments(query, view, None, 4, 16)
    one, other = (arguments.fill(query, view.pages_JY, view.window_pages_JMC) for _ in range(2))
    addresses = {x.data_ptr() for x in (*one[2:], *other[2:])}
    assert len(addresses) == 6


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("variant", "rows"), [(NARROW, (1, 5)), (WIDEST, (2, 20))])
def test_an_output_that_is_given_is_written(tmp_path_factory, variant, rows, splits):
    """With parts and without, one row after those of other calls; nothing around it is touched."""
    kernels = library(tmp_path_factory, C4, variant)
    query, view = random_case([150, 0, 500], rows, C4, seed=3)
    wanted = emulate(kernels, variant.columns, query, view, splits)
    shape = query.latent_BSNR.shape
    room = torch.full((2 + shape.numel() // RANK, RANK), 7.0, dtype=torch.bfloat16)
    arguments = DecodeArguments(query, view, splits, 4, variant.columns)
    part = run_emulated(kernels, arguments, query, view, room[1:-1].view(shape))
    assert part.out_BSNR.data_ptr() == room[1:].data_ptr()
    assert torch.equal(room[1:-1].view(shape), wanted.out_BSNR)
    assert torch.equal(part.lse_BSN, wanted.lse_BSN)
    assert (room[[0, -1]] == 7).all()


def test_a_wrong_weight_is_seen(tmp_path_factory):
    """One token in 64 has a scale that is 30 % off: the comparison above must fail."""
    kernels = library(tmp_path_factory, C4, NARROW)
    query, view = random_case([700], (1, 16), C4, seed=3)
    exact = _exact(query, view)
    wrong = view.pages_JY.clone()
    scales = wrong[:, view.layout.scales].contiguous().view(torch.float16)
    scales[:, ::64] *= 1.3  # token 0 of every group
    wrong[:, view.layout.scales] = scales.view(torch.uint8)
    out, _ = emulate(kernels, 16, query, dataclasses.replace(view, pages_JY=wrong))
    assert _relative(out, exact.out_BSNR) > _tolerance(query, view, exact.out_BSNR)


@pytest.mark.parametrize("variant", [NARROW, WIDEST])
@pytest.mark.parametrize("factor", [0.01, 1.0, 30.0])
def test_large_and_small_scores(tmp_path_factory, factor, variant):
    """The running maximum is raised many times, or never after the first page."""
    kernels = library(tmp_path_factory, C4, variant)
    query, view = random_case([1000], (1, 16), C4, seed=9)
    query = query._replace(softmax_scale=0.05 * factor)
    out, _ = emulate(kernels, variant.columns, query, view, 1)
    exact = _exact(query, view)
    assert torch.isfinite(out).all()
    # an error of 2^-10 of the largest score changes a probability by as much, relatively
    slack = 2**-10 * factor * 4
    assert _relative(out, exact.out_BSNR) < _tolerance(query, view, exact.out_BSNR) + slack


@pytest.mark.parametrize(
    ("fmt", "variant"),
    [(C4, NARROW), (C4, WIDE), (C4, WIDEST), (C2, NARROW), (C2, WIDE), (C2, WIDEST)],
)
def test_pages_of_unlike_scales_add_up(tmp_path_factory, fmt, variant):
    """The power of two that a page's scales carry differs from page to page, up and down."""
    kernels = library(tmp_path_factory, fmt, variant)
    query, view = random_case([1100], (1, 16), fmt, seed=11)
    query = query._replace(softmax_scale=0.002)
    pages = view.pages_JY.clone()
    scales = pages[:, view.layout.scales].contiguous().view(torch.float16)
    powers = torch.tensor([0, 5, -6, 2, 0, -3, 4])[torch.arange(len(pages)) % 7]
    scales *= (2.0 ** powers[:, None]).half()
    pages[:, view.layout.scales] = scales.view(torch.uint8)
    view = dataclasses.replace(view, pages_JY=pages)
    out, lse = emulate(kernels, variant.columns, query, view, 1)
    exact = _exact(query, view)
    assert _relative(out, exact.out_BSNR) < _tolerance(query, view, exact.out_BSNR)
    assert (lse.double() - exact.lse_BSN).abs().max() < 3 * 20 * 2**-11


@pytest.mark.parametrize(
    ("fmt", "variant"),
    [(C4, NARROW), (C4, WIDE), (C2, NARROW), (C4, WIDEST), (C2, WIDEST)],
)
def test_host_and_device_agree_on_sizes(tmp_path_factory, fmt, variant):
    kernels = library(tmp_path_factory, fmt, variant)
    _, view = random_case([1], (1, 1), fmt, seed=0)
    assert kernels.argument_bytes() == ctypes.sizeof(Arguments)
    assert kernels.shared_bytes() == shared_bytes(variant, view.layout) <= 227 * 1024
