"""Every query of every step against float64, through vLLM's scheduler, builders and layer."""

import pytest
import torch


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(512, (length,), generator=generator).tolist()


def outputs(engine, name):
    found = engine.outputs[name]
    return torch.stack([found[t] for t in sorted(found)])


@pytest.mark.parametrize("fmt", ["c4r4", "c2r4", "c8r8"])
def test_prompts_in_chunks_and_mixed_batches(engine, fmt):
    e = engine(fmt, chunk=256)
    for i, (length, new) in enumerate([(500, 12), (300, 40), (5, 70), (63, 2), (64, 2), (65, 2)]):
        e.pool.add(f"{i}", prompt(length, i), new)
    e.run()
    assert e.decoded > 110
    assert e.prefilled > 800


@pytest.mark.parametrize("runner", [1, 2])
def test_a_prompt_that_begins_before_one_that_goes_on(engine, runner):
    """Runner 2 orders prompts by their tokens; vLLM's merge wants those with context first.

    In the second step "b" goes on with 256 tokens after 128, and 255 of "c" are its first.
    """
    e = engine(chunk=512, runner=runner)
    for i, name in enumerate("abc"):
        e.pool.add(name, prompt(384, i), 2)
    e.run()
    assert e.worst < 1e-5


@pytest.mark.parametrize("workspace", [128, 320])
def test_context_larger_than_the_workspace_is_read_in_parts(engine, workspace):
    """Contexts of different lengths, so that some end before the last part."""
    e = engine(chunk=256)
    e.builders[0].chunked_prefill_workspace_size = workspace
    e.pool.add("a", prompt(600), 2)
    for i in range(2):
        e.pool.add(f"{i}", prompt(300 + i, i), 2)
    e.run()
    assert e.worst < 1e-5


def test_without_prefix_caching(engine):
    e = engine(chunk=256, caching=False)
    e.pool.add("a", prompt(300), 20)
    e.pool.add("b", prompt(300), 20)
    e.run()
    assert not any(e.hits.values())


@pytest.mark.parametrize("chunk", [1, 63, 64, 127, 300])
def test_any_chunk_size_gives_the_same_pages(engine, chunk):
    """Bytes are compared page by page in `_check_pages`."""
    e = engine(chunk=320, long_prefill_token_threshold=chunk)
    e.pool.add("a", prompt(270), 3)
    e.run()
    assert sorted(e.outputs["a"]) == list(range(272))


def test_a_second_turn_reads_what_the_first_one_left(engine):
    """A hit at the end of what was computed keeps bf16 rows: nothing is computed again."""
    e = engine()
    first = e.pool.add("a", prompt(400), 100)
    e.run()
    said = list(first.all_token_ids)
    e.pool.add("b", said + prompt(50, 1), 10)
    e.run()
    assert e.hits["b"] == 448
    assert e.sequences["b"].window_start == 0


def test_a_shared_prefix_within_a_chunk_is_shortened_by_the_window(engine):
    e = engine(chunk=1024)
    shared = prompt(640)
    e.pool.add("a", shared + prompt(300, 1), 5)
    e.run()
    e.pool.add("b", shared + prompt(200, 2), 5)
    e.run()
    assert e.hits["b"] == 512
    assert e.sequences["b"].window_start == 512


def test_what_follows_a_shortened_hit_sees_its_window_in_bf16(engine):
    """Also where the tokens that are computed again arrive a few at a time."""
    e = engine(chunk=1024)
    shared = prompt(640)
    e.pool.add("a", shared + prompt(300, 1), 1)
    e.run()
    e.pool.scheduler.scheduler_config.long_prefill_token_threshold = 1
    e.pool.add("b", shared + prompt(3, 2), 3)
    e.run()
    assert e.sequences["b"].window_start == 512
    assert e.hits["b"] == 512
    last = e.expected(
        "b", e.query[torch.tensor(e.sequences["b"].tokens[-1:])].view(1, 2, -1), 644, 1, True
    )
    e.sequences["b"].window_start = 0
    again = e.expected(
        "b", e.query[torch.tensor(e.sequences["b"].tokens[-1:])].view(1, 2, -1), 644, 1, True
    )
    assert torch.equal(last, again)  # the border no longer matters


