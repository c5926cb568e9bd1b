"""Counts of lost, coarse and clipped blocks, and the relative error."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sdsa_quant.accuracy.blocks import BlockStatistics
from sdsa_quant.files.cache_file import ScaleCounts, count_scales
from sdsa_quant.formats.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from support.caches import write_cache


def count(keys: torch.Tensor, nonfinite: str = "error") -> BlockStatistics:
    statistics = BlockStatistics()
    statistics.add_nvfp4(keys, *quantize_nvfp4(keys, nonfinite=nonfinite))
    return statistics


def key_with(amax: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """One key whose first block has one nonzero value."""
    key = torch.zeros(1, 128, dtype=dtype)
    key[0, 3] = amax
    return key


@pytest.mark.parametrize(
    ("amax", "kind"),
    [
        (0.0, None),  # a zero block is not flushed
        (1e-35, "flushed"),
        (2.0**-8, "flushed"),  # / 6 is below half the smallest scale
        (0.005859375, "flushed"),  # / 6 is the tie at 2^-10, which goes to even: 0
        (0.0059814453125, "subnormal"),  # scale byte 1
        (6 * 7 * 2.0**-9, "subnormal"),  # scale byte 7
        (6 * 8 * 2.0**-9, None),  # scale byte 8, the smallest normal scale
        (2688.0, None),  # exactly the largest value
        (2704.0, "saturated"),
        (1e30, "saturated"),
    ],
)
@pytest.mark.parametrize("sign", [1, -1], ids=["plus", "minus"])
def test_kinds_of_blocks(amax: float, kind: str | None, sign: int) -> None:
    statistics = count(key_with(sign * amax))
    found = {name: getattr(statistics, name) for name in ("flushed", "subnormal", "saturated")}
    assert found == {name: int(name == kind) for name in found}
    assert statistics.blocks == 8
    assert statistics.share(1) == 1 / 8
    if kind == "flushed":
        assert statistics.relative_error == 1.0


def test_the_error_of_one_rounded_value() -> None:
    keys = key_with(6.0)
    keys[0, 5] = 2.25  # scale 1: decodes to 2
    statistics = count(keys)
    assert statistics.relative_error == pytest.approx(0.25 / math.sqrt(36 + 2.25**2), rel=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_parts_add_up(dtype: torch.dtype, generator: torch.Generator) -> None:
    # More than one pass, and magnitudes from flushed to saturated.
    exponents = torch.randint(-14, 13, (9000, 8, 1), generator=generator).float()
    keys = torch.randn(9000, 8, 16, generator=generator) * torch.exp2(exponents)
    keys = keys.view(9000, 128).to(dtype)
    whole, parts = count(keys), BlockStatistics()
    for part in keys.split(1234):
        parts.add_nvfp4(part, *quantize_nvfp4(part))
    codes, scales = quantize_nvfp4(keys)
    amax, scale_bytes = keys.view(9000, 8, 16).abs().amax(-1), scales.view(torch.uint8)
    for statistics in (whole, parts):
        assert statistics.blocks == 72000
        assert statistics.flushed == int(((amax > 0) & (scale_bytes == 0)).sum()) > 0
        assert statistics.subnormal == int(((scale_bytes >= 1) & (scale_bytes <= 7)).sum()) > 0
        assert statistics.saturated == int((amax > 2688).sum()) > 0
        assert statistics.nonfinite == 0
    exact = keys.double()
    expected = (dequantize_nvfp4(codes, scales, torch.float64) - exact).norm() / exact.norm()
    assert whole.relative_error == pytest.approx(float(expected), rel=1e-12)
    assert parts.relative_error == pytest.approx(float(expected), rel=1e-12)


def test_keys_of_zeros_have_no_error() -> None:
    statistics = count(torch.zeros(5, 128))
    assert statistics.relative_error == 0.0
    assert statistics.flushed == statistics.subnormal == statistics.saturated == 0


def test_no_keys_have_no_numbers() -> None:
    statistics = count(torch.zeros(0, 128))
    assert statistics.blocks == 0
    assert math.isnan(statistics.share(0))
    assert math.isnan(statistics.relative_error)


def test_nonfinite_values_are_counted_and_left_out_of_the_error() -> None:
    finite = torch.full((1, 128), 6.0)
    keys = finite.clone()
    keys[0, 0], keys[0, 16], keys[0, 17] = math.nan, math.inf, -math.inf
    statistics = count(keys, "saturate")
    assert statistics.nonfinite == 3
    assert statistics.saturated == 1
    # The block with infinities has scale 448, which flushes its 14 sixes to zero.
    assert statistics.relative_error == pytest.approx(math.sqrt(14 / 125))


def test_a_block_of_nan_counts_as_flushed() -> None:
    keys = torch.zeros(1, 128)
    keys[0, :16] = math.nan
    statistics = count(keys, "saturate")
    assert (statistics.flushed, statistics.nonfinite) == (1, 16)


def test_keys_without_blocks() -> None:
    keys = torch.tensor([[1.0 + 2.0**-10, 3.0]]).repeat(1, 64)
    statistics = BlockStatistics()
    statistics.add_decoded(keys, keys.bfloat16())
    error = (keys.bfloat16().double() - keys.double()).norm() / keys.double().norm()
    assert statistics.relative_error == float(error) > 0


def test_scales_of_used_keys_are_counted_once(tmp_path: Path, generator: torch.Generator) -> None:
    keys = torch.randn(70, 128, generator=generator).bfloat16()
    keys[2:4], keys[64], keys[67] = 0.0, 2800.0, 2.0**-5
    cache = write_cache(tmp_path / "c.safetensors", keys, [70])
    counts = count_scales(cache)
    assert counts == ScaleCounts(70 * 8, zero=16, subnormal=8, largest=8)
    assert counts.share(counts.largest) == 1 / 70
    # Two requests that share the first page and see 67 and 3 of its keys; then none at all.
    table = torch.tensor([[0, 1], [0, -1]], dtype=torch.int32)
    for lengths, expected in (
        ([67, 3], ScaleCounts(67 * 8, zero=16, subnormal=0, largest=8)),
        ([0, 3], ScaleCounts(3 * 8, zero=8, subnormal=0, largest=0)),
        ([0, 0], ScaleCounts(0, 0, 0, 0)),
    ):
        numbers = torch.tensor(lengths, dtype=torch.int32)
        shared = replace(cache, block_table=table, context_lengths=numbers)
        assert count_scales(shared) == expected
    assert math.isnan(ScaleCounts(0, 0, 0, 0).share(0))
    assert count_scales(write_cache(tmp_path / "b.safetensors", keys, [70], "bf16")) is None
