"""E2M1 codes: encode, decode, pack, unpack.

A code is four bits ``s eem``: sign, two exponent bits, one mantissa bit. The magnitudes of codes 0
to 7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6 (OCP Microscaling Formats, version 1.0, FP4). Two codes share a
byte: value ``2i`` of a key in the low nibble of byte ``i``, value ``2i + 1`` in the high nibble.
"""

from __future__ import annotations

import torch

from sdsa_quant.errors import DtypeError, InputError
from sdsa_quant.layout import E2M1_MAX

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0 to 7

_SIGN_BIT = 8
_EXPONENT_MASK = 0x7F800000  # of a float32
# 2^22 has steps of 0.5 in float32: adding it to a value below 2 rounds to an E2M1 value, nearest
# even. Times the value's own power of two it does the same for [2, 4) and [4, 6].
_ROUNDING_UNIT = 4194304.0
_ROUNDING_EXPONENT = 149  # biased float32 exponent of _ROUNDING_UNIT

# An E2M1 code shifted to bits 15 and 11..9 is the float16 of its value times 2^-14, zero and
# subnormals included. Both nibbles of a byte get to their bits of an int32 by one multiplication,
# which is two shifts whose results do not overlap.
_SPREAD_MAGNITUDES = (1 << 9) + (1 << 21)
_SPREAD_SIGNS = (1 << 12) + (1 << 24)
_MAGNITUDE_BITS = 0x0E000E00
_SIGN_BITS = -0x7FFF8000  # 0x80008000 as an int32
UNPACKED_UNIT = 2.0**14  # unpack_float16(codes) * UNPACKED_UNIT are the values


def encode(values: torch.Tensor) -> torch.Tensor:
    """Round to the nearest E2M1 value, ties to even, saturating at 6; the sign of -0 is kept.

    Parameters
    ----------
    values : torch.Tensor
        float32, any shape, finite.

    Returns
    -------
    torch.Tensor
        uint8 of the same shape, one code (0 to 15) per value.

    Raises
    ------
    TypeError
        `values` is not float32.
    """
    if values.dtype != torch.float32:
        raise DtypeError(f"values must be float32, got {values.dtype}")
    work = values.clone(memory_format=torch.contiguous_format)
    workspace = torch.empty(2 * work.numel(), dtype=torch.int32, device=work.device)
    return encode_in_place(work, workspace).to(torch.uint8)


def encode_in_place(values: torch.Tensor, workspace: torch.Tensor) -> torch.Tensor:
    """`encode` into the memory of `values` (contiguous float32), returned as an int32 view.

    `workspace` is contiguous int32 of at least ``2 * values.numel()`` elements. New memory for
    every operation would cost more than the operations: the system hands it out page by page.
    """
    count = values.numel()
    bits = values.view(torch.int32)
    signs = workspace[:count].view(values.shape)
    torch.bitwise_right_shift(bits, 28, out=signs).bitwise_and_(_SIGN_BIT)
    magnitudes = values.abs_().clamp_(max=E2M1_MAX)
    units = workspace[count : 2 * count].view(values.shape)
    torch.bitwise_and(bits, _EXPONENT_MASK, out=units)
    magnitudes.add_(units.view(torch.float32).clamp_(min=1.0).mul_(_ROUNDING_UNIT))
    # The sum's mantissa now counts half units (0 to 4) and its exponent says which unit: 1, 2 or 4.
    halves = torch.bitwise_and(bits, 7, out=units)
    codes = bits.bitwise_right_shift_(22).sub_(2 * _ROUNDING_EXPONENT)
    return codes.add_(halves).bitwise_or_(signs)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """Value of each code (0 to 15; higher bits must be 0), float32 of the same shape."""
    values = [*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)]
    table = torch.tensor(values, dtype=torch.float32, device=codes.device)
    return table[codes.long()]


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Put two codes in a byte, the even-indexed one in the low nibble.

    Parameters
    ----------
    codes : torch.Tensor
        int32 or uint8 ``[..., 2 n]``, each 0 to 15.

    Returns
    -------
    torch.Tensor
        uint8 ``[..., n]``.

    Raises
    ------
    ValueError
        The last dimension is odd.
    """
    if codes.shape[-1] % 2:
        raise InputError(f"codes must have an even last dimension, got {list(codes.shape)}")
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8)


def pack_in_place(codes: torch.Tensor, packed: torch.Tensor) -> None:
    """`pack` contiguous int32 `codes` into uint8 `packed`; the codes are overwritten."""
    pairs = codes.view(torch.int64)
    packed.copy_(pairs.bitwise_or_(pairs >> 28))  # the cast keeps the lowest byte


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Undo `pack`: uint8 ``[..., n]`` to uint8 codes ``[..., 2 n]``."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def unpack_float16(packed: torch.Tensor, *, workspace: torch.Tensor | None = None) -> torch.Tensor:
    """Values of packed codes times 2^-14, exact, as float16.

    Parameters
    ----------
    packed : torch.Tensor
        uint8 ``[..., n]``.
    workspace : torch.Tensor, optional
        Contiguous int32 of at least ``2 * packed.numel()`` elements to use instead of new memory;
        the result lives in it.

    Returns
    -------
    torch.Tensor
        float16 ``[..., 2 n]``, times `UNPACKED_UNIT` the values.
    """
    count = packed.numel()
    if workspace is None:
        workspace = torch.empty(2 * count, dtype=torch.int32, device=packed.device)
    magnitudes = workspace[:count].view(packed.shape)
    signs = workspace[count : 2 * count].view(packed.shape)
    signs.copy_(packed)
    torch.mul(signs, _SPREAD_MAGNITUDES, out=magnitudes)
    magnitudes.bitwise_and_(_MAGNITUDE_BITS)
    signs.mul_(_SPREAD_SIGNS).bitwise_and_(_SIGN_BITS)
    return magnitudes.bitwise_or_(signs).view(torch.float16)
