"""Trials of the Hopper kernel change its source text: what they replace must be there."""

import pytest
from hopper_session import prepare_trial, published
from hopper_trials import TRIALS


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.name)
def test_replacements_apply(tmp_path, trial):
    assert prepare_trial(trial, tmp_path) == ""


def test_of_a_trial_s_checks_the_worst_is_kept():
    check = {"kind": "check", "trial": "a", "error": 1e-3, "lse_error": 2e-3, "passed": True}
    time = {"kind": "time", "trial": "a", "us": 150.0}
    checked = {"kind": "checked", "trial": "a", "good": False}
    worse = check | {"error": 3e-3, "lse_error": 1e-3, "passed": False}
    rows = [{"kind": "start", "trial": "a"}, check, worse, checked, time, {"kind": "end"}]
    worst = {"checks": 2, "all_passed": False, "error": 3e-3, "lse_error": 2e-3}
    assert published(rows) == [checked | worst, time]
    assert published(published(rows)) == published(rows)
