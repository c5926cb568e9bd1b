"""What NVFP4 does to blocks of 16 values: lost, coarse and clipped blocks, outliers, magnitudes.

A block is *flushed* if it has a nonzero value but its scale is 0, so that all of it decodes to
zero; *subnormal* if its scale is an E4M3 subnormal (below 2^-6, fewer than 4 significant bits);
*saturated* if its largest magnitude is above 2688, which decodes to at most 2688. It has an
*outlier* if its largest magnitude is more than 8 times its median one (the lower of the two middle
ones).

`profile_blocks` looks at keys alone, with the scales ``e4m3(amax / 6)`` that they would have.
`BlockStatistics` looks at keys and what a cache stores of them, and measures the error: the
relative L2 error is ``sqrt(sum (x - y)^2 / sum x^2)`` of the keys ``x`` and their decoded form
``y``, both sums in float64, over finite values. Counts are exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sdsa_quant.formats import e4m3
from sdsa_quant.formats.blocks import passes
from sdsa_quant.formats.nvfp4 import dequantize_nvfp4, e4m3_scales
from sdsa_quant.layout import BLOCK, NVFP4_MAX, SCALES_PER_KEY

OUTLIER_RATIO = 8.0
# Blocks are counted by the exponent of their largest magnitude, ends included in the outer ones.
FIRST_EXPONENT = -24
LAST_EXPONENT = 16
EXPONENTS = tuple(range(FIRST_EXPONENT, LAST_EXPONENT + 1))


class _Lossy(NamedTuple):
    """Numbers of blocks, as the module's docstring defines them."""

    flushed: int
    subnormal: int
    saturated: int


def _count_lossy(amax: torch.Tensor, scales: torch.Tensor) -> _Lossy:
    """Count blocks by their largest magnitudes and their E4M3 scales, of the same shape.

    A NaN is a value all the same, so that its block counts as nonzero.
    """
    scale_bytes = scales.view(torch.uint8)
    return _Lossy(
        flushed=int(((scale_bytes == 0) & (amax != 0)).sum()),
        subnormal=int(e4m3.is_subnormal(scale_bytes).sum()),
        saturated=int((amax > NVFP4_MAX).sum()),
    )


@dataclass(frozen=True, slots=True)
class BlockProfile:
    """Counts of blocks; profiles of disjoint keys add up."""

    blocks: int = 0
    flushed: int = 0
    subnormal: int = 0
    saturated: int = 0
    outliers: int = 0
    zero: int = 0  # all values 0; in no bin of `by_exponent`
    by_exponent: tuple[int, ...] = (0,) * len(EXPONENTS)  # floor(log2 amax)

    def __add__(self, other: BlockProfile) -> BlockProfile:
        return BlockProfile.from_counts(
            [a + b for a, b in zip(self.counts(), other.counts(), strict=True)]
        )

    def counts(self) -> list[int]:
        """Every count in one list, as `from_counts` takes it."""
        return [
            self.blocks,
            self.flushed,
            self.subnormal,
            self.saturated,
            self.outliers,
            self.zero,
            *self.by_exponent,
        ]

    @classmethod
    def from_counts(cls, counts: list[int]) -> BlockProfile:
        """Undo `counts`."""
        blocks, flushed, subnormal, saturated, outliers, zero, *by_exponent = counts
        return cls(blocks, flushed, subnormal, saturated, outliers, zero, tuple(by_exponent))


