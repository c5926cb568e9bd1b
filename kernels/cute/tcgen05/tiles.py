"""A tile of 128 keys, as the copies lay it out in shared memory and the tensor cores read it.

The keys are the M = 128 operand, two pages of a group one after the other; query rows are the N
columns. Both operands are K-major. Their rows in shared memory are swizzled: the 16-byte chunks of
a row are permuted by the row's number, which the copies of a tensor map do and matrix descriptors
know. Scales lie in 128x4 order: the word of row ``r`` and half ``h`` (the scales of values
``64 h .. 64 h + 63``) is at ``512 h + 16 (r % 32) + 4 (r / 32)``.

| | NVFP4 | BF16 |
| --- | --- | --- |
| row in shared memory | 64 bytes: a key | 128 bytes: half a key |
| swizzle | 64 bytes | 128 bytes |
| tile | 128 rows, then 1,024 bytes of scales | 128 rows of first halves, 128 of second halves |
| K of an MMA, MMAs | 64, 2 | 16, 8 |
| columns | 8 | 16 (M = 128 and 16-bit operands need a multiple of 16) |
"""

from dataclasses import dataclass, replace

from cutlass import Int32, Int64

from sdsa_kernels.cute.ptx import BARRIER_BYTES
from sdsa_quant.layout import MAX_ROWS, PAGE

TILE_PAGES = 2
TILE_KEYS = TILE_PAGES * PAGE
SCALE_TILE_BYTES = 1024  # of 128 rows, in 128x4 order
HALF_SCALE_BYTES = 512
MMA_K_BYTES = 32  # of a row, 64 E2M1 or 16 BF16 values

# Accumulators in tensor memory, each with the scale columns of its tile: the scales of a tile are
# overwritten no sooner than its scores were read, so its MMAs are complete.
ACCUMULATORS = 4
SCALE_COLUMNS = 4  # of 128 rows and 64 values
QUERY_BUFFERS = 2

_SWIZZLE_NONE, _SWIZZLE_128, _SWIZZLE_64 = 0, 2, 4  # of a matrix descriptor
_FLOAT32_SUMS, _BF16, _E2M1 = 1, 1, 1  # of an instruction descriptor


@dataclass(frozen=True)
class TileFormat:
    """Sizes of one kernel: what differs between key formats."""

    row_bytes: int  # of a row in shared memory, the width of the swizzle
    parts: int  # that a key's row is cut into
    columns: int
    scale_bytes: int  # of a tile
    tiled_scales: bool  # scales are stored in the 128x4 order, not as linear pages
    stages: int
    ctas_per_sm: int

    @property
    def part_bytes(self) -> int:
        """Of one part of a tile's keys."""
        return TILE_KEYS * self.row_bytes

    @property
    def key_bytes(self) -> int:
        """Of a tile's keys."""
        return self.parts * self.part_bytes

    @property
    def stage_bytes(self) -> int:
        return self.key_bytes + self.scale_bytes

    @property
    def query_part_bytes(self) -> int:
        return self.columns * self.row_bytes

    @property
    def query_bytes(self) -> int:
        """Of a group's query rows."""
        return self.parts * self.query_part_bytes

    @property
    def query_buffer_bytes(self) -> int:
        return self.query_bytes + self.scale_bytes

    @property
    def mmas_of_part(self) -> int:
        return self.row_bytes // MMA_K_BYTES

    @property
    def instruction(self) -> int:
        """Instruction descriptor of the MMA (PTX ISA, "Instruction descriptor")."""
        shape = (self.columns >> 3) << 17 | (TILE_KEYS >> 4) << 24
        if self.scale_bytes:
            return _E2M1 << 7 | _E2M1 << 10 | shape  # and UE4M3 scales, which is 0 in bit 23
        return _FLOAT32_SUMS << 4 | _BF16 << 7 | _BF16 << 10 | shape

    # ---- Columns of tensor memory: accumulators, scales of their tiles, scales of query rows ----

    @property
    def scale_column(self) -> int:
        return ACCUMULATORS * self.columns

    @property
    def query_scale_column(self) -> int:
        return self.scale_column + ACCUMULATORS * 2 * SCALE_COLUMNS

    @property
    def tensor_columns(self) -> int:
        """To allocate: a power of two, at least 32."""
        used = self.scale_column
        if self.scale_bytes:
            used = self.query_scale_column + QUERY_BUFFERS * 2 * SCALE_COLUMNS
        return max(32, 1 << (used - 1).bit_length())


