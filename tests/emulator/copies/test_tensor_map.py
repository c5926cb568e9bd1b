"""Boxes of tensor maps, against loops over single elements."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from emulator.errors import UnsupportedInstruction

from .tensor_map import DataType, TensorMap, TensorMapError

BASE = 0x7000_0000

# Five dimensions, padded strides, a traversal stride, a box that crosses several borders.
FIVE = TensorMap(
    DataType.UINT16,
    BASE,
    dimensions=(24, 5, 4, 3, 2),
    strides=(64, 320, 1408, 4352),
    box=(16, 4, 3, 2, 2),
    element_strides=(1, 2, 1, 1, 1),
)
PLANE = TensorMap(
    DataType.UINT8,
    BASE,
    dimensions=(128, 300),
    strides=(128,),
    box=(128, 16),
    element_strides=(1, 1),
    swizzle=3,
)


def elements_of_box(tensor: TensorMap, start: tuple[int, ...]) -> list[int | None]:
    """Global address of each byte of the box in order, None outside; by loops, not by numpy."""
    size = tensor.element_bits // 8
    loads = [tensor.box[0]] + [
        (box + step - 1) // step
        for box, step in zip(tensor.box[1:], tensor.element_strides[1:], strict=True)
    ]
    steps = (1, *tensor.element_strides[1:])
    strides = (size, *tensor.strides)
    found: list[int | None] = []
    for reverse in itertools.product(*(range(load) for load in reversed(loads))):
        index = [
            first + step * i for first, step, i in zip(start, steps, reversed(reverse), strict=True)
        ]
        inside = all(0 <= i < extent for i, extent in zip(index, tensor.dimensions, strict=True))
        place = tensor.address + sum(i * s for i, s in zip(index, strides, strict=True))
        found += [place + byte if inside else None for byte in range(size)]
    return found


STARTS = [(0, 0, 0, 0, 0), (16, 2, 2, 2, 1), (-8, -1, 1, -1, 0), (40, 0, 0, 0, 0), (8, 7, 0, 0, 0)]


@pytest.mark.parametrize("start", STARTS, ids=str)
def test_a_box_holds_the_elements_that_loops_find(start: tuple[int, ...]) -> None:
    box = FIVE.locate(start)
    found: list[int | None] = []
    for address, inside in zip(box.row_addresses, box.row_inside, strict=True):
        for byte in range(box.row_bytes):
            kept = inside and box.inner_start <= byte < box.inner_stop
            found.append(int(address) + byte if kept else None)
    assert found == elements_of_box(FIVE, start)
    assert len(found) == FIVE.box_bytes == 16 * 2 * 2 * 3 * 2 * 2


def test_rows_of_a_swizzled_box_follow_each_other_in_shared_memory() -> None:
    cells = PLANE.shared_cells(4096)
    assert cells.shape == (16, 8)
    np.testing.assert_array_equal(cells[0], 4096 + 16 * np.arange(8))
    row_five = 4096 + 5 * 128 + 16 * np.array([5, 4, 7, 6, 1, 0, 3, 2])
    np.testing.assert_array_equal(cells[5], row_five)
    np.testing.assert_array_equal(cells[13] - cells[5], 1024)


def test_four_bit_elements_are_packed_in_pairs() -> None:
    packed = replace(PLANE, data_type=DataType.U4_ALIGN_8B, dimensions=(256, 300), box=(256, 16))
    assert packed.row_bytes == 128
    assert int(packed.locate((32, 1)).row_addresses[0]) == BASE + 128 + 16
    assert packed.locate((224, 0)).inner_stop == 16


UNKNOWN = {
    "interleave": ({"interleave": 1}, "interleave 1"),
    "flip": ({"swizzle": 5}, "swizzle 5"),
    "padded": ({"data_type": DataType.U4_ALIGN_16B}, "data type 14"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_maps_that_are_not_implemented_are_named(name: str) -> None:
    changes, message = UNKNOWN[name]
    with pytest.raises(UnsupportedInstruction, match=message):
        replace(PLANE, **changes).check_supported()


def test_boxes_need_aligned_shared_memory_and_enough_coordinates() -> None:
    PLANE.check_supported()
    PLANE.check_shared_address(1024 + 128)
    with pytest.raises(TensorMapError, match="multiple of 128 bytes, got 0x40"):
        PLANE.check_shared_address(64)
    with pytest.raises(TensorMapError, match="1 coordinates for a map of rank 2"):
        PLANE.locate((0,))
    with pytest.raises(TensorMapError, match=r"multiple of 16 bytes .* not at 8 elements"):
        PLANE.locate((8, 0))


def test_rows_narrower_than_their_swizzle_lie_its_span_apart() -> None:
    cells = replace(PLANE, box=(32, 16)).shared_cells(4096)
    assert cells.shape == (16, 2)
    np.testing.assert_array_equal(cells[1], 4096 + 128 + 16 * np.array([1, 0]))
    np.testing.assert_array_equal(cells[4], 4096 + 4 * 128 + 16 * np.array([4, 5]))
