"""Jobs of the serving benchmark: their books, and what is left to do after an interruption."""

import os
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import serve_lanes
from bench_serve import by_core, drive, environment, lots, main, missing, only, share, visible
from serve_jobs import DECODE, GROUPS, LARGE, PRESSURE, VARIANTS, Group, Job, smaller, warm_ups
from serve_lanes import Engine, Task, expected_wall, run_lane
from serve_play import Delivery, Ledger, play, row

CHAT = Job(
    name="chats", requests=2, prompt=3, output=2, turns=2, shared=4, pool_tokens=100, repeats=2
)


class OneTokenEach:
    """An engine that gives every request a token a second."""

    def __init__(self):
        self.now, self.open, self.prompts = 0.0, {}, {}

    def add(self, request, prompt, output, prefix_caching):
        self.open[request], self.prompts[request] = output, prompt

    def busy(self):
        return bool(self.open)

    def step(self):
        self.now += 1.0
        self.open = {name: left - 1 for name, left in self.open.items()}
        done = [name for name, left in self.open.items() if not left]
        given = [Delivery(n, 1, n in done, [7, 8] if n in done else []) for n in self.open]
        for name in done:
            del self.open[name]
        return given


def test_a_turn_begins_with_all_that_was_said():
    engine = OneTokenEach()
    times = play(CHAT, 0, engine, lambda: engine.now)
    first, second = engine.prompts["0/0"], engine.prompts["0/1"]
    assert len(first) == 7
    assert second[:9] == [*first, 7, 8]
    assert first[:4] == engine.prompts["1/0"][:4]
    assert first[4:] != engine.prompts["1/0"][4:]
    assert (times.wall, times.output_tokens) == (4.0, 8)
    assert times.first == times.per_token == times.gaps == [1.0] * 4
    found = row(CHAT, times, Ledger())
    assert (found["output_tok_s"], found["ttft_p50"], found["tpot_p99"]) == (2.0, 1.0, 1.0)


def test_repeats_have_other_prompts_and_variants_the_same():
    assert CHAT.questions(0) == CHAT.questions(0)
    assert CHAT.questions(0) != CHAT.questions(1)


def decision(new=(), cached=(), preempted=()):
    """A scheduler's output: requests as (name, first token, tokens)."""
    return SimpleNamespace(
        total_num_scheduled_tokens=sum(n for _, _, n in (*new, *cached)),
        num_scheduled_tokens={name: n for name, _, n in (*new, *cached)},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=start) for name, start, _ in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _, _ in cached],
            num_computed_tokens=[start for _, start, _ in cached],
        ),
        preempted_req_ids=set(preempted),
    )


def scheduler(*computed, blocks=20, free=5):
    pool = SimpleNamespace(num_gpu_blocks=blocks, get_num_free_blocks=lambda: free)
    return SimpleNamespace(
        running=[SimpleNamespace(num_computed_tokens=n) for n in computed],
        kv_cache_manager=SimpleNamespace(block_pool=pool),
    )


def test_tokens_that_are_computed_again_are_counted():
    ledger = Ledger()
    ledger.observe(decision(new=[("0/0", 0, 8)]), scheduler(8), 4)
    ledger.observe(decision(cached=[("0/0", 8, 1)], new=[("1/0", 0, 6)]), scheduler(9, 6), 4)
    ledger.observe(decision(cached=[("0/0", 9, 1)], preempted=["1/0"]), scheduler(10), 4)
    assert ledger.recomputed_tokens == 0
    ledger.observe(decision(cached=[("1/0", 2, 5)]), scheduler(10, 7), 4)  # 2 of 6 were cached
    assert ledger.recomputed_tokens == 4
    ledger.observe(decision(new=[("0/1", 6, 9)]), scheduler(15), 4)  # the next turn, 6 of 10 cached
    assert ledger.recomputed_tokens == 8
    assert (ledger.steps, ledger.preemptions, ledger.max_running) == (5, 1, 2)
    assert ledger.reused_tokens == 6
    assert (ledger.peak_tokens, ledger.peak_blocks) == (17, 20 - 1 - 4 - 5)


