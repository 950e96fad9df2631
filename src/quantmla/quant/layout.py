"""Byte offsets within one page: the only place where they are decided.

A page holds `page_size` tokens of one layer as planes: content codes, rope codes, scales, zero
points, and the page's mean rope key. Scales (float16) and zero points (uint8) are transposed,
[group][token], content groups first. Every plane starts at a multiple of ALIGNMENT bytes and so
does the next page. A path of 16 bits is stored as bf16 rows and has no scales.
"""

from typing import NamedTuple

from quantmla.errors import UnsupportedModel, UsageError, require
from quantmla.mla.geometry import MlaGeometry
from quantmla.quant.format import CacheFormat
from quantmla.quant.packing import row_bytes

ALIGNMENT = 128
BF16_BYTES = 2
USUAL_GROUP = CacheFormat().group_size


class PageLayout(NamedTuple):
    """Planes of a page as byte ranges, and the counts that give them their shape."""

    content: slice  # [page_size, content_row_bytes]
    rope: slice  # [page_size, rope_row_bytes], interleaved channels
    scales: slice  # float16 [content_groups + rope_groups, page_size]
    zero_points: slice  # uint8, same shape
    mean: slice  # float16 [E]; empty without page centring
    page_bytes: int
    content_row_bytes: int
    rope_row_bytes: int
    content_groups: int
    rope_groups: int


def content_groups(fmt: CacheFormat, kv_lora_rank: int) -> int:
    """UnsupportedModel for the usual group size, UsageError for one that a recipe chose."""
    require(
        kv_lora_rank % fmt.group_size == 0,
        f"kv_lora_rank {kv_lora_rank} is not a multiple of group_size {fmt.group_size}",
        UnsupportedModel if fmt.group_size == USUAL_GROUP else UsageError,
    )
    return kv_lora_rank // fmt.group_size


def rope_groups(fmt: CacheFormat, qk_rope_head_dim: int) -> int:
    require(
        qk_rope_head_dim % (2 * fmt.rope_bands) == 0,
        f"qk_rope_head_dim {qk_rope_head_dim} cannot be split into {fmt.rope_bands} bands "
        "of whole pairs",
        UsageError,
    )
    return fmt.rope_bands


def page_layout(kv_lora_rank: int, qk_rope_head_dim: int, fmt: CacheFormat) -> PageLayout:
    """Offsets for one layer with these sizes in this format; UnsupportedModel where they cannot."""
    size = fmt.page_size
    groups_c = content_groups(fmt, kv_lora_rank) if fmt.content_bits < 16 else 0
    for key, channels in (("kv_lora_rank", kv_lora_rank), ("qk_rope_head_dim", qk_rope_head_dim)):
        whole = channels % 8 == 0
        require(whole, f"{key} {channels} is not a multiple of 8", UnsupportedModel)
    content_row = row_bytes(kv_lora_rank, fmt.content_bits)
    rope_row = row_bytes(qk_rope_head_dim, fmt.rope_bits) if qk_rope_head_dim else 0
    groups_r = rope_groups(fmt, qk_rope_head_dim) if fmt.rope_bits < 16 and qk_rope_head_dim else 0
    groups = groups_c + groups_r
    centred = fmt.rope_centring == "page" and groups_r > 0
    content, rope, scales, zero_points, mean, end = _place(
        size * content_row,
        size * rope_row,
        groups * size * 2,
        groups * size,
        qk_rope_head_dim * 2 if centred else 0,
    )
    return PageLayout(
        content=content,
        rope=rope,
        scales=scales,
        zero_points=zero_points,
        mean=mean,
        page_bytes=end.start,
        content_row_bytes=content_row,
        rope_row_bytes=rope_row,
        content_groups=groups_c,
        rope_groups=groups_r,
    )


def _place(*lengths: int) -> list[slice]:
    """One aligned slice per length, one after the other, and an empty one where the page ends."""
    planes, at = [], 0
    for length in (*lengths, 0):
        planes.append(slice(at, at + length))
        at = -(-(at + length) // ALIGNMENT) * ALIGNMENT
    return planes


def layout_for(geometry: MlaGeometry, fmt: CacheFormat) -> PageLayout:
    return page_layout(geometry.kv_lora_rank, geometry.qk_rope_head_dim, fmt)


def bf16_row_bytes(kv_lora_rank: int, qk_rope_head_dim: int) -> int:
    """Bytes of one token in the unquantised cache, or in the window."""
    return (kv_lora_rank + qk_rope_head_dim) * BF16_BYTES
