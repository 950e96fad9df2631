"""Plans against all plans, on small random problems; sizes worked out by hand."""

import itertools
import random

import pytest

from quantmla.analysis.bit_plan import (
    Choice,
    costs_by_layer,
    layer_choices,
    plan_bits,
    recipe_format,
    uniform_plan,
)
from quantmla.errors import UsageError
from quantmla.mla.geometry import MlaGeometry
from quantmla.recipe import recipe_from

DEEPSEEK = MlaGeometry(
    hidden_size=2048,
    num_heads=16,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    q_lora_rank=None,
    norm_eps=1e-6,
    softmax_scale=0.1,
)


def costs(scale: float = 1.0) -> dict[tuple[str, int], float]:
    """Squared steps of a uniform grid, which is what costs look like."""
    return {
        (path, bits): scale * weight / (2**bits - 1) ** 2
        for path, weight in (("content", 1.0), ("rope", 3.0))
        for bits in (2, 3, 4, 8)
    }


def test_choices_have_the_bytes_of_legal_pages_and_the_sum_of_both_costs():
    found = {c.format: c for c in layer_choices(costs(), DEEPSEEK)}
    assert len(found) == 25
    assert found["c4r4"].page_bytes == 20_480
    assert found["c3r4"].page_bytes == 16_384
    assert found["c4r2"].page_bytes == 19_456
    assert found["c16r16"].page_bytes == 73_728
    assert found["c2r4"].cost == pytest.approx(1 / 9 + 3 / 225)
    assert found["c16r4"].cost == pytest.approx(3 / 225)
    assert found["c16r16"].cost == 0


@pytest.mark.parametrize("seed", range(20))
def test_no_plan_within_the_budget_costs_less(seed):
    rng = random.Random(seed)
    choices = {
        layer: [
            Choice(f"f{n}", 128 * rng.randint(1, 12), rng.choice([0.0, 1.0, rng.random()]))
            for n in range(rng.randint(1, 5))
        ]
        for layer in range(5)
    }
    least = sum(min(c.page_bytes for c in layer) for layer in choices.values())
    most = sum(max(c.page_bytes for c in layer) for layer in choices.values())
    total = rng.uniform(least, 1.2 * most)
    plan = plan_bits(choices, total / 64 / 5 + 1e-9)
    every = itertools.product(*choices.values())
    cheapest = min(
        sum(c.cost for c in picked)
        for picked in every
        if sum(c.page_bytes for c in picked) <= total + 1
    )
    assert plan.cost == pytest.approx(cheapest, abs=1e-12)
    chosen = [next(c for c in choices[i] if c.format == name) for i, name in plan.formats.items()]
    assert sum(c.page_bytes for c in chosen) == plan.page_bytes <= total + 1
    assert sum(c.cost for c in chosen) == pytest.approx(plan.cost, abs=1e-12)


def test_layers_that_matter_get_the_bits():
    """One layer a thousand times as sensitive; the mean stays that of c3r4 in all layers."""
    choices = {i: layer_choices(costs(1000.0 if i == 2 else 1.0), DEEPSEEK) for i in range(4)}
    plan = plan_bits(choices, 256)
    uniform = uniform_plan(choices, "c3r4")
    assert uniform.bytes_per_token == 256
    assert plan.bytes_per_token <= 256
    assert plan.cost < uniform.cost / 3
    sizes = {c.format: c.page_bytes for c in choices[0]}
    assert sizes[plan.formats[2]] > max(sizes[plan.formats[i]] for i in (0, 1, 3))


def test_equal_layers_and_a_budget_for_just_one_format():
    choices = {i: layer_choices(costs(), DEEPSEEK) for i in range(3)}
    assert set(plan_bits(choices, 176).formats.values()) == {"c2r2"}
    assert plan_bits(choices, 1e6).cost == 0


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        (175.9, "175.9 bytes per token is less.*: 176"),
        (0, "budget 0 must be a finite number of more than 0 bytes"),
        (float("nan"), "budget nan"),
        (float("inf"), "budget inf must be a finite number"),
    ],
)
def test_budgets_that_cannot_be_kept_are_named(budget, words):
    with pytest.raises(UsageError, match=words):
        plan_bits({0: layer_choices(costs(), DEEPSEEK)}, budget)


@pytest.mark.parametrize("budget", [1e300, 1.7e308])
def test_a_budget_beyond_all_is_the_largest_formats(budget):
    choices = {i: layer_choices(costs(), DEEPSEEK) for i in range(3)}
    assert plan_bits(choices, budget) == plan_bits(choices, 4000)


def test_a_model_of_many_layers_is_planned_at_once():
    choices = {i: layer_choices(costs(1.3**i), DEEPSEEK) for i in range(61)}
    plan = plan_bits(choices, 256)
    assert 255 < plan.bytes_per_token <= 256
    assert plan.cost < uniform_plan(choices, "c3r4").cost


def test_a_recipe_takes_the_plan():
    formats = {0: "c4r4", 1: "c2r3", 2: "c4r4", 3: "c8r8"}
    recipe = recipe_from({"format": recipe_format(formats)})
    assert recipe.format.name == "c4r4"
    cache = recipe.format.cache_format()
    assert {i: cache.for_layer(i).name for i in formats} == formats
    assert recipe_from({"format": recipe_format({0: "c2r4", 1: "c2r4"})}).format.layers == {}


def test_rows_by_layer():
    rows = [
        {"layer": 1, "path": "rope", "bits": 2, "cost": 0.5, "cost_error": 0.1},
        {"layer": 0, "path": "content", "bits": 4, "cost": 0.25, "cost_error": None},
    ]
    assert costs_by_layer(rows) == {1: {("rope", 2): 0.5}, 0: {("content", 4): 0.25}}
