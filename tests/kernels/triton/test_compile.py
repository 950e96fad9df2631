"""Every kernel for GPUs that are not here, and a gate on the main loop's machine code."""

import pytest
import torch

pytest.importorskip("triton", reason="the compiler is part of triton")

from cases import Case, all_tokens, empty_cache, format_of, random_rows
from sass import TARGETS, compile_launch, report

from quantmla.kernels.problem import DecodeQuery
from quantmla.kernels.triton.launch import Launch
from quantmla.kernels.triton.launches import append_launch, decode_launches, gather_launch
from quantmla.kernels.triton.schedule import Device, schedule
from quantmla.kernels.triton.step import WindowRule, locate_launch, starts_launch

# Warp instructions of the split kernel's main loop per token (all warps), and bytes of stack. Seen
# with Triton 3.6: 107, 120, 139. Two pipeline stages have a quarter fewer and take a tenth longer.
# A version of Triton that does worse should be noticed.
GATES = {("c4r4", 16): (112, 320), ("c2r4", 16): (125, 128), ("c4r4", 32): (145, 448)}


def launches(
    fmt: str, heads: int, target: str, rank: int = 512, rope: int = 64
) -> dict[str, Launch]:
    case = Case(name="compile", fmt=fmt, heads=heads, rank=rank, rope=rope, lengths=(300, 70))
    generator = torch.Generator()
    view = empty_cache(case, generator)
    assert format_of(case) == view.fmt
    q = torch.zeros(2, 1, heads, rank + rope, dtype=torch.bfloat16)
    plan = schedule(2, heads, 512, Device(132, 227 << 10))
    nvidia = target != "gfx942"
    query = DecodeQuery(q[..., :rank].contiguous(), q[..., rank:].contiguous(), 0.1)
    (split, combine), _ = decode_launches(query, view, plan, (True, nvidia))
    tokens = all_tokens(case.lengths)
    rows = random_rows(370, case, generator)
    out = torch.empty(370, rank + rope, dtype=torch.bfloat16)
    return {
        "split": split,
        "combine": combine,
        "append": append_launch(rows, tokens, view),
        "gather": gather_launch(tokens, view, out),
        "locate": locate_launch(view.lengths_B, torch.zeros(2, dtype=torch.int64), 1, tokens),
        "starts": starts_launch(
            view.lengths_B,
            torch.arange(3, dtype=torch.int32),
            view.window_table_BW,
            WindowRule(128, 64, 16, 13),
            view.lengths_B.clone(),
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize(("fmt", "rank", "rope"), [("c4r4", 512, 64), ("c2r4", 256, 32)])
def test_every_kernel_compiles(target: str, fmt: str, rank: int, rope: int) -> None:
    for name, launch in launches(fmt, 16, target, rank, rope).items():
        binary = compile_launch(launch, target).asm["hsaco" if target == "gfx942" else "cubin"]
        assert len(binary) > 1000, name


@pytest.mark.slow
@pytest.mark.parametrize(("fmt", "heads"), list(GATES))
def test_instructions_per_token(fmt: str, heads: int) -> None:
    split = launches(fmt, heads, "sm_90")["split"]
    made = report(compile_launch(split, "sm_90"))
    per_token = made.loop.total() * split.num_warps / (64 * split.constants["STEP"])
    most, stack = GATES[fmt, heads]
    assert made.loop["HGMMA.64"] + made.loop["HGMMA.64x16x16.F32"] > 0, "no warpgroup MMA"
    assert per_token <= most, f"{per_token:.1f} warp instructions per token"
    assert made.stack <= stack, f"{made.stack} bytes of stack"
    assert made.shared <= 113 << 10, "two programs must fit one multiprocessor"


@pytest.mark.slow
def test_append_and_gather_do_not_spill() -> None:
    made = launches("c4r4", 16, "sm_90")
    for name in ("append", "gather", "combine"):
        assert report(compile_launch(made[name], "sm_90")).stack == 0, name
