"""What the tcgen05 instructions of a CTA share: tensor memory, order, queues.

Operations of one thread (MMAs, copies, commits) execute in the order of issue. Those of different
threads do so from the moment on when a pipeline between them is used (see `tensor_order`); until
then the scheduler may run either first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from emulator.errors import DivergentExecution, TensorMemoryMisuse
from emulator.machine.async_operation import AsyncOperation
from emulator.machine.convergence import EACH_LANE
from emulator.machine.registers import PendingLoad

from .tensor_memory import Footprint, TensorMemory
from .tensor_order import TensorOperation, TensorOrder

if TYPE_CHECKING:
    from emulator.instructions.registry import Mask
    from emulator.machine.execution import Cta, Warp
    from emulator.machine.memory import Bytes

WARP = 32


def check_whole_warp(warp: Warp, mask: Mask) -> None:
    """Refuse to execute a `.sync.aligned` tcgen05 instruction with fewer than 32 lanes.

    Raises
    ------
    DivergentExecution
        Some lanes have ended or are elsewhere.
    """
    if mask is not None:
        raise DivergentExecution("all 32 lanes of the warp must execute this together")


def thread_of(warp: Warp, lane: int) -> int:
    """Number of a thread within its CTA."""
    return warp.index * WARP + lane


def threads_of(warp: Warp) -> range:
    """The threads of a warp."""
    return range(warp.index * WARP, warp.index * WARP + WARP)


class TensorCore:
    """The state of one CTA; get it with `cta.extension(TensorCore)`.

    Attributes
    ----------
    memory : TensorMemory
        Its cells.
    order : TensorOrder
        Its operations in flight.
    """

    def __init__(self, cta: Cta) -> None:
        self.cta = cta
        self.memory = TensorMemory(cta.generator)
        launch = cta.launch
        threads = len(cta.warps) * WARP
        self.order = TensorOrder(threads, launch.note)
        self._queues = list(range(threads))
        self._collected: tuple[int, ...] | None = None
        cta.at_end.append(self.memory.check_empty)

    def queue(self, thread: int) -> tuple[str, int]:
        """The queue in which a thread's operations execute."""
        return "tcgen05", self._queues[thread]

    def source(self, thread: int) -> int:
        """Whose completions (see `clocks`) those of a thread's operations are."""
        return self.cta.clocks.reading_source(("tcgen05", thread))

    def submit(
        self,
        warp: Warp,
        operation: TensorOperation,
        perform: Callable[[], None],
        reads: Sequence[Bytes],
        name: str,
    ) -> None:
        """Issue an asynchronous operation of one thread.

        Parameters
        ----------
        warp : Warp
            The thread's.
        operation : TensorOperation
            What it does to tensor memory.
        perform : callable
            Does it.
        reads : sequence of Bytes
            What it reads of shared memory.
        name : str
            For messages.
        """
        for footprint in (*operation.reads, *operation.writes):
            self.memory.check_allocated(footprint)
        thread = operation.threads.start
        clocks = self.cta.clocks
        operation.clock = clocks.of(warp, EACH_LANE[thread % WARP]).reshape(2, -1)
        for earlier in self.order.start(operation):
            self._join(thread, earlier.threads.start)
        source = self.source(thread)

        def complete() -> None:
            self.order.finish(operation, source, clocks.completed(source))

        self.cta.submit(
            AsyncOperation(
                name, [perform], complete, reads=reads, queue=self.queue(thread), source=source
            ),
            warp,
        )

    def begin_transfer(
        self, warp: Warp, kind: str, cells: Sequence[Footprint], load: PendingLoad | None = None
    ) -> None:
        """A load, or store, of a warp, pending until its `tcgen05.wait`."""
        for footprint in cells:
            self.memory.check_allocated(footprint)
        reading, writing = ((), cells) if load is None else (cells, ())
        operation = TensorOperation(kind, threads_of(warp), reading, writing, load=load)
        operation.clock = self._clock(warp)
        self.order.start(operation)

    def finish_transfers(self, warp: Warp, kind: str) -> None:
        """`tcgen05.wait`: all loads or stores of a warp have completed."""
        self.order.finish_transfers(kind, threads_of(warp), self._clock(warp))

    def release(self, warp: Warp, cells: Footprint) -> None:
        """A warp gives up cells, which nothing may use any more."""
        user = TensorOperation("dealloc", threads_of(warp), writes=(cells,))
        user.clock = self._clock(warp)
        self.order.release(user)

    def _clock(self, warp: Warp) -> np.ndarray:
        return self.cta.clocks.of(warp, warp.lanes(None)).reshape(2, -1)

    def collect(self, use: str, matrix: tuple[int, ...]) -> None:
        """Apply a collector qualifier to matrix A, given by all that identifies it.

        Raises
        ------
        TensorMemoryMisuse
            It is to be reused, but the last one kept was another.
        """
        if use in ("use", "lastuse") and matrix != self._collected:
            raise TensorMemoryMisuse(f".collector::a::{use} of a matrix that was not kept before")
        self._collected = matrix if use in ("fill", "use") else None

    def _join(self, thread: int, other: int) -> None:
        """From now on the operations of two threads execute in the order of issue."""
        kept, dropped = self._queues[other], self._queues[thread]
        if kept == dropped:
            return
        self._queues = [kept if queue == dropped else queue for queue in self._queues]
        for operation in self.cta.pending:
            if operation.queue == ("tcgen05", dropped):
                operation.queue = ("tcgen05", kept)
