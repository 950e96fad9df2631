"""What vLLM's own scheduler does with the benchmark's jobs, on a CPU and without a model."""

import pytest
from serve_jobs import DECODE, LARGE
from serve_play import play, row

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="vllm is not installed")


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    """The row of a job for a cache, of the scheduler alone; made once."""
    from serve_scheduler import SchedulerAlone

    made = {}

    def of(variant, job, layers):
        if (variant, job) not in made:
            engine = SchedulerAlone(variant, layers, job, tmp_path_factory.mktemp("model"))
            made[variant, job] = row(job, play(job, 0, engine, engine.clock), engine.ledger)
        return made[variant, job]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("packed", ["c4r4", "c2r4"])
def test_no_preemption_at_the_sizing_where_bf16_preempts(books, packed):
    """A pool 0.4 % smaller than the demand of 5 x (131,072 + 1,024) tokens."""
    job = LARGE[0]
    plain, ours = books("bf16", job, 5), books(packed, job, 5)
    assert plain["preemptions"] > 0
    assert plain["recomputed_tokens"] > 131_072
    assert ours["preemptions"] == ours["recomputed_tokens"] == 0
    assert ours["max_running"] == 5


@pytest.mark.slow
@pytest.mark.parametrize("packed", ["c4r4", "c2r4"])
def test_a_pool_of_less_than_two_requests_runs_one_in_bf16_and_six_packed(books, packed):
    job = DECODE[0]
    assert books("bf16", job, 2)["max_running"] == 1
    assert books(packed, job, 2)["max_running"] == 6
    assert books(packed, job, 2)["preemptions"] == 0
    assert 4 * books(packed, job, 2)["steps"] < books("bf16", job, 2)["steps"]


@pytest.mark.slow
def test_the_pool_holds_three_and_a_half_times_the_tokens(books):
    """Tokens over blocks' bytes at the fullest step, five requests of 132,096 tokens in decode."""
    plain, ours = (books(variant, LARGE[0], 5) for variant in ("bf16", "c4r4"))
    bytes_of = {"bf16": 16 * 1152, "c4r4": 64 * 320}
    held = {
        name: found["peak_tokens"] / (found["peak_blocks"] * bytes_of[name])
        for name, found in (("bf16", plain), ("c4r4", ours))
    }
    assert held["c4r4"] / held["bf16"] >= 3.5
