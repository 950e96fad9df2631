"""Packed codes to float16 planes, in registers.

A 16-bit word j of a row holds the channels P*j .. P*j + P-1 of P = 16 / bits planes, the lowest bits
first. Plane i is the matrix of channels P*j + i: queries are read, and outputs written, with stride
P, so that no code ever moves from one thread to another. 0x6400 is 1024.0 in float16, whose last bit
is worth 1: an integer below 1024 put into its mantissa is exact.
"""

import triton
import triton.language as tl

# lop3 with 0xea is (a & b) | c. Words of two tokens or channels share a register.
UNPACK4 = tl.constexpr("""{
.reg .b32 y, c1, sixteenth;
mov.b32 sixteenth, 0x2c002c00;
add.rn.f16x2 c1, $5, 0x63806380;
shr.u32 y, $4, 8;
lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
lop3.b32 $1, $4, 0x00f000f0, 0x64006400, 0xea;
lop3.b32 $2, y, 0x000f000f, 0x64006400, 0xea;
lop3.b32 $3, y, 0x00f000f0, 0x64006400, 0xea;
add.rn.f16x2 $0, $0, $5;
fma.rn.f16x2 $1, $1, sixteenth, c1;
add.rn.f16x2 $2, $2, $5;
fma.rn.f16x2 $3, $3, sixteenth, c1;
}""")
UNPACK2 = tl.constexpr("""{
.reg .b32 y, c1, c2, c3, r1, r2, r3;
mov.b32 r1, 0x34003400;
mov.b32 r2, 0x2c002c00;
mov.b32 r3, 0x24002400;
add.rn.f16x2 c1, $9, 0x62006200;
add.rn.f16x2 c2, $9, 0x63806380;
add.rn.f16x2 c3, $9, 0x63e063e0;
shr.u32 y, $8, 8;
lop3.b32 $0, $8, 0x00030003, 0x64006400, 0xea;
lop3.b32 $1, $8, 0x000c000c, 0x64006400, 0xea;
lop3.b32 $2, $8, 0x00300030, 0x64006400, 0xea;
lop3.b32 $3, $8, 0x00c000c0, 0x64006400, 0xea;
lop3.b32 $4, y, 0x00030003, 0x64006400, 0xea;
lop3.b32 $5, y, 0x000c000c, 0x64006400, 0xea;
lop3.b32 $6, y, 0x00300030, 0x64006400, 0xea;
lop3.b32 $7, y, 0x00c000c0, 0x64006400, 0xea;
add.rn.f16x2 $0, $0, $9;
fma.rn.f16x2 $1, $1, r1, c1;
fma.rn.f16x2 $2, $2, r2, c2;
fma.rn.f16x2 $3, $3, r3, c3;
add.rn.f16x2 $4, $4, $9;
fma.rn.f16x2 $5, $5, r1, c1;
fma.rn.f16x2 $6, $6, r2, c2;
fma.rn.f16x2 $7, $7, r3, c3;
}""")


@triton.jit
def centred_planes(words, offset, BITS: tl.constexpr, ASM: tl.constexpr):
    """Tuple of P float16 tensors: code - zero point, exact. `offset` is -(1024 + zero point)."""
    if ASM and BITS == 4:
        return tl.inline_asm_elementwise(
            UNPACK4,
            "=&r,=&r,=&r,=&r,r,r",
            [words, offset],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif ASM and BITS == 2:
        return tl.inline_asm_elementwise(
            UNPACK2,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
            [words, offset],
            dtype=(
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
            ),
            is_pure=True,
            pack=2,
        )
    else:
        planes = ()
        for i in tl.static_range(16 // BITS):
            code = ((words >> (BITS * i)) & (2**BITS - 1)) | 0x6400
            planes = planes + (code.to(tl.int16).to(tl.float16, bitcast=True) + offset,)
        return planes


@triton.jit
def spread(x, ROWS: tl.constexpr, GROUPS: tl.constexpr, WORDS: tl.constexpr):
    """[ROWS, GROUPS] to [ROWS, GROUPS * WORDS]: each group's value for each of its words."""
    wide = tl.broadcast_to(x[:, :, None], [ROWS, GROUPS, WORDS])
    return tl.reshape(wide, [ROWS, GROUPS * WORDS])
