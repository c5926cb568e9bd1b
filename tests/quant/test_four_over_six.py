"""NVFP4 by the rule 4over6: by hand, against an independent form, never worse than amax/6."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from sdsa_quant.errors import InputError
from sdsa_quant.formats import blocks
from sdsa_quant.formats.nvfp4 import FOUR_OVER_SIX, dequantize_nvfp4, quantize_nvfp4


def independent_block(block: np.ndarray, largest_code: int) -> tuple[np.ndarray, int, np.ndarray]:
    """E2M1 bytes, E4M3 byte and decoded values of one float32 block, by ml_dtypes."""
    scale = min(np.abs(block).max() / np.float32(largest_code), np.float32(448))
    stored = np.asarray(scale).astype(ml_dtypes.float8_e4m3fn)
    factor = stored.astype(np.float32)
    inverse = np.float32(1) / factor if factor else np.float32(0)
    codes = np.clip(block * inverse, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    return codes.view(np.uint8), int(stored.view(np.uint8)), codes.astype(np.float32) * factor


def test_by_hand() -> None:
    # amax 6, scale 1: 4.5 rounds to 4. Scaled to 4, scale 1.5: 4.5 = 3 x 1.5 exactly. 4 wins.
    block = torch.zeros(16)
    block[:2] = torch.tensor([6.0, 4.5])
    codes, scales = quantize_nvfp4(block, rule=FOUR_OVER_SIX)
    assert scales.float().tolist() == [1.5]
    assert dequantize_nvfp4(codes, scales)[:2].tolist() == [6.0, 4.5]
    # 6 and 4 are both exact with scale 1; with 1.5 the 4 becomes 4.5. 6 wins.
    block[1] = 4.0
    codes, scales = quantize_nvfp4(block, rule=FOUR_OVER_SIX)
    assert scales.float().tolist() == [1.0]
    # 6 alone is exact either way: a draw, and the rule amax / 6 holds.
    block[1] = 0.0
    assert quantize_nvfp4(block, rule=FOUR_OVER_SIX)[1].float().tolist() == [1.0]


def test_agrees_with_independent_conversions(generator: torch.Generator) -> None:
    values = torch.randn(3000, 16, generator=generator)
    values *= torch.exp2(torch.randint(-10, 11, (3000, 1), generator=generator).float())
    codes, scales = quantize_nvfp4(values, rule=FOUR_OVER_SIX)
    codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    chosen_four = 0
    for block, code, scale in zip(values.numpy(), codes.numpy(), scales, strict=True):
        choices = [independent_block(block, largest) for largest in (6, 4)]
        errors = [np.square(decoded.astype(np.float64) - block).sum() for *_, decoded in choices]
        if math.isclose(errors[0], errors[1], rel_tol=1e-5):
            continue  # a draw except for rounding
        wanted = choices[int(errors[1] < errors[0])]
        assert np.array_equal(code, wanted[0])
        assert int(scale.view(torch.uint8)) == wanted[1]
        chosen_four += errors[1] < errors[0]
    assert 300 < chosen_four < 2700, "both choices must occur for this test to mean anything"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_no_block_is_worse_than_by_amax_over_6(
    dtype: torch.dtype, generator: torch.Generator
) -> None:
    values = (torch.randn(500, 128, generator=generator) * 3).to(dtype)

    def block_errors(rule: str) -> torch.Tensor:
        decoded = dequantize_nvfp4(*quantize_nvfp4(values, rule=rule), torch.float64)
        return (decoded - values.double()).square().unflatten(-1, (-1, 16)).sum(-1)

    before, after = block_errors("amax/6"), block_errors("4over6")
    assert (after <= before * (1 + 1e-6)).all()
    assert after.sum() < 0.95 * before.sum()


def test_extremes() -> None:
    # Zeros, a block that saturates, and one whose scale vanishes: never NaN, never worse.
    blocks = torch.zeros(3, 16)
    blocks[1] = 2800.0
    blocks[2] = 1e-4
    codes, scales = quantize_nvfp4(blocks, rule=FOUR_OVER_SIX)
    decoded = dequantize_nvfp4(codes, scales)
    assert decoded[1].eq(2688.0).all()
    assert decoded.isfinite().all()
    assert not decoded[0].any()


def test_non_finite_values_saturate_as_by_the_other_rule() -> None:
    block = torch.ones(2, 16)
    block[0, 3], block[1, 3] = math.nan, math.inf
    rules = [
        quantize_nvfp4(block, nonfinite="saturate", rule=rule) for rule in ("amax/6", FOUR_OVER_SIX)
    ]
    assert torch.equal(rules[0][1].view(torch.uint8), rules[1][1].view(torch.uint8))
    assert torch.equal(rules[0][0], rules[1][0])
    with pytest.raises(InputError, match="values must be finite"):
        quantize_nvfp4(block, rule=FOUR_OVER_SIX)


def test_refuses_an_unknown_rule() -> None:
    with pytest.raises(InputError, match=r"rule must be one of .*, got 'amax/5'"):
        quantize_nvfp4(torch.zeros(16), rule="amax/5")


def test_blocks_do_not_depend_on_the_pass(
    monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    values = torch.randn(9, 128, generator=generator)
    whole = quantize_nvfp4(values, rule=FOUR_OVER_SIX)
    monkeypatch.setattr(blocks, "values_per_pass", lambda device: 48)
    parts = quantize_nvfp4(values, rule=FOUR_OVER_SIX)
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1].view(torch.uint8), parts[1].view(torch.uint8))