def profile_blocks(keys: torch.Tensor) -> BlockProfile:
    """Profile of keys, finite floating point ``[n, 128]``."""
    magnitudes = keys.float().unflatten(-1, (-1, BLOCK)).abs().flatten(0, 1)
    amax = magnitudes.amax(-1)
    lossy = _count_lossy(amax, e4m3_scales(amax))
    nonzero = amax != 0
    # Half of the values below amax / 8 is what a lower median below amax / 8 means.
    small = (magnitudes.mul_(OUTLIER_RATIO) < amax[:, None]).sum(-1)
    exponents = torch.frexp(amax[nonzero]).exponent.long() - 1
    bins = exponents.clamp_(FIRST_EXPONENT, LAST_EXPONENT) - FIRST_EXPONENT
    by_exponent = torch.bincount(bins, minlength=len(EXPONENTS))
    return BlockProfile(
        blocks=amax.shape[0],
        flushed=lossy.flushed,
        subnormal=lossy.subnormal,
        saturated=lossy.saturated,
        outliers=int((small >= BLOCK // 2).sum()),
        zero=int((~nonzero).sum()),
        by_exponent=tuple(by_exponent.tolist()),
    )


class BlockStatistics:
    """Running totals over the keys of a cache; give it each part of the keys once.

    Attributes
    ----------
    keys : int
        Keys seen.
    flushed : int
        Blocks with a nonzero value whose scale is zero.
    subnormal : int
        Blocks with a subnormal scale.
    saturated : int
        Blocks with a magnitude above 2688.
    nonfinite : int
        Values that are NaN or infinite.
    """

    def __init__(self) -> None:
        self.keys = 0
        self.flushed = 0
        self.subnormal = 0
        self.saturated = 0
        self.nonfinite = 0
        self._squared_error = 0.0
        self._squared_norm = 0.0

    @property
    def blocks(self) -> int:
        return self.keys * SCALES_PER_KEY

    def share(self, count: int) -> float:
        """`count` as a share of all blocks, NaN where there are none."""
        return count / self.blocks if self.blocks else math.nan

    @property
    def relative_error(self) -> float:
        """Relative L2 error of the decoded keys; 0 where nothing was lost, even of all zeros."""
        if self._squared_error == 0.0:
            return 0.0 if self.keys else math.nan
        return math.sqrt(self._squared_error / self._squared_norm)

    def add_nvfp4(self, keys: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Count quantized keys.

        Parameters
        ----------
        keys : torch.Tensor
            bfloat16, float16 or float32 ``[n, 128]``, before quantization.
        codes : torch.Tensor
            uint8 ``[n, 64]``.
        scales : torch.Tensor
            float8_e4m3fn ``[n, 8]``.
        """
        for part in _parts(keys):
            amax = keys[part].unflatten(-1, (-1, BLOCK)).abs().amax(-1)
            lossy = _count_lossy(amax, scales[part])
            self.flushed += lossy.flushed
            self.subnormal += lossy.subnormal
            self.saturated += lossy.saturated
            self._add_error(keys[part], dequantize_nvfp4(codes[part], scales[part], torch.float64))

    def add_decoded(self, keys: torch.Tensor, decoded: torch.Tensor) -> None:
        """Count keys that were stored without blocks, as ``[n, 128]`` before and after."""
        for part in _parts(keys):
            self._add_error(keys[part], decoded[part].double())

    def _add_error(self, keys: torch.Tensor, decoded: torch.Tensor) -> None:
        """Add keys and their decoded form (float64, overwritten)."""
        self.keys += keys.shape[0]
        exact = keys.double()
        squared_norm = float(_squared_sum(exact))
        if not math.isfinite(squared_norm):
            finite = exact.isfinite()
            self.nonfinite += finite.numel() - int(finite.sum())
            exact = exact.where(finite, 0.0)
            decoded = decoded.where(finite, 0.0)
            squared_norm = float(_squared_sum(exact))
        self._squared_norm += squared_norm
        self._squared_error += float(_squared_sum(decoded.sub_(exact)))


def _parts(keys: torch.Tensor) -> list[slice]:
    """The keys a few at a time: a float64 pass takes four times the memory of a BF16 one."""
    return [part for part, _ in passes(keys.shape[0], 4 * keys.shape[-1], keys.device)]


def _squared_sum(values: torch.Tensor) -> torch.Tensor:
    flat = values.flatten()
    return torch.dot(flat, flat)
