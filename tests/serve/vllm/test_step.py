import pytest
import torch

from quantmla.kernels.problem import Tokens
from quantmla.quant.format import parse_format
from quantmla.serve.vllm.pool import pool_layout
from quantmla.serve.vllm.step import (
    FirstLayer,
    context_tokens,
    kept_only,
    locate_decodes,
    locate_tokens,
    plan_calls,
    split_queries,
    window_starts,
    without_context,
    write_decodes,
    write_window_starts,
)

LAYOUT = pool_layout(parse_format("c4r4"), 512, 64)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_rows_without_a_slot_belong_to_no_sequence():
    """Three sequences, one of them padding without rows, and two rows of padding at the end."""
    slots = torch.tensor([5, 6, 7, 900, -1, -1])
    tokens = locate_tokens(ints(3, 4, 4), ints(10, 1, 0), slots, torch.arange(6, dtype=torch.int32))
    assert tokens.sequence_T.tolist() == [0, 0, 0, 1, -1, -1]
    assert tokens.position_T.tolist()[:4] == [7, 8, 9, 0]
    assert {x.dtype for x in tokens} == {torch.int32}


def test_queries_of_different_lengths_end_together():
    (call,) = plan_calls(ints(0, 1, 4, 6), decode_length=3, most=0, piece=64)
    assert call.sequences == slice(0, 3)
    assert call.rows.view(3, 3).tolist() == [[0, 0, 0], [1, 2, 3], [4, 4, 5]]
    assert call.places.view(3, 3).tolist() == [[6, 6, 0], [1, 2, 3], [6, 4, 5]]


def test_decodes_are_not_padded_to_a_chunk():
    """Nor copied: both calls read the engine's own tables; their results lie as their rows do."""
    assert plan_calls(ints(0, 1, 2, 3, 23), decode_length=1, most=64, piece=64) == (
        (slice(0, 3), slice(0, 3), 3, None, None),
        (slice(3, 4), slice(3, 23), 1, None, None),
    )


