"""What a closure may return, beside None (go on with the next instruction).

An integer jumps all active lanes to that instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Wait:
    """The lanes wait until `ready()`.

    With `retry` the instruction then runs again; without, it is done, after a call of `finish`.
    A wait that `may_expire` ends when nothing else can run: the instruction runs again while
    `warp.fragment.expired` is set. `why` appears in the message of a deadlock.
    """

    ready: Callable[[], bool]
    retry: bool
    why: str
    finish: Callable[[], None] | None = None
    may_expire: bool = False


@dataclass(frozen=True)
class Scatter:
    """Lanes go different ways: pairs of lanes (bool [32]) and what happens to them.

    What happens is an outcome of its own: None, an integer, `Wait`, `EXIT` or a `Return`. Lanes in
    no pair are those that were not active.
    """

    parts: list[tuple[np.ndarray, Any]]


@dataclass(frozen=True)
class Call:
    """The lanes call a function at instruction `target` and will come back after this one."""

    target: int


class Signal:
    """An outcome without data."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


# The lanes end; the lanes return from a function (from a kernel: end).
EXIT = Signal("EXIT")
RETURN = Signal("RETURN")
# The lanes polled something in vain: others should run before they go on.
YIELD = Signal("YIELD")
