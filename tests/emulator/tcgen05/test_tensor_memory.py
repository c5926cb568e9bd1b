"""Allocation and poison of tensor memory, and the cells that each register of a warp is."""

import numpy as np
import pytest

from emulator.errors import TensorMemoryLeak, TensorMemoryMisuse

from .tensor_memory import ALL_LANES, Footprint, TensorMemory, split_address
from .tensor_memory_shapes import register_cells


@pytest.fixture
def memory() -> TensorMemory:
    return TensorMemory(np.random.default_rng(3))


def test_allocations_do_not_overlap_and_wait_when_there_is_no_room(memory: TensorMemory) -> None:
    taken: set[int] = set()
    starts = []
    for columns in (256, 64, 64, 32):
        start = memory.allocate(columns)
        assert start is not None
        columns_of_it = set(range(start, start + columns))
        assert not taken & columns_of_it
        assert start % 32 == 0
        taken |= columns_of_it
        starts.append((start, columns))
    while memory.allocate(32) is not None:
        pass
    memory.release(*starts[3])
    assert memory.allocate(32) == starts[3][0]


def test_the_place_of_an_allocation_differs_between_seeds() -> None:
    places = {TensorMemory(np.random.default_rng(seed)).allocate(32) for seed in range(20)}
    assert len(places) > 3


MISUSE = {
    "no-power": (lambda m: m.allocate(96), "power of two from 32 to 512, got 96"),
    "small": (lambda m: m.allocate(16), "got 16"),
    "large": (lambda m: m.allocate(1024), "got 1024"),
    "growing": (lambda m: (m.allocate(32), m.allocate(64)), "64 columns after one of 32"),
    "relinquished": (lambda m: (m.relinquish(), m.allocate(32)), "after tcgen05.relinquish"),
    "foreign": (lambda m: m.release(0, 32), "allocated are none"),
    "size": (lambda m: m.release(m.allocate(64), 32), "dealloc of 32 columns"),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_of_allocation(memory: TensorMemory, name: str) -> None:
    act, message = MISUSE[name]
    with pytest.raises(TensorMemoryMisuse, match=message):
        act(memory)


def test_a_leak_is_reported(memory: TensorMemory) -> None:
    start = memory.allocate(128)
    with pytest.raises(TensorMemoryLeak, match=f"128 columns at {start}"):
        memory.check_empty()
    memory.release(start, 128)
    memory.check_empty()


def test_accesses_stay_within_allocations(memory: TensorMemory) -> None:
    start = memory.allocate(512)
    memory.check_allocated(Footprint(ALL_LANES, start, start + 512))
    with pytest.raises(TensorMemoryMisuse, match="column 512 is not allocated"):
        memory.check_allocated(Footprint(1, 508, 516))
    memory.release(start, 512)
    start = memory.allocate(32)
    with pytest.raises(TensorMemoryMisuse, match=f"column {start + 32} is not allocated"):
        memory.check_allocated(Footprint(1, start + 30, start + 33))


def test_cells_are_undefined_until_written_and_again_after_a_new_allocation() -> None:
    memory = TensorMemory(np.random.default_rng(0))
    start = memory.allocate(512)
    lanes, offsets = np.array([[5], [6]]), np.arange(8)[None, :]
    memory.write(lanes, offsets, np.arange(16, dtype=np.uint8).reshape(2, 8))
    data, undefined = memory.read(lanes, offsets)
    np.testing.assert_array_equal(data[1], np.arange(8, 16))
    assert undefined is None
    _, undefined = memory.read(np.array([6, 6]), np.array([7, 8]))
    np.testing.assert_array_equal(undefined, [False, True])
    memory.write(lanes, offsets, data, data == 3)
    np.testing.assert_array_equal(memory.read(lanes, offsets)[1], data == 3)
    memory.release(start, 512)
    memory.allocate(512)
    assert memory.read(lanes, offsets)[1].all()


def test_footprints() -> None:
    left = Footprint(0b0011, 0, 8)
    assert left.overlaps(Footprint(0b0010, 7, 9))
    assert not left.overlaps(Footprint(0b0010, 8, 9))
    assert not left.overlaps(Footprint(0b0100, 0, 8))
    assert str(left) == "columns 0-7 of lanes 0-1"
    assert split_address(0x0040_0123) == (64, 0x123)


# Thread, register, lane, column; read off the fragment layouts of the ISA.
FRAGMENTS = {
    "32x32b": [(0, 0, 0, 0), (31, 0, 31, 0), (7, 3, 7, 3)],
    "16x64b": [
        (0, 0, 0, 0),
        (1, 0, 8, 0),
        (2, 0, 0, 1),
        (3, 0, 8, 1),
        (4, 0, 1, 0),
        (31, 2, 15, 5),
    ],
    "16x128b": [(0, 0, 0, 0), (3, 0, 0, 3), (4, 0, 1, 0), (0, 1, 8, 0), (31, 5, 15, 11)],
    "16x256b": [(0, 1, 0, 1), (1, 0, 0, 2), (4, 0, 1, 0), (0, 2, 8, 0), (31, 7, 15, 15)],
    "16x32bx2": [(0, 0, 0, 0), (15, 1, 15, 1), (16, 0, 0, 20), (31, 3, 15, 23)],
}


@pytest.mark.parametrize("shape", FRAGMENTS)
def test_cells_of_registers(shape: str) -> None:
    cells = register_cells(shape, 4, 20 if shape == "16x32bx2" else 0, packed=False)
    for thread, register, lane, column in FRAGMENTS[shape]:
        assert cells.lanes[thread, register, 0] == lane
        assert cells.columns[thread, register, 0] == column


@pytest.mark.parametrize("shape", FRAGMENTS)
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_every_cell_belongs_to_one_register(shape: str, packed: bool) -> None:
    cells = register_cells(shape, 4, 8 if shape == "16x32bx2" else 0, packed)
    pairs = set(zip(cells.lanes.ravel().tolist(), cells.columns.ravel().tolist(), strict=True))
    assert len(pairs) == cells.columns.size
    assert {lane for lane, _ in pairs} == set(range(cells.lane_count))


def test_packing_pairs_adjacent_columns() -> None:
    cells = register_cells("16x128b", 1, 0, packed=True)
    assert cells.columns[3, 0].tolist() == [6, 7]
