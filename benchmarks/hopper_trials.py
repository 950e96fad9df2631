"""What hopper_session.py tries: variants of the Hopper kernel, and parts of it left out.

A trial's replacements change the kernels' source text, so that the sources carry no experiments.
"""

from dataclasses import dataclass
from pathlib import Path

from hopper_trace import STAMPS

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Trial:
    name: str
    columns: int
    warpgroups: int
    stages: int
    tma: bool = True
    per_sm: int = 1
    defines: tuple[str, ...] = ()
    replace: tuple[tuple[str, str], ...] = ()
    right: bool = True  # False: a part of the work is left out, to see what it costs
    only_if_wrong: bool = False  # a fallback: tried if the first trial is wrong
    full: bool = False  # timed on every shape
    fmt: str = "c4r4"
    traced: bool = False  # says where the time goes, by clocks; its own time is a little longer
    pool: int = 0  # pages that tables point to; 0: all
    shuffled: bool = True  # tables
    shapes: tuple[tuple[int, int, int], ...] = ()  # instead of the usual ones


NO_SCORES = (
    "    score_page(at, stage, means, s);\n",
    "    for (int i = 0; i < H2; i++) s[i] = as_float(lds32(stage + i * 4)) > 0;\n",
)
NO_VALUES = ("    value_page(at, stage, turn % 2, o);\n", "")
NO_SOFTMAX = (
    "    }\n    softmax(at, turn % 2, s, o, l);\n",
    "    }\n    for (int i = 0; i < H2; i++) l[0] += s[i];\n",
)
NO_MEAN = (
    "  for (int k = 0; k < 4; k++) mma<1>(s, mean[k], query_tile(MEAN_TILE + k));\n"
    "  mma_commit();\n}",
    "  mma_commit();\n}",
)
# the cost of reading nibbles of values as subnormals, scales aside: 9 instructions instead of 11
SUBNORMAL_VALUES = (
    "  v0 = hfma2(and_or(x << 4, 0x00f000f0, 0x54005400), scale, offset);\n"
    "  v1 = hfma2(and_or(x, 0x00f000f0, 0x54005400), scale, offset);\n"
    "  v2 = hfma2(and_or(x >> 4, 0x00f000f0, 0x54005400), scale, offset);\n"
    "  v3 = hfma2(and_or(x >> 8, 0x00f000f0, 0x54005400), scale, offset);\n",
    "  u32 y = x >> 8;\n"
    "  v0 = hfma2(x & 0x000f000f, scale, offset), v1 = hfma2(x & 0x00f000f0, scale, offset);\n"
    "  v2 = hfma2(y & 0x000f000f, scale, offset), v3 = hfma2(y & 0x00f000f0, scale, offset);\n",
)

# a shorter loop, should fetching instructions be the limit
ROLLED_VALUES = (
    (
        "#pragma unroll\n  for (u32 i = 0; i < 8; i++) {\n    V4 x = next, s = next_scale;",
        "#pragma unroll 1\n  for (u32 i0 = 0; i0 < 8; i0 += 2) {\n   settle_output(o);\n"
        "#pragma unroll\n   for (u32 i = i0; i < i0 + 2; i++) {\n    V4 x = next, s = next_scale;",
    ),
    (
        "    if (i < 7) mma_wait<1>();\n  }\n  mma_wait<0>();",
        "    mma_wait<1>();\n   }\n   mma_wait<0>();\n   settle_output(o);\n  }\n",
    ),
)


def paired_scores() -> tuple[str, str]:
    """The scores of 4-bit content as hopper_paired.cuh has them."""
    kernels = HERE.parent / "src/quantmla/kernels/cuda"
    own = (kernels / "content4.cuh").read_text()
    start, end = own.index("DEVICE void score_group("), own.index("DEVICE void scale_nibbles(")
    return own[start:end], (HERE / "hopper_paired.cuh").read_text()


