"""Trials of the Hopper kernel change its source text: what they replace must be there."""

import pytest
from hopper_session import prepare_trial
from hopper_trials import TRIALS


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.name)
def test_replacements_apply(tmp_path, trial):
    assert prepare_trial(trial, tmp_path) == ""
