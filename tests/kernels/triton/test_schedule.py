"""Schedules depend on sizes alone, and fill the device."""

import pytest

from quantmla.kernels.triton.schedule import MAX_SPLITS, MIN_PAGES, Device, schedule

H200 = Device(132, 227 << 10)


@pytest.mark.parametrize("batch", [1, 3, 32, 700])
@pytest.mark.parametrize("num_rows", [1, 16, 17, 40, 128, 1024])
@pytest.mark.parametrize("max_pages", [1, 16, 2048, 16384])
def test_splits_fill_the_device_once_and_are_never_tiny(
    batch: int, num_rows: int, max_pages: int
) -> None:
    plan = schedule(batch, num_rows, max_pages, H200)
    blocks = -(-num_rows // plan.rows)
    resident = H200.multiprocessors * 8 // plan.num_warps
    assert 1 <= plan.num_splits <= min(MAX_SPLITS, -(-max_pages // MIN_PAGES))
    assert plan.num_splits == 1 or batch * blocks * plan.num_splits <= resident
    assert 1 <= plan.window_splits <= 7
    enough = -(-max_pages // MIN_PAGES), MAX_SPLITS
    assert plan.num_splits in enough or batch * blocks * (plan.num_splits + 1) > resident


def test_a_given_number_of_splits_is_taken_as_it_is() -> None:
    plan = schedule(4, 16, 64, H200, num_splits=64)
    assert (plan.num_splits, plan.min_pages) == (64, 1)


def test_small_shared_memory_gets_small_tiles() -> None:
    assert schedule(1, 64, 64, Device(84, 64 << 10)).rows == 16
    assert schedule(1, 64, 64, Device(108, 120 << 10)).rows == 32
    assert schedule(1, 16, 64, H200).rows == 16
