"""Which tcgen05 operations are ordered, and which of them race for tensor memory.

Source: PTX ISA, "Memory Consistency Model for 5th generation of TensorCore operations". Operations
are asynchronous: two that touch the same cells, one of them writing, must be ordered by

* completion: the first was waited for (`tcgen05.commit` and its mbarrier, `tcgen05.wait`), or
* a pipeline: `mma -> mma` of the same accumulator and shape, or `cp -> mma`; between threads a
  pipeline needs `tcgen05.fence::before_thread_sync` after the first operation and
  `tcgen05.fence::after_thread_sync` before the second.

Either way the later one's threads must have been told of the earlier one, at barriers; that is held
against `clocks`. An operation that completed by chance, with nothing that says so, is still in
flight for whoever meets it. Barriers with `.relaxed` are enough between the two fences.

Anything else is an error here. What the ISA does not promise but NVIDIA's own kernels do is by
default counted as a note, and only refused with `strict`:

* `mma -> cp` and `cp -> cp` of one thread without waiting (scale factors of the next step replace
  those of the last in place);
* an MMA that overwrites what one of another accumulator reads, by the same thread;
* operations of different threads that are ordered by a completion, without the two fences, and
  `tcgen05.dealloc` without the first of them;
* overwriting or giving up what a `tcgen05.ld` read, without `tcgen05.wait::ld`, where its registers
  were read before the release: they have been loaded by then.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from emulator.errors import DataRace, EmulationError, InFlightRead, InFlightWrite
from emulator.machine.registers import PendingLoad

from .tensor_memory import Footprint

# Counts, or refuses, what the ISA does not promise: what, the error, its details.
Note = Callable[[str, type[EmulationError], str], None]
_MEMORY, _TIME = 0, 1  # halves of a clock


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
    clock : numpy array [2, columns]
        What its threads knew when they issued it (see `clocks`).
    completions : list of (int, int)
        Sources and epochs, each of which says that it is complete.
    after : list of TensorOperation
        Of other threads, which it follows in a pipeline.
    load : PendingLoad or None
        Of a load, its registers.
    """

    kind: str
    threads: range
    reads: Sequence[Footprint] = ()
    writes: Sequence[Footprint] = ()
    pipeline: tuple[int, ...] = ()
    clock: np.ndarray = field(default_factory=lambda: np.zeros((2, 0), np.uint32))
    fenced: float = float("inf")  # when its threads fenced it with before_thread_sync
    completions: list[tuple[int, int]] = field(default_factory=list)
    after: list["TensorOperation"] = field(default_factory=list)
    waited: np.ndarray | None = None  # the clock of its `tcgen05.wait`
    load: PendingLoad | None = None

    def is_complete_for(self, later: "TensorOperation") -> bool:
        """Whether it was waited for, and a later one's threads know."""
        time = later.clock[_TIME]
        if self.waited is not None:
            return self._is_known(self.waited, time)
        return any(time[source] >= epoch for source, epoch in self.completions)

    def complete(self, source: int, epoch: int) -> None:
        """An epoch of a source says that it is complete, and what it follows."""
        self.completions.append((source, epoch))
        for earlier in self.after:
            earlier.complete(source, epoch)
        self.after = []

    def is_known_to(self, later: "TensorOperation", half: int) -> bool:
        """Whether a later one's threads have been told of it by all its threads."""
        return self._is_known(self.clock, later.clock[half])

    def _is_known(self, clock: np.ndarray, told: np.ndarray) -> bool:
        mine = slice(self.threads.start, self.threads.stop)
        return bool((told[mine] >= clock[_TIME, mine]).all())

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
    note : callable
        Takes orders that the ISA does not promise.
    """

    def __init__(self, threads: int, note: Note) -> None:
        self._in_flight: list[TensorOperation] = []
        self._completed: dict[tuple[str, tuple[Footprint, ...], range], TensorOperation] = {}
        self._after_fence = [-1.0] * threads
        self._now = 0.0
        self._note = note

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
        for earlier in (*self._in_flight, *self._completed.values()):
            cells = earlier.clash(operation)
            if cells is None:
                continue
            if not earlier.is_complete_for(operation):
                self._check_pipeline(earlier, operation, cells)
                if earlier.threads != operation.threads and earlier.kind != "ld":
                    operation.after.append(earlier)
            elif earlier.threads != operation.threads:
                self._check_fences(earlier, operation)
            _check_told(earlier, operation)
        self._in_flight.append(operation)
        return [earlier for earlier in operation.after if earlier in self._in_flight]

    def finish(self, operation: TensorOperation, source: int, epoch: int) -> None:
        """The operation has completed, which is an epoch of a source."""
        operation.complete(source, epoch)
        self._complete(operation)

    def finish_transfers(self, kind: str, threads: range, clock: np.ndarray) -> None:
        """`tcgen05.wait`: all loads or stores of a warp, which now knows that much, are done."""
        for operation in [o for o in self._in_flight if o.kind == kind and o.threads == threads]:
            operation.waited = clock
            if operation.load is not None:
                operation.load.finish()
            self._complete(operation)

    def _complete(self, operation: TensorOperation) -> None:
        self._now += 1
        self._in_flight.remove(operation)
        key = operation.kind, (*operation.reads, *operation.writes), operation.threads
        self._completed[key] = operation

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

    def release(self, user: TensorOperation) -> None:
        """Give up cells: nothing in flight may use them, and nobody later hears of who did.

        Raises
        ------
        InFlightRead, InFlightWrite, DataRace
            An operation that used them is not complete, or nothing orders it before.
        TensorOrderError
            With `strict`: no fence follows such an operation of another warp.
        """
        for earlier in (*self._in_flight, *self._completed.values()):
            cells = earlier.clash(user)
            if cells is None:
                continue
            if not earlier.is_complete_for(user):
                self._refuse_race(earlier, user, cells)
            _check_told(earlier, user)
            others = earlier.threads.start not in user.threads
            if others and earlier.fenced == float("inf"):
                what = f"{earlier.kind} -> dealloc without tcgen05.fence::before_thread_sync"
                self._note(what, TensorOrderError, f" (thread {earlier.threads.start})")
        self._completed = {
            key: each for key, each in self._completed.items() if not each.clash(user)
        }

    def _check_pipeline(
        self, earlier: TensorOperation, later: TensorOperation, cells: Footprint
    ) -> None:
        """Refuse a clash with an operation in flight unless the two form a pipeline."""
        pair = earlier.kind, later.kind
        if pair == ("cp", "mma") or (pair == ("mma", "mma") and earlier.pipeline == later.pipeline):
            if earlier.threads != later.threads:
                self._check_fences(earlier, later)
            return
        if earlier.threads == later.threads and earlier.kind in ("mma", "cp"):
            if later.kind == "cp":
                self._note(
                    f"{earlier.kind} -> cp without waiting", TensorOrderError, f" on {cells}"
                )
                return
            if not any(mine.overlaps(cells) for mine in earlier.writes):
                what = "mma -> mma of another accumulator that overwrites what the first one reads"
                self._note(what, InFlightWrite, f": {cells}")
                return
        self._refuse_race(earlier, later, cells)

    def _refuse_race(
        self, earlier: TensorOperation, later: TensorOperation, cells: Footprint
    ) -> None:
        """Two operations touch the same cells and nothing orders them."""
        writes = any(cells is footprint for footprint in later.writes)
        kind = InFlightWrite if writes else InFlightRead
        known = later.clock[_TIME, earlier.threads.start : earlier.threads.stop]
        if earlier.load is not None and earlier.load.was_read(int(known.min(initial=0xFFFFFFFF))):
            what = f"ld -> {later.kind} without tcgen05.wait::ld"
            self._note(what, InFlightWrite, f" on {cells}")
            earlier.load.overwritten = True
            return
        raise kind(
            f"tcgen05.{later.kind} {'writes' if writes else 'reads'} tensor memory {cells} while "
            f"an earlier tcgen05.{earlier.kind} on it has not completed, or nothing says so"
        )

    def _check_fences(self, earlier: TensorOperation, later: TensorOperation) -> None:
        """Note an order between threads that lacks one of the two fences."""
        entered = min(self._after_fence[thread] for thread in later.threads)
        if earlier.fenced < entered:
            return
        missing = "before" if earlier.fenced == float("inf") else "after"
        what = f"{earlier.kind} -> {later.kind} of another thread without "
        what += f"tcgen05.fence::{missing}_thread_sync"
        threads = f"threads {earlier.threads.start} and {later.threads.start}"
        if not earlier.is_known_to(later, _MEMORY):
            raise DataRace(f"{what}, where barriers are .relaxed ({threads})")
        self._note(what, TensorOrderError, f" ({threads})")


def _check_told(earlier: TensorOperation, later: TensorOperation) -> None:
    """Insist that an operation's threads know of an earlier one of all its threads."""
    if not earlier.is_known_to(later, _TIME):
        raise DataRace(
            f"tcgen05.{later.kind} of thread {later.threads.start} meets tcgen05.{earlier.kind}"
            f" of thread {earlier.threads.start} in tensor memory, and nothing orders the two"
        )
