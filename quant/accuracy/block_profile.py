"""How keys fall into NVFP4 blocks: lost, coarse and clipped blocks, outliers, and magnitudes.

A block is 16 values. It is *flushed* if it has a nonzero value but its scale ``e4m3(amax / 6)`` is
0, *subnormal* if its scale is an E4M3 subnormal (below 2^-6, fewer than 4 significant bits),
*saturated* if its largest magnitude is above 2688, and it has an *outlier* if its largest magnitude
is more than 8 times its median one (the lower of the two middle ones).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sdsa_quant.formats.nvfp4 import e4m3_scales
from sdsa_quant.layout import BLOCK, E4M3_LAST_SUBNORMAL, NVFP4_MAX

OUTLIER_RATIO = 8.0
# Blocks are counted by the exponent of their largest magnitude, ends included in the outer ones.
FIRST_EXPONENT = -24
LAST_EXPONENT = 16
EXPONENTS = tuple(range(FIRST_EXPONENT, LAST_EXPONENT + 1))


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
    scales = e4m3_scales(amax).view(torch.uint8)
    nonzero = amax > 0
    # Half of the values below amax / 8 is what a lower median below amax / 8 means.
    small = (magnitudes.mul_(OUTLIER_RATIO) < amax[:, None]).sum(-1)
    exponents = torch.frexp(amax[nonzero]).exponent.long() - 1
    bins = exponents.clamp_(FIRST_EXPONENT, LAST_EXPONENT) - FIRST_EXPONENT
    by_exponent = torch.bincount(bins, minlength=len(EXPONENTS))
    return BlockProfile(
        blocks=amax.shape[0],
        flushed=int(((scales == 0) & nonzero).sum()),
        subnormal=int(((scales > 0) & (scales <= E4M3_LAST_SUBNORMAL)).sum()),
        saturated=int((amax > NVFP4_MAX).sum()),
        outliers=int((small >= BLOCK // 2).sum()),
        zero=int((~nonzero).sum()),
        by_exponent=tuple(by_exponent.tolist()),
    )
