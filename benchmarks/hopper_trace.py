"""Clocks written by the Hopper kernel while it runs, and what they say.

STAMPS are replacements in the kernels' source: warp 0 of every warpgroup writes its
multiprocessor's clock between the phases of a page, and the clock and the GPU's timer between those
of an item (a part of a sequence) and of its block.
"""

from statistics import median

BLOCKS, GROUPS, PAGES, ITEMS = 132, 3, 128, 4
PAGE_PHASES = ("wait for data", "scores", "softmax", "values")
ITEM_PHASES = ("query", "bf16 rows", "pages", "finish")
BLOCK_PHASES = ("start", "wait", "lengths", "schedule", "items")

_DEFINITIONS = f"""
extern "C" __device__ unsigned int trace_pages[{BLOCKS * GROUPS * PAGES * 5}];
extern "C" __device__ unsigned long long trace_items[{BLOCKS * GROUPS * ITEMS * 5 * 2}];
extern "C" __device__ unsigned long long trace_blocks[{BLOCKS * 6 * 2}];
#define PAGE_AT ((blockIdx.x * {GROUPS} + at.group) * {PAGES} + min(turn, {PAGES - 1}u))
#define STAMP_PAGE(k) if (at.warp == 0 && at.lane == 0) {{ unsigned int c; \\
  asm volatile("mov.u32 %0, %%clock;" : "=r"(c) :: "memory"); trace_pages[PAGE_AT * 5 + k] = c; }}
#define STAMP_BOTH(to) {{ unsigned long long c, n; \\
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(c) :: "memory"); \\
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(n) :: "memory"); (to)[0] = n, (to)[1] = c; }}
#define STAMP_ITEM(k) if (at.warp == 0 && at.lane == 0) STAMP_BOTH(trace_items + \\
  (((blockIdx.x * {GROUPS} + at.group) * {ITEMS} + min(at.traced, {ITEMS - 1}u)) * 5 + k) * 2)
#define STAMP_BLOCK(k) if (threadIdx.x == 0) STAMP_BOTH(trace_blocks + (blockIdx.x * 6 + k) * 2)
"""


def _after(text: str, stamp: str) -> tuple[str, str]:
    return text, f"{text}{stamp}\n"


def _before(text: str, stamp: str) -> tuple[str, str]:
    return text, f"{stamp}\n{text}"


SOFTMAX = (
    "    softmax(at, unit - shift, turn % 2, s, o, l, "
    "[&] { first_values(at, stage, prepared, first); });\n"
)
STAMPS = (
    _before("typedef unsigned char u8;", _DEFINITIONS),
    _after("struct Place {  // of a thread\n", "  u32 traced;"),
    _after("  check_shared_base();\n", "  STAMP_BLOCK(0)"),
    _before("  wait_for_previous_kernel();  // nothing", "  STAMP_BLOCK(1)"),
    _before("  const u32 costs = SHARED_BASE + AT_COSTS;\n", "  STAMP_BLOCK(2)"),
    _before("  int blocks = block_count(), chunk = choose", "  STAMP_BLOCK(3)"),
    _before("  Place at;\n  find_place(at);\n", "  STAMP_BLOCK(4)"),
    _after("  find_place(at);\n", "  at.traced = 0;"),
    _after("      attend(p, at, item, k % p.tiles, turn);\n", "      at.traced++;"),
    _before("    release_next_kernel();", "    STAMP_BLOCK(5)"),
    _before("  int b = item.sequence;\n", "  STAMP_ITEM(0)"),
    _after("  start_item(p, b, tile, windowed);\n", "  STAMP_ITEM(1)"),
    _before("  bool ready = false;\n", "  STAMP_ITEM(2)"),
    _before("  V4 to = lds128(SHARED_BASE + AT_OUTPUT);", "  STAMP_ITEM(3)"),
    _after("to.w != 0}, 1.0f / unit_of(unit), o, l);\n", "  STAMP_ITEM(4)"),
    _before("    if (!ready) barrier_wait(ready_barrier(", "    STAMP_PAGE(0)"),
    _before("    score_page(at, stage, prepared, s);\n", "    STAMP_PAGE(1)"),
    _after("    score_page(at, stage, prepared, s);\n", "    STAMP_PAGE(2)"),
    _after(SOFTMAX, "    STAMP_PAGE(3)"),
    _after("    value_page(at, stage, prepared, turn % 2, first, o);\n", "    STAMP_PAGE(4)"),
)


