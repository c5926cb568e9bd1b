"""The quantizing kernel under Triton's interpreter: the bits of the golden vectors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from sdsa_kernels.problem import WriteProblem
from sdsa_kernels.triton.write import run_kernel
from sdsa_quant.formats.nvfp4 import quantize_nvfp4
from support.problems import gaussian_values
from support.quantize_cases import every_maximum, ties_and_their_neighbours

# NumPy, which the interpreter computes with, warns where a block holds nothing but NaN.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")


def poisoned_rows(values: torch.Tensor, places: torch.Tensor, *outer: int) -> WriteProblem:
    codes = torch.full((*outer, 64), 0xA5, dtype=torch.uint8)
    scales = torch.full((*outer, 8), 0xA5, dtype=torch.uint8)
    return WriteProblem(values, places, codes, scales)


def assert_quantized(values: torch.Tensor) -> None:
    count = values.shape[0]
    rows = poisoned_rows(values, torch.arange(count), -(-count // 64), 64)
    run_kernel(rows, None)
    codes, scales = quantize_nvfp4(values)
    assert torch.equal(rows.codes.view(-1, 64)[:count], codes)
    assert torch.equal(rows.scales.view(-1, 8)[:count], scales.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_golden_vectors(fixtures: Path, dtype: torch.dtype) -> None:
    golden = load_file(fixtures / "nvfp4-golden.safetensors")
    keys = poisoned_rows(golden["inputs"].to(dtype), torch.arange(64) + 64, 3, 64)
    run_kernel(keys, None)
    assert torch.equal(keys.codes[1], golden["codes"])
    assert torch.equal(keys.scales[1], golden["scales"])
    for other in (0, 2):
        assert (keys.codes[other] == 0xA5).all()
        assert (keys.scales[other] == 0xA5).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_keys_and_queries_with_skipped_places(
    generator: torch.Generator, dtype: torch.dtype
) -> None:
    values = gaussian_values((45, 128), generator).to(dtype)
    slots = torch.randperm(128, generator=generator)[:40]
    slots[::7] = -1
    keys = poisoned_rows(values[:40], slots, 2, 64)
    queries = poisoned_rows(values[40:], torch.tensor([3, -1, 0, -(2**40), 5]), 6)
    run_kernel(keys, queries)
    codes, scales = quantize_nvfp4(values)
    scales = scales.view(torch.uint8)
    for rows, first in ((keys, 0), (queries, 40)):
        flat_codes, flat_scales = rows.codes.view(-1, 64), rows.scales.view(-1, 8)
        untouched = torch.ones(flat_codes.shape[0], dtype=torch.bool)
        for i, place in enumerate(rows.index.tolist()):
            if place >= 0:
                untouched[place] = False
                assert torch.equal(flat_codes[place], codes[first + i])
                assert torch.equal(flat_scales[place], scales[first + i])
        assert (flat_codes[untouched] == 0xA5).all()
        assert (flat_scales[untouched] == 0xA5).all()


def test_a_single_page_and_row_may_have_any_stride(generator: torch.Generator) -> None:
    values = gaussian_values((2, 128), generator)
    rows = poisoned_rows(values[:1], torch.tensor([7]), 1, 64)
    page = torch.full((1, 4100), 0xA5, dtype=torch.uint8)[:, :4096]
    row = torch.full((1, 68), 0xA5, dtype=torch.uint8)[:, :64]
    codes = page.as_strided((1, 64, 64), (4100, 64, 1))
    keys = WriteProblem(rows.values, rows.index, codes, rows.scales)
    query_scales = torch.zeros(1, 8, dtype=torch.uint8)
    run_kernel(keys, WriteProblem(values[1:], torch.tensor([0]), row, query_scales))
    codes, scales = quantize_nvfp4(values)
    assert torch.equal(keys.codes[0, 7], codes[0])
    assert torch.equal(row[0], codes[1])
    assert torch.equal(query_scales[0], scales[1].view(torch.uint8))


@pytest.mark.parametrize(
    "make", [every_maximum, ties_and_their_neighbours], ids=lambda make: make.__name__
)
def test_hard_rows(make: Callable[[], torch.Tensor]) -> None:
    values = make()
    # The rest has scales of 0 or saturates; a GPU goes through all of it.
    amax = values.float().abs().amax(-1)
    assert_quantized(values[(amax > 2.0**-12) & (amax < 2.0**13)])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), least=st.integers(-40, 20))
def test_any_float32(seed: int, least: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(least, least + 24, (16, 128), generator=generator)
    values = torch.randn(16, 128, generator=generator) * torch.exp2(exponents.float())
    assert_quantized(values)
