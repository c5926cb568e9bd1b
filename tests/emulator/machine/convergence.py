"""Instructions that lanes execute together (`.aligned`, and `.sync` with a member mask)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from emulator.errors import DivergentExecution
from emulator.instructions.registry import Closure, Decoder, Mask

from .outcomes import Scatter, Wait

if TYPE_CHECKING:
    from .execution import Warp

_ALL_MEMBERS = b"\xff" * 128
EACH_LANE = np.eye(32, dtype=bool)  # row i: lane i alone
_BITS = np.uint32(1) << np.arange(32, dtype=np.uint32)


def bits_of(lanes: np.ndarray) -> int:
    """Lanes (bool [32]) as an integer, lane 0 lowest."""
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")


def lanes_of(bits: int) -> np.ndarray:
    """The lanes of an integer, bool [32]."""
    return (np.uint32(bits & 0xFFFFFFFF) & _BITS) != 0


def aligned(closure: Closure) -> Closure:
    """The closure, run by all lanes of the warp that have not ended, together."""

    def run(warp: Warp, mask: Mask) -> Any:
        if mask is None or (mask == warp.live).all():
            return closure(warp, mask)
        if warp.guarded is not None:
            raise DivergentExecution("an aligned instruction whose guard differs between lanes")
        fragment = warp.fragment

        def together() -> bool:
            return bool((warp.lanes(fragment.mask) == warp.live).all())

        return _gather(warp, mask, together, "all lanes of the warp")

    return run


def require_full_warp(op: Decoder, mask: Mask) -> None:
    """Refuse a warp in which some lanes have ended, or never were."""
    if mask is not None:
        raise op.unsupported("a warp of fewer than 32 lanes")


def synchronized(closure: Closure, members: int) -> Closure:
    """The closure, run by the lanes of a member mask together.

    `members` is the slot of the mask (uint32). Every value of it among the active lanes is a group
    of its own; the closure runs once per group that is complete, with the group's lanes.
    """

    def run(warp: Warp, mask: Mask) -> Any:
        values = warp.slots[members]
        if mask is None and values.tobytes() == _ALL_MEMBERS:
            return closure(warp, None)
        return _run_groups(warp, mask, values, closure)

    return run


def _run_groups(warp: Warp, mask: Mask, values: np.ndarray, closure: Closure) -> Any:
    active = warp.lanes(mask)
    parts: list[tuple[np.ndarray, Any]] = []
    for value in np.unique(values[active]).tolist():
        group = active & (values == value)
        named = lanes_of(value)
        if (group & ~named).any():
            raise DivergentExecution(f"a lane executes it with member mask {value:#x} without it")
        missing = named & warp.live & ~group
        if missing.any():
            parts.append((group, _wait_for(warp, group, named, value)))
        else:
            parts.append((group, closure(warp, None if group.all() else group)))
    if len(parts) == 1:
        return parts[0][1]
    return Scatter(parts)


def _wait_for(warp: Warp, group: np.ndarray, named: np.ndarray, value: int) -> Wait:
    """Wait until other lanes that the mask names come here, or end."""

    def complete() -> bool:
        return not (named & warp.live & ~group).any()

    return Wait(complete, True, f"waits for lanes of member mask {value:#x}")


def _gather(warp: Warp, mask: Mask, complete: Callable[[], bool], whom: str) -> Wait:
    return Wait(complete, True, f"waits for {whom}")


class Meeting:
    """Lanes that arrived at `bar.warp.sync`, wherever in the program ("bar.warp.sync")."""

    def __init__(self) -> None:
        self.arrived = np.zeros(32, bool)

    def complete(self, warp: Warp, named: np.ndarray) -> bool:
        return not (named & warp.live & ~self.arrived).any()
