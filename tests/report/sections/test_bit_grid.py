from report_samples import eval_row, evaluated, grid

from quantmla.report.collect import Record, RunFiles
from quantmla.report.sections.bit_grid import gather


def run(*files):
    return RunFiles("run", tuple(Record(f"{i}.json", "eval", d) for i, d in enumerate(files)))


def test_a_grid_takes_nothing_from_other_files():
    other = evaluated()
    other["rows"][2]["kl_mean"] = 99.0
    (found,) = gather(run(grid(), other))["grids"]
    assert {cell["kl"] for cell in found["cells"]} == {0.1 / n for n in (4, 8, 16)}
    assert found["note"] == "few steps"


def test_formats_of_several_files_make_a_grid():
    names = ("c2r2", "c2r4", "c4r2", "c4r4")
    one_each = [{"header": {}, "rows": [eval_row("rtn", name, 0.1)]} for name in names]
    (found,) = gather(run(*one_each))["grids"]
    assert [(c["content"], c["rope"]) for c in found["cells"]] == [(2, 2), (2, 4), (4, 2), (4, 4)]


def test_few_formats_are_no_grid():
    assert gather(run(evaluated())) is None
