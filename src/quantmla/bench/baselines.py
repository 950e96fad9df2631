"""BF16 decode attention to compare with: kernels of vLLM's binary distribution, or torch itself.

FlashMLA (`_flashmla_C`) and FlashAttention 3 with a latent value (`_vllm_fa3_C`) are shared objects
that register torch operators; they are loaded without vLLM, and their argument lists are those of
vllm 0.22. Where there are none, torch's products over unpaged rows, which cost no page table.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from quantmla.errors import UsageError, require
from quantmla.kernels.problem import DecodeQuery

TORCH = "torch_products"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bf16Cache:
    """Rows of 512 + 64 channels in 64-token pages."""

    pages_JLC: Tensor  # bfloat16
    block_table_BJ: Tensor  # int32
    lengths_B: Tensor  # int32


def bf16_cache(context: int, batch: int, block_table_BJ: Tensor, channels: int = 576) -> Bf16Cache:
    pages = torch.empty(block_table_BJ.numel(), 64, channels, dtype=torch.bfloat16, device="cuda")
    for part in pages.split(4096):
        part.normal_()
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    return Bf16Cache(pages_JLC=pages, block_table_BJ=block_table_BJ, lengths_B=lengths)


OPERATORS = {"flashmla": "_flashmla_C", "fa3_mla": "_vllm_fa3_C"}  # also names of the files


def find_libraries(folder: Path | None) -> list[Path]:
    """The shared objects below a folder, by default those of an installed vllm."""
    if folder is None:
        spec = find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            return []
        folder = Path(spec.submodule_search_locations[0])
        return _below(folder)
    found = _below(folder)
    wanted = ", ".join(f"{name}*.so" for name in OPERATORS.values())
    require(bool(found), f"no file named {wanted} below {folder}", UsageError)
    return found


def _below(folder: Path) -> list[Path]:
    return [path for name in OPERATORS.values() for path in sorted(folder.rglob(f"{name}.*so"))]


def load(libraries: Sequence[Path]) -> list[str]:
    """Names of the baselines that these shared objects bring; without any, torch's own."""
    if not libraries:
        return [TORCH]
    for path in libraries:
        require(path.is_file(), f"no shared object at {path}", UsageError)
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            raise UsageError(f"{path} does not fit this torch: {error}") from None
    found = []
    if hasattr(torch.ops._flashmla_C, "dense_decode_fwd"):
        found.append("flashmla")
    if hasattr(torch.ops._vllm_fa3_C, "fwd"):
        found.append("fa3_mla")
    return found


def torch_products(query: DecodeQuery, cache: Bf16Cache) -> Callable[[], Tensor]:
    """Products and a softmax in torch, over rows that lie in order."""
    q_BSNC = torch.cat((query.latent_BSNR, query.rope_BSNE), dim=-1)
    batch, query_len, _, rank = query.latent_BSNR.shape
    rows_BTC = cache.pages_JLC.flatten(0, 1).unflatten(0, (batch, -1))
    position = torch.arange(rows_BTC.shape[1], device="cuda")
    last_BS = cache.lengths_B[:, None] - query_len + torch.arange(query_len, device="cuda")
    hidden_BST = position > last_BS[:, :, None]

    def run() -> Tensor:
        scores = torch.einsum("bsnc,btc->bsnt", q_BSNC, rows_BTC) * query.softmax_scale
        p = torch.softmax(scores.masked_fill_(hidden_BST[:, :, None], -torch.inf), dim=-1)
        return torch.einsum("bsnt,btr->bsnr", p, rows_BTC[..., :rank])

    return run


def flashmla(query: DecodeQuery, cache: Bf16Cache) -> Callable[[], Tensor]:
    q = torch.cat((query.latent_BSNR, query.rope_BSNE), dim=-1)
    rank, causal = query.latent_BSNR.shape[-1], q.shape[1] > 1
    pages, table, lengths = cache.pages_JLC[:, :, None], cache.block_table_BJ, cache.lengths_B
    forward = torch.ops._flashmla_C.dense_decode_fwd
    fixed = (q, pages, rank, lengths, table, query.softmax_scale, causal)
    _, _, plan, splits = forward(*fixed, None, None, None)
    return lambda: forward(*fixed, plan, splits, None)[0]


def fa3_mla(query: DecodeQuery, cache: Bf16Cache) -> Callable[[], Tensor]:
    batch, query_len, heads, rank = query.latent_BSNR.shape
    rope = query.rope_BSNE.shape[-1]
    context = cache.block_table_BJ.shape[1] * 64
    starts = torch.arange(0, (batch + 1) * query_len, query_len, dtype=torch.int32, device="cuda")
    q_latent, q_rope = query.latent_BSNR.flatten(0, 1), query.rope_BSNE.flatten(0, 1)
    keys, values = cache.pages_JLC[:, :, None, rank:], cache.pages_JLC[:, :, None, :rank]
    sizes = (batch, query_len, context, heads, 1, rope, rank)
    plan = torch.ops._vllm_fa3_C.get_scheduler_metadata(
        *sizes, torch.bfloat16, cache.lengths_B, starts, None, None, None, None, 64, 0, True,
        -1, -1, False, 0, None, 0,
    )  # fmt: skip
    return lambda: torch.ops._vllm_fa3_C.fwd(
        q_rope, keys, values, None, None, q_latent, None, starts, None, None, None, cache.lengths_B,
        query_len, context, cache.block_table_BJ, None, None, None, None, None, None, None, None,
        query.softmax_scale, True, -1, -1, 0.0, True, plan, 0, None, 0, None, 1, 0, None,
    )[0]  # fmt: skip


BASELINES = {"flashmla": flashmla, "fa3_mla": fa3_mla, TORCH: torch_products}