# 193,536 (NVFP4) and 196,608 bytes (BF16) under way on an SM: docs/explanation/tcgen05.md says why.
_NVFP4 = TileFormat(
    row_bytes=64,
    parts=1,
    columns=MAX_ROWS,
    scale_bytes=SCALE_TILE_BYTES,
    tiled_scales=False,
    stages=7,
    ctas_per_sm=3,
)
_BF16_KEYS = TileFormat(
    row_bytes=128, parts=2, columns=16, scale_bytes=0, tiled_scales=False, stages=3, ctas_per_sm=2
)
FORMATS = {
    "tcgen05_nvfp4": _NVFP4,
    "tcgen05_nvfp4_128x4": replace(_NVFP4, tiled_scales=True),
    "tcgen05_bf16": _BF16_KEYS,
}


@dataclass(frozen=True)
class SharedMap:
    """Where things are in a CTA's shared memory: byte offsets from a multiple of 1,024."""

    tile: TileFormat
    scratch_bytes: int  # of the schedule

    @property
    def queries(self) -> int:
        return self.tile.stages * self.tile.stage_bytes

    @property
    def full(self) -> int:
        """Barriers of stages: the copies of a tile have landed."""
        return self.queries + QUERY_BUFFERS * self.tile.query_buffer_bytes

    @property
    def empty(self) -> int:
        """Barriers of stages: the MMAs of a tile are complete."""
        return self.full + self.tile.stages * BARRIER_BYTES

    @property
    def query_full(self) -> int:
        return self.empty + self.tile.stages * BARRIER_BYTES

    @property
    def query_empty(self) -> int:
        return self.query_full + QUERY_BUFFERS * BARRIER_BYTES

    @property
    def scored(self) -> int:
        """Barriers of accumulators: the MMAs of a tile are complete."""
        return self.query_empty + QUERY_BUFFERS * BARRIER_BYTES

    @property
    def stored(self) -> int:
        """Barriers of accumulators: the scores of a tile were read."""
        return self.scored + ACCUMULATORS * BARRIER_BYTES

    @property
    def tensor_slot(self) -> int:
        """The address in tensor memory that was allocated."""
        return self.stored + ACCUMULATORS * BARRIER_BYTES

    @property
    def scratch(self) -> int:
        return self.tensor_slot + 8

    @property
    def total(self) -> int:
        return self.scratch + self.scratch_bytes


def _descriptor(address: Int32, group_bytes: int, swizzle: int) -> Int64:
    """Descriptor of a K-major matrix (PTX ISA, "Matrix descriptor").

    Bits 0-13 and 32-45 are the address and the distance between groups of 8 rows, in 16 bytes; the
    distance between columns of chunks, bits 16-29, is not used here; bits 46-48 are 1.
    """
    fixed = (group_bytes >> 4) << 32 | 1 << 46 | swizzle << 61
    if fixed >= 1 << 63:
        fixed -= 1 << 64
    return Int64(address >> 4) | Int64(fixed)


def operand_descriptor(tile: TileFormat, address: Int32) -> Int64:
    """Of swizzled rows of keys or of a query; a step of 32 bytes along K adds 2."""
    swizzle = _SWIZZLE_64 if tile.row_bytes == 64 else _SWIZZLE_128
    return _descriptor(address, 8 * tile.row_bytes, swizzle)


def scale_descriptor(address: Int32) -> Int64:
    """Of 32 lines of 16 bytes, one after the other."""
    return _descriptor(address, 8 * 16, _SWIZZLE_NONE)
