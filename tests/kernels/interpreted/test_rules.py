"""The kernels of the other rules under Triton's interpreter: the bytes of the CPU."""

from __future__ import annotations

import pytest
import torch

from sdsa_kernels.problem import WriteProblem
from sdsa_kernels.triton.write import run_kernel
from sdsa_quant.calibration.layer import LayerWeights
from sdsa_quant.formats.nvfp4 import COVARIANCE, RULES, quantize_nvfp4
from support.rule_cases import adversarial_keys, correlated, not_finite_keys, some_weights

# NumPy, which the interpreter computes with, warns of what infinities and NaN give.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def rows_to_write(values: torch.Tensor, index: torch.Tensor, *outer: int) -> WriteProblem:
    codes = torch.full((*outer, 64), 0xA5, dtype=torch.uint8)
    scales = torch.full((*outer, 8), 0xA5, dtype=torch.uint8)
    return WriteProblem(values, index, codes, scales)


def assert_written(keys: torch.Tensor, rule: str, generator: torch.Generator) -> None:
    weights = some_weights(generator) if rule == COVARIANCE else None
    calibration = None if weights is None else LayerWeights(weights, weights)
    count = keys.shape[0]
    rows = rows_to_write(keys, torch.arange(count), -(-count // 64), 64)
    run_kernel(rows, None, rule, calibration)
    codes, scales = quantize_nvfp4(keys, nonfinite="saturate", rule=rule, weights=weights)
    assert torch.equal(rows.codes.view(-1, 64)[:count], codes)
    assert torch.equal(rows.scales.view(-1, 8)[:count], scales.view(torch.uint8))


@pytest.mark.parametrize("rule", RULES[1:])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_usual_adversarial_and_not_finite_keys(
    generator: torch.Generator, rule: str, dtype: torch.dtype
) -> None:
    some = correlated(488, generator), adversarial_keys(488, generator)
    assert_written(torch.cat([*some, not_finite_keys(generator)]).to(dtype), rule, generator)


@pytest.mark.large
@pytest.mark.parametrize("rule", RULES[1:])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_keys(generator: torch.Generator, rule: str, dtype: torch.dtype) -> None:
    some = correlated(6144, generator), adversarial_keys(6144, generator)
    assert_written(torch.cat(some).to(dtype), rule, generator)


@pytest.mark.parametrize("rule", RULES[1:])
def test_keys_and_query_rows_with_skipped_indices(generator: torch.Generator, rule: str) -> None:
    calibration = None
    if rule == COVARIANCE:
        calibration = LayerWeights(some_weights(generator), some_weights(generator))
    values = correlated(45, generator).bfloat16()
    slots = torch.randperm(128, generator=generator)[:40]
    slots[::7] = -1
    keys = rows_to_write(values[:40], slots, 2, 64)
    queries = rows_to_write(values[40:], torch.tensor([3, -1, 0, -(2**40), 5]), 6)
    run_kernel(keys, queries, rule, calibration)
    for rows, name in ((keys, "keys"), (queries, "queries")):
        weights = None if calibration is None else getattr(calibration, name)
        codes, scales = quantize_nvfp4(rows.values, rule=rule, weights=weights)
        kept = rows.index >= 0
        expected_codes = torch.full_like(rows.codes.view(-1, 64), 0xA5)
        expected_scales = torch.full_like(rows.scales.view(-1, 8), 0xA5)
        expected_codes[rows.index[kept]] = codes[kept]
        expected_scales[rows.index[kept]] = scales.view(torch.uint8)[kept]
        assert torch.equal(rows.codes.view(-1, 64), expected_codes)
        assert torch.equal(rows.scales.view(-1, 8), expected_scales)