def clear(module) -> None:
    """Before the launch that is to be read."""
    from cuda.bindings import driver

    for name in (b"trace_pages", b"trace_items", b"trace_blocks"):
        _, pointer, size = driver.cuModuleGetGlobal(module, name)
        driver.cuMemsetD8(pointer, 0, size)


def read(module) -> dict:
    """Spread of every phase, in cycles or ns, of the last launch."""
    import numpy as np
    from cuda.bindings import driver

    def array(name: bytes, dtype, *shape: int):
        _, pointer, size = driver.cuModuleGetGlobal(module, name)
        out = np.empty(shape, dtype)
        driver.cuMemcpyDtoH(out.ctypes.data, pointer, size)
        return out

    pages = array(b"trace_pages", np.uint32, BLOCKS, GROUPS, PAGES, 5)
    items = array(b"trace_items", np.uint64, BLOCKS, GROUPS, ITEMS, 5, 2)
    blocks = array(b"trace_blocks", np.uint64, BLOCKS, 6, 2)
    return {
        "pages, cycles": _pages(pages),
        "items, ns": _phases(items[..., 0].reshape(-1, 5).tolist(), ITEM_PHASES),
        "blocks, ns": _phases(blocks[..., 0].tolist(), BLOCK_PHASES) | _ends(blocks),
    }


def spread(values: list[float]) -> list[float]:
    """Least, median, mean, most, and how many."""
    if not values:
        return []
    mean = sum(values) / len(values)
    return [round(x) for x in (min(values), median(values), mean, max(values), len(values))]


def _pages(stamps) -> dict:
    """Phases of pages; the first of a warpgroup apart, and the period of early and late ones."""
    found: dict[str, list] = {name: [] for name in (*PAGE_PHASES, "rest", "first wait")}
    periods: dict[str, list] = {"period 2 to 9": [], "period 10 on": []}
    for group in stamps.reshape(-1, PAGES, 5).astype("int64").tolist():
        known = [page for page in group[: PAGES - 1] if page[0] and page[4]]
        for i, page in enumerate(known):
            for k, name in enumerate(PAGE_PHASES):
                name = "first wait" if (i, k) == (0, 0) else name
                found[name].append((page[k + 1] - page[k]) % 2**32)
            if i + 1 < len(known):
                found["rest"].append((known[i + 1][0] - page[4]) % 2**32)
                period = (known[i + 1][0] - page[0]) % 2**32
                if i > 0:
                    periods["period 2 to 9" if i < 9 else "period 10 on"].append(period)
    return {name: spread(values) for name, values in (found | periods).items()}


def _phases(rows: list[list[int]], names: tuple[str, ...]) -> dict:
    """Rows of stamps, one more than names; those that were never written are left out."""
    known = [row for row in rows if all(row)]
    return {name: spread([r[k + 1] - r[k] for r in known]) for k, name in enumerate(names)}


def _ends(blocks) -> dict:
    """When blocks start and end after the first start, and their clocks' rate in MHz."""
    known = [row for row in blocks.astype("int64").tolist() if row[-1][0]]
    if not known:
        return {}
    zero = min(row[0][0] for row in known)
    rate = [1000 * (r[-1][1] - r[0][1]) / max(r[-1][0] - r[0][0], 1) for r in known]
    return {
        "started": spread([row[0][0] - zero for row in known]),
        "ended": spread([row[-1][0] - zero for row in known]),
        "MHz": spread(rate),
    }


if __name__ == "__main__":
    print(f"{__doc__}\nusage: hopper_session.py reads it, and is what to run")
