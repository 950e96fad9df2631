"""One choice at a time, from text of its own, and compared window by window."""

import json

import pytest
import torch
from bench_choices import ALL_TOKENS, AS_IT_IS, OPTIONS, compared, earlier, jobs_of, learned, texts

from quantmla.errors import UsageError
from quantmla.method import options_for
from quantmla.quant.format import CacheFormat, parse_format


def test_every_choice_is_a_change_of_what_it_is():
    """An option's value that is the default already would say nothing."""
    usual = options_for("quantmla", {})
    for name, values in OPTIONS.items():
        for value in values:
            assert getattr(options_for("quantmla", {name: value}), name) != getattr(usual, name)
    jobs = jobs_of(2, "cpu")
    clips = {(j.format, j.change[1]) for j in jobs if j.change and j.change[0] == "content_clip"}
    assert all(parse_format(name).content_clip != value for name, value in clips)
    assert len({job[:2] for job in jobs}) == len(jobs)
    assert [job.choice for job in jobs[:2]] == [AS_IT_IS] * 2  # what the others are compared with
    assert {job.format for job in jobs[:2]} == {"c4r4", "c2r4"}


def test_windows_to_measure_on_are_neither_learned_from_nor_chosen_by():
    tokens, measured = texts(3)
    assert len(measured) == 3
    used = torch.cat((tokens.train_BS, tokens.held_out_BS))
    assert not any(torch.equal(one, other) for one in measured for other in used)


def test_shares_are_of_the_method_as_it_is_and_errors_are_paired():
    def row(choice: str, *kls: float) -> dict:
        part = {"kl_mean": sum(kls) / len(kls), "kl_of_windows": list(kls)}
        return {"format": "c4r4", "choice": choice, "protected": part, "unprotected": dict(part)}

    rows = compared([row(AS_IT_IS, 1.0, 3.0), row("other", 1.5, 3.5), row("third", 2.0, 3.0)])
    assert [r["protected"]["more"] for r in rows] == pytest.approx([0, 0.25, 0.25])
    # the same difference in every window has no error, however far apart the windows are
    assert [r["protected"]["more_error"] for r in rows] == pytest.approx([0, 0, 0.25])


def test_a_run_goes_on_with_its_own_rows_alone(tmp_path):
    path, header = tmp_path / "found.json", {"windows": 4}
    assert earlier(path, header) == []
    path.write_text(json.dumps({"header": header, "rows": [{"choice": "x"}]}))
    assert earlier(path, header) == [{"choice": "x"}]
    with pytest.raises(UsageError, match="is of another run: remove it"):
        earlier(path, {"windows": 5})


def test_formats_that_are_learned(monkeypatch):
    """`H of all tokens` is what is learned where nothing is protected; a clip is the format's."""
    import bench_choices

    seen: list[tuple[str, CacheFormat]] = []

    def stop(_source, _adapter, _tokens, settings, _work):
        seen.append((settings.method, settings.fmt))
        raise InterruptedError

    monkeypatch.setattr(bench_choices, "learn_checkpoint", stop)
    jobs = [job for job in jobs_of(2, "cpu") if job.format == "c4r4"]
    for job in jobs[:2]:
        with pytest.raises(InterruptedError):
            learned(job, parse_format("c4r4"))
    usual = parse_format("c4r4")
    assert jobs[1].choice == ALL_TOKENS
    assert seen == [("quantmla", usual), ("quantmla", usual.unprotected())]
