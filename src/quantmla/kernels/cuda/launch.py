"""Loading the machine code on a GPU and launching it on torch's current stream."""

import ctypes
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch

from quantmla.errors import QuantMLAError
from quantmla.kernels.cuda.build import cubin

COMBINE_SLICES = 4  # of a row
SHARED_LIMIT = 227 * 1024


class Kernels(NamedTuple):
    module: Any
    decode: Any
    combine: Any
    shared_bytes: int


def check(result: tuple[Any, ...]) -> Any:
    """The value of a driver call, or an error."""
    if result[0].value != 0:
        raise QuantMLAError(f"the CUDA driver says {result[0].name}")
    return result[1] if len(result) == 2 else result[1:]


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def kernels(macros: tuple[str, ...], shared_bytes: int, device: torch.device) -> Kernels:
    """Both kernels on one GPU; the first call compiles."""
    return load(cubin(macros), shared_bytes, device)


def load(image: bytes, shared_bytes: int, device: torch.device) -> Kernels:
    from cuda.bindings import driver

    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes torch's context current
        module = check(driver.cuModuleLoadData(image))
        decode = check(driver.cuModuleGetFunction(module, b"decode"))
        combine = check(driver.cuModuleGetFunction(module, b"combine"))
        most_shared = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(decode, most_shared, shared_bytes))
    return Kernels(module, decode, combine, shared_bytes)


@cache
def tensor_map(pointer: int, row_bytes: int, page_stride: int, num_pages: int) -> Any:
    """Content of a pool as [page][128-byte half of a row][token][word], swizzled on arrival."""
    from cuda.bindings import driver

    u64, u32, halves = driver.cuuint64_t, driver.cuuint32_t, row_bytes // 128
    return check(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT16,
            4,
            pointer,
            [u64(64), u64(64), u64(halves), u64(num_pages)],
            [u64(row_bytes), u64(128), u64(page_stride)],
            [u32(64), u32(64), u32(halves), u32(1)],
            [u32(1), u32(1), u32(1), u32(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


def combine_threads(rows: int, blocks: int) -> int:
    """Few rows have many parts: more warps share them. Else a block has a warp for each slice."""
    return 512 if rows * COMBINE_SLICES <= 2 * blocks else 128


class Launch:
    """One kernel on one grid. What `parameters` point to is read anew by every start."""

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int],
        threads: int,
        shared_bytes: int,
        *,
        overlaps: bool = False,
    ) -> None:
        """`overlaps`: it is set up while the kernel before it still runs, and waits for it."""
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid[0], grid[1], 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared_bytes
        if overlaps:
            ids = driver.CUlaunchAttributeID
            attribute = driver.CUlaunchAttribute()
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        self._launch, self._config, self._kernel = driver.cuLaunchKernelEx, config, kernel
        self._stream: int | None = None

    def start(self, parameters: ctypes.Array[ctypes.c_void_p], device: torch.device) -> None:
        """On torch's current stream; the driver has copied the arguments when it returns."""
        stream = torch._C._cuda_getCurrentRawStream(device.index)  # as torch.compile's code does
        if stream != self._stream:
            self._config.hStream = self._stream = stream
        check(self._launch(self._config, self._kernel, ctypes.addressof(parameters), 0))


_here = nullcontext()


def on(device: torch.device) -> AbstractContextManager[object]:
    """torch.cuda.device, but nothing where that is current already."""
    return _here if torch.cuda.current_device() == device.index else torch.cuda.device(device)
