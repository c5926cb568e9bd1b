"""MXFP4: blocks of 32 values, E2M1 codes, one power-of-two scale per block (E8M0).

OCP Microscaling Formats, version 1.0, section 6.3: the scale of a block is 2 to the exponent of its
largest magnitude less 2 (the exponent of E2M1's largest value, 6); a value's code is
``e2m1(x / scale)``, nearest even, saturating at 6. An E8M0 byte is the biased exponent, the value
``2^(byte - 127)``; 255 would be NaN and does not occur. Bytes hold two codes as in NVFP4.
"""

from __future__ import annotations

import torch

from sdsa_quant.arguments import checked_arguments
from sdsa_quant.errors import DtypeError, InputError

from . import e2m1
from .blocks import quantize_blocks

BLOCK = 32  # values that share one scale

_E2M1_EXPONENT = 2  # of 6, the largest magnitude
_MAGNITUDE = 0x7FFFFFFF  # of a float32's bits
_INFINITY = 0x7F800000
_EXPONENT_SHIFT = 23
_LARGEST_BIASED_EXPONENT = 254  # of a float32, and twice its bias
_SMALLEST_SCALE_BITS = 0x00400000  # 2^-127, a float32 subnormal


@checked_arguments
def quantize_mxfp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``codes, scales`` of `values`, bit for bit as the module's docstring says.

    Parameters
    ----------
    values : torch.Tensor
        Input, bfloat16, float16 or float32 ``[..., n]``, ``n`` a multiple of 32, CPU or CUDA.

    Returns
    -------
    codes : torch.Tensor
        uint8 ``[..., n / 2]``, two codes to a byte.
    scales : torch.Tensor
        uint8 ``[..., n / 32]``, E8M0.

    Raises
    ------
    TypeError
        `values` has another dtype.
    ValueError
        ``n`` is not a multiple of 32, or `values` are not finite.
    """
    return quantize_blocks(values, BLOCK, torch.uint8, _quantize_blocks)


def _quantize_blocks(
    blocks: torch.Tensor, workspace: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> None:
    """`quantize_mxfp4` of ``[blocks, 32]`` in one pass; 3 int32 of `workspace` for each value."""
    count = blocks.numel()
    scaled = workspace[:count].view(torch.float32).view(blocks.shape)
    rest = workspace[count : 3 * count]
    scaled.copy_(blocks)
    magnitudes = rest[:count].view(blocks.shape)
    torch.bitwise_and(scaled.view(torch.int32), _MAGNITUDE, out=magnitudes)
    amax_bits = magnitudes.amax(-1)
    if bool((amax_bits >= _INFINITY).any()):
        raise InputError("values must be finite, got NaN or infinity")
    biased = (amax_bits >> _EXPONENT_SHIFT).sub_(_E2M1_EXPONENT).clamp_(min=0)
    scales.copy_(biased)
    # The reciprocal of a power of two is exact, so that multiplying is dividing.
    inverse = ((_LARGEST_BIASED_EXPONENT - biased) << _EXPONENT_SHIFT).view(torch.float32)
    scaled.mul_(inverse.unsqueeze(-1))
    e2m1.pack_in_place(e2m1.encode_in_place(scaled, rest), codes)


@checked_arguments
def dequantize_mxfp4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``code * scale`` as float32 ``[..., n]``, exact.

    Parameters
    ----------
    codes : torch.Tensor
        Input, uint8 ``[..., n / 2]``.
    scales : torch.Tensor
        Input, uint8 ``[..., n / 32]``, E8M0.

    Raises
    ------
    TypeError
        `codes` or `scales` are not uint8.
    ValueError
        Their shapes do not belong together.
    """
    for name, tensor in (("codes", codes), ("scales", scales)):
        if tensor.dtype != torch.uint8:
            raise DtypeError(f"{name} must be uint8, got {tensor.dtype}")
    wanted = [*codes.shape[:-1], codes.shape[-1] // (BLOCK // 2)]
    if codes.shape[-1] % (BLOCK // 2) or list(scales.shape) != wanted:
        raise InputError(
            f"scales must be {wanted} for codes {list(codes.shape)}, got {list(scales.shape)}"
        )
    values = e2m1.unpack_float16(codes).float().mul_(e2m1.UNPACKED_UNIT)
    values.unflatten(-1, (-1, BLOCK)).mul_(_decode_e8m0(scales).unsqueeze(-1))
    return values


def _decode_e8m0(scales: torch.Tensor) -> torch.Tensor:
    bits = scales.to(torch.int32) << _EXPONENT_SHIFT
    return bits.masked_fill_(scales == 0, _SMALLEST_SCALE_BITS).view(torch.float32)
