"""Loading the machine code on a GPU and launching it on torch's current stream."""

import ctypes
from functools import cache
from typing import Any, NamedTuple

import torch

from quantmla.cache.view import CacheView
from quantmla.errors import QuantMLAError
from quantmla.kernels.cuda.arguments import Arguments
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


def run(loaded: Kernels, threads: int, arguments: Arguments, view: CacheView, blocks: int) -> None:
    """Both launches; each is set up while the kernel before it still runs, and waits for it."""
    pages = view.pages_JY
    pointer = ctypes.addressof(arguments)
    stream = torch.cuda.current_stream(pages.device).cuda_stream
    with torch.cuda.device(pages.device):
        row_bytes = view.layout.content_row_bytes
        content = tensor_map(pages.data_ptr(), row_bytes, pages.stride(0), pages.shape[0])
        parameters = (ctypes.c_void_p * 2)(pointer, content.getPtr())
        _launch(loaded.decode, (blocks, 1), threads, loaded.shared_bytes, (stream, parameters))
        rows = arguments.batch * arguments.query_len * arguments.heads
        only = (ctypes.c_void_p * 1)(pointer)
        threads = combine_threads(rows, blocks)
        grid = (rows, COMBINE_SLICES if threads > 128 else 1)
        _launch(loaded.combine, grid, threads, threads * 16, (stream, only))


def _launch(
    kernel: Any, grid: tuple[int, int], threads: int, shared: int, how: tuple[int, Any]
) -> None:
    from cuda.bindings import driver

    stream, parameters = how
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid[0], grid[1], 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.hStream = shared, stream
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.attrs, config.numAttrs = [attribute], 1
    check(driver.cuLaunchKernelEx(config, kernel, ctypes.addressof(parameters), 0))
