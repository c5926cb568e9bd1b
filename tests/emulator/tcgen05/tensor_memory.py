"""Tensor memory of a CTA: its cells, which of them hold data, and who has allocated them.

Source: PTX ISA, "Tensor Memory" (128 lanes by 512 columns of 32 bits; an address is
`lane << 16 | column`) and "Tensor Memory Allocation and Management Instructions".
"""

from dataclasses import dataclass

import numpy as np

from emulator.errors import TensorMemoryLeak, TensorMemoryMisuse

LANES = 128
COLUMNS = 512
WORD = 4  # bytes of a cell
MIN_COLUMNS = 32  # unit of allocation
ALL_LANES = (1 << LANES) - 1
# What cells hold that nothing has written: a NaN, as FP32 and as two FP16.
POISON = np.array([0xA5, 0xFF, 0xA5, 0xFF], np.uint8)

Index = slice | np.ndarray


def split_address(address: int) -> tuple[int, int]:
    """Lane and column of a tensor-memory address."""
    return address >> 16, address & 0xFFFF


def lane_mask(lanes: np.ndarray) -> int:
    """The set of `lanes` as bits of an integer."""
    return sum(1 << int(lane) for lane in np.unique(lanes))


@dataclass(frozen=True)
class Footprint:
    """Some lanes of a run of columns.

    Attributes
    ----------
    lanes : int
        Bit `i` stands for lane `i`.
    first, stop : int
        Columns `[first, stop)`.
    """

    lanes: int
    first: int
    stop: int

    def overlaps(self, other: "Footprint") -> bool:
        """Whether the two share a cell."""
        return (
            self.first < other.stop and other.first < self.stop and bool(self.lanes & other.lanes)
        )

    def __str__(self) -> str:
        lowest = (self.lanes & -self.lanes).bit_length() - 1
        highest = self.lanes.bit_length() - 1
        return f"columns {self.first}-{self.stop - 1} of lanes {lowest}-{highest}"


class TensorMemory:
    """The cells of one CTA and their allocation.

    Attributes
    ----------
    data : np.ndarray
        uint8 `[128, 2048]`: the bytes of each lane.
    written : np.ndarray
        bool `[128, 2048]`: whether a byte holds defined data of the current allocation.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self.data = np.tile(POISON, (LANES, COLUMNS))
        self.written = np.zeros((LANES, COLUMNS * WORD), bool)
        self._rng = rng
        self._allocations: dict[int, int] = {}
        self._relinquished = False
        self._last_size = COLUMNS

    def allocate(self, columns: int) -> int | None:
        """Allocate `columns` at a place of the emulator's choice.

        Returns
        -------
        int or None
            Address of the first cell; None while there is no room.

        Raises
        ------
        TensorMemoryMisuse
            A rule of `tcgen05.alloc` is broken.
        """
        self._check_size(columns)
        if self._relinquished:
            raise TensorMemoryMisuse("tcgen05.alloc after tcgen05.relinquish_alloc_permit")
        if columns > self._last_size:
            raise TensorMemoryMisuse(
                f"tcgen05.alloc of {columns} columns after one of {self._last_size}: "
                "allocations must not grow"
            )
        places = self._places(columns)
        if not places:
            return None
        first = int(self._rng.choice(places))
        self._allocations[first] = columns
        self._last_size = columns
        self.written[:, first * WORD : (first + columns) * WORD] = False
        self.data[:, first * WORD : (first + columns) * WORD] = np.tile(POISON, columns)
        return first

    def has_room(self, columns: int) -> bool:
        """Whether an allocation of `columns` would succeed."""
        return bool(self._places(columns))

    def release(self, address: int, columns: int) -> None:
        """Undo an allocation.

        Raises
        ------
        TensorMemoryMisuse
            There is no such allocation.
        """
        self._check_size(columns)
        if self._allocations.get(address) != columns:
            raise TensorMemoryMisuse(
                f"tcgen05.dealloc of {columns} columns at {address:#x}: allocated are "
                f"{self._describe()}"
            )
        del self._allocations[address]

    def relinquish(self) -> None:
        """Give up the right to allocate."""
        self._relinquished = True

    def check_empty(self) -> None:
        """Refuse to end with columns allocated.

        Raises
        ------
        TensorMemoryLeak
            Some still are.
        """
        if self._allocations:
            raise TensorMemoryLeak(f"tensor memory still allocated at exit: {self._describe()}")

    def check_allocated(self, footprint: Footprint) -> None:
        """Refuse an access outside the allocations.

        Raises
        ------
        TensorMemoryMisuse
            The footprint leaves tensor memory, or some of its columns are not allocated.
        """
        column = footprint.first
        while column < footprint.stop:
            for first, size in self._allocations.items():
                if first <= column < first + size:
                    column = first + size
                    break
            else:
                raise TensorMemoryMisuse(
                    f"access to {footprint}, where column {column} is not allocated "
                    f"(allocated are {self._describe()})"
                )

    def read(self, lanes: Index, offsets: Index) -> tuple[np.ndarray, np.ndarray | None]:
        """Bytes at `[lanes, offsets]`, as NumPy indexes (byte offsets within a lane).

        Returns
        -------
        data : np.ndarray
            uint8.
        undefined : np.ndarray or None
            bool: which of them nothing has written; None where every one is.
        """
        written = self.written[lanes, offsets]
        return self.data[lanes, offsets], None if written.all() else ~written

    def write(
        self, lanes: Index, offsets: Index, data: np.ndarray, undefined: np.ndarray | None = None
    ) -> None:
        """Store bytes at `[lanes, offsets]`, some of which may be undefined."""
        self.data[lanes, offsets] = data
        self.written[lanes, offsets] = True if undefined is None else ~undefined

    def _check_size(self, columns: int) -> None:
        """The rule on the number of columns."""
        if columns.bit_count() != 1 or not MIN_COLUMNS <= columns <= COLUMNS:
            raise TensorMemoryMisuse(
                f"tensor memory columns must be a power of two from 32 to 512, got {columns}"
            )

    def _places(self, columns: int) -> list[int]:
        """First columns where an allocation fits."""
        starts = range(0, COLUMNS - columns + 1, MIN_COLUMNS)
        return [first for first in starts if self._is_free(first, columns)]

    def _is_free(self, first: int, columns: int) -> bool:
        """Whether no allocation reaches into these columns."""
        return all(
            first + columns <= start or start + size <= first
            for start, size in self._allocations.items()
        )

    def _describe(self) -> str:
        """The allocations, for messages."""
        parts = [f"{size} columns at {first}" for first, size in sorted(self._allocations.items())]
        return ", ".join(parts) or "none"
