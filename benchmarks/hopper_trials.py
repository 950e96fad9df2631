"""What hopper_session.py tries: variants of the Hopper kernel, and parts of it left out.

A trial's replacements change the kernels' source text, so that the sources carry no experiments.
"""

from dataclasses import dataclass

from hopper_trace import SOFTMAX, STAMPS


@dataclass(frozen=True)
class Trial:
    name: str
    columns: int
    warpgroups: int
    stages: int
    defines: tuple[str, ...] = ()
    replace: tuple[tuple[str, str], ...] = ()
    right: bool = True  # False: a part of the work is left out, to see what it costs
    full: bool = False  # timed on every shape
    fmt: str = "c4r4"
    traced: bool = False  # says where the time goes, by clocks; its own time is a little longer
    pool: int = 0  # pages that tables point to; 0: all
    shuffled: bool = True  # tables
    carveout: int = -1  # percent of L1 that `combine` leaves to shared memory; -1: as usual
    shapes: tuple[tuple[int, int, int], ...] = ()  # instead of the usual ones


NO_SCORES = (
    "    score_page(at, stage, prepared, s);\n",
    "    for (int i = 0; i < H2; i++) s[i] = as_float(lds32(stage + i * 4)) > 0;\n",
)
NO_VALUES = ("    value_page(at, stage, prepared, turn % 2, first, o);\n", "")
_FIRST_VALUES = "    }\n    FirstValues first;\n"
NO_SOFTMAX = (
    _FIRST_VALUES + SOFTMAX,
    _FIRST_VALUES + "    first_values(at, stage, prepared, first);\n"
    "    for (int i = 0; i < H2; i++) l[0] += s[i];\n",
)
NO_PREPARING = (
    "  for (u32 first = 0; first < (alone ? 10 : 8); first += 4) "
    "prepare_groups(stage, prepared, lane, first, shift);\n",
    "",
)
NO_WINDOW = (
    "  if (windowed) attend_window(p, at, w, b, (turn + 1) % 2, o, l);\n",
    "  windowed = false;\n",
)
NO_PAGES = ("  int last = first_page(item, all, item.part + 1), page", "  int last = 0, page")
# what cuts the fixed costs, taken back one by one
LATE_RELEASE = ("  release_next_kernel();  // once all blocks", "  // once all blocks")
NO_PREFETCH = ("  prefetch_inputs(p, &map);\n", "")
_WINDOW_PREFETCH = (
    "    if (i < rows && (i == 0 || i == recent || within == 0))\n"
    "      prefetch_bytes((const void*)row.address, "
    "((run - 1) * (u32)p.window_row_stride + LATENT + ROPE) * 2);\n"
)
LINE_PREFETCH = (
    _WINDOW_PREFETCH,
    "    if (i < rows)\n"
    "      for (int line = 0; line < 9; line++) prefetch(row.address + line * 128);\n",
)
ROW_PREFETCH = (
    _WINDOW_PREFETCH,
    "    if (i < rows) prefetch_bytes((const void*)row.address, (LATENT + ROPE) * 2);\n",
)
_EARLY_VALUES = "    load_row_values(at, 0, 0, x[0]), load_row_values(at, 0, 1, x[1]);\n"
_WINDOW_SOFTMAX = "    softmax(at, 0, buffer, s, o, l, [] {});\n"
LATE_VALUES = (_EARLY_VALUES + _WINDOW_SOFTMAX, _WINDOW_SOFTMAX + _EARLY_VALUES)
NO_COMBINE = ("  if (count == 1) return;\n", "  if (count >= 1) return;\n")
LOADS_ONLY = (NO_SCORES, NO_SOFTMAX, NO_VALUES, NO_WINDOW)
# the first pages again and again: right for one item a block
COMPUTE_ONLY = (
    ("    barrier_wait(full_barrier", "    if (turn < STAGES) barrier_wait(full_barrier"),
    ("      if (loads) load_page(p, map, group, (turn - RING) % STAGES, number);\n", ""),
    NO_WINDOW,
)
CONSUMERS_ONLY = (
    ("    if (!ready) barrier_wait(ready_barrier", "    if (turn < 2) barrier_wait(ready_barrier"),
    ("    warp_arrives(empty_barrier(at.group, turn), at.lane);\n", ""),
    ("  for (u32 done = 0; page < last;", "  for (u32 done = 0; page < last && done < 2;"),
    NO_WINDOW,
)

