"""Cycles of a multiprocessor for one m64n16k16 product, by pattern and number of warpgroups.

python benchmarks/hopper_products.py
"""

import argparse
import ctypes
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))

PATTERNS = ("independent", "chains of four", "two chains at once", "chains, sums used")
TIMES, PRODUCTS, SHARED = 64, 32, 17 * 1024


def image(pattern: int) -> bytes:
    from quantmla.kernels.cuda.build import compile_text, source

    text = source("device.cuh") + (HERE / "hopper_products.cu").read_text()
    return compile_text(text.replace("#pragma once", ""), (f"-DPATTERN={pattern}",))


def cycles(code: bytes, warpgroups: int) -> float:
    import torch
    from cuda.bindings import driver

    from quantmla.kernels.cuda.launch import check

    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    out = torch.zeros(blocks, dtype=torch.int64, device="cuda")
    sink = torch.zeros(blocks * warpgroups * 128, device="cuda")
    function = check(driver.cuModuleGetFunction(check(driver.cuModuleLoadData(code)), b"products"))
    values = (ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(sink.data_ptr()))
    pointers = (ctypes.c_void_p * 2)(*(ctypes.addressof(value) for value in values))
    stream = torch.cuda.current_stream().cuda_stream
    for _ in range(3):
        grid, block = (blocks, 1, 1), (warpgroups * 128, 1, 1)
        check(
            driver.cuLaunchKernel(
                function, *grid, *block, SHARED, stream, ctypes.addressof(pointers), 0
            )
        )
    torch.cuda.synchronize()
    return out.double().median().item() / (TIMES * PRODUCTS * warpgroups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        parser.error("needs a Hopper GPU, and torch sees none")
    torch.zeros(1, device="cuda")
    for pattern, name in enumerate(PATTERNS):
        code = image(pattern)
        print(name, {n: round(cycles(code, n), 1) for n in (1, 2, 3, 4)}, flush=True)


if __name__ == "__main__":
    main()
