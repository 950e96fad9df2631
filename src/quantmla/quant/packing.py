"""Codes to bytes and back: little-endian bit fields, channel c of a row at bit c * bits.

T rows, C channels (a multiple of 8), Y bytes per row. So at 4 bits a 16-bit word j holds channels
4j..4j+3, channel 4j+i in bits 4i..4i+3, which is what the kernels' nibble planes read. 3 bits are a
plane of the low 2 bits followed by a plane of the high bit, so that no field crosses a byte.
"""

import torch
from torch import Tensor

from quantmla.errors import UsageError, require


def row_bytes(channels: int, bits: int) -> int:
    """Bytes of one packed row; 16 bits is bf16 as it is."""
    require(channels % 8 == 0, f"{channels} channels are not a multiple of 8", UsageError)
    return channels * bits // 8


def _pack_plane(codes_TC: Tensor, bits: int) -> Tensor:
    per_byte = 8 // bits
    fields = codes_TC.unflatten(-1, (-1, per_byte)).to(torch.int32)
    shifts = torch.arange(0, 8, bits, device=codes_TC.device, dtype=torch.int32)
    return (fields << shifts).sum(-1).to(torch.uint8)


def _unpack_plane(packed_TY: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, device=packed_TY.device, dtype=torch.int32)
    fields = (packed_TY.to(torch.int32)[..., None] >> shifts) & (2**bits - 1)
    return fields.flatten(-2).to(torch.uint8)


def pack(codes_TC: Tensor, bits: int) -> Tensor:
    """uint8 codes, one per byte, to packed rows [T, C * bits / 8]."""
    row_bytes(codes_TC.shape[-1], bits)
    if bits == 3:
        return torch.cat((_pack_plane(codes_TC & 3, 2), _pack_plane(codes_TC >> 2, 1)), dim=-1)
    return _pack_plane(codes_TC, bits)


def unpack(packed_TY: Tensor, bits: int) -> Tensor:
    """Inverse of `pack`."""
    if bits == 3:
        split = packed_TY.shape[-1] * 2 // 3
        low, high = packed_TY[..., :split], packed_TY[..., split:]
        return _unpack_plane(low, 2) | (_unpack_plane(high, 1) << 2)
    return _unpack_plane(packed_TY, bits)
