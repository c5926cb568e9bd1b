"""Operands of tcgen05.mma: the bytes they occupy and the values in them.

Source: PTX ISA, "Packing formats of elements in Tensor and Shared memory", "Data Path Layout
Organization" (which lanes hold which rows), "Scale Factor A ID" and "Scale Factor B ID". Whatever
the type, K elements of one row of a matrix take 32 bytes.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from emulator.errors import TensorMemoryMisuse
from emulator.numbers import number_formats as formats

from .matrix_descriptors import CELL, decode_shared_descriptor, k_major_cells, mn_major_elements
from .tensor_memory import LANES, WORD, TensorMemory, split_address

ROW_BYTES = 32  # K elements of any kind
PARTITION = 32  # lanes of a warp's quarter of tensor memory
PARTITIONS = LANES // PARTITION

_BYTE_SHIFTS = np.array([0, 8, 16], np.uint32)
_SIX_BIT_SHIFTS = np.array([0, 6, 12, 18], np.uint32)


def unpack_nibbles(data: np.ndarray) -> np.ndarray:
    """4-bit codes of bytes, low nibble first; the last axis doubles."""
    pairs = np.stack([data & 15, data >> 4], axis=-1)
    return pairs.reshape(*data.shape[:-1], -1)


def unpack_six_bit(data: np.ndarray) -> np.ndarray:
    """6-bit codes of bytes, 4 codes to 3 bytes from the low bits up."""
    triples = data.reshape(*data.shape[:-1], -1, 3).astype(np.uint32)
    words = (triples << _BYTE_SHIFTS).sum(-1, dtype=np.uint32)
    codes = words[..., None] >> _SIX_BIT_SHIFTS & np.uint32(63)
    return codes.reshape(*data.shape[:-1], -1).astype(np.uint8)


# Values of both halves of a byte, the only 4-bit format being E2M1.
_E2M1_PAIRS = formats.E2M1.decode(unpack_nibbles(np.arange(256)[:, None]))


def _decode_pairs(data: np.ndarray) -> np.ndarray:
    """E2M1 values of bytes, low half first; the last axis doubles."""
    return _E2M1_PAIRS[data].reshape(*data.shape[:-1], -1)


def _wide_codes(data: np.ndarray, bits: int) -> np.ndarray:
    """Little-endian codes of 8, 16 or 32 bits."""
    return np.ascontiguousarray(data).view({8: np.uint8, 16: np.uint16, 32: np.uint32}[bits])


@dataclass(frozen=True)
class SharedOperand:
    """A matrix operand in shared memory.

    Attributes
    ----------
    addresses : np.ndarray
        int64 `[rows, bytes]`: addresses of the bytes that are read, row by row along K.
    format : Format
        Of the elements.
    packed : bool
        Whether 4-bit elements lie side by side; else 16 of them, or of 6-bit elements, start each
        16-byte cell and the rest of the cell is padding.
    """

    addresses: np.ndarray
    format: formats.Format
    packed: bool

    def decode(self, data: np.ndarray) -> np.ndarray:
        """Values `[rows, K]` (float64) of the bytes at `addresses`."""
        bits = self.format.bits
        if bits == 4:
            return _decode_pairs(data)
        if bits == 6:
            return self.format.decode(unpack_six_bit(data))
        return self.format.decode(_wide_codes(data, bits))


@lru_cache(maxsize=1024)
def shared_operand(
    word: int, format_: formats.Format, rows: int, depth: int, *, transposed: bool, packed: bool
) -> SharedOperand:
    """The operand that a shared-memory descriptor describes.

    Parameters
    ----------
    word : int
        Descriptor.
    format_ : Format
        Of the elements.
    rows, depth : int
        Extent along M or N, and along K.
    transposed : bool
        Whether the matrix is MN-major.
    packed : bool
        See `SharedOperand`.
    """
    descriptor = decode_shared_descriptor(word)
    if transposed:
        size = format_.bits // 8
        starts = mn_major_elements(descriptor, rows, depth, size)
        addresses = starts[:, :, None] + np.arange(size)
    else:
        cells = k_major_cells(descriptor, rows, ROW_BYTES // CELL)
        used = CELL if packed or format_.bits >= 8 else CELL * format_.bits // 8
        addresses = cells[:, :, None] + np.arange(used)
    return SharedOperand(addresses.reshape(rows, -1), format_, packed)


def data_path_lanes(rows: int, lane: int) -> np.ndarray:
    """Lanes `[rows]` that hold the rows of D, and of A in tensor memory.

    M = 128 uses all lanes (layout D); M = 64 half of each quarter, from lane 0 or 16 of it
    (layout F).

    Raises
    ------
    TensorMemoryMisuse
        The address does not start on an allowed lane.
    """
    if lane not in ((0,) if rows == LANES else (0, 16)):
        raise TensorMemoryMisuse(f"a matrix of {rows} rows cannot start at lane {lane}")
    row = np.arange(rows)
    return row if rows == LANES else row % 16 + row // 16 * PARTITION + lane


def decode_tensor_memory_operand(
    data: np.ndarray, format_: formats.Format, kind: str
) -> np.ndarray:
    """Values `[rows, K]` of matrix A in tensor memory.

    Parameters
    ----------
    data : np.ndarray
        uint8 `[rows, 32]`.
    format_ : Format
        Of the elements.
    kind : str
        MMA-kind: narrow elements have an 8-bit container each except in mxf4 and mxf4nvf4, E2M1 in
        its middle and 6-bit elements in its low bits.
    """
    if format_.bits == 4:
        packed = kind in ("mxf4", "mxf4nvf4")
        return _decode_pairs(data) if packed else format_.decode(data >> 2 & 15)
    if format_.bits == 6:
        return format_.decode(data & 63)
    return format_.decode(_wide_codes(data, format_.bits))


@dataclass(frozen=True)
class ScaleOperand:
    """The scale factors of a matrix in tensor memory.

    Row `r` has its `count` factors in the word at lane `r % 32`, column `r // 32` of the operand,
    from byte `first` on; all four quarters of tensor memory hold the same.
    """

    column: int
    rows: int
    first: int
    count: int

    @property
    def columns(self) -> int:
        """Columns that are read."""
        return -(-self.rows // PARTITION)

    def read(
        self, memory: TensorMemory, format_: formats.SmallFloat
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Values `[rows, count]`, float64, NaN for a code of too many bits, and undefined rows.

        What a UE4M3 code with its top bit set means is not specified. It is no fault by itself:
        memory that nobody has filled yet may hold one, in a row that nobody looks at.

        Raises
        ------
        TensorMemoryMisuse
            The quarters differ.
        """
        row = np.arange(self.rows)
        quarter = np.arange(PARTITIONS) * PARTITION
        lanes = (quarter[:, None] + row % PARTITION)[:, :, None]
        starts = (self.column + row // PARTITION) * WORD + self.first
        codes, flags = memory.read(lanes, starts[None, :, None] + np.arange(self.count))
        undefined = None if flags is None else flags.any((0, 2))
        same = (codes == codes[0]).all((0, 2))
        if not (same if undefined is None else same | undefined).all():
            raise TensorMemoryMisuse(
                f"scale factors at column {self.column} differ between the four quarters of lanes"
            )
        values = format_.decode(codes[0] & np.uint8((1 << format_.bits) - 1))
        return np.where(codes[0].astype(int) >> format_.bits, np.nan, values), undefined


def scale_operand(address: int, rows: int, first: int, count: int) -> ScaleOperand:
    """The scale factors of `rows` rows that start at a tensor-memory address.

    The two top bits of the address may repeat `first`, the first byte: CuTe's addresses of bytes
    within a cell have it there, and its kernels hand them to `tcgen05.mma` as they are.

    Raises
    ------
    TensorMemoryMisuse
        They hold something else, or the lane is not 0.
    """
    lane, column = split_address(address)
    byte, lane = lane >> 14, lane & 0x3FFF
    if lane or byte not in (0, first):
        raise TensorMemoryMisuse(f"scale factors from byte {first} on at address {address:#010x}")
    return ScaleOperand(column, rows, first, count)