def test_rows_that_are_there_are_not_made_again():
    group = Group(name=GROUPS[0].name, layers=2, jobs=(DECODE[2],))
    engine, other = Engine(group, "bf16"), Engine(group, "c4r4")
    done = {"job": DECODE[2].name, "layers": 2, "variant": "bf16", "repeat": 0, "wall": 3.0}
    assert [task.repeat for task in missing([engine], [])] == [0, 1, 2]
    assert [task.repeat for task in missing([engine], [done])] == [1, 2]
    assert [task.repeat for task in missing([other], [done])] == [0, 1, 2]
    assert len(missing([engine], [done | {"layers": 5}])) == 3, "rows of another model"
    assert expected_wall(Task(other, DECODE[2], 0), [done]) == 3.0
    assert expected_wall(Task(other, DECODE[0], 0), [done]) == 0.0
    assert expected_wall(Task(other, DECODE[2], 0), [done | {"layers": 5}]) == 0.0


def test_some_jobs_alone():
    group = only(GROUPS[0], [DECODE[3].name, "another"])
    assert (group.name, group.jobs, group.layers) == (GROUPS[0].name, (DECODE[3],), 27)
    assert only(GROUPS[0], [DECODE[3].name], layers=5) == replace(group, layers=5)
    tasks = missing([Engine(group, "c4r4")], [])
    assert [(task.job, task.repeat) for task in tasks] == [(DECODE[3], i) for i in range(3)]


def test_a_gpu_runs_as_many_engines_as_it_holds(monkeypatch):
    """Weights and pools of those that run side by side; what is left of time is divided."""
    weights, other, gpu = 31.4e9, 4e9, 143_771 * 2**20
    for group in GROUPS:
        engines = [Engine(group, variant) for variant in VARIANTS]
        found = []
        monkeypatch.setattr("time.time", lambda: 100.0)
        for lot, until in lots(engines, 1000.0):
            assert len(lot) * (weights + other + group.cache_bytes) < gpu
            found.append((list(lot), until))
            monkeypatch.setattr("time.time", lambda: 300.0)  # the first lot ends early
        assert [engine for lot, _ in found for engine in lot] == engines
        ends = [1000.0] if group.side_by_side == 3 else [700.0, 1000.0]
        assert [until for _, until in found] == pytest.approx(ends)
        assert list(lots(engines, 299.0)) == []  # time is over


