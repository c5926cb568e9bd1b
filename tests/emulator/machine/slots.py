"""Where a warp keeps the values that closures read and write.

A slot is the number of an array of 32 lanes. Registers, views of registers as another type,
constants and special registers all have slots, so closures only know numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from emulator.syntax.module import Register
from emulator.syntax.ptx_types import bits_type

from .special_registers import SPECIAL_REGISTERS

if TYPE_CHECKING:
    from emulator.instructions.registry import Decoder

    from .execution import Warp

LANES = 32


# Makes the lanes of a slot that is no register.
Make = Callable[["Warp"], np.ndarray]


class Slots:
    """The slots of one program; `create` makes a warp's arrays."""

    def __init__(self) -> None:
        self._numbers: dict[tuple, int] = {}
        # What each slot is: a view of a register, or made by a function.
        self._slots: list[tuple[str, type, int] | Make] = []
        self._places: dict[str, tuple[int, int]] = {}  # of registers: first byte, bytes
        self._predicates: dict[str, int] = {}
        self._register_bytes = 0

    def _add(self, key: tuple | None, slot: tuple[str, type, int] | Make) -> int:
        if key is not None and key in self._numbers:
            return self._numbers[key]
        number = len(self._slots)
        self._slots.append(slot)
        if key is not None:
            self._numbers[key] = number
        return number

    def register(self, register: Register, dtype: type) -> int:
        """A register's lanes as `dtype`, of its width or the low part of it."""
        name, stored = register.name, np.dtype(bits_type(register.type))
        if stored == np.bool_:
            self._predicates.setdefault(name, len(self._predicates))
        elif name not in self._places:
            size = stored.itemsize * LANES
            self._places[name] = self._register_bytes, size
            self._register_bytes += size
        return self._add((name, dtype), (name, dtype, stored.itemsize // np.dtype(dtype).itemsize))

    def constant(self, value: int | float, dtype: type) -> int:
        """A constant; integers wrap around to the type's width."""
        if issubclass(dtype, np.integer):
            bits = np.dtype(dtype).itemsize * 8
            unsigned = np.array(int(value) & ((1 << bits) - 1), f"u{bits // 8}")
            lanes = np.full(LANES, unsigned).view(dtype)
        else:
            lanes = np.full(LANES, value, dtype)
        lanes.flags.writeable = False
        return self._add(("constant", lanes.tobytes(), dtype), lambda warp: lanes)

    def special(self, name: str, dtype: type, op: Decoder) -> int:
        """A special register that is constant for a warp."""
        value = SPECIAL_REGISTERS.get(name)
        if value is None:
            raise op.unsupported(f"special register {name}")
        return self._add(
            (name, dtype), lambda warp: np.broadcast_to(value(warp), LANES).astype(dtype)
        )

    def temporary(self, dtype: type) -> int:
        """Lanes of one instruction's own."""
        return self._add(None, lambda warp: np.zeros(LANES, dtype))

    def shared(self, name: str, dtype: type) -> int:
        """Lanes that several instructions share, such as the carry bit."""
        return self._add((name, dtype), lambda warp: np.zeros(LANES, dtype))

    def sink(self, dtype: type) -> int:
        """Lanes that nobody reads."""
        return self._add(("sink", dtype), lambda warp: np.zeros(LANES, dtype))

    def create(self, warp: Warp, generator: np.random.Generator) -> list[np.ndarray]:
        """A warp's arrays; registers hold garbage until they are written."""
        garbage = np.frombuffer(bytearray(generator.bytes(self._register_bytes)), np.uint8)
        count = len(self._predicates)
        flags = generator.integers(0, 2, (count, LANES), np.uint8).view(np.bool_)
        registers = {name: flags[row] for name, row in self._predicates.items()}
        for name, (start, size) in self._places.items():
            registers[name] = garbage[start : start + size]
        arrays = []
        for slot in self._slots:
            if isinstance(slot, tuple):
                name, dtype, parts = slot
                lanes = registers[name].view(dtype)
                arrays.append(lanes if parts == 1 else lanes[::parts])
            else:
                arrays.append(slot(warp))
        return arrays