NO_WINDOW = (
    "  if (windowed) attend_window(p, at, w, b, (turn + 1) % 2, o, l);\n",
    "  windowed = false;\n",
)
NO_PAGES = ("  int last = first_page(item, all, item.part + 1), page", "  int last = 0, page")
NO_COMBINE = ("  if (count == 1) return;\n", "  if (count >= 1) return;\n")
LOADS_ONLY = (NO_SCORES, NO_SOFTMAX, NO_VALUES, NO_WINDOW)
# the first pages again and again: right for one item a block
COMPUTE_ONLY = (
    ("    barrier_wait(SHARED_BASE", "    if (turn < STAGES) barrier_wait(SHARED_BASE"),
    ("    if (later < last && uniform(others) == 3) load_page(p, map, at, slot, number);\n", ""),
    NO_WINDOW,
)
# three groups' products on their way instead of two
DEEPER_SCORES = (
    ("  float acc[2][H2];\n  u32 rows", "  float acc[3][H2];\n  u32 rows"),
    (
        "    score_group(at, x, g, acc[g % 2]);\n"
        "    mma_wait<1>();\n"
        "    settle(acc[(g - 1) % 2]);\n"
        "    if (g == 1) settle(s);\n"
        "    fold(at, g - 1, acc[(g - 1) % 2], s);\n",
        "    score_group(at, x, g, acc[g % 3]);\n"
        "    if (g == 1) settle(s);\n"
        "    if (g == 1) continue;\n"
        "    mma_wait<2>();\n"
        "    settle(acc[(g - 2) % 3]);\n"
        "    fold(at, g - 2, acc[(g - 2) % 3], s);\n",
    ),
    (
        "  score_band(at, next.x, next.y, 0, acc[0]);\n"
        "  mma_wait<1>();\n"
        "  settle(acc[1]);\n"
        "  fold(at, 7, acc[1], s);\n"
        "  score_band(at, next.z, next.w, 1, acc[1]);\n"
        "  mma_wait<1>();\n"
        "  settle(acc[0]);\n"
        "  fold(at, 8, acc[0], s);\n"
        "  mma_wait<0>();\n"
        "  settle(acc[1]);\n"
        "  fold(at, 9, acc[1], s);\n",
        "  score_band(at, next.x, next.y, 0, acc[2]);\n"
        "  mma_wait<2>();\n"
        "  settle(acc[0]);\n"
        "  fold(at, 6, acc[0], s);\n"
        "  score_band(at, next.z, next.w, 1, acc[0]);\n"
        "  mma_wait<2>();\n"
        "  settle(acc[1]);\n"
        "  fold(at, 7, acc[1], s);\n"
        "  mma_wait<1>();\n"
        "  settle(acc[2]);\n"
        "  fold(at, 8, acc[2], s);\n"
        "  mma_wait<0>();\n"
        "  settle(acc[0]);\n"
        "  fold(at, 9, acc[0], s);\n",
    ),
)


def window_pages(cost: int) -> tuple[str, str]:
    return "#define WINDOW_PAGES 6 ", f"#define WINDOW_PAGES {cost} "


def item_cost(cost: int) -> tuple[str, str]:
    return "#define ITEM_COST 8 ", f"#define ITEM_COST {cost} "


def least_chunk(chunk: int) -> tuple[str, str]:
    return "#define LEAST_CHUNK 6\n", f"#define LEAST_CHUNK {chunk}\n"


BOTH = ((16, 32768, 32), (16, 8192, 32))
PARTS = (*BOTH, (16, 131072, 8), (16, 8192, 128))
FEW = ((16, 131072, 1), (16, 32768, 1), (16, 8192, 1))