def test_musts_come_first_then_a_row_of_everything():
    engines = [Engine(group, variant) for group in GROUPS for variant in VARIANTS]
    tasks = missing(engines, [])
    assert len(set(tasks)) == len(tasks) == sum(3 * j.repeats for g in GROUPS for j in g.jobs)
    musts = {job.name for group in GROUPS for job in group.jobs if job.must}
    first = tasks[: 3 * len(musts)]
    assert [t.engine.variant for t in first] == [*VARIANTS] * len(musts)
    assert {(t.job.name, t.repeat) for t in first} == {(name, 0) for name in musts}
    count = sum(3 * job.repeats for group in GROUPS for job in group.jobs if job.must)
    assert {t.job.name for t in tasks[:count]} == musts
    others = sum(len(group.jobs) for group in GROUPS) - len(musts)
    assert {t.repeat for t in tasks[count : count + 3 * others]} == {0}
    turns = [t.engine.variant for t in tasks]
    assert turns == [*VARIANTS] * (len(tasks) // 3)  # always next to one another


class Deaf:
    """A worker that answers at once, or is gone at its second job."""

    def __init__(self, dies):
        self.name, self.state, self.dies, self.asked = "w", "ready", dies, 0

    def ask(self, task, until):
        self.asked += 1
        if self.dies and self.asked == 2:
            self.state = "gone"
            return None
        row = {"job": task.job.name, "layers": task.engine.group.layers, "wall": 50.0}
        return row | {"variant": task.engine.variant}

    def stop(self):
        self.state = "gone"


def test_a_lane_goes_on_without_an_engine_and_begins_nothing_too_late():
    group = GROUPS[0]
    engines = [Engine(group, variant) for variant in ("bf16", "c4r4")]
    workers = {engines[0]: Deaf(dies=True), engines[1]: Deaf(dies=False)}
    rows = []
    tasks = missing(engines, [])
    run_lane(workers, tasks, time.time() + 3000, lambda: rows, rows.append)
    assert [row["variant"] for row in rows].count("bf16") == 1
    assert [row["variant"] for row in rows].count("c4r4") == sum(j.repeats for j in group.jobs)
    late = {engine: Deaf(dies=False) for engine in engines}
    rows.clear()
    run_lane(late, tasks, time.time() + 20, lambda: rows, rows.append)
    assert [(row["job"], row["variant"]) for row in rows] == [
        (job.name, "bf16") for must in (True, False) for job in group.jobs if job.must is must
    ]


@pytest.mark.parametrize("job", [*DECODE, *PRESSURE, *LARGE], ids=lambda job: job.name)
def test_pools_are_what_their_jobs_say(job):
    (group,) = (group for group in GROUPS if job in group.jobs)
    wanted = job.pool_bytes(group.layers)
    assert wanted is None or wanted <= group.cache_bytes
    assert job.pool_tokens is None or job.pool_tokens >= job.longest  # one request fits
    demand = job.requests * job.longest
    if "short" in job.name:
        assert job.pool_tokens / demand == pytest.approx(0.996, abs=1e-4)
    if "pool of 1.77" in job.name:  # so that bf16 runs one request at a time
        assert job.pool_tokens < 2 * job.prompt


def test_a_shared_document_is_held_once():
    (questions,) = (job for job in DECODE if job.shared)
    assert questions.longest == 32_768 + 128 + 512
    assert questions.demand == 32_768 + 32 * (128 + 512 + 128)
    assert CHAT.demand == 4 + 2 * (2 * (3 + 2) + 128)


def test_gpus_share_the_cpus():
    assert [share(range(10, 18), gpu, 2) for gpu in (0, 1)] == [range(10, 14), range(14, 18)]
    assert share([3], 0, 2) == share([3], 1, 2) == [3]


def test_threads_of_a_core_stay_together(tmp_path):
    """Linux often numbers the second threads of all cores after the first ones."""
    for cpu in range(8):
        place = tmp_path / f"cpu{cpu}" / "topology"
        place.mkdir(parents=True)
        (place / "core_id").write_text(f"{cpu % 4 % 2}\n")
        (place / "physical_package_id").write_text(f"{cpu % 4 // 2}\n")
    assert by_core({7, 6, 5, 4, 3, 2, 1, 0}, tmp_path) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert by_core([9, 8], tmp_path) == [8, 9]


@pytest.mark.parametrize("found", [None, object()])
def test_vllm_samples_by_itself_where_flashinfer_is_not_there(monkeypatch, found):
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    monkeypatch.setattr("bench_serve.find_spec", lambda _: found)
    wanted = "0" if found is None else None
    assert environment().get("VLLM_USE_FLASHINFER_SAMPLER") == wanted


def test_gpus_are_those_that_this_process_sees(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible(1) == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-5f")
    assert [visible(gpu) for gpu in (0, 1)] == ["3", "GPU-5f"]


def test_a_lane_that_breaks_ends_its_engines_and_is_said(tmp_path, monkeypatch):
    stopped = []

    class Idle(SimpleNamespace):
        name, state = "idle", "ready"

        def ask(self, task, until):
            return {"job": task.job.name, "wall": 0.0}

        def stop(self):
            stopped.append(self)

    def full(path, rows):
        raise OSError("no space left")

    monkeypatch.setattr("bench_serve.start", lambda *_: Idle())
    monkeypatch.setattr("bench_serve.write", full)
    options = SimpleNamespace(seconds=9.0, output=tmp_path / "rows.json", jobs=[DECODE[0].name])
    options.engines, options.gpus, options.layers = ["decode/bf16", "decode/c4r4"], 1, 27
    with pytest.raises(OSError, match="no space left"):
        drive(options, tmp_path)
    assert len(stopped) == 2


def test_trials_are_smaller():
    small = smaller(LARGE[0], 64)
    assert (small.prompt, small.output, small.requests) == (2048, 16, 5)
    first, *_, last = warm_ups(GROUPS[2])
    assert (first.prompt * 5 > 8192, first.requests) == (True, 5)
    assert (last.prompt, last.requests) == (131_072, 2)


WORKER = """
import json, sys
print("a log line")
print("@serve " + json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    name, repeat = json.loads(line)
    if repeat == 2:
        sys.exit(3)
    told = {"failed": "why"} if repeat else {"row": {"job": name, "wall": 1.0}}
    print("\\n@serve " + json.dumps(told), flush=True)
"""


def test_an_engine_s_process_is_heard(tmp_path, monkeypatch, capfd):
    """A row, a job that fails, an end in the middle of a job."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    monkeypatch.setattr(serve_lanes, "WORKER", script)
    engine = Engine(GROUPS[0], "bf16")
    worker = serve_lanes.Worker(engine, [], os.environ)
    rows = []
    tasks = [Task(engine, DECODE[0], repeat) for repeat in (0, 1, 2, 0)]
    run_lane({engine: worker}, tasks, time.time() + 600, lambda: [], rows.append)
    assert rows == [{"job": DECODE[0].name, "wall": 1.0}]
    printed = capfd.readouterr().out
    for part in ("decode bf16] a log line", "ready after", "failed: why", "exit code 3"):
        assert part in printed


LATE = """
import pathlib, sys, time
others_end = pathlib.Path(__file__).with_name("end")
while sys.argv[2] == "bf16" and not others_end.exists():
    time.sleep(0.05)
"""


def test_an_engine_that_starts_late_joins_the_others(tmp_path, monkeypatch):
    script = tmp_path / "worker.py"
    script.write_text(LATE + WORKER + f"    if name == {DECODE[1].name!r}: others_end.touch()\n")
    monkeypatch.setattr(serve_lanes, "WORKER", script)
    monkeypatch.setattr(serve_lanes, "START_SECONDS", 1)
    engines = [Engine(GROUPS[0], variant) for variant in ("bf16", "c4r4")]
    workers = {engine: serve_lanes.Worker(engine, [], os.environ) for engine in engines}
    tasks = [Task(engine, job, 0) for job in DECODE[:2] for engine in engines]
    rows = []
    run_lane(workers, tasks, time.time() + 600, lambda: [], rows.append)
    assert [row["job"] for row in rows] == [DECODE[0].name, DECODE[1].name] * 2


def test_an_engine_that_does_not_start_is_not_waited_for(tmp_path, monkeypatch):
    script = tmp_path / "worker.py"
    script.write_text("raise SystemExit(1)")
    monkeypatch.setattr(serve_lanes, "WORKER", script)
    engine = Engine(GROUPS[0], "bf16")
    worker = serve_lanes.Worker(engine, [], os.environ)
    began = time.time()
    run_lane({engine: worker}, [Task(engine, DECODE[0], 0)], began + 600, lambda: [], print)
    assert time.time() - began < 300


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seconds", "nan"], "'nan' is not a number of seconds above 0"),
        (["--seconds", "-1"], "'-1' is not a number of seconds above 0"),
        (["--gpus", "0"], "'0' is not a whole number of at least 1"),
        (["--shrink", "-5"], "'-5' is not a whole number of at least 1"),
        (["--layers", "0"], "'0' is not a whole number of at least 1"),
        (["--output", "none/rows.json"], "is not a file in a folder that exists"),
        (["--output", "other"], "'other' is no earlier result: name another file"),
    ],
    ids=" ".join,
)
def test_flags_that_cannot_be_meant_start_no_engine(
    arguments, words, tmp_path, monkeypatch, capsys
):
    def start(*_):
        raise AssertionError("an engine was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bench_serve.start", start)
    (tmp_path / "other").write_text("root:x:0:0")
    given = ["bench_serve.py", "--rehearse", "--output", "rows.json", *arguments]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit, match="2"):
        main()
    assert words in capsys.readouterr().err


def test_without_gpus_enough_no_engine_is_started(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["bench_serve.py", "--gpus", "2"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "needs 2 GPU(s), and torch sees 1" in capsys.readouterr().err
