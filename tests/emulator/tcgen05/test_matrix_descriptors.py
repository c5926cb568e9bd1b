"""Matrix descriptors against the ISA's worked examples and its canonical CuTe layouts."""

import numpy as np
import pytest

from emulator.errors import UnsupportedInstruction

from .canonical_layouts import Mode, cute_swizzle, encode_descriptor, layout_index
from .matrix_descriptors import (
    DescriptorError,
    decode_shared_descriptor,
    k_major_cells,
    mn_major_elements,
)

# "Exact layout" of the ISA's figures: mode of the descriptor, element bytes, K or MN of the
# figure's title, layouts of rows and columns in elements, LBO and SBO in bytes, swizzle.
FIGURES = {
    "k-none-tf32": (0, 4, "k", ((8, 2), (4, 32)), ((4, 4), (1, 64)), 64 * 4, 32 * 4, (0, 4, 3)),
    "k-32B-tf32": (6, 4, "k", ((8, 2), (8, 64)), ((4, 4), (1, 4)), 16, 64 * 4, (1, 4, 3)),
    "mn-none-bf16": (0, 2, "mn", ((8, 1, 2), (1, 8, 64)), ((8, 2), (8, 128)), 256, 128, (0, 4, 3)),
    "mn-32B-bf16": (6, 2, "mn", ((8, 2, 2), (1, 8, 128)), ((8, 2), (16, 256)), 256, 512, (1, 4, 3)),
    "mn-64B-bf16": (
        4,
        2,
        "mn",
        ((8, 4, 2), (1, 8, 256)),
        ((8, 2), (32, 512)),
        512,
        1024,
        (2, 4, 3),
    ),
}
START = 0x2000  # a multiple of every period


def expected_addresses(
    rows: Mode, columns: Mode, size: int, swizzle: tuple[int, ...]
) -> np.ndarray:
    """Addresses of all elements of a layout that starts at `START`."""
    extents = int(np.prod(rows[0])), int(np.prod(columns[0]))
    table = np.empty(extents, np.int64)
    for i, k in np.ndindex(extents):
        offset = (layout_index(rows, i) + layout_index(columns, k)) * size
        table[i, k] = START + cute_swizzle(*swizzle, offset)
    return table


def decoded_addresses(word: int, major: str, shape: tuple[int, int], size: int) -> np.ndarray:
    """Addresses of all elements as the emulator has them."""
    descriptor = decode_shared_descriptor(word)
    if major == "mn":
        return mn_major_elements(descriptor, *shape, size)
    cells = k_major_cells(descriptor, shape[0], shape[1] * size // 16)
    return (cells[:, :, None] + np.arange(0, 16, size)).reshape(shape)


@pytest.mark.parametrize("name", FIGURES)
def test_layouts_of_the_figures(name: str) -> None:
    mode, size, major, rows, columns, leading, stride, swizzle = FIGURES[name]
    expected = expected_addresses(rows, columns, size, swizzle)
    word = encode_descriptor(START, leading, stride, mode)
    np.testing.assert_array_equal(decoded_addresses(word, major, expected.shape, size), expected)


@pytest.mark.parametrize("size", [1, 2], ids=["8-bit", "16-bit"])
@pytest.mark.parametrize(("mode", "bits"), [(6, 1), (4, 2), (2, 3)], ids=["32B", "64B", "128B"])
@pytest.mark.parametrize("major", ["k", "mn"])
def test_canonical_swizzled_layouts(major: str, mode: int, bits: int, size: int) -> None:
    """The table "Canonical Layouts", with uneven strides that overlap nothing."""
    t, cells = 16 // size, 1 << bits
    leading, stride = 0x3000, 0x5000
    if major == "k":
        rows = ((8, 4), (cells * t, stride // size))
        columns = ((t, 2), (1, t))
    else:
        rows = ((t, cells, 2), (1, t, leading // size))
        columns = ((8, 2), (cells * t, stride // size))
    expected = expected_addresses(rows, columns, size, (bits, 4, 3))
    word = encode_descriptor(START, leading, stride, mode)
    np.testing.assert_array_equal(decoded_addresses(word, major, expected.shape, size), expected)


def test_tf32_mn_major_with_32_byte_atoms() -> None:
    """Swizzle atom of 8 x 4 cells (table "Layout for swizzle atoms"), XOR of bits 5-6 with 7-8."""
    leading, stride = 0x1000, 0x2000
    rows = ((4, 8, 2), (1, 4, leading // 4))
    columns = ((4, 2), (32, stride // 4))
    expected = expected_addresses(rows, columns, 4, (2, 5, 2))
    word = encode_descriptor(START, leading, stride, 1)
    np.testing.assert_array_equal(decoded_addresses(word, "mn", expected.shape, 4), expected)


def test_a_start_inside_the_atom_steps_along_k() -> None:
    """The second 32 bytes of a 128-byte row: the swizzle follows the address."""
    whole = k_major_cells(decode_shared_descriptor(encode_descriptor(START, 16, 1024, 2)), 32, 4)
    second = k_major_cells(
        decode_shared_descriptor(encode_descriptor(START + 32, 16, 1024, 2)), 32, 2
    )
    np.testing.assert_array_equal(second, whole[:, 2:])


def test_base_offset_is_the_line_where_the_pattern_begins() -> None:
    shifted = START + 3 * 128
    moved = k_major_cells(
        decode_shared_descriptor(encode_descriptor(shifted, 16, 1024, 2, 3)), 8, 2
    )
    plain = k_major_cells(decode_shared_descriptor(encode_descriptor(START, 16, 1024, 2)), 8, 2)
    np.testing.assert_array_equal(moved, plain + 3 * 128)


REFUSED = {
    "version": (encode_descriptor(START, 16, 1024, 2) ^ 1 << 46, DescriptorError, "bits 46-48"),
    "low-reserved": (
        encode_descriptor(START, 16, 1024, 2) | 1 << 14,
        DescriptorError,
        "bits 14-15",
    ),
    "middle-reserved": (
        encode_descriptor(START, 16, 1024, 2) | 1 << 31,
        DescriptorError,
        "bits 30-31",
    ),
    "high-reserved": (
        encode_descriptor(START, 16, 1024, 2) | 1 << 57,
        DescriptorError,
        "bits 53-60",
    ),
    "mode-3": (encode_descriptor(START, 16, 1024, 3), DescriptorError, "mode 3"),
    "mode-5": (encode_descriptor(START, 16, 1024, 5), DescriptorError, "mode 5"),
    "absolute": (
        encode_descriptor(START, 16, 1024, 2) | 1 << 52,
        UnsupportedInstruction,
        "absolute",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_fields_that_are_refused(name: str) -> None:
    word, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        decode_shared_descriptor(word)


def test_combinations_that_the_isa_excludes() -> None:
    plain = decode_shared_descriptor(encode_descriptor(START, 16, 1024, 2))
    atoms = decode_shared_descriptor(encode_descriptor(START, 16, 1024, 1))
    with pytest.raises(UnsupportedInstruction, match="4-byte elements"):
        mn_major_elements(plain, 128, 8, 4)
    with pytest.raises(UnsupportedInstruction, match="2-byte elements"):
        mn_major_elements(atoms, 128, 16, 2)
    with pytest.raises(UnsupportedInstruction, match="K-major"):
        k_major_cells(atoms, 128, 2)
