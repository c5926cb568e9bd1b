"""`tcgen05.cp`: from shared to tensor memory, with multicast and decompression.

Source: PTX ISA, "Tensor Memory Data Movement Instructions" and "Optional Decompression". The source
is a K-major matrix of 16-byte cells, as its descriptor places them; row `i` goes to lane `i`, and
the cells of a row go side by side. A multicast shape has fewer rows and repeats them:

| shape                     | rows for lanes 0-31, 32-63, 64-95, 96-127 |
| ------------------------- | ----------------------------------------- |
| `.64x128b.warpx2::02_13`  | 0-31, 32-63, 0-31, 32-63                  |
| `.64x128b.warpx2::01_23`  | 0-31, 0-31, 32-63, 32-63                  |
| `.32x128b.warpx4`         | 0-31, 0-31, 0-31, 0-31                    |

Not implemented, and refused by name: `.4x256b`, `tcgen05.shift`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from emulator.errors import UnsupportedInstruction
from emulator.instructions.registry import Closure, Decoder, Mask, instruction

from .matrix_descriptors import CELL, decode_shared_descriptor, k_major_cells
from .matrix_operands import unpack_nibbles, unpack_six_bit
from .tensor_core import TensorCore, thread_of
from .tensor_memory import ALL_LANES, LANES, WORD, Footprint, split_address
from .tensor_order import TensorOperation

if TYPE_CHECKING:
    from emulator.machine.execution import Warp

_LANE = np.arange(LANES)
# Shape: cells of a row, multicast qualifier, row of each lane.
SHAPES: dict[str, tuple[int, dict[str, np.ndarray]]] = {
    "128x256b": (2, {"": _LANE}),
    "128x128b": (1, {"": _LANE}),
    "64x128b": (
        1,
        {"warpx2::02_13": _LANE % 64, "warpx2::01_23": _LANE // 64 * 32 + _LANE % 32},
    ),
    "32x128b": (1, {"warpx4": _LANE % 32}),
}


def _from_four_bit(data: np.ndarray) -> np.ndarray:
    """Codes of 16 elements in the middle of a byte each."""
    return unpack_nibbles(data) << 2


# Source format: bytes of a cell that hold data, and their 16 bytes in tensor memory.
DECOMPRESSION: dict[str, tuple[int, Callable[[np.ndarray], np.ndarray]]] = {
    "": (CELL, lambda data: data),
    "b4x16_p64": (8, _from_four_bit),
    "b6x16_p32": (12, unpack_six_bit),
}


@dataclass(frozen=True)
class _Shape:
    """What a copy moves: `cells` 16-byte cells of row `rows[i]` to lane `i`."""

    cells: int
    rows: np.ndarray
    used: int
    decompress: Callable[[np.ndarray], np.ndarray]

    def start(
        self, core: TensorCore, warp: Warp, thread: int, word: int, address: int, name: str
    ) -> None:
        """Issue a copy from the matrix of a descriptor to an address."""
        lane, column = split_address(address)
        if lane:
            raise UnsupportedInstruction(f"{name} to lane {lane}")
        descriptor = decode_shared_descriptor(word)
        count = int(self.rows.max()) + 1
        cells = k_major_cells(descriptor, count, self.cells)
        source = core.cta.shared.bytes_at(cells[:, :, None] + np.arange(self.used))
        width = self.cells * CELL // WORD

        def perform() -> None:
            data = self.decompress(source.load().reshape(count, self.cells, self.used))
            columns = slice(column * WORD, (column + width) * WORD)
            flags, undefined = source.undefined, None
            if flags.any():
                # As 0xff, which every element that holds some of it shows.
                parts = flags.reshape(count, self.cells, self.used) * np.uint8(0xFF)
                undefined = self.decompress(parts).reshape(count, -1)[self.rows] != 0
            core.memory.write(slice(None), columns, data.reshape(count, -1)[self.rows], undefined)

        operation = TensorOperation(
            "cp",
            range(thread, thread + 1),
            writes=[Footprint(ALL_LANES, column, column + width)],
        )
        core.submit(warp, operation, perform, [source], name)


def _take_shape(op: Decoder) -> _Shape:
    """Take shape, multicast and formats."""
    shape = op.one_of(*SHAPES)
    cells, multicasts = SHAPES[shape]
    multicast = op.one_of(*multicasts, default="" if "" in multicasts else None)
    source_format = ""
    if op.flag("b8x16"):
        source_format = op.one_of("b6x16_p32", "b4x16_p64")
    used, decompress = DECOMPRESSION[source_format]
    return _Shape(cells, multicasts[multicast], used, decompress)


@instruction("tcgen05.cp")
def compile_cp(op: Decoder) -> Closure:
    """One copy for every active lane."""
    op.expect_operands(2)
    op.one_of("cta_group::1")
    shape = _take_shape(op)
    target, descriptor = op.memory(0), op.source(1, np.uint64)
    name = op.instruction.text

    def run(warp: Warp, mask: Mask) -> None:
        core = warp.cta.extension(TensorCore)
        addresses = target.evaluate(warp, None)
        for lane in np.flatnonzero(warp.lanes(mask)).tolist():
            word = int(warp.slots[descriptor][lane])
            address = int(addresses[lane]) & 0xFFFFFFFF
            shape.start(core, warp, thread_of(warp, lane), word, address, name)

    return run
