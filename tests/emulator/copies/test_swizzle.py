"""Swizzling against the tables of the ISA ("Swizzling Modes"): rows of eight 16-byte cells."""

import numpy as np
import pytest

from . import swizzle

FULL = ["01234567", "10325476", "23016745", "32107654"]
FULL += ["45670123", "54761032", "67452301", "76543210"]
# Where the ISA's tables place the cells of consecutive 128-byte lines.
TABLES = {
    "none": (swizzle.NONE, ["01234567", "01234567"]),
    "32B": (swizzle.B32, ["01234567", "10325476"]),
    "64B": (swizzle.B64, ["01234567", "10325476", "23016745", "32107654"]),
    "128B": (swizzle.B128, FULL),
    "128B-32B": (swizzle.B128_ATOM_32B, ["01234567", "23016745", "45670123", "67452301"]),
    "128B-64B": (swizzle.B128_ATOM_64B, ["01234567", "45670123"]),
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("periods", [1, 3], ids=["first", "repeated"])
def test_cells_lie_where_the_table_says(name: str, periods: int) -> None:
    mode, rows = TABLES[name]
    lines = rows * periods
    cells = np.arange(8 * len(lines), dtype=np.int64)
    placed = mode.apply(cells * 16 + 1024) - 1024
    held = np.empty_like(cells)
    held[placed // 16] = cells  # which cell each place holds
    expected = [8 * i + int(cell) for i, row in enumerate(lines) for cell in row]
    np.testing.assert_array_equal(held, expected)


@pytest.mark.parametrize("name", TABLES)
def test_bytes_of_a_cell_stay_together_and_nothing_is_lost(name: str) -> None:
    mode, _ = TABLES[name]
    places = mode.apply(np.arange(8192, dtype=np.int64))
    assert np.array_equal(np.sort(places), np.arange(8192))
    cells = places.reshape(-1, 16)
    assert np.array_equal(cells, cells[:, :1] + np.arange(16))


@pytest.mark.parametrize("name", [name for name in TABLES if name != "none"])
def test_the_pattern_repeats_after_its_period_and_not_before(name: str) -> None:
    mode, rows = TABLES[name]
    assert mode.period == 128 * len(rows)
    addresses = np.arange(4096, dtype=np.int64)
    moves = mode.apply(addresses) - addresses
    assert np.array_equal(moves[: -mode.period], moves[mode.period :])
    assert not np.array_equal(moves[: -mode.period // 2], moves[mode.period // 2 :])


def test_the_pattern_follows_the_address_and_not_the_buffer() -> None:
    # A buffer on line 3 starts with the fourth row of the 128-byte table.
    placed = swizzle.B128.apply(np.arange(384, 512, 16, dtype=np.int64))
    np.testing.assert_array_equal((placed - 384) // 16, [3, 2, 1, 0, 7, 6, 5, 4])


def test_a_base_offset_moves_the_first_line_of_the_pattern() -> None:
    placed = swizzle.B128.apply(np.arange(384, 640, 16, dtype=np.int64), first_line=3)
    np.testing.assert_array_equal((placed[:8] - 384) // 16, range(8))
    np.testing.assert_array_equal((placed[8:] - 512) // 16, [1, 0, 3, 2, 5, 4, 7, 6])