def test_a_preempted_request_resumes_on_the_pages_that_are_left(engine):
    e = engine(pages=38, chunk=128, max_len=512)
    requests = [e.pool.add("a", prompt(150), 250), e.pool.add("b", prompt(150, 1), 270)]
    e.run()
    assert [r.num_preemptions for r in requests] == [0, 1]
    assert [r.num_output_tokens for r in requests] == [250, 270]
    assert e.hits["b"] >= 64


@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_drafts_are_verified_in_one_step(engine, drafts):
    """Some of what is proposed is wrong; some requests propose nothing, some too little.

    A page that a draft completes is packed again when the right token comes: bytes are compared.
    """
    plain = engine(chunk=256)
    wanted = [plain.pool.add(f"{i}", prompt(90 + 50 * i, i), 60) for i in range(3)]
    plain.run()
    e = engine(chunk=512, drafts=drafts)
    says = {f"{i}": list(r.output_token_ids) for i, r in enumerate(wanted)}
    generator = torch.Generator().manual_seed(8)

    def draft(request):
        start = request.num_output_tokens
        right = says[request.request_id][start : start + drafts]
        if torch.rand((), generator=generator) < 0.3:
            right = right[: len(right) // 2] + [(t + 1) % 512 for t in right[len(right) // 2 :]]
        return right[: int(torch.randint(drafts + 1, (), generator=generator))]

    e.draft = draft
    got = [e.pool.add(f"{i}", prompt(90 + 50 * i, i), 60) for i in range(3)]
    e.run()
    assert all(r.num_output_tokens == 60 for r in got)
    assert e.taken > 10, "hardly a draft was right"
    assert e.prefilled == sum(r.num_prompt_tokens for r in got), "a decode was read as a prompt"


@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize("drafts", [0, 3])
def test_steps_are_scheduled_before_what_the_last_one_gave_is_known(engine, runner, drafts):
    """vLLM's default; of drafts, the scheduler takes all for right until it hears otherwise."""
    changes = {"pages": 42, "chunk": 128, "max_len": 512, "caching": runner == 1}
    e = engine(runner=runner, drafts=drafts, async_scheduling=True, **changes)
    generator = torch.Generator().manual_seed(8)
    e.draft = lambda request: prompt(drafts, int(torch.randint(99, (), generator=generator)))
    lengths = [(370, 30), (150, 260), (150, 250), (64, 50), (3, 20)]
    requests = [e.pool.add(f"{i}", prompt(n, i), new) for i, (n, new) in enumerate(lengths)]
    e.run()
    assert sum(r.num_preemptions for r in requests) > 0
    assert [r.num_output_tokens for r in requests] == [new for _, new in lengths]


def test_a_long_answer_moves_through_the_pool(engine):
    """Window pages are freed behind it, sinks stay, evicted pages are used again."""
    e = engine(pages=46, chunk=128, max_len=1024)
    e.pool.add("a", prompt(100), 400)
    held = []
    while e.pool.scheduler.has_unfinished_requests():
        e.step()
        blocks = e.pool.window_blocks.req_to_blocks.get("a", [])
        held.append(sum(not b.is_null for b in blocks))
        assert not blocks or not blocks[0].is_null
    assert max(held) <= e.layout.window_pages(1, 1024)
    assert held[-2] <= 192 // 16 + 2


def test_wrong_rows_would_be_noticed(engine):
    """The tolerance tells a row read packed from the same row read in bf16."""
    e = engine()
    e.pool.add("a", prompt(300), 2)
    e.step()
    query = e.query[torch.tensor([5])].view(1, 2, -1)
    want = e.expected("a", query, 255, 1, True)
    e.sequences["a"].window_start = 192
    other = e.expected("a", query, 255, 1, True)
    assert (want - other).abs().max() / want.abs().max() > 4 * 2.5e-4
