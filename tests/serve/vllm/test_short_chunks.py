"""Short parts of a prompt, which are attended to as decodes are; every query against float64.

`e.steps` has each step's metadata and the tokens of its sequences, in the order that vLLM's runner
gave them.
"""

import pytest
import torch

N = 64  # longest chunk that is read as a decode is, at a recent window of 128
LONGEST = 191  # that is read so in pieces
RUNNERS = pytest.mark.parametrize("runner", [1, 2])


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(512, (length,), generator=generator).tolist()


def shapes(metadata) -> list[tuple[int, int]]:
    """Sequences and query length of each call of the decode kernel."""
    packed = metadata[0]
    if packed.calls is None:
        count = packed.num_decodes
        return [(count, packed.num_decode_tokens // count)] if count else []
    rows = torch.arange(packed.num_decode_tokens)
    return [(c.batch, len(rows[c.rows]) // c.batch) for c in packed.calls]


@RUNNERS
@pytest.mark.parametrize("count", [2, 11, 63, N])
@pytest.mark.parametrize("before", [127, 128, 191, 192, 193, 256])
def test_alone_at_borders_of_pages_and_of_the_window(engine, runner, before, count):
    e = engine(chunk=before, runner=runner)
    e.pool.add("a", prompt(before + count), 2)
    e.run()
    assert [tokens for _, tokens in e.steps] == [[before], [count], [1]]
    assert shapes(e.steps[1][0]) == [(1, count)]
    assert (e.prefilled, e.decoded) == (before, count + 1)


def test_one_token_more_is_a_prefill(engine):
    e = engine(chunk=256)
    e.pool.add("a", prompt(256 + LONGEST + 1), 2)
    e.run()
    assert (e.prefilled, e.decoded) == (256 + LONGEST + 1, 1)


@RUNNERS
@pytest.mark.parametrize("fmt", ["c4r4", "c2r4"])
@pytest.mark.parametrize("count", [N + 1, 2 * N - 1, 2 * N, 2 * N + 1, LONGEST])
@pytest.mark.parametrize("before", [N, 127, 192, 193, 256, 700])
def test_longer_ones_are_read_in_pieces(engine, runner, fmt, count, before):
    """Every query as if its piece had been a step: the border moves from one to the next."""
    e = engine(fmt, chunk=before if before > LONGEST else 1024, runner=runner)
    threshold = before if before <= LONGEST else 0
    e.pool.scheduler.scheduler_config.long_prefill_token_threshold = threshold
    e.pool.add("a", prompt(before), 1)
    e.run()
    e.pool.scheduler.scheduler_config.long_prefill_token_threshold = 0
    e.pool.add("b", prompt(before // N * N) + prompt(count, 1), 2)
    read = e.prefilled
    e.run()
    new = [n for m, n in e.steps if n[0] > 1][-1][0]
    whole = before // N * N - e.hits["b"] + count
    assert new == whole
    assert e.prefilled - read == (new if new > LONGEST else 0)
    if new <= LONGEST:
        pieces = -(-new // N)
        assert sum(batch for batch, _ in shapes(e.steps[-2][0])) == pieces


@RUNNERS
def test_pieces_beside_decodes_drafts_and_prompts(engine, runner):
    e = engine(chunk=400, drafts=3, runner=runner, pages=500)
    e.draft = lambda request: prompt(int(torch.randint(4, ())), request.num_tokens)
    shared = prompt(640)
    e.pool.add("first", shared, 60)
    for _ in range(4):
        e.step()
    for i in range(4):
        e.pool.add(f"{i}", shared + prompt(70 + 40 * i, i), 30)
    e.pool.add("long", prompt(500, 9), 5)
    e.run()
    divided = [m[0] for m, n in e.steps if m[0].calls and any(N < x <= LONGEST for x in n)]
    assert any(call.after is not None for m in divided for call in m.calls)


def test_without_context_they_are_prompts(engine):
    e = engine(chunk=512)
    for i, length in enumerate((65, 128, 191)):
        e.pool.add(f"{i}", prompt(length, i), 1)
    e.run()
    assert (e.prefilled, e.decoded) == (65 + 128 + 191, 0)


@RUNNERS
@pytest.mark.parametrize("fmt", ["c4r4", "c2r4"])
def test_prompts_begin_without_context_beside_decodes_and_a_remainder(engine, runner, fmt):
    """The job that this is for: what decodes take of a step is left over of its last prompt."""
    e = engine(fmt, chunk=256, pages=400, runner=runner)
    for i in range(6):
        e.pool.add(f"{i}", prompt(128, i), 40)
    e.run()
    begin = [(m, sorted(n)) for m, n in e.steps[:4]]
    assert [n for _, n in begin] == [
        [128, 128],
        [1, 1, 126, 128],
        [1, 1, 1, 2, 123, 128],
        [1, 1, 1, 1, 1, 5],
    ]
    assert [shapes(m) for m, _ in begin] == [[], [(2, 1)], [(3, 1), (1, 2)], [(5, 1), (1, 5)]]
    prefills = [m[0].prefill for m, _ in begin]
    assert all(p.chunked_context is None for p in prefills[:3])
    assert prefills[3] is None


@RUNNERS
def test_chunks_of_different_lengths_side_by_side(engine, runner):
    e = engine(chunk=400, runner=runner, long_prefill_token_threshold=N)
    for i, length in enumerate((N + 5, N + 40, N + 17, 30, 2, 200)):
        e.pool.add(f"{i}", prompt(length, i), 5)
    e.run()
    assert e.prefilled == 0
    assert any(len(shapes(m)) == 1 and shapes(m)[0][0] == 6 for m, _ in e.steps)


@RUNNERS
def test_a_long_chunk_that_continues_takes_none_of_them_along(engine, runner):
    """A prompt's second part of more than LONGEST tokens has context; a shorter one has none."""
    e = engine(chunk=512, runner=runner, long_prefill_token_threshold=200)
    for i, length in enumerate((220, 500, 210)):
        e.pool.add(f"{i}", prompt(length, i), 3)
    e.run()
    second, tokens = e.steps[1]
    assert sorted(tokens) == [20, 98, 200] or sorted(tokens) == [10, 20, 200]
    assert len(second[0].context_lengths) == second[0].num_prefills
    assert second[0].num_decode_tokens == sum(n for n in tokens if n <= LONGEST)


@RUNNERS
@pytest.mark.parametrize("drafts", [1, 3])
def test_beside_drafts(engine, runner, drafts):
    """Drafts of any length are one call; a chunk longer than them is another."""
    e = engine(chunk=192, drafts=drafts, runner=runner, long_prefill_token_threshold=50)
    generator = torch.Generator().manual_seed(2)
    e.draft = lambda request: prompt(int(torch.randint(drafts + 1, (), generator=generator)))
    for i in range(5):
        e.pool.add(f"{i}", prompt(170 + 9 * i, i), 30)
    e.run()
    found = [shapes(m) for m, n in e.steps if drafts + 1 < max(n) <= N or m[0].calls]
    assert any(len(calls) == 2 for calls in found)
    for calls in found:
        assert all(length <= drafts + 1 for _, length in calls[:1] if len(calls) > 1)
    uniform = [m[0] for m, n in e.steps if set(n) in ({1}, {drafts + 1})]
    assert uniform
    assert all(m.calls is None for m in uniform)


@RUNNERS
@pytest.mark.parametrize("chunk", [40, N])
def test_a_reused_prefix_without_its_window(engine, runner, chunk):
    """Up to its end it is read packed, also by chunks that lie in what is computed again."""
    e = engine(chunk=1024, runner=runner)
    shared = prompt(640)
    e.pool.add("a", shared + prompt(300, 1), 1)
    e.run()
    e.pool.scheduler.scheduler_config.long_prefill_token_threshold = chunk
    read = e.prefilled
    e.pool.add("b", shared + prompt(30, 2), 70)
    e.run()
    assert (e.hits["b"], e.sequences["b"].window_start) == (512, 512)
    assert e.prefilled == read


@RUNNERS
def test_a_resumed_request_continues_with_a_short_chunk(engine, runner):
    """It may come before the decodes then, and is no less a chunk."""
    e = engine(pages=42, chunk=128, max_len=512, runner=runner)
    e.pool.scheduler.scheduler_config.long_prefill_token_threshold = 50
    requests = [e.pool.add("a", prompt(370), 100), e.pool.add("b", prompt(370, 1), 120)]
    e.run()
    assert sum(r.num_preemptions for r in requests) > 0
    assert [r.num_output_tokens for r in requests] == [100, 120]
    assert e.prefilled == 0


def test_rows_read_as_a_prefill_reads_them_would_be_noticed(engine):
    """Where the border moves within the chunk, the two paths differ by more than the tolerance."""
    from vllm_harness import TOLERANCE

    e = engine(chunk=250)
    e.pool.add("a", prompt(260), 1)
    e.run()
    tokens = torch.tensor(e.sequences["a"].tokens[250:260])
    query = e.query[tokens].view(10, 2, -1)
    decoded, prefilled = (e.expected("a", query, 250, 10, decode) for decode in (True, False))
    assert (decoded - prefilled).abs().max() > 4 * TOLERANCE * decoded.abs().max()