TRIALS = (
    Trial("n16_wg3_st2", 16, 3, 2, full=True),
    Trial("n32_wg2_st3", 32, 2, 3, full=True),
    Trial("n16_traced", 16, 3, 2, replace=STAMPS, traced=True, shapes=BOTH + FEW),
    Trial("n16_traced_in_l2", 16, 3, 2, replace=STAMPS, traced=True, pool=1024),
    Trial("n32_traced", 32, 2, 3, replace=STAMPS, traced=True),
    Trial("n16_wg2_st4_traced", 16, 2, 4, replace=STAMPS, traced=True),
    Trial("c2_n16_wg3_st2", 16, 3, 2, fmt="c2r4"),
    Trial("c2_n16_wg3_st3", 16, 3, 3, fmt="c2r4"),
    Trial("c2_n32_wg2_st3", 32, 2, 3, fmt="c2r4"),
    Trial("n16_wg3_st2_cpasync", 16, 3, 2, tma=False),
    Trial("n32_wg2_st3_cpasync", 32, 2, 3, tma=False, only_if_wrong=True),
    Trial("n16_wg2_st2_cpasync", 16, 2, 2, tma=False, only_if_wrong=True),
    Trial("n16_wg3_st2_swapped", 16, 3, 2, defines=("SWAP_STRIDES",), only_if_wrong=True),
    Trial(
        "n16_wg3_st2_swapped_cpasync",
        16,
        3,
        2,
        tma=False,
        defines=("SWAP_STRIDES",),
        only_if_wrong=True,
    ),
    Trial("n16_wg2_st2", 16, 2, 2),
    Trial("n16_wg2_st4", 16, 2, 4),
    Trial("n16_wg1_st2_x3", 16, 1, 2, per_sm=3, defines=("BLOCKS_PER_SM=3",)),
    Trial("n16_wg1_st3_x2", 16, 1, 3, per_sm=2, defines=("BLOCKS_PER_SM=2",)),
    Trial("n32_wg1_st2_x2", 32, 1, 2, per_sm=2, defines=("BLOCKS_PER_SM=2",)),
    Trial("n16_wg3_st2_means", 16, 3, 2, defines=("MEANS_AHEAD",), full=True),
    Trial("n32_wg2_st3_means", 32, 2, 3, defines=("MEANS_AHEAD",)),
    Trial("c2_n16_wg3_st2_means", 16, 3, 2, defines=("MEANS_AHEAD",), fmt="c2r4"),
    Trial("n32_wg2_st2", 32, 2, 2),
    Trial("n16_scores_deep", 16, 3, 2, replace=DEEPER_SCORES),
    Trial("n16_values_rolled", 16, 3, 2, replace=ROLLED_VALUES),
    Trial("n16_paired", 16, 3, 2, replace=(paired_scores(),), shapes=BOTH),
    Trial("n16_paired_means", 16, 3, 2, defines=("MEANS_AHEAD",), replace=(paired_scores(),)),
    Trial("n16_paired_rolled", 16, 3, 2, replace=(paired_scores(), *ROLLED_VALUES)),
    Trial("n16_wg2_st4_paired", 16, 2, 4, replace=(paired_scores(),)),
    Trial("n16_wg2_st4_ahead", 16, 2, 4, defines=("PAIRS_AHEAD",), replace=(paired_scores(),)),
    Trial("n32_paired", 32, 2, 3, replace=(paired_scores(),)),
    # what windows, parts and their combination cost
    Trial("n16_window_3", 16, 3, 2, replace=(window_pages(3),), shapes=BOTH),
    Trial("n16_window_10", 16, 3, 2, replace=(window_pages(10),), shapes=BOTH),
    Trial("n16_window_16", 16, 3, 2, replace=(window_pages(16),), shapes=BOTH),
    Trial("n16_item_4", 16, 3, 2, replace=(item_cost(4),), shapes=PARTS),
    Trial("n16_item_16", 16, 3, 2, replace=(item_cost(16),), shapes=PARTS),
    Trial("n16_least_3", 16, 3, 2, replace=(least_chunk(3),), shapes=FEW),
    Trial("n16_least_12", 16, 3, 2, replace=(least_chunk(12),), shapes=FEW),
    Trial("n16_no_window", 16, 3, 2, replace=(NO_WINDOW,), right=False, shapes=BOTH),
    Trial("n16_window_only", 16, 3, 2, replace=(NO_PAGES,), right=False, shapes=BOTH),
    Trial("n16_no_combine", 16, 3, 2, replace=(NO_COMBINE,), right=False, shapes=BOTH + FEW),
    # where pages are: in order, or few enough for the L2
    Trial("n16_in_order", 16, 3, 2, shuffled=False),
    Trial("n16_in_l2", 16, 3, 2, pool=1024),
    Trial("n16_loads_only", 16, 3, 2, replace=LOADS_ONLY, right=False),
    Trial("n16_loads_only_in_order", 16, 3, 2, replace=LOADS_ONLY, right=False, shuffled=False),
    Trial("n16_loads_only_in_l2", 16, 3, 2, replace=LOADS_ONLY, right=False, pool=1024),
    Trial("n16_wg2_st4_loads_only", 16, 2, 4, replace=LOADS_ONLY, right=False),
    Trial("n16_cpasync_loads_only", 16, 3, 2, tma=False, replace=LOADS_ONLY, right=False),
    Trial("n16_compute_only", 16, 3, 2, replace=COMPUTE_ONLY, right=False),
    Trial("n32_compute_only", 32, 2, 3, replace=COMPUTE_ONLY, right=False),
    # parts of a page's work, without the window
    Trial("n16_no_mean", 16, 3, 2, replace=(NO_MEAN, NO_WINDOW), right=False),
    Trial("n16_subnormal_values", 16, 3, 2, replace=(SUBNORMAL_VALUES, NO_WINDOW), right=False),
    Trial("n16_no_values", 16, 3, 2, replace=(NO_VALUES, NO_WINDOW), right=False),
    Trial("n16_no_scores", 16, 3, 2, replace=(NO_SCORES, NO_WINDOW), right=False),
    Trial("n16_no_softmax", 16, 3, 2, replace=(NO_SOFTMAX, NO_WINDOW), right=False),
    Trial("n32_no_values", 32, 2, 3, replace=(NO_VALUES, NO_WINDOW), right=False),
    Trial("n32_no_scores", 32, 2, 3, replace=(NO_SCORES, NO_WINDOW), right=False),
)
# heads, context, batch
MAIN_SHAPE = {16: (16, 32768, 32), 32: (32, 32768, 32)}
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
}
# heads, query length, lengths, splits
CHECKS = (
    (16, 1, (1, 63, 700, 5000), None),
    (16, 1, (300,), 1),
    (5, 3, (0, 129, 130, 191, 193, 4096), None),
    (64, 2, (2000, 65), 3),
)
