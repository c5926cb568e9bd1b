"""What a tensor map says: which bytes of global memory make up a box, and where they go.

A tensor map is opaque in PTX; the emulator works from the arguments its maker passed to the driver.
Sources: CUDA driver API, `cuTensorMapEncodeTiled` (its rules are in `tensor_map_rules`); PTX ISA,
"Tensor Access Modes", "Tiled Mode", "Swizzling Modes". Dimensions are listed innermost first,
as the driver takes them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from emulator.errors import EmulationError, UnsupportedInstruction

from .swizzle import B32, B64, B128, B128_ATOM_32B, B128_ATOM_64B, NONE, Swizzle

MAX_RANK = 5
MAX_BOX = 256
MAX_ELEMENT_STRIDE = 8
CELL = 16  # bytes that every swizzling mode keeps whole


class TensorMapError(EmulationError):
    """A tensor map or a box that breaks a rule of the driver or of the ISA."""


class DataType(enum.IntEnum):
    """`CUtensorMapDataType`."""

    UINT8 = 0
    UINT16 = 1
    UINT32 = 2
    INT32 = 3
    UINT64 = 4
    INT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT32_FTZ = 10
    TFLOAT32 = 11
    TFLOAT32_FTZ = 12
    U4_ALIGN_8B = 13
    U4_ALIGN_16B = 14
    U6_ALIGN_16B = 15


ELEMENT_BITS = {
    DataType.UINT8: 8,
    DataType.UINT16: 16,
    DataType.UINT32: 32,
    DataType.INT32: 32,
    DataType.UINT64: 64,
    DataType.INT64: 64,
    DataType.FLOAT16: 16,
    DataType.FLOAT32: 32,
    DataType.FLOAT64: 64,
    DataType.BFLOAT16: 16,
    DataType.FLOAT32_FTZ: 32,
    DataType.TFLOAT32: 32,
    DataType.TFLOAT32_FTZ: 32,
    DataType.U4_ALIGN_8B: 4,
}
# Padding variants are refused by name.

SWIZZLES = {0: NONE, 1: B32, 2: B64, 3: B128, 4: B128_ATOM_32B, 6: B128_ATOM_64B}


@dataclass(frozen=True)
class Box:
    """The bytes of one box: `rows` contiguous runs of global memory.

    Attributes
    ----------
    row_addresses : np.ndarray
        int64 `[rows]`: global address of a row's first byte, also of rows outside the tensor.
    row_inside : np.ndarray
        bool `[rows]`: whether the row's outer coordinates lie inside the tensor.
    inner_start, inner_stop : int
        Bytes `[inner_start, inner_stop)` of a row lie inside the tensor.
    row_bytes : int
        Bytes of a row of the box.
    starts_before : bool
        Whether a coordinate is negative.
    """

    row_addresses: np.ndarray
    row_inside: np.ndarray
    inner_start: int
    inner_stop: int
    row_bytes: int
    starts_before: bool

    @property
    def splits_a_cell(self) -> bool:
        """Whether the tensor ends within a 16-byte cell of the box."""
        return self.inner_stop % CELL != 0

    def in_whole_cells(self) -> Box:
        """The box with rows that end where their last 16-byte cell does."""
        return replace(self, inner_stop=-(-self.inner_stop // CELL) * CELL)


@dataclass(frozen=True)
class TensorMap:
    """The arguments of `cuTensorMapEncodeTiled`.

    Attributes
    ----------
    data_type, interleave, swizzle, l2_promotion, oob_fill : int
        The driver's enumerators.
    address : int
        Global address of the tensor.
    dimensions : tuple of int
        Elements in each dimension, innermost first.
    strides : tuple of int
        Bytes between neighbours in dimensions 1, 2, ...
    box : tuple of int
        Elements traversed in each dimension.
    element_strides : tuple of int
        Steps of the traversal; the first is ignored without interleaving.
    """

    data_type: int
    address: int
    dimensions: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: int = 0
    swizzle: int = 0
    l2_promotion: int = 0
    oob_fill: int = 0

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.dimensions)

    @property
    def element_bits(self) -> int:
        """Bits of an element in global and in shared memory."""
        try:
            return ELEMENT_BITS[DataType(self.data_type)]
        except (KeyError, ValueError):
            raise UnsupportedInstruction(f"tensor map of data type {self.data_type}") from None

    @property
    def swizzling(self) -> Swizzle:
        """The swizzling mode of the box in shared memory."""
        try:
            return SWIZZLES[self.swizzle]
        except KeyError:
            raise UnsupportedInstruction(f"tensor map of swizzle {self.swizzle}") from None

    @property
    def loaded(self) -> tuple[int, ...]:
        """Elements copied in each dimension: `ceil(box / element stride)`."""
        outer = zip(self.box[1:], self.element_strides[1:], strict=True)
        return (self.box[0], *(-(-extent // step) for extent, step in outer))

    @property
    def row_bytes(self) -> int:
        """Bytes of the innermost dimension of a box."""
        return self.box[0] * self.element_bits // 8

    @property
    def box_bytes(self) -> int:
        """Bytes of a box in shared memory; also its `complete_tx` count."""
        return self.row_bytes * prod(self.loaded[1:])

    @property
    def shared_pitch(self) -> int:
        """Bytes from a row to the next in shared memory.

        Rows that are narrower than the span of their swizzling leave the rest of it alone: so an
        H200 does (recorded); the ISA does not say.
        """
        return self.swizzling.span or self.row_bytes

    def check_supported(self) -> None:
        """Refuse maps that the driver makes but the emulator does not implement.

        Raises
        ------
        UnsupportedInstruction
            Interleaving, a padded type, or the 8-byte flip.
        TensorMapError
            Rows of a box that are no multiples of 16 bytes, which the driver refuses.
        """
        if self.interleave != 0:
            raise UnsupportedInstruction(f"tensor map of interleave {self.interleave}")
        _ = self.element_bits, self.swizzling  # these refuse what they do not know
        if self.row_bytes % CELL:
            raise TensorMapError(f"rows of {self.row_bytes} bytes of a box are no multiples of 16")

    def locate(self, coordinates: tuple[int, ...]) -> Box:
        """The bytes of the box that starts at `coordinates` (elements, innermost first)."""
        if len(coordinates) != self.rank:
            raise TensorMapError(f"{len(coordinates)} coordinates for a map of rank {self.rank}")
        bits = self.element_bits
        if coordinates[0] * bits % (8 * CELL):
            # The ISA does not say so, but an H200 stops with an illegal instruction (recorded).
            raise TensorMapError(
                f"a box must start on a multiple of 16 bytes within a row, not at {coordinates[0]}"
                f" elements of {bits} bits"
            )
        start = coordinates[0] * bits // 8
        width = self.dimensions[0] * bits // 8
        addresses = np.array([self.address + start], np.int64)
        inside = np.ones(1, bool)
        for axis in range(1, self.rank):
            index = coordinates[axis] + np.arange(self.loaded[axis]) * self.element_strides[axis]
            addresses = addresses[None, :] + (index * self.strides[axis - 1])[:, None]
            fits = (index >= 0) & (index < self.dimensions[axis])
            inside = inside[None, :] & fits[:, None]
            addresses, inside = addresses.ravel(), inside.ravel()
        stop = int(np.clip(width - start, 0, self.row_bytes))
        first = min(max(0, -start), stop)
        return Box(addresses, inside, first, stop, self.row_bytes, min(coordinates) < 0)

    def of_rows(self, count: int) -> TensorMap:
        """The map of `tile::gather4` and `tile::scatter4`: its boxes have that many rows.

        Raises
        ------
        TensorMapError
            The map is not of boxes of one row.
        """
        if self.rank != 2 or self.box[1] != 1:
            raise TensorMapError(f"rows of a matrix need a map of boxes of one row, not {self.box}")
        return replace(self, box=(self.box[0], count))

    def locate_rows(self, column: int, *rows: int) -> Box:
        """The bytes of some rows from a column on."""
        boxes = [self.locate((column, row)) for row in rows]
        return replace(
            boxes[0],
            row_addresses=np.concatenate([box.row_addresses for box in boxes]),
            row_inside=np.concatenate([box.row_inside for box in boxes]),
            starts_before=any(box.starts_before for box in boxes),
        )

    def shared_cells(self, address: int) -> np.ndarray:
        """Shared-memory addresses of the 16-byte cells of a box placed at `address`.

        Returns
        -------
        np.ndarray
            int64 `[rows, row_bytes // 16]`.
        """
        rows = address + np.arange(prod(self.loaded[1:]), dtype=np.int64) * self.shared_pitch
        return self.swizzling.apply(rows[:, None] + np.arange(0, self.row_bytes, CELL))

    def check_shared_address(self, address: int) -> None:
        """Refuse a box address that tensor copies cannot use.

        PTX ISA, `cp.async.bulk.tensor`: 128-byte alignment of the box in shared memory.

        Raises
        ------
        TensorMapError
            The address is misaligned.
        """
        if address % 128:
            raise TensorMapError(f"a box must lie on a multiple of 128 bytes, got {address:#x}")
