"""Defaults that the documentation states are those of the code."""

import re
from pathlib import Path

import yaml

from quantmla.evaluate.retrieval import KINDS
from quantmla.evaluation import DEFAULT_CONTEXT, DEFAULT_WINDOWS, FEW_NEEDLES
from quantmla.method import METHODS, load_method, options_for
from quantmla.method.paper import Options as PaperOptions
from quantmla.method.quantmla import Options
from quantmla.quant.format import CLIP_BY_BITS, CacheFormat
from quantmla.recipe import recipe_from
from quantmla.verify import MAX_FOLD_ERROR

DOCS = Path(__file__).parents[2] / "docs"
MATHS = (DOCS / "maths.md").read_text(encoding="utf-8")
USING = (DOCS / "using.md").read_text(encoding="utf-8")


def row(text: str, name: str) -> list[str]:
    """Cells of a table's row after its name."""
    match = re.search(rf"^\| {re.escape(name)} \| (.*) \|$", text, re.MULTILINE)
    assert match is not None, name
    return match[1].split(" | ")


def test_learning_rates_steps_and_text():
    rates = [
        [float(x) for x in cell.split(", ")]
        for cell in row(MATHS, "learning rates: rotation, scale, angle, gain")
    ]
    found = [
        [o.rotation_rate, o.scale_rate, o.angle_rate, o.gain_rate]
        for o in (PaperOptions(), Options())
    ]
    assert rates == found
    paper, ours = row(MATHS, "content objective")
    assert re.findall(r"\d+", paper) == [str(PaperOptions().steps)]
    o = Options()
    assert re.findall(r"\d+", ours) == [str(n) for n in (o.steps, o.polish_steps, o.polish_tokens)]
    for name, cell in zip(("paper", "quantmla"), row(MATHS, "text"), strict=True):
        amounts = [int(n.replace(",", "")) for n in re.findall(r"[\d,]*\d", cell)]
        assert amounts == [
            load_method(name).CALIBRATION[key]
            for key in ("num_sequences", "held_out_sequences", "sequence_length")
        ]


def test_clip_ratios():
    match = re.search(r"the defaults are ([\d.]+) and ([\d.]+)\.", MATHS)
    assert match is not None
    assert {2: float(match[1]), 3: float(match[2])} == CLIP_BY_BITS


def test_the_recipe_of_the_guide_is_valid():
    block = re.search(r"```yaml\n(.*?)```", USING, re.DOTALL)
    assert block is not None
    recipe = recipe_from(yaml.safe_load(block[1]))
    assert recipe.format.cache_format() == CacheFormat()
    options_for(recipe.transform.method, recipe.transform.options)
    line = next(line for line in block[1].splitlines() if "method:" in line)
    assert set(re.findall(r"\w+", line)) >= set(METHODS)


def test_amounts_of_an_evaluation():
    text = " ".join(USING.split())
    assert f"({DEFAULT_WINDOWS} of {DEFAULT_CONTEXT:,}," in text
    assert FEW_NEEDLES.of_each_kind * len(KINDS) == 6
    assert "six planted facts" in text
    assert f"inputs of {FEW_NEEDLES.context:,} tokens" in text
    assert f"above {MAX_FOLD_ERROR:.0e}".replace("e-09", "e-9") in text
