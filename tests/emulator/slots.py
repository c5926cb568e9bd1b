"""Where a warp keeps the values that closures read and write.

A slot is the number of an array of 32 lanes. Registers, views of registers as another type,
constants and special registers all have slots, so closures only know numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .ptx_syntax import Register
from .ptx_types import bits_type
from .special_registers import SPECIAL_REGISTERS

if TYPE_CHECKING:
    from .execution import Warp
    from .registry import Decoder

LANES = 32


class Slots:
    """The slots of one program; `create` makes a warp's arrays."""

    def __init__(self) -> None:
        self._numbers: dict[tuple, int] = {}
        self._makers: list[Callable[[dict[str, np.ndarray], Warp], np.ndarray]] = []
        self._registers: dict[str, type] = {}

    def _add(
        self, key: tuple | None, make: Callable[[dict[str, np.ndarray], Warp], np.ndarray]
    ) -> int:
        if key is not None and key in self._numbers:
            return self._numbers[key]
        number = len(self._makers)
        self._makers.append(make)
        if key is not None:
            self._numbers[key] = number
        return number

    def register(self, register: Register, dtype: type) -> int:
        """A register's lanes as `dtype`, of its width or the low part of it."""
        stored = bits_type(register.type)
        name = register.name
        self._registers[name] = stored
        parts = np.dtype(stored).itemsize // np.dtype(dtype).itemsize
        return self._add(
            (name, dtype), lambda registers, warp: registers[name].view(dtype)[::parts]
        )

    def constant(self, value: int | float, dtype: type) -> int:
        """A constant; integers wrap around to the type's width."""
        if issubclass(dtype, np.integer):
            bits = np.dtype(dtype).itemsize * 8
            unsigned = np.array(int(value) & ((1 << bits) - 1), f"u{bits // 8}")
            lanes = np.full(LANES, unsigned).view(dtype)
        else:
            lanes = np.full(LANES, value, dtype)
        lanes.flags.writeable = False
        return self._add(("constant", lanes.tobytes(), dtype), lambda registers, warp: lanes)

    def special(self, name: str, dtype: type, op: Decoder) -> int:
        """A special register that is constant for a warp."""
        value = SPECIAL_REGISTERS.get(name)
        if value is None:
            raise op.unsupported(f"special register {name}")
        return self._add(
            (name, dtype),
            lambda registers, warp: np.broadcast_to(value(warp), LANES).astype(dtype),
        )

    def temporary(self, dtype: type) -> int:
        """Lanes of one instruction's own."""
        return self._add(None, lambda registers, warp: np.zeros(LANES, dtype))

    def shared(self, name: str, dtype: type) -> int:
        """Lanes that several instructions share, such as the carry bit."""
        return self._add((name, dtype), lambda registers, warp: np.zeros(LANES, dtype))

    def sink(self, dtype: type) -> int:
        """Lanes that nobody reads."""
        return self._add(("sink", dtype), lambda registers, warp: np.zeros(LANES, dtype))

    def create(self, warp: Warp, generator: np.random.Generator) -> list[np.ndarray]:
        """A warp's arrays; registers hold garbage until they are written."""
        registers = {
            name: generator.integers(0, 2, LANES).astype(bool)
            if dtype is np.bool_
            else generator.integers(0, np.iinfo(dtype).max, LANES, dtype, endpoint=True)
            for name, dtype in self._registers.items()
        }
        return [make(registers, warp) for make in self._makers]
