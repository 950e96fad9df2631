"""Replaying an engine's steps with transformers: the steps, the tolerance, and that it can fail."""

import pytest
import torch
from answers_engines import unfused_nano
from answers_reference import (
    Pass,
    Step,
    _model,
    _together,
    differences,
    fault,
    history,
    log_probabilities,
    passes,
    truncated,
)

from quantmla.quant.format import CacheFormat, parse_format
from quantmla.serve.vllm.pool import SHORT_CHUNK, divided_chunk

FORMAT = parse_format("c2r4")


def request(name, prompt, answer, steps):
    return {"case": "any", "name": name, "prompt": prompt, "answer": answer, "steps": steps}


def test_steps_of_a_request_that_was_preempted():
    """Its first tokens came from the first pass, the others from the second."""
    steps = [(0, 3), (3, 1), (4, 1), (0, 2), (2, 4), (6, 1)]
    asked = [request("a", [1, 2, 3], [4, 5, 6, 7, 8], steps)]
    first, second = passes(asked, 0)
    assert first == ([(0, 3, 3), (3, 1, 1), (4, 1, 1)], 0)
    assert second == ([(0, 2, 2), (2, 4, 4), (6, 1, 1)], 5)
    assert history(asked, 0) == second.steps


def test_a_request_that_resumes_from_its_own_pages():
    steps = [(0, 4), (4, 1), (5, 1), (2, 4), (6, 1)]
    first, second = passes([request("a", [1, 2, 3, 4], [4, 5, 6, 7], steps)], 0)
    assert first == ([(0, 4, 4), (4, 1, 1), (5, 1, 1)], 0)
    assert second == ([(0, 2, 4), (2, 4, 4), (6, 1, 1)], 6)


def test_steps_of_drafts_that_were_refused():
    steps = [(0, 3), (3, 4), (5, 4), (9, 4)]
    found = history([request("a", [1, 2, 3], list(range(8)), steps)], 0)
    assert found == [(0, 3, 3), (3, 2, 4), (5, 4, 4), (9, 1, 4)]


def test_steps_of_a_prefix_are_those_that_computed_it():
    first = request("a", [1, 2, 3, 4], [5, 6], [(0, 3), (3, 1), (4, 1)])
    other = request("b", [1, 2, 9], [5], [(0, 3)])
    hit = request("c", [1, 2, 3, 4, 5, 7], [8, 9], [(5, 1), (6, 1)])
    found = history([first, other, hit], 2)
    assert found == [(0, 3, 3), (3, 1, 1), (4, 1, 1), (5, 1, 1), (6, 1, 1)]
    with pytest.raises(ValueError, match="the 2 tokens that were reused"):
        history([first, request("d", [7, 7, 7], [1], [(2, 1)])], 1)


def test_truncated():
    steps = [Step(0, 4, 4), Step(4, 4, 4), Step(8, 1, 1)]
    assert truncated(steps, 6) == [(0, 4, 4), (4, 2, 4)]


def test_a_short_step_cut_at_a_page_reads_what_it_read_whole():
    """What is packed ends where it did, so that the tokens that are left see the same."""
    for border in range(64, 1024, 64):
        for end in range(border, border + SHORT_CHUNK):
            assert FORMAT.first_recent(end) == FORMAT.first_recent(border)
    assert FORMAT.page_size == SHORT_CHUNK


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """nano with a cache of 2-bit latents, not fused, in float32 and in bfloat16."""
    folder = unfused_nano(tmp_path_factory.mktemp("models") / "nano", FORMAT.name)
    return tuple(_model(folder, dtype, "cpu") for dtype in (torch.float32, torch.bfloat16))


def line(models, steps, fmt):
    """The line of an engine that is transformers in bfloat16 with a cache of this format."""
    tokens = torch.randint(0, 4096, (309,), generator=torch.Generator().manual_seed(3)).tolist()
    asked = request("a", tokens[:300], tokens[300:], steps)
    config = models[1].config
    kept = config.quantmla_config
    config.quantmla_config = kept | {"format": fmt.to_json()}
    computed = passes([asked], 0)
    served = log_probabilities(models[1], asked, computed)
    config.quantmla_config = kept
    answer = torch.tensor(asked["answer"])[:, None]
    asked["logprobs"] = served.gather(1, answer)[:, 0].tolist()
    lines = [differences(models, asked, computed)]
    return _together(lines, lines)


@pytest.mark.slow
def test_short_steps_read_what_decode_reads(models):
    """250 tokens, then 10 more, with which the border of what is packed moves from 64 to 128.

    What is left of a long step is a prefill still.
    """
    tokens = torch.randint(0, 4096, (261,), generator=torch.Generator().manual_seed(4)).tolist()
    asked = request("a", tokens[:260], tokens[260:], [])

    def answer(whole):
        steps = [Step(0, 250, 250), Step(250, 10, whole)]
        return log_probabilities(models[0], asked, [Pass(steps, 0)])

    short, cut = answer(10), answer(divided_chunk(FORMAT) + 1)
    assert torch.equal(short, answer(SHORT_CHUNK))
    assert torch.equal(cut, answer(300))
    assert (short - cut).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("size", [100, 128, 150])
def test_longer_steps_are_read_in_pieces(models, size):
    """150 tokens, cut off after `size`, as so many steps of up to 64."""
    tokens = torch.randint(0, 4096, (251 + size,), generator=torch.Generator().manual_seed(4))
    asked = request("a", tokens[:-1].tolist(), tokens[-1:].tolist(), [])
    pieces = [Step(at, min(64, 250 + size - at), 64) for at in range(250, 250 + size, 64)]
    whole = [Step(0, 250, 250), Step(250, size, 150)]
    found = [
        log_probabilities(models[0], asked, [Pass(steps, 0)])
        for steps in (whole, [whole[0], *pieces])
    ]
    assert torch.equal(*found)


@pytest.mark.slow
def test_an_engine_that_reads_as_it_should_has_no_fault(models):
    steps = [(0, 127), (127, 173), *((i, 1) for i in range(300, 308))]
    found = line(models, steps, FORMAT)
    assert found["rms"] == pytest.approx(found["rms_allowed"] / 2, rel=0.01)
    # its tokens are random, so nothing is said of greedy ones
    assert fault(found | {"largest_lead": 0.0}) is None


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"recent_window": 0}, {"num_sink_tokens": 0}])
def test_an_engine_without_a_window_or_sinks_has_one(models, change):
    steps = [(0, 127), (127, 173), *((i, 1) for i in range(300, 308))]
    other = CacheFormat(**(FORMAT.to_json() | change))
    assert "is more than" in fault(line(models, steps, other) | {"largest_lead": 0.0})


def test_an_unlikely_token_is_a_fault():
    fine = {"rms": 0.1, "rms_allowed": 0.2, "worst": 0.3, "worst_allowed": 0.4}
    assert fault(fine | {"largest_lead": 0.4}) is None
    assert "less likely" in fault(fine | {"largest_lead": 0.41})


@pytest.mark.parametrize("name", ["rms", "rms_allowed", "worst", "worst_allowed", "largest_lead"])
def test_no_number_is_a_fault(name):
    fine = {"rms": 0.1, "rms_allowed": 0.2, "worst": 0.3, "worst_allowed": 0.4, "largest_lead": 0}
    assert fault(fine) is None
    assert fault(fine | {name: float("nan")})
