"""Sizes of a page in the words that the kernels read, from the layout and nothing else."""

from dataclasses import asdict, dataclass

from quantmla.cache.view import CacheView

WORD_BITS = 16


@dataclass(frozen=True, kw_only=True)
class PageShape(dict[str, int]):
    """One compile-time constant of a kernel; offsets are bytes from a page's start.

    A dict of its fields too: who watches Triton's compiler (vLLM does) writes constants as JSON.
    """

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
    BYTES: int

    def __post_init__(self) -> None:
        self.update(asdict(self))

    @property
    def PLANES(self) -> int:
        """Content channels in a word."""
        return WORD_BITS // self.BITS

    @property
    def WORDS(self) -> int:
        """Words of a token's content."""
        return self.RANK // self.PLANES

    @property
    def ROPE_PLANES(self) -> int:
        return WORD_BITS // self.ROPE_BITS

    @property
    def ROPE_WORDS(self) -> int:
        return self.ROPE // self.ROPE_PLANES

    @property
    def ROPE_WIDTH(self) -> int:
        """Words of the rope operands: at least the tensor core's shortest inner dimension."""
        return max(16, self.ROPE_WORDS)

    @property
    def LINES(self) -> int:
        """Cache lines of a page."""
        return self.BYTES // 128

    @property
    def LINES_WIDTH(self) -> int:
        """The power of two that holds them."""
        return 1 << (self.LINES - 1).bit_length()

    @property
    def GROUP(self) -> int:
        """Content channels that share a scale."""
        return self.RANK // self.GROUPS

    @property
    def BAND(self) -> int:
        return self.ROPE // self.BANDS

    @property
    def ZEROS_END(self) -> int:
        return self.ZEROS_AT + (self.GROUPS + self.BANDS) * self.TOKENS

    @property
    def MEAN_END(self) -> int:
        return self.MEAN_AT + 2 * self.ROPE


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
        BYTES=layout.page_bytes,
    )
