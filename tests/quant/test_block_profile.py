"""Block counts by hand, against the stored scales, and added up."""

from __future__ import annotations

import torch

from sdsa_quant.accuracy.blocks import (
    EXPONENTS,
    FIRST_EXPONENT,
    LAST_EXPONENT,
    BlockProfile,
    profile_blocks,
)
from sdsa_quant.formats.nvfp4 import quantize_nvfp4


def bin_of(exponent: int) -> int:
    return exponent - FIRST_EXPONENT


def key_of_blocks(*blocks: list[float]) -> torch.Tensor:
    """One key whose first blocks start with these values."""
    key = torch.zeros(8, 16)
    for place, values in enumerate(blocks):
        key[place, : len(values)] = torch.tensor(values)
    return key.view(1, 128)


def test_blocks_by_hand() -> None:
    # Scales: 1; 0 (flushed, 2^-8 / 6 < 2^-10); subnormal (0.03 / 6 = 0.005 < 2^-6); saturated.
    key = key_of_blocks([6.0] * 16, [2.0**-8] * 16, [0.03] * 16, [3000.0] * 16, [0.0])
    profile = profile_blocks(key)
    assert (profile.blocks, profile.zero) == (8, 4)
    assert (profile.flushed, profile.subnormal, profile.saturated) == (1, 1, 1)
    assert profile.outliers == 0
    used = {place: count for place, count in enumerate(profile.by_exponent) if count}
    assert used == {bin_of(2): 1, bin_of(-8): 1, bin_of(-6): 1, bin_of(11): 1}


def test_an_outlier_is_more_than_8_times_the_lower_median() -> None:
    # 16 values: the lower median is the 8th smallest.
    key = key_of_blocks(
        [8.0] + [1.0] * 15,  # 8 = 8 x 1: not more
        [8.125] + [1.0] * 15,  # more
        [9.0] * 8 + [1.0] * 8,  # 8th smallest is 1: more
        [9.0] * 9 + [1.0] * 7,  # 8th smallest is 9
        [5.0],  # 15 zeros: infinitely more
    )
    assert profile_blocks(key).outliers == 3


def test_counts_agree_with_the_stored_scales(generator: torch.Generator) -> None:
    exponents = torch.randint(-14, 13, (500, 8, 1), generator=generator).float()
    keys = torch.randn(500, 8, 16, generator=generator) * torch.exp2(exponents)
    keys = keys.view(500, 128).bfloat16()
    profile = profile_blocks(keys)
    scales = quantize_nvfp4(keys)[1].view(torch.uint8)
    assert profile.flushed == int((scales == 0).sum()) > 0
    assert profile.subnormal == int(((scales > 0) & (scales < 8)).sum()) > 0
    assert profile.saturated == int((keys.view(500, 8, 16).abs().amax(-1) > 2688).sum()) > 0
    assert sum(profile.by_exponent) + profile.zero == profile.blocks == 4000


def test_magnitudes_beyond_the_bins_are_in_the_outer_ones() -> None:
    profile = profile_blocks(key_of_blocks([2.0**-30], [2.0**30]))
    assert profile.by_exponent[bin_of(FIRST_EXPONENT)] == 1
    assert profile.by_exponent[bin_of(LAST_EXPONENT)] == 1
    assert len(profile.by_exponent) == len(EXPONENTS)


def test_profiles_of_parts_add_up(generator: torch.Generator) -> None:
    keys = torch.randn(90, 128, generator=generator)
    whole = profile_blocks(keys)
    parts = profile_blocks(keys[:31]) + profile_blocks(keys[31:31]) + profile_blocks(keys[31:])
    assert parts == whole
    assert BlockProfile() + whole == whole
    assert BlockProfile.from_counts(whole.counts()) == whole