def test_chunks_between_decodes_are_found():
    """As vLLM's first runner orders a request that resumes with a few tokens."""
    calls = plan_calls(ints(0, 1, 21, 22, 23, 33), decode_length=1, most=64, piece=64)
    assert [call.sequences.tolist() for call in calls[:1]] == [[0, 2, 3]]
    assert calls[0].rows.tolist() == [0, 21, 22]
    assert calls[1].sequences.tolist() == [1, 4]
    assert calls[1].rows.tolist() == [*range(1, 21), *[23] * 11, *range(24, 33)]
    assert calls[0].places is calls[0].rows
    assert calls[1].places.tolist() == [*range(1, 21), *[33] * 10, *range(23, 33)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_plan_goes_to_the_device_as_it_is(device):
    plan = plan_calls(ints(0, 1, 21, 22, 23, 33), decode_length=1, most=64, piece=64)
    for call in plan:
        moved = call.to(torch.device(device))
        assert moved.places.device.type == device
        assert torch.equal(moved.sequences.cpu(), call.sequences)
        assert torch.equal(moved.rows.cpu(), call.rows)
        assert torch.equal(moved.places.cpu(), call.places)
        assert (moved.places is moved.rows) == (call.places is call.rows)  # copied once
    slices = plan_calls(ints(0, 1, 2, 3, 23), decode_length=1, most=64, piece=64)
    assert tuple(call.to(torch.device(device)) for call in slices) == slices


def places_of(calls, rows: torch.Tensor) -> list[torch.Tensor]:
    """Of every call's rows in the result; -1 for what is made up, which is only before own ones."""
    found = []
    for call in calls:
        read = rows[call.rows]
        place = read if call.places is None else call.places
        own = place < len(rows)
        assert (place[~own] == len(rows)).all()
        assert torch.equal(place[own], read[own])
        found.append(torch.where(own, place, -1))
    return found


def test_calls_do_not_grow_with_their_padding():
    assert split_queries([1, 1, 2, 5, 9, 40], 1, 64) == [range(2), range(2, 5), range(5, 6)]
    assert split_queries([1, 1, 4, 4], 4, 1) == [range(4)]
    assert split_queries([40, 40], 1, 16) == [range(1), range(1, 2)]
    assert split_queries([2] * 100 + [64], 1, 1024) == [range(100), range(100, 101)]


@pytest.mark.parametrize("decode_length", [1, 4])
def test_every_query_is_read_once_in_any_order(decode_length):
    """Each sequence's last S rows end with its own last one; its own ones are all found again."""
    generator = torch.Generator().manual_seed(5)
    for most in (1, 100, 1000):
        lengths = torch.randint(1, 65, (20,), generator=generator, dtype=torch.int32)
        lengths[torch.rand(20, generator=generator) < 0.5] = 1
        bounds = torch.cat((ints(0), lengths.cumsum(0, dtype=torch.int32)))
        calls = plan_calls(bounds, decode_length, most, 64)
        rows, sequences = torch.arange(int(bounds[-1])), torch.arange(20)
        places = torch.cat(places_of(calls, rows))
        assert torch.equal(places[places >= 0].sort().values, rows)
        seen = [sequences[call.sequences] for call in calls]
        assert sorted(torch.cat(seen).tolist()) == list(range(20))
        for call, chosen in zip(calls, seen, strict=True):
            last = rows[call.rows].view(call.batch, -1)[:, -1]
            assert torch.equal(last, bounds[1:][chosen] - 1)
            longest = lengths[chosen].max()
            if call.places is not None:  # a sequence's own rows are the last ones
                own = call.places.view(call.batch, -1) < len(rows)
                assert torch.equal(own.sum(1), lengths[chosen])
                assert torch.equal(own.int().diff(dim=1).clamp(min=0).sum(1), 1 - own[:, 0].int())
            assert longest <= decode_length or len(chosen) == 1 or len(chosen) * longest <= most
            assert longest <= decode_length or (lengths[chosen] > decode_length).all()


@pytest.mark.parametrize("queries", [1, 4, 300])
def test_as_many_rows_of_each_are_a_special_case(queries):
    lengths, rows = ints(307, 300, 0), torch.arange(3 * queries, dtype=torch.int32)
    slots = torch.arange(3 * queries).flip(0) - queries  # the last sequence is padding
    quick = locate_decodes(lengths, slots, rows, queries)
    slow = locate_tokens(queries * ints(1, 2, 3), lengths, slots, rows)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(quick, slow, strict=True))
    assert quick.position_T.tolist()[:queries] == list(range(307 - queries, 307))
    assert quick.sequence_T.tolist()[queries:] == [1] * queries + [-1] * queries


def test_null_pages_hold_nothing():
    table = torch.tensor([[0, 4, 0], [3, 0, 9]], dtype=torch.int32)
    assert kept_only(table).tolist() == [[-1, 4, -1], [3, -1, 9]]


