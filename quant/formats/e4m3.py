"""E4M3 bytes: to float32, several times as fast as torch's own cast on a CPU, and the subnormal."""

from __future__ import annotations

import torch

from sdsa_quant.layout import E4M3_LAST_SUBNORMAL

_NAN = 0x7F  # magnitude bits
# E4M3's exponent and mantissa, shifted into a float16's, are the value times 2^-8.
_FLOAT16_UNIT = 256.0


def decode(codes: torch.Tensor, *, unit: float = 1.0) -> torch.Tensor:
    """Value of each E4M3 byte times `unit`, exact, subnormals and NaN included.

    Parameters
    ----------
    codes : torch.Tensor
        float8_e4m3fn or its uint8 bytes, any shape.
    unit : float
        A power of two to multiply by at no cost.

    Returns
    -------
    torch.Tensor
        float32 of the same shape.
    """
    bits = codes.view(torch.int8).to(torch.int16)
    is_nan = (bits & _NAN) == _NAN
    # Sign-extended and shifted by 7, bits 15 and 14 are both the sign: clear the latter.
    halves = (bits << 7).bitwise_and_(~0x4000).view(torch.float16)
    return halves.float().mul_(_FLOAT16_UNIT * unit).masked_fill_(is_nan, float("nan"))


def is_subnormal(scale_bytes: torch.Tensor) -> torch.Tensor:
    """Whether uint8 scales are subnormal, bytes 1 to 7: below 2^-6, fewer than 4 significant bits.

    A scale is never negative, so that no sign bit is looked at.
    """
    return (scale_bytes > 0) & (scale_bytes <= E4M3_LAST_SUBNORMAL)
