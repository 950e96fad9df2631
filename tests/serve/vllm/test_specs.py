"""vLLM's real scheduler and cache manager over the plugin's specs, without a model.

DeepSeek-V2-Lite's cache: 27 layers, a latent of 512 and a rope key of 64.
"""

import pickle
from itertools import pairwise
from random import Random
from types import SimpleNamespace

import pytest
import torch

from quantmla.quant.format import parse_format
from quantmla.serve.settings import MAX_DRAFTS
from quantmla.serve.vllm.pool import pool_layout

LAYERS = 3


def ids(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(512, (length,), generator=generator).tolist()


@pytest.fixture
def pool(cpu_vllm, tmp_path):
    from vllm.config import set_current_vllm_config
    from vllm_harness import Pool, model_config, vllm_config

    from quantmla.serve.vllm.layer import PackedAttention, WindowCache

    def make(pages, fmt="c4r4", layers=LAYERS, **changes):
        fmt = parse_format(fmt)
        config = vllm_config(model_config(tmp_path, fmt, layers=layers), **changes)
        layout = pool_layout(fmt, 512, 64)
        specs = {}
        with set_current_vllm_config(config):
            for i in range(layers):
                name = f"model.layers.{i}.self_attn.attn"
                window = WindowCache(f"{name}.window", layout)
                packed = SimpleNamespace(window=window)
                specs[name] = PackedAttention.get_kv_cache_spec(packed, config)
                specs[window.prefix] = window.get_kv_cache_spec(config)
        made = Pool(config, specs, pages)
        made.layout, made.names, made.specs = layout, list(specs), list(specs.values())
        return made

    return make


def step(pool, watch=None) -> dict[str, int]:
    """One step with made-up answers; `watch` sees the scheduler's output before it is settled."""
    output = pool.scheduler.schedule()
    counts = output.num_scheduled_tokens
    if watch is not None:
        watch(output)
    requests = pool.scheduler.requests
    whole = {r: requests[r].num_computed_tokens >= requests[r].num_tokens for r in counts}
    pool.finish(output, {r: [7] if whole[r] else [] for r in counts})
    return counts


def run(pool, watch=None) -> int:
    """Tokens that were scheduled until all requests ended."""
    total = 0
    while pool.scheduler.has_unfinished_requests():
        counts = step(pool, watch)
        assert counts, "stuck"
        total += sum(counts.values())
    return total


def run_behind(pool) -> int:
    """Tokens that were scheduled until all requests ended, with a step in flight."""
    total, outputs = 0, []
    while pool.scheduler.has_unfinished_requests():
        output = pool.scheduler.schedule()
        counts, alive = output.num_scheduled_tokens, pool.scheduler.requests
        total += sum(counts.values())
        outputs.append((output, {n: [] if alive[n].is_prefill_chunk else [7] for n in counts}))
        if len(outputs) > 1 or not counts:
            output, sampled = outputs.pop(0)
            if sampled:
                pool.finish(output, sampled)
    return total


def hit_of(pool, name, prompt, new=2) -> int:
    """Tokens of the prompt that were found in the cache; the request runs to its end."""
    pool.add(name, prompt, new)
    hits = []
    run(pool, lambda output: hits.extend(r.num_computed_tokens for r in output.scheduled_new_reqs))
    return hits[0]


@pytest.mark.parametrize(("fmt", "size"), [("c4r4", 16), ("c2r4", 8)])
def test_two_groups_share_one_pool(pool, fmt, size):
    made = pool(500, fmt)
    packed, window = (group.kv_cache_spec for group in made.kv.kv_cache_groups)
    assert packed.page_size_bytes == window.page_size_bytes == made.layout.page_bytes
    assert (packed.block_size, window.block_size) == (64, size)
    assert [len(group.layer_names) for group in made.kv.kv_cache_groups] == [LAYERS, LAYERS]
    assert sum(t.size for t in made.kv.kv_cache_tensors) == 500 * LAYERS * made.layout.page_bytes
    assert made.scheduler.block_size == 64


def test_specs_travel_between_processes(pool):
    for group in pool(500).kv.kv_cache_groups:
        spec = group.kv_cache_spec
        again = pickle.loads(pickle.dumps(spec))
        assert (type(again), again) == (type(spec), spec)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("fmt", ["c4r4", "c2r4"])
def test_what_vllm_says_of_the_pool_is_what_the_layout_says(pool, fmt, asynchronous):
    from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

    made = pool(9000, fmt, max_len=131_072, chunk=8192, async_scheduling=asynchronous)
    tokens, concurrency = get_kv_cache_capacity(made.config, made.kv)
    layout, batches = made.layout, made.config.max_concurrent_batches
    assert batches == (2 if asynchronous else 1)
    request = layout.packed_pages(131_072) + layout.window_pages(batches, 131_072) + 1
    assert concurrency == pytest.approx(9000 / request)
    assert tokens == int(9000 / request * 131_072)


@pytest.mark.parametrize("short_of_all", [1, 15, 40, 64])
@pytest.mark.parametrize("fmt", ["c4r4", "c2r4"])
def test_the_longest_prompt_that_vllm_lets_a_pool_be_made_for_runs(pool, fmt, short_of_all):
    """--max-model-len -1 takes the longest; a prompt that never runs would hold up all others."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    made = pool(2000, fmt, max_len=100_000, chunk=500, async_scheduling=True)
    specs = dict(zip(made.names, made.specs, strict=True))
    made.config.cache_config.num_gpu_blocks_override = None
    made.config.model_config.original_max_model_len = -1
    get_kv_cache_configs(made.config, [specs], [200 * LAYERS * made.layout.page_bytes])
    longest = made.config.model_config.max_model_len
    packed = made.layout.packed_pages(longest)
    assert packed + made.layout.window_pages(2, longest) == 199  # one is vLLM's own
    made = pool(200, fmt, max_len=longest, chunk=500, async_scheduling=True)
    requests = [made.add("long", ids(longest - short_of_all), 1), made.add("short", ids(20), 1)]
    run_behind(made)
    assert all(r.num_output_tokens == 1 for r in requests)
    assert sum(r.num_preemptions for r in requests) == 0


@pytest.mark.parametrize("answer", [500, 3000])
@pytest.mark.parametrize(("fmt", "pages"), [("c4r4", 420), ("c2r4", 620)])
def test_a_long_answer_leaves_other_prefixes_in_a_pool_that_holds_them(pool, fmt, pages, answer):
    """Its window pages are several for each packed one, and nobody asks for them again."""
    made = pool(pages, fmt, max_len=6000, chunk=2048)
    prompts = [ids(1025, seed) for seed in range(10)]
    for i, prompt in enumerate(prompts):
        made.add(f"first {i}", prompt, 1)
        run(made)
    made.add("long", ids(64, 11), answer)
    run(made)
    for i, prompt in enumerate(prompts):
        assert hit_of(made, f"again {i}", prompt[:1024] + ids(10, 12)) == 1024


def test_a_long_prompt_takes_window_pages_only_at_its_end(pool):
    made = pool(1200, max_len=32_768, chunk=8192)
    made.add("a", ids(30_000), 3)
    most = 0

    def watch(output):
        nonlocal most
        blocks = made.window_blocks.req_to_blocks["a"]
        held = [i for i, b in enumerate(blocks) if not b.is_null]
        most = max(most, len(held))
        computed = made.scheduler.requests["a"].num_computed_tokens
        assert held[0] == 0, "the sinks are kept"
        needed = range(made.layout.fmt.first_recent(computed) // 16, -(-computed // 16))
        assert set(needed) <= set(held)

    run(made, watch)
    assert most <= made.layout.window_pages(1, 32_768)
    assert made.scheduler.kv_cache_manager.usage == 0


@pytest.mark.parametrize(("fmt", "size"), [("c4r4", 16), ("c2r4", 8)])
def test_a_chunk_keeps_what_is_read_where_drafts_are_taken_back(pool, fmt, size):
    """A step that ends with tokens that may not stay leaves the window of the fewest that do."""
    made = pool(400, fmt, max_len=8192)
    manager = made.window_blocks
    for tokens in range(900, 964):
        manager.allocate_new_blocks("a", tokens, tokens)
        blocks = manager.req_to_blocks["a"]
        real = [i for i, block in enumerate(blocks) if not block.is_null]
        assert 0 in real, "the sinks are kept"
        first = made.layout.fmt.first_recent(tokens - MAX_DRAFTS) // size
        assert set(range(first, -(-tokens // size))) <= set(real)
        assert len(real) <= made.layout.window_pages(0, 8192)
        manager.free("a")


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize(("fmt", "size"), [("c4r4", 16), ("c2r4", 8)])
def test_window_pages_come_and_go_with_packed_pages(pool, fmt, size, in_flight):
    """A decode holds 192 tokens, the window of the next packed page among them, and its sinks.

    What a step in flight reads is kept; the pages after it are then taken in two parts.
    """
    made = pool(400, fmt, max_len=8192, chunk=512, async_scheduling=in_flight > 0)
    request = made.add("a", ids(100), 1000)
    outputs, held, tables = [], [], []
    while made.scheduler.has_unfinished_requests():
        outputs.append(made.scheduler.schedule())
        table = [block.block_id for block in made.window_blocks.req_to_blocks["a"]]
        read = made.layout.fmt.first_recent(request.num_computed_tokens - in_flight) // size
        assert 0 not in [table[0], *table[read:]]
        if 300 < request.num_computed_tokens < 1080:
            held.append(sum(page != 0 for page in table))
            tables.append(table)
        if len(outputs) > in_flight or request.num_computed_tokens >= 1099:
            output = outputs.pop(0)
            made.finish(output, {name: [7] for name in output.num_scheduled_tokens})
    most = 192 // size + 1
    assert len(held) == 779
    assert set(held) == set(range(most, most + 1 + in_flight))
    changes = sum(one != other for one, other in pairwise(tables))
    assert changes <= (1 + 2 * in_flight) * (len(tables) / 64 + 1)


@pytest.mark.parametrize("fmt", ["c4r4", "c2r4"])
def test_a_full_pool_computes_little_twice(pool, fmt):
    """With steps in flight, room that a decode is about to take is not given to another request."""
    random = Random(1)
    made = pool(400, fmt, chunk=1024, async_scheduling=True, caching=False, max_num_seqs=64)
    requests = [
        made.add(f"{i}", ids(random.randrange(200, 900), i), random.randrange(200, 500))
        for i in range(60)
    ]
    assert run_behind(made) < 1.25 * sum(request.num_tokens - 1 for request in requests)


@pytest.mark.parametrize("fmt", ["c4r4", "c2r4"])
@pytest.mark.parametrize("spare", range(20, 64, 4))
def test_a_prompt_is_let_in_where_all_its_chunks_fit(pool, fmt, spare):
    """Between them it holds more than at its end, and would preempt itself again and again."""
    layout = pool_layout(parse_format(fmt), 512, 64)
    pages = layout.packed_pages(33_000) + layout.window_pages(2, 33_000) + spare
    made = pool(pages, fmt, 1, max_len=33_000, chunk=8192, async_scheduling=True, caching=False)
    made.add("a", ids(4000, 1), 2500)
    made.add("b", ids(32_000, 2), 4)
    assert run_behind(made) == 4000 + 2499 + 32_000 + 3


@pytest.mark.parametrize("fmt", ["c4r4", "c2r4"])
@pytest.mark.parametrize("share", [2.75, 3.0, 3.75, 4.25])
def test_prompts_in_chunks_are_computed_about_once(pool, fmt, share):
    size = {"c4r4": 104 + 14, "c2r4": 104 + 26}[fmt]
    settings = {"chunk": 1024, "max_len": 8192, "caching": False, "max_num_seqs": 16}
    made = pool(int(share * size), fmt, 1, async_scheduling=True, **settings)
    requests = [made.add(f"{i}", ids(6000 - 37 * i, i), 100) for i in range(8)]
    assert run_behind(made) < 1.1 * sum(request.num_tokens - 1 for request in requests)


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("fmt", ["c4r4", "c2r4"])
def test_the_answers_case_of_preempted_requests_preempts(pool, fmt, in_flight):
    """On a GPU it says that nothing was, at the cost of the engine's start."""
    from answers_collect import BATCHED_TOKENS, PREEMPTED, blocks_to_preempt

    blocks = blocks_to_preempt(pool_layout(parse_format(fmt), 512, 64).window_page_size)
    settings = {"max_len": 4096, "chunk": BATCHED_TOKENS, "max_num_seqs": 8}
    made = pool(blocks + 400, fmt, 1, async_scheduling=in_flight, **settings)
    made.scheduler.kv_cache_manager.block_pool.get_new_blocks(400)
    prompt, answer = PREEMPTED
    requests = [made.add(f"{i}", ids(prompt, i), answer) for i in range(4)]
    run_behind(made) if in_flight else run(made)
    assert sum(request.num_preemptions for request in requests) > 0
    assert all(request.num_output_tokens == answer for request in requests)


def test_tiny_requests_hold_what_they_need(pool):
    made = pool(150, max_len=512, chunk=256, caching=False, max_num_seqs=64)
    for i in range(60):
        made.add(f"{i}", ids(20, i), 20)
    running = []
    run(made, lambda _: running.append(len(made.scheduler.running)))
    assert max(running) > 35  # of four window pages each, 149 pages would hold 29


@pytest.mark.parametrize("longest", [333, 320, 383])
@pytest.mark.parametrize(("fmt", "size"), [("c4r4", 16), ("c2r4", 8)])
@pytest.mark.parametrize("shortened", [False, True])
def test_no_page_is_taken_beyond_the_longest_sequence(pool, fmt, size, longest, shortened):
    """Tables have whole packed pages, also of a length that vLLM fits to the memory it finds."""
    made = pool(200, fmt, max_len=2048 if shortened else longest, chunk=128)
    spec = made.kv.kv_cache_groups[1].kv_cache_spec
    made.add("a", ids(200), longest - 200)
    most = 0

    def watch(_):
        nonlocal most
        most = max(most, len(made.window_blocks.req_to_blocks["a"]))

    run(made, watch)
    table = spec.max_num_blocks_per_req(made.config, longest)
    assert most == table == -(-longest // 64) * 64 // size


def test_a_pool_for_one_request_serves_one_after_the_other(pool):
    """Admission counts what a request will hold, so that the second waits instead of preempting."""
    layout = pool_layout(parse_format("c4r4"), 512, 64)
    pages = layout.packed_pages(4096) + layout.window_pages(1, 4096) + 1
    made = pool(pages, max_len=4096, chunk=1024, caching=False)
    requests = [made.add(f"{i}", ids(4000, i), 96) for i in range(3)]
    running = []
    total = run(made, lambda _: running.append(len(made.scheduler.running)))
    assert max(running) == 1
    assert total == 3 * 4095
    assert sum(r.num_preemptions for r in requests) == 0


def test_preempted_requests_find_their_pages_again(pool):
    made = pool(110, max_len=2048, chunk=512)
    requests = [made.add(f"{i}", ids(1000, i), 1000) for i in range(4)]
    run(made)
    assert sum(r.num_preemptions for r in requests) > 0
    assert all(r.num_output_tokens == 1000 for r in requests)
    assert made.scheduler.kv_cache_manager.usage == 0


def test_a_turn_continues_where_the_last_one_ended(pool):
    made = pool(500)
    first = made.add("a", ids(640), 200)
    run(made)
    said = list(first.all_token_ids)
    assert hit_of(made, "b", said + ids(30, 1)) == (len(said) - 1) // 64 * 64
    assert hit_of(made, "c", said[:640] + ids(30, 2)) == 640  # the end of the prompt, kept too


def test_a_prefix_that_ended_within_a_chunk_is_used_but_for_its_window(pool):
    made = pool(500, chunk=2048)
    shared = ids(1024)
    assert hit_of(made, "a", shared + ids(600, 1)) == 0
    assert hit_of(made, "b", shared + ids(500, 2)) == 1024 - 128
    assert hit_of(made, "c", shared + ids(500, 3)) == 1024 - 128
    assert hit_of(made, "d", shared[:128] + ids(500, 4)) == 0


def test_no_hit_without_sinks(pool):
    made = pool(500)
    shared = ids(640)
    hit_of(made, "a", shared)
    manager = made.scheduler.kv_cache_manager
    sink = next(
        b
        for b in manager.block_pool.blocks
        if b.block_hash is not None and b.block_hash_num_tokens == 16
    )
    manager.block_pool.evict_blocks({sink.block_id})
    assert hit_of(made, "b", shared + ids(10, 1)) == 0


def test_sinks_survive_sparse_retention(pool, monkeypatch):
    import vllm.envs as envs

    monkeypatch.setattr(envs, "VLLM_PREFIX_CACHE_RETENTION_INTERVAL", 512, raising=False)
    made = pool(500, chunk=256)
    shared = ids(1024)
    hit_of(made, "a", shared + ids(100, 1))
    assert hit_of(made, "b", shared + ids(90, 2)) >= 512


@pytest.mark.parametrize("pages", [70, 90, 200])
def test_a_tight_pool_keeps_its_books(pool, pages):
    """Many requests with shared prefixes: evictions, hits and preemptions, nothing leaks."""
    made = pool(pages, max_len=2048, chunk=256)
    shared = ids(320)
    requests = [made.add(f"{i}", shared + ids(50 + 37 * i, i + 1), 60) for i in range(12)]
    run(made)
    assert all(r.num_output_tokens == 60 for r in requests)
    manager = made.scheduler.kv_cache_manager
    assert manager.usage == 0
    assert not made.window_blocks.cleared
    assert not made.window_blocks.req_to_blocks


@pytest.mark.parametrize(("chunked", "third"), [(True, 112), (False, None)])
def test_without_chunked_prefill_no_prompt_is_cut_where_a_step_is_full(pool, chunked, third):
    """`eval --engine vllm` asks for that: a cut prompt would read its beginning quantised."""
    settings = {"chunk": 512, "max_len": 512, "caching": False}
    made = pool(640, **settings, enable_chunked_prefill=chunked)
    for name in "abc":
        made.add(name, ids(200), new=2)
    counts = step(made)
    assert (counts["a"], counts["b"], counts.get("c")) == (200, 200, third)
    assert step(made)["c"] == 200 - (third or 0)


@pytest.mark.parametrize("fmt", ["c4r4", "c2r4"])
def test_stages_of_a_pipeline_have_the_same_groups_and_pages(pool, fmt):
    """vLLM divides layers over workers and gives all of them the smallest pool."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    made = pool(500, fmt, layers=5)
    config = made.config
    specs = dict(zip(made.names, made.specs, strict=True))
    stages = [
        {name: spec for name, spec in specs.items() if int(name.split(".")[2]) in layers}
        for layers in (range(3), range(3, 5))
    ]
    config.cache_config.num_gpu_blocks_override = None
    object.__setattr__(config.parallel_config, "pipeline_parallel_size", 2)
    first, second = get_kv_cache_configs(config, stages, [1 << 30] * 2)
    kinds = [[type(g.kv_cache_spec) for g in stage.kv_cache_groups] for stage in (first, second)]
    assert kinds[0] == kinds[1]
    assert [len(g.layer_names) for g in first.kv_cache_groups] == [3, 3]
    assert [len(g.layer_names) for g in second.kv_cache_groups] == [2, 2]
    assert first.num_blocks == second.num_blocks == (1 << 30) // (3 * made.layout.page_bytes)
