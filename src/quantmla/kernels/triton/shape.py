"""Sizes of a page in the words that the kernels read, from the layout and nothing else."""

from typing import NamedTuple

from quantmla.cache.view import CacheView

WORD_BITS = 16


class PageShape(NamedTuple):
    """Compile-time constants; offsets are bytes from a page's start."""

    RANK: int  # latent channels
    ROPE: int  # rope channels
    BITS: int  # of the content codes
    ROPE_BITS: int
    GROUPS: int  # content groups of a token
    BANDS: int  # rope groups of a token
    TOKENS: int  # of a page
    ROPE_AT: int
    SCALES_AT: int
    ZEROS_AT: int
    MEAN_AT: int
    PAGE_BYTES: int


def page_shape(view: CacheView) -> PageShape:
    layout = view.layout
    return PageShape(
        RANK=view.kv_lora_rank,
        ROPE=view.qk_rope_head_dim,
        BITS=view.fmt.content_bits,
        ROPE_BITS=view.fmt.rope_bits,
        GROUPS=layout.content_groups,
        BANDS=layout.rope_groups,
        TOKENS=view.fmt.page_size,
        ROPE_AT=layout.rope.start,
        SCALES_AT=layout.scales.start,
        ZEROS_AT=layout.zero_points.start,
        MEAN_AT=layout.mean.start,
        PAGE_BYTES=layout.page_bytes,
    )
