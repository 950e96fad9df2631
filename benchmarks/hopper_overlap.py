"""What products and arithmetic of different warps cost one another on a multiprocessor.

python benchmarks/hopper_overlap.py

Prints cycles of a multiprocessor for one product (a wgmma of a warpgroup; four mma.sync, one of
each quarter) and for one instruction of four warps, alone and side by side.
"""

import argparse
import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))

WINDOW, INSTRUCTIONS, SHARED = 40000, 32, 65536
PRODUCTS = {
    "wgmma A registers n8": (1, 8),
    "wgmma A registers n16": (1, 16),
    "wgmma A registers n32": (1, 32),
    "wgmma A registers n64": (1, 64),
    "wgmma A shared n16": (2, 16),
    "mma.sync m16n8k16": (3, 16),
}
OTHERS = {"lop3": 1, "hfma2": 2, "ffma": 3, "ldmatrix.x4": 4, "ex2": 5}


def image(product: int, columns: int, other: int) -> bytes:
    from quantmla.kernels.cuda.build import compile_text, source

    text = source("device.cuh") + (HERE / "hopper_overlap.cu").read_text()
    macros = (f"-DPRODUCT={product}", f"-DCOLUMNS={columns}", f"-DOTHER={other}")
    return compile_text(text.replace("#pragma once", ""), macros)


def run(code: bytes, per_round: int, tensor_warps: int, other_warps: int) -> tuple[float, float]:
    """Products and instructions (of four warps each) in a cycle of a multiprocessor."""
    import torch
    from cuda.bindings import driver

    from quantmla.kernels.cuda.launch import check

    warps = tensor_warps + other_warps
    out = torch.zeros(132 * warps, dtype=torch.int32, device="cuda")
    sink = torch.zeros(132 * warps * 32, device="cuda")
    function = check(driver.cuModuleGetFunction(check(driver.cuModuleLoadData(code)), b"overlap"))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(driver.cuFuncSetAttribute(function, attribute, SHARED))
    values = (
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_void_p(sink.data_ptr()),
        ctypes.c_int(tensor_warps),
    )
    pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in values))
    stream = torch.cuda.current_stream().cuda_stream
    for _ in range(2):
        check(
            driver.cuLaunchKernel(
                function, 132, 1, 1, warps * 32, 1, 1, SHARED, stream, ctypes.addressof(pointers), 0
            )
        )
    torch.cuda.synchronize()
    counts = out.view(132, warps).double().median(0).values
    rate = 1 / WINDOW / 4
    products, others = counts[:tensor_warps].sum().item(), counts[tensor_warps:].sum().item()
    return products * per_round * rate, others * INSTRUCTIONS * rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        parser.error("needs a Hopper GPU, and torch sees none")
    torch.zeros(1, device="cuda")
    keys = [(p, o) for p in PRODUCTS for o in OTHERS]
    with ThreadPoolExecutor(16) as pool:
        images = pool.map(lambda k: image(*PRODUCTS[k[0]], OTHERS[k[1]]), keys)
        codes = dict(zip(keys, images, strict=True))
    for product in PRODUCTS:
        per_round = 32 if "mma.sync" in product else 64
        code = codes[product, "lop3"]
        alone = {w: round(1 / run(code, per_round, 4 * w, 0)[0], 2) for w in (1, 2, 3, 4)}
        print(f"{product} alone, cycles by warpgroups: {alone}", flush=True)
        for other in OTHERS:
            code = codes[product, other]
            base = {w: round(1 / run(code, 1, 0, w)[1], 2) for w in (4, 8, 12)}
            lines = []
            for groups in (1, 2):
                for warps in (4, 8, 12):
                    p, o = run(code, per_round, 4 * groups, warps)
                    lines.append(f"{groups}g+{warps}w: {1 / p:.1f} & {1 / o:.2f}")
            print(f"   {other} alone {base}; " + "; ".join(lines), flush=True)


if __name__ == "__main__":
    main()
