"""The machine code for Hopper, without a GPU: it compiles, and keeps out of local memory."""

import re
import subprocess
from pathlib import Path

import pytest

from quantmla.kernels.cuda.backend import NARROW, WIDE, WIDEST, variant_for
from quantmla.kernels.cuda.build import cubin, defines
from quantmla.kernels.cuda.launch import combine_threads
from quantmla.quant.format import parse_format
from quantmla.quant.layout import page_layout

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")


def _cuobjdump() -> str:
    triton = pytest.importorskip("triton")
    path = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not path.exists():
        pytest.skip("triton brings no cuobjdump")
    return str(path)


def _page_loop(sass: str) -> list[str]:
    """Opcodes of the innermost loop that holds the products of a page."""
    decode = next(part for part in sass.split("Function : ") if part.startswith("decode"))
    line = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)(.*?);")
    code = [(int(m[1], 16), m[2], m[3]) for m in line.finditer(decode)]
    loops = []
    for address, opcode, rest in code:
        target = re.search(r"0x([0-9a-f]+)", rest) if opcode == "BRA" else None
        if target and int(target[1], 16) < address:
            body = [op for at, op, _ in code if int(target[1], 16) <= at <= address]
            if sum(op.startswith("HGMMA") for op in body) >= 60:
                loops.append(body)
    return min(loops, key=len)


@pytest.mark.parametrize("name", ["c4r4", "c2r4"])
@pytest.mark.parametrize(
    ("variant", "products", "most"), [(NARROW, 69, 1200), (WIDE, 68, 1520), (WIDEST, 68, 1960)]
)
def test_page_loop(tmp_path, name, variant, products, most):
    """Operands from registers, no product waits for another, few instructions for 64 tokens."""
    image = cubin(defines(variant, page_layout(512, 64, parse_format(name))))
    (tmp_path / "decode.cubin").write_bytes(image)
    tool = [_cuobjdump(), str(tmp_path / "decode.cubin")]
    usage = subprocess.run(
        [tool[0], "-res-usage", tool[1]], capture_output=True, text=True, check=True
    )
    (stack,) = re.findall(r"Function decode:\n.*?STACK:(\d+)", usage.stdout + usage.stderr)
    assert int(stack) <= 160  # what a part keeps beside its loop over pages
    sass = subprocess.run(
        [tool[0], "-sass", tool[1]], capture_output=True, text=True, check=True
    ).stdout
    loop = _page_loop(sass)
    assert sum(op.startswith("HGMMA") for op in loop) == products
    assert sum(op.startswith(("LDL", "STL")) for op in loop) <= 24
    # a product that waits for the one before has its own WARPGROUP.DEPBAR
    assert sum(op.startswith("WARPGROUP.DEPBAR") for op in loop) < 25
    assert len(loop) <= most


def test_variant_by_rows():
    assert variant_for(1) == variant_for(16) == NARROW
    assert variant_for(17) == variant_for(32) == WIDE
    assert variant_for(33) == variant_for(128) == WIDEST


def test_few_rows_are_combined_by_more_warps():
    assert combine_threads(16, 132) == 512
    assert combine_threads(16 * 32, 132) == 128
