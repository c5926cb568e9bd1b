"""The 128x4 scale order: the formula itself, and both directions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdsa_quant.errors import InputError
from sdsa_quant.formats.scale_order import linear_from_128x4, linear_to_128x4, tiled_bytes


def position(row: int, column: int, columns: int) -> int:
    """Offset of a scale, written out as the format's documents give it."""
    return (
        ((row // 128) * (columns // 4) + column // 4) * 512
        + (row % 32) * 16
        + (row % 128 // 32) * 4
        + column % 4
    )


@given(rows=st.integers(0, 300), columns=st.integers(1, 17), seed=st.integers(0, 99))
def test_every_scale_is_where_the_formula_says(rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randint(1, 256, (rows, columns), generator=generator).to(torch.uint8)
    tiled = linear_to_128x4(scales)
    padded = -(-columns // 4) * 4
    expected = torch.zeros(tiled_bytes(rows, columns), dtype=torch.uint8)
    for row in range(rows):
        for column in range(columns):
            expected[position(row, column, padded)] = scales[row, column]
    assert torch.equal(tiled, expected)
    assert torch.equal(linear_from_128x4(tiled, rows, columns), scales)


def test_dtype_is_kept() -> None:
    scales = torch.ones(5, 8).to(torch.float8_e4m3fn)
    tiled = linear_to_128x4(scales)
    assert tiled.dtype == torch.float8_e4m3fn
    back = linear_from_128x4(tiled, 5, 8)
    assert torch.equal(back.view(torch.uint8), scales.view(torch.uint8))


def test_wrong_sizes_are_named() -> None:
    with pytest.raises(InputError, match=r"must be \[rows, columns\], got \[8\]"):
        linear_to_128x4(torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(InputError, match=r"tiled scales of \[1, 8\] must be \[1024\], got \[512\]"):
        linear_from_128x4(torch.zeros(512, dtype=torch.uint8), 1, 8)
