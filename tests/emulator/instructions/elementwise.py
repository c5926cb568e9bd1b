"""Closures that compute every lane's result from its own operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .registry import Closure, Mask

if TYPE_CHECKING:
    from emulator.machine.execution import Warp


def apply_ufunc(ufunc: Callable[..., np.ndarray], result: int, *sources: int) -> Closure:
    """`result = ufunc(*sources)` for a numpy ufunc, into slots; no temporaries."""
    if len(sources) == 1:
        (only,) = sources

        def run_unary(warp: Warp, mask: Mask) -> None:
            slots = warp.slots
            if mask is None:
                ufunc(slots[only], out=slots[result])
            else:
                ufunc(slots[only], out=slots[result], where=mask)

        return run_unary
    first, second = sources

    def run_binary(warp: Warp, mask: Mask) -> None:
        slots = warp.slots
        if mask is None:
            ufunc(slots[first], slots[second], out=slots[result])
        else:
            ufunc(slots[first], slots[second], out=slots[result], where=mask)

    return run_binary


def apply_function(function: Callable[..., np.ndarray], result: int, *sources: int) -> Closure:
    """`result = function(*sources)` for a function of whole arrays of lanes.

    The function computes all 32 lanes; those that are not active keep their old value.
    """

    def run(warp: Warp, mask: Mask) -> None:
        slots = warp.slots
        values = function(*[slots[source] for source in sources])
        if mask is None:
            slots[result][:] = values
        else:
            np.copyto(slots[result], values, where=mask, casting="unsafe")

    return run


def write(warp: Warp, slot: int, mask: Mask, values: np.ndarray) -> None:
    """Give the active lanes of a slot new values; `values` holds all 32 lanes."""
    if mask is None:
        warp.slots[slot][:] = values
    else:
        np.copyto(warp.slots[slot], values, where=mask, casting="unsafe")


def copy_slot(result: int, source: int) -> Closure:
    """`result = source`."""

    def run(warp: Warp, mask: Mask) -> None:
        slots = warp.slots
        if mask is None:
            slots[result][:] = slots[source]
        else:
            np.copyto(slots[result], slots[source], where=mask, casting="unsafe")

    return run
