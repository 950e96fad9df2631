"""Compiles launches for GPUs that are not there, and reads what the compiler made of them."""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quantmla.kernels.triton.launch import Launch

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
POINTERS = {
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
}
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


class Report(NamedTuple):
    registers: int
    stack: int  # bytes, spills included
    shared: int  # bytes
    loop: Counter  # opcodes of the loop with the most warpgroup products


def compile_launch(launch: Launch, target: str):
    """As the launcher would specialise it: 1 is a constant, multiples of 16 are known as such."""
    signature, constants, attributes = {}, dict(launch.constants), {}
    for place, parameter in enumerate(launch.kernel.params):
        name, special = parameter.name, not parameter.do_not_specialize
        if name in launch.constants:
            signature[name] = "constexpr"
            continue
        value = launch.args[name]
        if isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and special:
            signature[name] = "constexpr"
            constants[name] = 1
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and special:
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes
    )
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    return triton.compile(source, target=TARGETS[target], options=options)


def _run(tool: str, flag: str, path: Path) -> str:
    done = subprocess.run([TOOLS / tool, flag, path], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _instructions(sass: str) -> list[tuple[int, str, str]]:
    pattern = r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)(.*?);"
    return [(int(at, 16), op, rest) for at, op, rest in re.findall(pattern, sass)]


def _warpgroup_products(loop: Counter) -> int:
    """Of the packed path: rows of the window are too few for warpgroup instructions."""
    return sum(count for op, count in loop.items() if op.startswith("HGMMA"))


def report(compiled) -> Report:
    """Registers, spills and the main loop of a Hopper kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        usage = re.search(r"REG:(\d+) STACK:(\d+)", _run("cuobjdump", "-res-usage", path))
        instructions = _instructions(_run("cuobjdump", "-sass", path))
    assert usage is not None
    loops = []
    for at, op, rest in instructions:
        back = re.search(r"0x([0-9a-f]+)", rest) if op.startswith("BRA") else None
        if back and int(back[1], 16) < at:
            first = int(back[1], 16)
            loops.append(Counter(name for place, name, _ in instructions if first <= place <= at))
    loop = max(loops, key=_warpgroup_products, default=Counter())
    return Report(int(usage[1]), int(usage[2]), compiled.metadata.shared, loop)
