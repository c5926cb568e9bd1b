"""Which tcgen05 operations are ordered, and which of them race for tensor memory.

Source: PTX ISA, "Memory Consistency Model for 5th generation of TensorCore operations". Operations
are asynchronous: two that touch the same cells, one of them writing, must be ordered by

* completion: the first was waited for (`tcgen05.commit` and its mbarrier, `tcgen05.wait`), or
* a pipeline: `mma -> mma` of the same accumulator and shape, or `cp -> mma`; between threads a
  pipeline needs `tcgen05.fence::before_thread_sync` after the first operation and
  `tcgen05.fence::after_thread_sync` before the second.

Either way the later one's threads must have been told of the earlier one, at barriers; that is held
against the clocks of `race_detector`.

Anything else is an error here. Three orders that the ISA does not promise are common in NVIDIA's
own kernels, so by default they are counted as notes and only refused with `strict`:

* `mma -> cp` and `cp -> cp` of one thread without waiting (scale factors of the next step replace
  those of the last in place);
* operations of different threads that are ordered by a completion, without the two fences;
* overwriting or giving up what a `tcgen05.ld` read, without `tcgen05.wait::ld` (its registers have
  been used by then).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from emulator.errors import DataRace, EmulationError, InFlightRead, InFlightWrite

from .tensor_memory import Footprint


class TensorOrderError(EmulationError):
    """Operations on tensor memory in an order that works but that the ISA does not promise."""


@dataclass(eq=False)
class TensorOperation:
    """One operation on tensor memory, from its issue to its completion.

    Attributes
    ----------
    kind : str
        ``mma``, ``cp``, ``ld`` or ``st``.
    threads : range
        Threads of the CTA that issued it: one, or the 32 of a warp.
    reads, writes : sequence of Footprint
        Cells.
    pipeline : tuple
        Of an MMA its accumulator and shape: MMAs that agree in it run in order.
    clock : numpy array
        What its threads knew when they issued it (see `race_detector`).
    """

    kind: str
    threads: range
    reads: Sequence[Footprint] = ()
    writes: Sequence[Footprint] = ()
    pipeline: tuple[int, ...] = ()
    clock: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint32))
    fenced: float = float("inf")  # when its threads fenced it with before_thread_sync

    def clash(self, later: "TensorOperation") -> Footprint | None:
        """Cells that both touch and that one of them writes."""
        for mine, theirs in (
            (self.writes, later.writes),
            (self.writes, later.reads),
            (self.reads, later.writes),
        ):
            for first in mine:
                for second in theirs:
                    if first.overlaps(second):
                        return second
        return None


class TensorOrder:
    """The operations of one CTA on its tensor memory.

    Parameters
    ----------
    threads : int
        Of the CTA.
    notes : Counter
        Counts orders that the ISA does not promise.
    strict : bool
        Whether these are errors.
    """

    def __init__(self, threads: int, notes: Counter[str], strict: bool) -> None:
        self._in_flight: list[TensorOperation] = []
        self._completed: dict[tuple[str, tuple[Footprint, ...], range], TensorOperation] = {}
        self._after_fence = [-1.0] * threads
        self._now = 0.0
        self._notes = notes
        self._strict = strict

    def start(self, operation: TensorOperation) -> list[TensorOperation]:
        """Issue an operation.

        Returns
        -------
        list of TensorOperation
            Operations in flight, of other threads, that must run before it.

        Raises
        ------
        InFlightRead, InFlightWrite
            It races with an operation in flight.
        DataRace
            Nothing orders it after an operation of another thread, whether in flight or not.
        TensorOrderError
            With `strict`: its order is common but not promised.
        """
        self._now += 1
        before = []
        for earlier in list(self._in_flight):
            cells = earlier.clash(operation)
            if cells is not None:
                self._check_pipeline(earlier, operation, cells)
                _check_told(earlier, operation)
                if earlier.threads != operation.threads and earlier.kind != "ld":
                    before.append(earlier)
        for earlier in self._completed.values():
            if earlier.threads != operation.threads and earlier.clash(operation):
                self._check_fences(earlier, operation)
                _check_told(earlier, operation)
        self._in_flight.append(operation)
        return before

    def finish(self, operation: TensorOperation) -> None:
        """The operation has completed."""
        self._now += 1
        self._in_flight.remove(operation)
        key = operation.kind, (*operation.reads, *operation.writes), operation.threads
        self._completed[key] = operation

    def finish_transfers(self, kind: str, threads: range) -> None:
        """`tcgen05.wait`: all loads or stores of a warp have completed."""
        for operation in [o for o in self._in_flight if o.kind == kind and o.threads == threads]:
            self.finish(operation)

    def fence_before(self, thread: int) -> None:
        """`tcgen05.fence::before_thread_sync`, also implied by `tcgen05.commit`."""
        self._now += 1
        for operation in (*self._in_flight, *self._completed.values()):
            if thread in operation.threads:
                operation.fenced = min(operation.fenced, self._now)

    def fence_after(self, thread: int) -> None:
        """`tcgen05.fence::after_thread_sync`."""
        self._now += 1
        self._after_fence[thread] = self._now

    def check_idle(self, cells: Footprint) -> None:
        """Refuse to give up cells that an operation in flight uses.

        Raises
        ------
        InFlightWrite
            There is one.
        """
        user = TensorOperation("dealloc", range(0), writes=(cells,))
        for operation in list(self._in_flight):
            if operation.clash(user):
                self._refuse_race(operation, user, cells)

    def _check_pipeline(
        self, earlier: TensorOperation, later: TensorOperation, cells: Footprint
    ) -> None:
        """Refuse a clash with an operation in flight unless the two form a pipeline."""
        pair = earlier.kind, later.kind
        if pair == ("cp", "mma") or (pair == ("mma", "mma") and earlier.pipeline == later.pipeline):
            if earlier.threads != later.threads:
                self._check_fences(earlier, later)
            return
        if (
            later.kind == "cp"
            and earlier.kind in ("mma", "cp")
            and earlier.threads == later.threads
        ):
            self._note(f"{earlier.kind} -> cp without waiting", f"on {cells}")
            return
        self._refuse_race(earlier, later, cells)

    def _refuse_race(
        self, earlier: TensorOperation, later: TensorOperation, cells: Footprint
    ) -> None:
        """Two operations touch the same cells and nothing orders them."""
        if earlier.kind == "ld" and not self._strict:
            self._note(f"ld -> {later.kind} without tcgen05.wait::ld", f"on {cells}")
            self.finish(earlier)
            return
        writes = any(cells is footprint for footprint in later.writes)
        raise (InFlightWrite if writes else InFlightRead)(
            f"tcgen05.{later.kind} {'writes' if writes else 'reads'} tensor memory {cells} while "
            f"an earlier tcgen05.{earlier.kind} on it has not completed"
        )

    def _check_fences(self, earlier: TensorOperation, later: TensorOperation) -> None:
        """Note an order between threads that lacks one of the two fences."""
        entered = min(self._after_fence[thread] for thread in later.threads)
        if earlier.fenced < entered:
            return
        missing = "before" if earlier.fenced == float("inf") else "after"
        self._note(
            f"{earlier.kind} -> {later.kind} of another thread without "
            f"tcgen05.fence::{missing}_thread_sync",
            f"threads {earlier.threads.start} and {later.threads.start}",
        )

    def _note(self, what: str, detail: str) -> None:
        """Count, or refuse, an order that the ISA does not promise."""
        if self._strict:
            raise TensorOrderError(f"{what} ({detail})")
        self._notes[what] += 1


def _check_told(earlier: TensorOperation, later: TensorOperation) -> None:
    """Insist that an operation's threads know of an earlier one of all its threads."""
    for thread in earlier.threads:
        if later.clock[thread] < earlier.clock[thread]:
            raise DataRace(
                f"tcgen05.{later.kind} of thread {later.threads.start} meets tcgen05.{earlier.kind}"
                f" of thread {thread} in tensor memory, and nothing orders the two"
            )
