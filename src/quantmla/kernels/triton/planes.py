"""Packed codes to float16 planes, in registers.

A 16-bit word j of a row holds the channels P*j .. P*j + P-1 of P = 16 / bits planes, the lowest
bits first. Plane i is the matrix of channels P*j + i: queries are read, and outputs written, with
stride P, so that no code ever moves from one thread to another.

0x6400 is 1024.0 in float16, whose last bit is worth 1, so a code put into its mantissa is exact. A
field that lies k bits higher counts 2**k times as much: 1024 + code * 2**k, over 2**k.
"""

import triton
import triton.language as tl

# lop3 with 0xea is (a & b) | c. The words of two tokens or channels share a register.
LOW_FIELD = tl.constexpr("""{
.reg .b32 t;
shr.u32 t, $1, SHIFT;
lop3.b32 t, t, MASK, 0x64006400, 0xea;
add.rn.f16x2 $0, t, $2;
}""")
HIGH_FIELD = tl.constexpr("""{
.reg .b32 t, f;
shr.u32 t, $1, SHIFT;
lop3.b32 t, t, MASK, 0x64006400, 0xea;
mov.b32 f, FACTOR;
fma.rn.f16x2 $0, t, f, $2;
}""")


def _texts(bits: int) -> tuple[str, ...]:
    """PTX of each plane. Fields are taken to the low byte of their word: 10 bits of mantissa."""
    texts = []
    for plane in range(16 // bits):
        at, shift = plane * bits % 8, plane * bits // 8 * 8
        field = (2**bits - 1) << at
        half = (15 - at) << 10  # bits of the float16 2**-at
        text = HIGH_FIELD.value if at else LOW_FIELD.value
        text = text.replace("FACTOR", hex(half | half << 16)).replace(
            "MASK", hex(field | field << 16)
        )
        texts.append(text.replace("SHIFT", str(shift)))
    return tuple(texts)


PLANES4 = tl.constexpr(_texts(4))
PLANES2 = tl.constexpr(_texts(2))


@triton.jit
def offset_of(offset, PLANE: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """-(1024 / 2**k + zero point) for the plane's field, from that of k = 0; exact in float16."""
    if ASM and PLANE * BITS % 8 != 0:
        return offset + (1024.0 - 1024.0 / 2 ** (PLANE * BITS % 8))
    else:
        return offset


@triton.jit
def centred_plane(words, offset, PLANE: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """code - zero point of one plane, exact in float16; `offset` as offset_of gives it."""
    if ASM:
        return tl.inline_asm_elementwise(
            PLANES4[PLANE] if BITS == 4 else PLANES2[PLANE],
            "=r,r,r",
            [words, offset],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        code = ((words >> (BITS * PLANE)) & (2**BITS - 1)) | 0x6400
        return code.to(tl.int16).to(tl.float16, bitcast=True) + offset


@triton.jit
def spread(x, ROWS: tl.constexpr, GROUPS: tl.constexpr, WORDS: tl.constexpr):
    """[ROWS, GROUPS] to [ROWS, GROUPS * WORDS]: each group's value for each of its words."""
    wide = tl.broadcast_to(x[:, :, None], [ROWS, GROUPS, WORDS])
    return tl.reshape(wide, [ROWS, GROUPS * WORDS])