@pytest.mark.parametrize("size", [8, 16])
def test_a_lost_window_begins_where_its_prefix_ended(size):
    """Against a search of every page that is read, for prefixes that end anywhere."""
    layout = pool_layout(parse_format("c4r4" if size == 16 else "c2r4"), 512, 64)
    assert layout.window_page_size == size
    width = 1024 // size
    for hit in range(64, 512, 64):
        for context in range(hit, hit + 300, 7):
            table = torch.zeros(1, width, dtype=torch.int32)
            table[0, hit // size : -(-context // size)] = 5
            table[0, 0] = 9  # sinks
            got = window_starts(ints(context), table, layout).item()
            lost = hit > layout.fmt.first_recent(context)
            assert got == (hit if lost else 0)


def test_old_null_pages_and_stale_entries_do_not_matter():
    """Pages of a chunk that were never kept, and numbers of pages that were freed."""
    table = torch.full((1, 64), 3, dtype=torch.int32)
    table[0, 1:40] = 0  # tokens 16..639 of a prompt of 1,000
    table[0, 63] = 0  # beyond the end
    assert window_starts(ints(1000), table, LAYOUT).tolist() == [0]
    assert window_starts(ints(0), table, LAYOUT).tolist() == [0]


def test_context_is_laid_out_sequence_after_sequence():
    sequence = ints(0, 0, 1, 2, 2)
    tokens = context_tokens(
        sequence, ints(64, 64, 64), ints(0, 2, 3), torch.arange(5, dtype=torch.int32)
    )
    assert tokens.position_T.tolist() == [64, 65, 64, 64, 65]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_a_decode_reads_is_written_where_it_lies(device):
    """A lost window, a whole one, padding; on a GPU by one launch each."""
    lengths = ints(321, 1000, 0).to(device)
    table = torch.full((3, 64), 3, dtype=torch.int32)
    table[0, :20] = 0  # a prefix of 320 tokens without its rows
    kept = Tokens(*torch.full((2, 7), 77, dtype=torch.int32, device=device))
    slots = torch.tensor([9, 10, 8, 9, -1, -1], device=device)
    rows = torch.arange(6, dtype=torch.int32, device=device)
    for queries, sequence, position in (
        (1, [0, 1, -1], [320, 999, -1]),
        (2, [0, 0, 1, 1, -1, -1], [319, 320, 998, 999, -2, -1]),
    ):
        count = 3 * queries
        written = slots[::2] if queries == 1 else slots
        out = Tokens(*(x[:count] for x in kept))
        write_decodes(lengths, written.contiguous(), rows[:count], queries, out)
        assert kept.sequence_T.tolist()[: count + 1] == [*sequence, 77]
        assert kept.position_T.tolist()[: count + 1] == [*position, 77]
    starts = torch.full((4,), 77, dtype=torch.int32, device=device)
    bounds = ints(0, 1, 2, 2).to(device)
    write_window_starts(lengths, bounds, table.to(device), LAYOUT, starts[:3])
    assert starts.tolist() == [320, 0, 0, 77]


def test_queries_without_context_are_those_of_empty_sequences() -> None:
    lengths, context = (3, 1, 0, 2, 4), (5, 0, 0, 7, 0)
    bounds = [torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in (lengths, context)]
    empty = without_context(*bounds, torch.arange(10, dtype=torch.int32))
    wanted = [n == 0 for n, count in zip(context, lengths, strict=True) for _ in range(count)]
    assert empty.tolist() == wanted


@pytest.mark.parametrize("piece", [1, 7, 64])
def test_pieces_cover_every_row_once(piece):
    generator = torch.Generator().manual_seed(6)
    lengths = torch.randint(1, 200, (12,), generator=generator, dtype=torch.int32)
    bounds = torch.cat((ints(0), lengths.cumsum(0, dtype=torch.int32)))
    calls = plan_calls(bounds, 1, 500, piece)
    rows, sequences = torch.arange(int(bounds[-1])), torch.arange(12)
    places = torch.cat(places_of(calls, rows))
    assert torch.equal(places[places >= 0].sort().values, rows)
    for call in calls:
        last = rows[call.rows].view(call.batch, -1)[:, -1]
        after = 0 if call.after is None else call.after
        chosen = sequences[call.sequences]
        assert torch.equal(last + after, bounds[1:][chosen].long() - 1)
        assert (((last + 1 - bounds[:-1][chosen]) % piece == 0) | (after == 0)).all()
        assert call.after is None or call.after.dtype == torch.int32


def test_the_first_layer_writes_and_writes_again_when_it_comes_again():
    """As in a trial run and the capture after it, with the same metadata."""
    written = []
    first = FirstLayer(lambda: written.append("now"))
    for name in ("b", "a", "c", "b", "a"):
        first.enter(name)
        written.append(name)
    assert written == ["now", "b", "a", "c", "now", "b", "a"]
