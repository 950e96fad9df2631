"""Which items are taken, and how long answers may be."""

from quantmla.tasks.registry import BY_NAME
from quantmla.tasks.scoring import Amount, chosen_items


def test_items_come_from_the_parts_in_turn():
    sizes = {"a": 1, "b": 4, "c": 3}
    assert chosen_items(sizes, None) == {"a": [0], "b": [0, 1, 2, 3], "c": [0, 1, 2]}
    assert chosen_items(sizes, 2) == {"a": [0], "b": [0]}
    assert chosen_items(sizes, 6) == {"a": [0], "b": [0, 1, 2], "c": [0, 1]}
    assert chosen_items(sizes, 99) == chosen_items(sizes, None)


def test_answers_leave_half_of_the_positions():
    aime, piqa = BY_NAME["aime25"], BY_NAME["piqa"]
    assert Amount().new_tokens(aime, 131_072) == 32_768
    assert Amount().new_tokens(aime, 4096) == 2048
    assert Amount(max_new_tokens=48).new_tokens(aime, 4096) == 48
    assert Amount(max_new_tokens=4000).new_tokens(BY_NAME["fda"], 4096) == 48
    assert Amount().new_tokens(piqa, 4096) is None
