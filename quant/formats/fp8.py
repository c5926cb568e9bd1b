"""FP8 keys: one E4M3 code per value and one FP32 scale per key, as DeepSeek's indexers store them.

``scale = amax / 448`` over the last dimension, a true float32 division; ``code = e4m3(x / scale)``,
nearest even, saturating at 448, or 0 where the scale is 0.
"""

from __future__ import annotations

import torch

from sdsa_quant.arguments import checked_arguments
from sdsa_quant.errors import DtypeError, InputError
from sdsa_quant.layout import E4M3_MAX

from . import e4m3
from .blocks import passes, require_block_values


@checked_arguments
def quantize_fp8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``codes, scales`` of `values`, one scale for each vector along the last dimension.

    Parameters
    ----------
    values : torch.Tensor
        Input, bfloat16, float16 or float32 ``[..., n]``, CPU or CUDA.

    Returns
    -------
    codes : torch.Tensor
        float8_e4m3fn ``[..., n]``.
    scales : torch.Tensor
        float32 ``[...]``.

    Raises
    ------
    TypeError
        `values` has another dtype.
    ValueError
        `values` has no dimension, or is not finite.
    """
    require_block_values(values, 1)
    codes = torch.empty(values.shape, dtype=torch.float8_e4m3fn, device=values.device)
    scales = torch.empty(values.shape[:-1], dtype=torch.float32, device=values.device)
    vectors = values.reshape(-1, values.shape[-1])
    code_rows, scale_rows = codes.view(vectors.shape), scales.view(-1)
    count, width = vectors.shape
    for part, _ in passes(count, width, values.device):
        _quantize_vectors(vectors[part].float(), code_rows[part], scale_rows[part])
    return codes, scales


def _quantize_vectors(vectors: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """`quantize_fp8` of float32 ``[vectors, n]`` in one pass."""
    smallest, largest = vectors.aminmax(dim=-1)
    amax = torch.maximum(-smallest, largest)
    if not bool(amax.isfinite().all()):
        raise InputError("values must be finite, got NaN or infinity")
    # A tensor divisor: CUDA turns division by a Python number into a reciprocal multiplication.
    torch.div(amax, torch.full_like(amax, E4M3_MAX), out=scales)
    divisors = scales.masked_fill(scales == 0, torch.inf).unsqueeze(-1)
    # Clamped: a subnormal scale is so coarse that the quotient can exceed 448.
    codes.copy_((vectors / divisors).clamp_(-E4M3_MAX, E4M3_MAX))


@checked_arguments
def dequantize_fp8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``code * scale`` in float32 ``[..., n]``, rounded once.

    Parameters
    ----------
    codes : torch.Tensor
        Input, float8_e4m3fn ``[..., n]``.
    scales : torch.Tensor
        Input, float32 ``[...]``.

    Raises
    ------
    TypeError
        `codes` is not float8_e4m3fn, or `scales` not float32.
    ValueError
        Their shapes do not belong together.
    """
    if codes.dtype != torch.float8_e4m3fn:
        raise DtypeError(f"codes must be float8_e4m3fn, got {codes.dtype}")
    if scales.dtype != torch.float32:
        raise DtypeError(f"scales must be float32, got {scales.dtype}")
    if scales.shape != codes.shape[:-1]:
        raise InputError(
            f"scales must be {list(codes.shape[:-1])} for codes {list(codes.shape)}, "
            f"got {list(scales.shape)}"
        )
    return e4m3.decode(codes).mul_(scales.unsqueeze(-1))
