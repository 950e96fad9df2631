"""The attention backends that vLLM asks about both groups of the pool."""

from typing import Any, ClassVar

import torch

from quantmla.serve.settings import CACHE_DTYPES
from quantmla.serve.vllm.engine import AttentionBackend, MLACommonBackend, MultipleOf

PAGE_SIZE = 64  # tokens of a packed page that the kernels take


class QuantMLABackend(MLACommonBackend):
    """`--attention-backend CUSTOM`: packed pages, each a row of bytes."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return [PAGE_SIZE]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # any; the kernels say which

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """`head_size` is the bytes of a token, as in the layer's spec."""
        return (num_blocks, block_size * head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (1, 0, 2) if include_num_layers_dimension else (0, 1)

    @staticmethod
    def get_impl_cls() -> type:
        from quantmla.serve.vllm.impl import QuantMLAImpl

        return QuantMLAImpl

    @staticmethod
    def get_builder_cls() -> type:
        from quantmla.serve.vllm.metadata import PackedBuilder

        return PackedBuilder


class WindowBackend(AttentionBackend):
    """Window pages: bf16 rows, with padding between pages."""

    @staticmethod
    def get_name() -> str:
        return "QUANTMLA_WINDOW"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return [MultipleOf(1)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return (num_blocks, block_size, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (1, 0, 2, 3) if include_num_layers_dimension else (0, 1, 2)

    @staticmethod
    def get_impl_cls() -> type:
        raise NotImplementedError("window pages have no attention of their own")

    @staticmethod
    def get_builder_cls() -> type:
        from quantmla.serve.vllm.metadata import WindowBuilder

        return WindowBuilder
