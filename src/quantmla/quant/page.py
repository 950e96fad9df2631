"""Whole pages to bytes and back, in torch: the reference writer and reader.

J pages, L page_size tokens, R latent channels, E rope channels (interleaved), Y page_bytes.
The range rule of bytes is `hold_zero`: the published rule has no byte layout.
"""

import torch
from torch import Tensor

from quantmla.errors import UsageError, require
from quantmla.quant.affine import Quantized, dequantize, quantize
from quantmla.quant.format import CacheFormat
from quantmla.quant.layout import PageLayout, page_layout
from quantmla.quant.packing import pack, unpack
from quantmla.quant.roundtrip import page_means


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _plane(x_J: Tensor) -> Tensor:
    return _bytes(x_J).flatten(1)


def require_byte_layout(fmt: CacheFormat) -> None:
    """Refuses formats that can be simulated only: their pages have no bytes."""
    require(
        fmt.range_rule == "hold_zero",
        f"range_rule {fmt.range_rule!r} has no byte layout: only 'hold_zero' has",
        UsageError,
    )


def pack_pages(latent_JLR: Tensor, k_rope_JLE: Tensor, fmt: CacheFormat) -> Tensor:
    """bf16 rows of complete pages to bytes, uint8 [J, Y]; padding bytes are 0."""
    require_byte_layout(fmt)
    for name, x in (("latent", latent_JLR), ("k_rope", k_rope_JLE)):
        require(
            x.dtype == torch.bfloat16,
            f"{name} is {x.dtype}; the cache takes torch.bfloat16",
            UsageError,
        )
    layout = page_layout(latent_JLR.shape[-1], k_rope_JLE.shape[-1], fmt)
    pages = torch.zeros(
        latent_JLR.shape[0], layout.page_bytes, dtype=torch.uint8, device=latent_JLR.device
    )
    if not len(pages):
        return pages
    scales, zeros = [], []

    if fmt.content_bits == 16:
        pages[:, layout.content] = _plane(latent_JLR)
    else:
        q = quantize(latent_JLR, fmt.content_bits, layout.content_groups, clip=fmt.content_clip)
        pages[:, layout.content] = _plane(pack(q.codes_TC, fmt.content_bits))
        scales.append(q.scale_TG)
        zeros.append(q.zero_point_TG)

    if fmt.rope_bits == 16 or layout.rope_groups == 0:
        pages[:, layout.rope] = _plane(k_rope_JLE)
    else:
        rows = k_rope_JLE.float()
        if fmt.rope_centring == "page":
            mean = page_means(rows)
            pages[:, layout.mean] = _plane(mean.to(torch.float16))
            rows = rows - mean[:, None, :]
        q = quantize(rows, fmt.rope_bits, layout.rope_groups, clip=fmt.rope_clip)
        pages[:, layout.rope] = _plane(pack(q.codes_TC, fmt.rope_bits))
        scales.append(q.scale_TG)
        zeros.append(q.zero_point_TG)

    if scales:
        scale_JGL = torch.cat(scales, dim=-1).transpose(1, 2).to(torch.float16)
        pages[:, layout.scales] = _plane(scale_JGL)
        pages[:, layout.zero_points] = _plane(torch.cat(zeros, dim=-1).transpose(1, 2))
    return pages


def unpack_pages(
    pages_JY: Tensor, kv_lora_rank: int, qk_rope_head_dim: int, fmt: CacheFormat
) -> tuple[Tensor, Tensor]:
    """Bytes to float32 rows: latent [J, L, R] and rope key [J, L, E]."""
    layout = page_layout(kv_lora_rank, qk_rope_head_dim, fmt)
    require(
        pages_JY.dtype == torch.uint8 and pages_JY.shape[-1] == layout.page_bytes,
        f"pages are {pages_JY.dtype} of {pages_JY.shape[-1]} bytes; "
        f"{fmt.name} needs uint8 of {layout.page_bytes}",
        UsageError,
    )
    scale_JLG, zero_JLG = _metadata(pages_JY, layout, fmt.page_size)
    content = pages_JY[:, layout.content].unflatten(1, (fmt.page_size, layout.content_row_bytes))
    if fmt.content_bits == 16:
        latent = content.contiguous().view(torch.bfloat16).float()
    else:
        groups = slice(0, layout.content_groups)
        latent = dequantize(
            Quantized(
                unpack(content, fmt.content_bits), scale_JLG[..., groups], zero_JLG[..., groups]
            )
        )
    if qk_rope_head_dim == 0:
        return latent, latent.new_zeros(*latent.shape[:2], 0)
    rope = pages_JY[:, layout.rope].unflatten(1, (fmt.page_size, layout.rope_row_bytes))
    if fmt.rope_bits == 16:
        return latent, rope.contiguous().view(torch.bfloat16).float()
    groups = slice(layout.content_groups, None)
    k_rope = dequantize(
        Quantized(unpack(rope, fmt.rope_bits), scale_JLG[..., groups], zero_JLG[..., groups])
    )
    if fmt.rope_centring == "page":
        mean = pages_JY[:, layout.mean].contiguous().view(torch.float16).float()
        k_rope = k_rope + mean[:, None, :]
    return latent, k_rope


def _metadata(pages_JY: Tensor, layout: PageLayout, page_size: int) -> tuple[Tensor, Tensor]:
    groups = layout.content_groups + layout.rope_groups
    scale = pages_JY[:, layout.scales].contiguous().view(torch.float16).float()
    zero = pages_JY[:, layout.zero_points]
    return (
        scale.unflatten(1, (groups, page_size)).transpose(1, 2) if groups else scale,
        zero.unflatten(1, (groups, page_size)).transpose(1, 2) if groups else zero,
    )
