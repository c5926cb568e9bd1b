"""Work that a kernel starts and that proceeds by itself: copies, MMAs, arrivals."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from emulator.errors import EmulationError, MissingProxyFence

from .memory import UNWRITTEN, Bytes

if TYPE_CHECKING:
    from .execution import Launch
    from .race_detector import RaceDetector


@dataclass(eq=False)
class AsyncOperation:
    """Work that a kernel started and that proceeds by itself.

    Parameters
    ----------
    name : str
        For messages, such as the instruction's text.
    steps : sequence of functions
        Each moves a part of the data. They run one by one, in any order, at any time after the
        submission; the scheduler chooses.
    complete : function
        Runs after the last step: signals an mbarrier, counts down a group.
    reads, writes : sequence of Bytes
        What must not change, and what must not be touched, until it is complete. Checked and marked
        at submission.
    queue : hashable or None
        Operations of one queue run and complete in the order of submission.
    undefined : function or None
        Which bytes of each of `writes` are undefined, where some that it reads are; None leaves it
        to its steps.
    source : int or None
        Whose completions its own is one of (see `clocks`).
    async_proxy : bool
        Whether it accesses memory through the async proxy ("Proxies", PTX ISA 8.6); `cp.async` of
        16 bytes or less does not.
    must_finish : bool
        Whether a CTA must not end before it.
    after : sequence of AsyncOperation
        Operations that must be done before it takes a step.

    Attributes
    ----------
    done : bool
        Whether it is complete.
    """

    name: str
    steps: Sequence[Callable[[], None]]
    complete: Callable[[], None]
    reads: Sequence[Bytes] = ()
    writes: Sequence[Bytes] = ()
    queue: Hashable = None
    source: int | None = None
    undefined: Callable[[], Sequence[np.ndarray]] | None = None
    async_proxy: bool = True
    must_finish: bool = True
    after: Sequence[AsyncOperation] = ()
    done: bool = False
    clock: np.ndarray | None = None  # of the lanes that started it
    reads_undefined: bool = False
    place: str = ""  # the instruction that started it, for messages
    remaining: list[Callable[[], None]] = field(default_factory=list)

    def begin(self, launch: Launch) -> None:
        """Check and mark its bytes."""
        self.remaining = list(self.steps)
        for where in self.reads:
            if where.region.begin_async_read(where.where, self.async_proxy, self.name):
                self.reads_undefined = True
        for where in self.writes:
            if where.region.begin_async_write(where.where, self.name) and self.async_proxy:
                what = "copy over what the generic proxy wrote, without a proxy fence"
                launch.note(what, MissingProxyFence, f": {where.region.name}: {self.name}")

    def step(self, choice: int, races: RaceDetector) -> bool:
        """Run one of the remaining steps; after the last one complete, and say so."""
        races.clocks.run(self.clock)
        try:
            if self.remaining:
                self.remaining.pop(choice % len(self.remaining))()
            if self.remaining:
                return False
            undefined = self.undefined() if self.undefined and self.reads_undefined else ()
            for where in self.reads:
                where.region.end_async_read(where.where)
            for where in self.writes:
                where.region.end_async_write(where.where, self.async_proxy)
            for where, flags in zip(self.writes, undefined, strict=False):
                where.region.shadow[where.where] |= flags * np.uint8(UNWRITTEN)
            self.done = True
            races.complete(self)
            self.complete()
        except EmulationError as error:
            error.locate(self.place)
            raise
        return True
