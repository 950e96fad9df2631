"""What a reader of the cache sees: values after the write and the read, without the bytes.

T consecutive tokens from token `start` of a sequence, R latent channels, E rope channels
(interleaved). Learning, evaluation and tests all quantise through these two functions, and the
bytes of quant/page.py decode to the same values.
"""

import torch
from torch import Tensor

from quantmla.quant.affine import fake_quantize
from quantmla.quant.format import CacheFormat
from quantmla.quant.layout import content_groups, rope_groups

MAX_MEAN = 65504.0  # largest float16


def read_content(stored_TR: Tensor, fmt: CacheFormat) -> Tensor:
    """Latents as read back; differentiable. Leading dimensions may be more than one."""
    if fmt.content_bits == 16:
        return stored_TR
    groups = content_groups(fmt, stored_TR.shape[-1])
    return fake_quantize(stored_TR, fmt.content_bits, groups, fmt.range_rule, fmt.content_clip)


def page_means(k_rope_JLE: Tensor) -> Tensor:
    """Mean rope key of whole pages [J, E], rounded to float16 as stored; finite.

    The sum is taken in float64, where it is exact for bf16 rows, so no order of summation matters.
    """
    mean = k_rope_JLE.double().mean(dim=-2).clamp(-MAX_MEAN, MAX_MEAN)
    return mean.to(torch.float32).to(torch.float16).to(k_rope_JLE.dtype)


def read_rope(k_rope_TE: Tensor, fmt: CacheFormat) -> Tensor:
    """Rope keys as read back; differentiable. [..., T, E], where T starts at a page's first token.

    Tokens of an unfinished last page are centred by the mean of those that are there. Finite for
    finite keys, but for those that `paper` reads as more than float32 holds.
    """
    channels = k_rope_TE.shape[-1]
    if fmt.rope_bits == 16 or channels == 0:
        return k_rope_TE
    groups = rope_groups(fmt, channels)
    if fmt.rope_centring == "none":
        return fake_quantize(k_rope_TE, fmt.rope_bits, groups, fmt.range_rule, fmt.rope_clip)
    length, page = k_rope_TE.shape[-2], fmt.page_size
    whole = length // page * page
    parts = []
    if whole:
        parts.append(
            _read_pages(k_rope_TE[..., :whole, :].unflatten(-2, (-1, page)), fmt, groups).flatten(
                -3, -2
            )
        )
    if whole < length:
        parts.append(_read_pages(k_rope_TE[..., whole:, :], fmt, groups))
    return torch.cat(parts, dim=-2) if parts else k_rope_TE


def _read_pages(k_rope_JLE: Tensor, fmt: CacheFormat, groups: int) -> Tensor:
    mean = page_means(k_rope_JLE).unsqueeze(-2)
    # fake_quantize computes in the input's dtype; the rounding of the mean carries no gradient. The
    # true mean's is that of a mean of zeros, as the sum of the keys themselves may overflow
    mean = mean.detach() + (k_rope_JLE - k_rope_JLE.detach()).mean(dim=-2, keepdim=True)
    return mean + fake_quantize(
        k_rope_JLE - mean, fmt.rope_bits, groups, fmt.range_rule, fmt.rope_clip
    )
