"""The rule ``search``: of all scales that a block could have, the one that loses least.

Per block: every E4M3 scale from ``amax / 8`` to ``amax / 3.5``, and that of ``amax / 6``. A scale's
error is the sum of ``(code * scale - x)^2``.
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
_FIRST_ROUNDED_PAST_6 = 7.0
# The byte of an E4M3 scale at bits 20 to 26 is a float32 of its value times 2^-120.
_E4M3_SHIFT = 20
_E4M3_UNIT = 2.0**120
_LARGEST_INVERSE = 2.0**9


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


def best_scales(magnitudes: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Bytes of the scales that lose least.

    Parameters
    ----------
    magnitudes : torch.Tensor
        float32 ``[16, n]``, contiguous: a block in each column.
    base : torch.Tensor
        int32 ``[n]``, the bytes of the rule amax/6.

    Returns
    -------
    torch.Tensor
        int32 ``[n]``; `base` for a block with NaN.
    """
    amax = magnitudes.amax(0)
    first, last = scales_to_try(amax, base)
    # NaN and infinity have no more to try than others: they keep their base.
    count = min(int((last - first).amax()) + 1, MAX_SCALES) if base.numel() else 0
    steps = torch.arange(count, dtype=torch.int32, device=base.device).unsqueeze(1)
    tried = torch.maximum(last - steps, first)
    scales = tried.bitwise_left_shift(_E4M3_SHIFT).view(torch.float32).mul_(_E4M3_UNIT)
    # Under a scale of 0 any finite code is as good as 0.
    inverse = scales.reciprocal().clamp_(max=_LARGEST_INVERSE)
    largest = (inverse * amax).amax(1).tolist()
    errors = torch.empty_like(scales)
    scaled, units = torch.empty_like(magnitudes), torch.empty_like(magnitudes)
    halves = [(scaled[:8], scaled[8:], units[:8])]
    for half in (4, 2):
        halves.append((units[:half], units[half : 2 * half], units[:half]))
    for scale, factor, top, error in zip(
        scales.unbind(0), inverse.unbind(0), largest, errors.unbind(0), strict=True
    ):
        torch.mul(magnitudes, factor, out=scaled)
        if not top < _FIRST_ROUNDED_PAST_6:
            scaled.clamp_(max=E2M1_MAX)
        torch.bitwise_and(scaled.view(torch.int32), _EXPONENT_MASK, out=units.view(torch.int32))
        units.clamp_(min=1.0).mul_(_ROUNDING_UNIT)
        scaled.add_(units).sub_(units).mul_(scale).sub_(magnitudes).mul_(scaled)
        for one, other, out in halves:
            torch.add(one, other, out=out)
        torch.add(units[0], units[1], out=error)
    best = tried.gather(0, errors.argmin(0, keepdim=True))[0]  # the first of equal ones
    return torch.where(amax.isfinite(), best, base)
