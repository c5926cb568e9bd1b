"""Keys quantized through pages: the same bits and errors as `quantize_nvfp4`."""

from __future__ import annotations

import pytest
import torch

from sdsa_kernels.quantize_write import quantize_keys
from sdsa_quant.errors import InputError
from sdsa_quant.formats.nvfp4 import UNCALIBRATED_RULES, quantize_nvfp4
from support.problems import gaussian_values


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize("rule", UNCALIBRATED_RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_same_bits(generator: torch.Generator, count: int, rule: str, dtype: torch.dtype) -> None:
    values = gaussian_values((2 * count, 128), generator).to(dtype)[::2]
    expected_codes, expected_scales = quantize_nvfp4(values, rule=rule)
    codes, scales = quantize_keys(values, rule=rule)
    assert torch.equal(codes, expected_codes)
    assert scales.dtype == torch.float8_e4m3fn
    assert torch.equal(scales.view(torch.uint8), expected_scales.view(torch.uint8))


def test_nonfinite_values(generator: torch.Generator) -> None:
    values = gaussian_values((70, 128), generator)
    values[69, 3], values[2, 0] = float("nan"), float("inf")
    with pytest.raises(InputError, match="values must be finite"):
        quantize_keys(values)
    expected_codes, expected_scales = quantize_nvfp4(values, nonfinite="saturate")
    codes, scales = quantize_keys(values, nonfinite="saturate")
    assert torch.equal(codes, expected_codes)
    assert torch.equal(scales.view(torch.uint8), expected_scales.view(torch.uint8))
