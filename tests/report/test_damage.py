"""Whatever is wrong within a file, the user gets a sentence, not a traceback."""

import copy
import random

import pytest
from report_samples import files_of, write_run

from quantmla.errors import QuantMLAError
from quantmla.report.build import build
from quantmla.report.collect import collect
from quantmla.report.page import page
from quantmla.report.summary import model_card, summary

WRONG = (None, "x", [], {}, -1, [None], "<b>")
TRIES = 40


def places(value, path=()):
    """Every path into a document."""
    found = [path] if path else []
    inner = value.items() if isinstance(value, dict) else ()
    inner = enumerate(value) if isinstance(value, list) else inner
    for key, entry in inner:
        found += places(entry, (*path, key))
    return found


def damaged(document, rng):
    found = copy.deepcopy(document)
    path = rng.choice(places(found))
    parent = found
    for key in path[:-1]:
        parent = parent[key]
    if rng.random() < 0.3 and isinstance(parent, dict):
        del parent[path[-1]]
    else:
        parent[path[-1]] = rng.choice(WRONG)
    return found


@pytest.mark.parametrize("name", files_of())
def test_a_wrong_entry_is_a_sentence_or_harmless(tmp_path, name):
    rng = random.Random(name)
    for attempt in range(TRIES):
        run = write_run(tmp_path / str(attempt), {name: damaged(files_of()[name], rng)})
        try:
            report = build([collect(str(run))])
            assert page(report)
            assert summary(report)
            assert model_card(report["runs"][0])
        except QuantMLAError:
            continue
