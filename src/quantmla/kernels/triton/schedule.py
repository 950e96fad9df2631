"""How a decode is cut into programs: decided by sizes of tensors, never by what they hold."""

from typing import NamedTuple

RESIDENT_WARPS = 8  # on one multiprocessor, at 255 registers a thread
MIN_PAGES = 8  # per split: a shorter one reads fewer bytes than its partial result costs
MAX_SPLITS = 256
WINDOW_TILE = 32  # tokens
MAX_WINDOW_SPLITS = 7  # tiles of the longest window
MEDIUM_TILE_BYTES = 104 << 10  # shared memory that 32 rows need, at most


class Device(NamedTuple):
    multiprocessors: int
    shared_bytes: int  # that one program may use


class Schedule(NamedTuple):
    rows: int  # query rows (query tokens x heads) of a program
    num_warps: int
    step: int  # pages that a program takes at a time
    num_splits: int  # of the packed pages
    window_splits: int
    min_pages: int  # a split takes at least so many, if there are
    prefetch: bool = True  # the next pages into L2; NVIDIA only
    stages: int = 1  # of Triton's pipeline: the L2 prefetch is enough, and registers are scarce


def _tile(num_rows: int, device: Device) -> tuple[int, int, int]:
    """Rows of a program, its warps, and its pages at a time."""
    if num_rows <= 16 or device.shared_bytes < MEDIUM_TILE_BYTES:
        return 16, 4, 1
    return 32, 8, 2  # 64 rows take twice as long: they spill


def schedule(
    batch: int, num_rows: int, max_pages: int, device: Device, num_splits: int | None = None
) -> Schedule:
    """Enough splits to fill the device once, each of at least MIN_PAGES pages if all are in use."""
    rows, warps, step = _tile(num_rows, device)
    resident = device.multiprocessors * RESIDENT_WARPS // warps
    fill = max(1, resident // max(1, batch * -(-num_rows // rows)))
    window_splits = max(1, min(MAX_WINDOW_SPLITS, fill // 2))
    if num_splits is not None:
        return Schedule(rows, warps, step, num_splits, window_splits, 1)
    most = min(MAX_SPLITS, -(-max_pages // MIN_PAGES))
    return Schedule(rows, warps, step, max(1, min(fill, most)), window_splits, MIN_PAGES)