# 64 columns: another kernel, so other texts
W64_NO_WINDOW = ("  return part.windowed ? (part", "  return part.windowed > 1 ? (part")
W64_COMPUTE_ONLY = (
    ("    if (lane == 0) load_page(p", "    if (lane == 0 && turn < STAGES) load_page(p"),
    (
        "    barrier_sleep(SHARED_BASE + AT_LOADED + slot * 8, turn / STAGES % 2);\n",
        "    if (turn >= STAGES) continue;\n"
        "    barrier_sleep(SHARED_BASE + AT_LOADED + slot * 8, turn / STAGES % 2);\n",
    ),
    (
        "{ barrier_wait(SHARED_BASE + AT_READY",
        "{ if (page < STAGES) barrier_wait(SHARED_BASE + AT_READY",
    ),
    W64_NO_WINDOW,
)
WHOLE_NIBBLES = (
    (
        "byte0 = x & 0x00ff00ff;\n  byte1 = permute(x, 0, 0x4341), n2 = byte1 & 0x000f000f;",
        "byte0 = x & 0x00f000f0;\n  n2 = x >> 8 & 0x000f000f, byte1 = x >> 8 & 0x00f000f0;",
    ),
    ("0x4c404c40", "0x4c004c00"),
    ("  add_planes(o[0], 1), add_planes(o[1], 1);\n", ""),
    ("  add_planes(o[0], -1), add_planes(o[1], -1);\n", ""),
)


def window_pages(cost: int) -> tuple[str, str]:
    usual = "#define WINDOW_PAGES (HEADS == 16 ? 12 : 10) "
    return usual, f"#define WINDOW_PAGES {cost} "


def item_cost(cost: int) -> tuple[str, str]:
    return "#define ITEM_COST 8 ", f"#define ITEM_COST {cost} "


def least_chunk(chunk: int) -> tuple[str, str]:
    return "#define LEAST_CHUNK 6\n", f"#define LEAST_CHUNK {chunk}\n"


BOTH = ((16, 32768, 32), (16, 8192, 32))
PARTS = (*BOTH, (16, 131072, 8), (16, 8192, 128))
FEW = ((16, 131072, 1), (16, 32768, 1), (16, 8192, 1))

