"""The rule ``search``: of all scales that a block could have, the one that loses least.

Per block: every E4M3 scale from ``amax / 8`` to ``amax / 3.5``, and that of ``amax / 6``. A scale's
error is the sum of ``w (code * scale - x)^2``, with weights ``w`` of the block's values or without.
The smallest error wins, and of equal ones the larger scale. So the rule is never worse than
``amax/6``, and exact where that is.

Every operation is float32 and rounded by itself. The 16 squares are added as a tree: value ``i``
and ``i + 8``, then ``i`` and ``i + 4``, and so on.
"""

from __future__ import annotations

import torch

from sdsa_quant.layout import E2M1_MAX, E4M3_MAX

from . import e4m3

LEAST_CODE = 3.5  # the largest scale puts amax here
GREATEST_CODE = 8.0  # and the smallest one here, where it saturates
MAX_SCALES = 11  # that a block can have to choose from; a test goes through every amax
_LAST_SCALE = 0x7E  # the byte of 448
_EXPONENT_MASK = 0x7F800000  # of a float32
# 1.5 * 2^22 has steps of 0.5 in float32 on both sides: adding it to a value between -2 and 2, and
# taking it away, rounds to an E2M1 value, nearest even. Times 2 and 4 it does so further out.
_ROUNDING_UNIT = 1.5 * 2.0**22


def round_to_e2m1(values: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
    """E2M1 value nearest to each of contiguous float32 `values`, in place; a zero is +0.

    `units` is a workspace like `values`. NaN stays NaN.
    """
    values.clamp_(-E2M1_MAX, E2M1_MAX)
    torch.bitwise_and(values.view(torch.int32), _EXPONENT_MASK, out=units.view(torch.int32))
    units.clamp_(min=1.0).mul_(_ROUNDING_UNIT)
    return values.add_(units).sub_(units)


def inverse_of(scales: torch.Tensor) -> torch.Tensor:
    """``1 / scale`` of float32 scales, 0 where the scale is 0."""
    return scales.reciprocal().masked_fill_(scales == 0, 0.0)


def scales_to_try(amax: torch.Tensor, base: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First and last byte of the scales to try: int32, of float32 `amax` and the bytes of amax/6.

    `base` is int32. NaN and infinite `amax` have nothing but `base`.
    """
    last = _rounded(amax, LEAST_CODE, down=True).maximum(base)
    first = _rounded(amax, GREATEST_CODE, down=False).minimum(base)
    return first, last


def _rounded(amax: torch.Tensor, code: float, *, down: bool) -> torch.Tensor:
    """int32 byte of ``amax / code`` rounded down or up to E4M3, at most that of 448."""
    # A tensor divisor, as in nvfp4.
    quotient = (amax / torch.full_like(amax, code)).clamp_(max=E4M3_MAX)
    nearest = quotient.to(torch.float8_e4m3fn)
    bytes_ = nearest.view(torch.uint8).to(torch.int32)
    values = e4m3.decode(nearest)
    if down:
        return bytes_.sub_((values > quotient).int())
    return bytes_.add_((values < quotient).int()).clamp_(max=_LAST_SCALE)


def best_scales(
    magnitudes: torch.Tensor, base: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Bytes of the scales that lose least.

    Parameters
    ----------
    magnitudes : torch.Tensor
        float32 ``[groups, 16, n]``, contiguous, the blocks along the second dimension.
    base : torch.Tensor
        int32 ``[groups, n]``, the bytes of the rule amax/6.
    weights : torch.Tensor, optional
        float32 ``[groups, 16, 1]``.

    Returns
    -------
    torch.Tensor
        int32 ``[groups, n]``; `base` for a block with NaN.
    """
    first, last = scales_to_try(magnitudes.amax(1), base)
    best = base.clone()
    least = torch.full(base.shape, torch.inf, dtype=torch.float32, device=base.device)
    scaled, units = torch.empty_like(magnitudes), torch.empty_like(magnitudes)
    for step in range(MAX_SCALES):
        tried = (last - step).maximum(first)
        scales = e4m3.decode(tried.to(torch.uint8))
        torch.mul(magnitudes, inverse_of(scales).unsqueeze(1), out=scaled)
        round_to_e2m1(scaled, units).mul_(scales.unsqueeze(1)).sub_(magnitudes).square_()
        if weights is not None:
            scaled.mul_(weights)
        errors = _sum_of_16(scaled, units)
        better = errors < least
        least = torch.where(better, errors, least)
        best = torch.where(better, tried, best)
    return best


def _sum_of_16(values: torch.Tensor, workspace: torch.Tensor) -> torch.Tensor:
    """``[groups, n]`` sums over the second dimension of ``[groups, 16, n]``, as a tree."""
    half = values.shape[1] // 2
    while half:
        out = workspace[:, :half]
        torch.add(values[:, :half], values[:, half : 2 * half], out=out)
        values, half = out, half // 2
    return values[:, 0]
