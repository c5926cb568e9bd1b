"""What is known of a warp's registers beside their values: what is undefined, or still on its way.

A load of what nothing has written makes the bits of registers undefined, and results of these are
undefined in turn. That is no fault yet: the fault is to store them to global memory, to branch on
them, to take them for an address, or to hand them to an instruction that does not carry them on.

The registers of a `tcgen05.ld` are there when they are used: an instruction that reads one waits
for it. What was not read before its cells are overwritten needs `tcgen05.wait::ld`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from emulator.errors import InFlightRead, UnwrittenRead

from .outcomes import Wait

if TYPE_CHECKING:
    from emulator.instructions.registry import Closure, Mask

    from .execution import Warp

# Which bits of a register are undefined, uint64 [32]; by register.
Undefined = dict[str, np.ndarray]
UNDEFINED = "what nothing has written"  # for messages
_ALL = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
_NONE: np.ndarray = np.zeros(32, np.uint64)


class PendingLoad:
    """The registers of a load that nobody has waited for.

    Attributes
    ----------
    overwritten : bool
        Whether what it loads from has been overwritten since.
    """

    def __init__(self, registers: Sequence[str], watched: dict[str, PendingLoad]) -> None:
        self._watched = watched
        self._reads: list[int] = []  # epochs of the warp
        self.overwritten = False
        for register in registers:
            watched[register] = self

    def read(self, register: str, epoch: int) -> None:
        """An instruction uses a register, for the first time, in some epoch of the warp.

        Raises
        ------
        InFlightRead
            It may hold what was stored later.
        """
        if self.overwritten:
            raise InFlightRead(
                f"{register} is used with no tcgen05.wait::ld since its load, and what it loads"
                " from has been overwritten"
            )
        self._reads.append(epoch)
        del self._watched[register]

    def was_read(self, epoch: int) -> bool:
        """Whether registers were read up to an epoch, and none of them after it."""
        return bool(self._reads) and self._reads[-1] <= epoch

    def finish(self) -> None:
        """It was waited for."""
        for register in [name for name, load in self._watched.items() if load is self]:
            del self._watched[register]


@dataclass(frozen=True)
class Place:
    """An operand: its register, if it is one, its slot, and its bits."""

    register: str | None
    slot: int
    bits: int

    @property
    def mask(self) -> np.uint64:
        return np.uint64((1 << self.bits) - 1)


# From which bits of the sources are undefined, those of the targets.
Carry = Callable[["Warp", Sequence[Place], list[np.ndarray], int], list[np.ndarray]]


@dataclass(frozen=True)
class Uses:
    """The registers of one instruction.

    Attributes
    ----------
    sources, targets : tuple of Place
        In the order in which it is compiled.
    carry : Carry or None
        How undefined bits pass through it.
    carried : set of str
        Registers that may be undefined; the closure itself sees to what follows, without `carry`.
    guard : (Place, bool) or None
        With whether it is negated.
    """

    sources: tuple[Place, ...] = ()
    targets: tuple[Place, ...] = ()
    carry: Carry | None = None
    carried: frozenset[str] = frozenset()
    guard: tuple[Place, bool] | None = None

    @property
    def names(self) -> frozenset[str]:
        """All registers."""
        places = [*self.sources, *self.targets, *(self.guard or ())[:1]]
        return frozenset(each.register for each in places if each.register is not None)

    def run(self, closure: Closure, warp: Warp, mask: Mask) -> Any:
        """Run the closure, some registers of which are undefined or on their way.

        Raises
        ------
        UnwrittenRead, InFlightRead
        """
        lanes = warp.lanes(mask)
        if self.guard is not None:
            guard, negated = self.guard
            if (undefined_bits(warp, guard)[lanes]).any():
                raise UnwrittenRead(_complaint(guard.register) + origin_of(warp))
            lanes = lanes & (warp.slots[guard.slot] ^ negated)
            if not lanes.any():
                return closure(warp, mask)
        epoch = warp.cta.clocks.epochs[warp.index]
        for source in self.sources:
            if source.register in warp.loads:
                warp.loads[source.register].read(source.register, epoch)
        for target in self.targets:
            warp.loads.pop(target.register or "", None)
        return (
            self._run_undefined(closure, warp, mask, lanes)
            if warp.undefined
            else closure(warp, mask)
        )

    def _run_undefined(self, closure: Closure, warp: Warp, mask: Mask, lanes: np.ndarray) -> Any:
        given = [np.where(lanes, undefined_bits(warp, each), np.uint64(0)) for each in self.sources]
        results: list[np.ndarray] = []
        if any(bits.any() for bits in given):
            for source, bits in zip(self.sources, given, strict=True):
                if bits.any() and self.carry is None and source.register not in self.carried:
                    raise UnwrittenRead(_complaint(source.register) + origin_of(warp))
            if self.carry is not None:
                results = self.carry(warp, self.sources, given, len(self.targets))
        before = {t.register: warp.undefined.get(t.register or "") for t in self.targets}
        for target in self.targets:
            set_undefined(warp, target.register, lanes, _NONE)
        outcome = closure(warp, mask)
        if isinstance(outcome, Wait) and outcome.retry:
            for register, known in before.items():
                if register is not None and known is not None:
                    warp.undefined[register] = known
            return outcome
        for target, bits in zip(self.targets, results, strict=False):
            set_undefined(warp, target.register, lanes, bits & target.mask)
        return outcome


def _complaint(register: str | None) -> str:
    return f"{register} is used, which depends on {UNDEFINED}"


def origin_of(warp: Warp) -> str:
    """Where undefined bits came from, for messages."""
    return f" (last loaded by {warp.loaded_undefined})"


def undefined_bits(warp: Warp, place: Place) -> np.ndarray:
    """Which bits of an operand are undefined, uint64 [32]."""
    return warp.undefined.get(place.register or "", _NONE) & place.mask


def set_undefined(warp: Warp, register: str | None, lanes: np.ndarray, bits: np.ndarray) -> None:
    """Say which bits of a register are undefined in some lanes; `bits` holds all 32."""
    if register is None or (register not in warp.undefined and not bits.any()):
        return
    now = np.where(lanes, bits, warp.undefined.get(register, _NONE))
    if now.any():
        warp.undefined[register] = now
    else:
        del warp.undefined[register]


# How undefined bits pass through instructions of each lane.


def carry_all(
    warp: Warp, sources: Sequence[Place], given: list[np.ndarray], targets: int
) -> list[np.ndarray]:
    """Every bit of a result depends on every bit of every source."""
    return [np.where(np.bitwise_or.reduce(given) != 0, _ALL, np.uint64(0))] * targets


def _values(warp: Warp, place: Place) -> np.ndarray:
    return np.asarray(warp.slots[place.slot]).astype(np.uint64) & place.mask


def _carry_bits(
    warp: Warp, sources: Sequence[Place], given: list[np.ndarray], targets: int
) -> list[np.ndarray]:
    """Every bit of the result depends on the same bits of the sources."""
    return [np.bitwise_or.reduce(given)]


def _carry_shift(
    warp: Warp, sources: Sequence[Place], given: list[np.ndarray], targets: int, left: bool
) -> list[np.ndarray]:
    amounts = np.minimum(_values(warp, sources[1]), np.uint64(63))
    moved = given[0] << amounts if left else given[0] >> amounts
    return [np.where(given[1] != 0, _ALL, moved)]


def _carry_choice(
    warp: Warp, sources: Sequence[Place], given: list[np.ndarray], targets: int
) -> list[np.ndarray]:
    """`selp`: of two sources the one that the third says."""
    first, second, chooser = given
    chosen = np.where(warp.slots[sources[2].slot], first, second)
    return [np.where(chooser != 0, _ALL, chosen)]


def _carry_move(
    warp: Warp, sources: Sequence[Place], given: list[np.ndarray], targets: int
) -> list[np.ndarray]:
    """`mov`: whole registers, or their parts side by side."""
    if len(given) == 1:
        width = np.uint64(sources[0].bits // targets)
        return [given[0] >> width * np.uint64(index) for index in range(targets)]
    width = np.uint64(sources[0].bits)
    parts = [bits << width * np.uint64(index) for index, bits in enumerate(given)]
    return [np.bitwise_or.reduce(parts)]


def carry_by(function: Callable[..., np.ndarray], moved: int) -> Carry:
    """What moves bits of its first operands moves those that are undefined; others decide how."""

    def carry(
        warp: Warp, sources: Sequence[Place], given: list[np.ndarray], targets: int
    ) -> list[np.ndarray]:
        if any(bits.any() for bits in given[moved:]):
            return carry_all(warp, sources, given, targets)
        operands = [np.asarray(warp.slots[each.slot]) for each in sources]
        for index in range(moved):
            operands[index] = given[index].astype(operands[index].dtype)
        return [function(*operands).astype(np.uint64)]

    return carry


def carry_flips(function: Callable[..., np.ndarray]) -> Carry:
    """Of a function bit by bit: undefined is what depends on undefined bits, these being what."""

    def carry(
        warp: Warp, sources: Sequence[Place], given: list[np.ndarray], targets: int
    ) -> list[np.ndarray]:
        values = [np.asarray(warp.slots[each.slot]) for each in sources]
        flips = [bits.astype(value.dtype) for bits, value in zip(given, values, strict=True)]
        result, changed = function(*values), np.zeros_like(values[0])
        for chosen in range(1, 1 << len(values)):
            flipped = [
                value ^ flip if chosen >> index & 1 else value
                for index, (value, flip) in enumerate(zip(values, flips, strict=True))
            ]
            changed |= function(*flipped) ^ result
        return [changed.astype(np.uint64)]

    return carry


CARRIES: dict[str, Carry] = {
    "and": carry_flips(np.bitwise_and),
    "or": carry_flips(np.bitwise_or),
    "xor": _carry_bits,
    "not": _carry_bits,
    "selp": _carry_choice,
    "mov": _carry_move,
    "shl": lambda *given: _carry_shift(*given, left=True),
    "shr": lambda *given: _carry_shift(*given, left=False),
}