TRIALS = (
    Trial("n16_wg3_st2", 16, 3, 2, full=True),
    Trial("n32_wg2_st2", 32, 2, 2, full=True),
    Trial("n16_traced", 16, 3, 2, replace=STAMPS, traced=True, shapes=BOTH + FEW),
    Trial("n32_traced", 32, 2, 2, replace=STAMPS, traced=True),
    Trial("c2_n16_wg3_st2", 16, 3, 2, fmt="c2r4"),
    Trial("c2_n32_wg2_st2", 32, 2, 2, fmt="c2r4"),
    Trial("n16_wg2_st3", 16, 2, 3),
    Trial("c2_n16_wg3_st3", 16, 3, 3, fmt="c2r4"),
    Trial("n64_st4", 64, 2, 4, full=True),
    Trial("c2_n64_st4", 64, 2, 4, fmt="c2r4"),
    Trial("n64_in_l2", 64, 2, 4, pool=1024),
    Trial("n64_compute_only", 64, 2, 4, replace=W64_COMPUTE_ONLY, right=False),
    Trial("n64_no_window", 64, 2, 4, replace=(W64_NO_WINDOW,), right=False),
    # for compute-sanitizer's racecheck
    Trial("n16_checked", 16, 3, 2, defines=("CHECKED",)),
    Trial("n32_checked", 32, 2, 2, defines=("CHECKED",)),
    Trial("n64_checked", 64, 2, 4, defines=("CHECKED",)),
    # what windows, parts and their combination cost
    Trial("n16_whole_nibbles", 16, 3, 2, replace=WHOLE_NIBBLES, shapes=BOTH),
    Trial("n32_whole_nibbles", 32, 2, 2, replace=WHOLE_NIBBLES),
    Trial("n16_window_3", 16, 3, 2, replace=(window_pages(3),), shapes=BOTH),
    Trial("n16_window_6", 16, 3, 2, replace=(window_pages(6),), shapes=BOTH + FEW),
    Trial("n16_window_13", 16, 3, 2, replace=(window_pages(13),), shapes=BOTH + FEW),
    Trial("n32_window_6", 32, 2, 2, replace=(window_pages(6),)),
    Trial("n32_window_16", 32, 2, 2, replace=(window_pages(16),)),
    Trial("n32_window_18", 32, 2, 2, replace=(window_pages(18),)),
    Trial("n64_window_6", 64, 2, 4, replace=(window_pages(6),)),
    Trial("n64_window_14", 64, 2, 4, replace=(window_pages(14),)),
    Trial("n64_window_18", 64, 2, 4, replace=(window_pages(18),)),
    Trial("n16_item_5", 16, 3, 2, replace=(item_cost(5),), shapes=PARTS),
    Trial("n16_item_16", 16, 3, 2, replace=(item_cost(16),), shapes=PARTS),
    Trial("n16_least_3", 16, 3, 2, replace=(least_chunk(3),), shapes=FEW),
    Trial("n16_least_12", 16, 3, 2, replace=(least_chunk(12),), shapes=FEW),
    Trial("n16_late_release", 16, 3, 2, replace=(LATE_RELEASE,), shapes=BOTH + FEW),
    Trial("n16_no_prefetch", 16, 3, 2, replace=(NO_PREFETCH,), shapes=BOTH + FEW),
    Trial("n16_carveout", 16, 3, 2, carveout=100, shapes=BOTH + FEW),
    Trial("n16_line_prefetch", 16, 3, 2, replace=(LINE_PREFETCH,), shapes=BOTH + FEW),
    Trial("n16_row_prefetch", 16, 3, 2, replace=(ROW_PREFETCH,), shapes=BOTH + FEW),
    Trial("n16_late_values", 16, 3, 2, replace=(LATE_VALUES,), shapes=BOTH + FEW),
    Trial("n16_no_window", 16, 3, 2, replace=(NO_WINDOW,), right=False, shapes=BOTH),
    Trial("n16_window_only", 16, 3, 2, replace=(NO_PAGES,), right=False, shapes=BOTH),
    Trial("n16_no_combine", 16, 3, 2, replace=(NO_COMBINE,), right=False, shapes=BOTH + FEW),
    # where pages are: in order, or few enough for the L2
    Trial("n16_in_l2", 16, 3, 2, pool=1024),
    Trial("n16_loads_only", 16, 3, 2, replace=LOADS_ONLY, right=False),
    Trial("n16_compute_only", 16, 3, 2, replace=COMPUTE_ONLY, right=False),
    Trial("n16_consumers_only", 16, 3, 2, replace=CONSUMERS_ONLY, right=False),
    Trial("n32_compute_only", 32, 2, 2, replace=COMPUTE_ONLY, right=False),
    Trial("n32_consumers_only", 32, 2, 2, replace=CONSUMERS_ONLY, right=False),
    # parts of a page's work, without the window
    Trial("n16_no_preparing", 16, 3, 2, replace=(NO_PREPARING, NO_WINDOW), right=False),
    Trial("n16_no_values", 16, 3, 2, replace=(NO_VALUES, NO_WINDOW), right=False),
    Trial("n16_no_scores", 16, 3, 2, replace=(NO_SCORES, NO_WINDOW), right=False),
    Trial("n16_no_softmax", 16, 3, 2, replace=(NO_SOFTMAX, NO_WINDOW), right=False),
    Trial("n32_no_values", 32, 2, 2, replace=(NO_VALUES, NO_WINDOW), right=False),
    Trial("n32_no_scores", 32, 2, 2, replace=(NO_SCORES, NO_WINDOW), right=False),
)
# heads, context, batch
MAIN_SHAPE = {16: (16, 32768, 32), 32: (32, 32768, 32), 64: (64, 32768, 32)}
SHAPES = {
    16: (
        (16, 32768, 32),
        (16, 8192, 32),
        (16, 131072, 1),
        (16, 131072, 8),
        (16, 32768, 1),
        (16, 8192, 1),
    ),
    32: ((32, 32768, 32), (64, 32768, 32), (128, 32768, 32), (32, 8192, 32), (32, 131072, 1)),
    64: ((64, 32768, 32), (128, 32768, 32), (64, 8192, 32), (64, 131072, 1), (128, 8192, 32)),
}
# heads, query length, lengths, splits
CHECKS = [
    (16, 1, (1, 63, 700, 5000), None),
    (16, 1, (300,), 1),
    (5, 3, (0, 129, 130, 191, 193, 4096), None),
    (64, 2, (2000, 65), 3),
]


if __name__ == "__main__":
    print(f"{__doc__}\nusage: hopper_session.py reads it, and is what to run")
