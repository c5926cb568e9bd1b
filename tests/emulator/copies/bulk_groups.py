"""Bulk async-groups: stores of bulk copies, and waiting for them.

Source: PTX ISA, "Async-group mechanism", `cp.async.bulk.commit_group` and
`cp.async.bulk.wait_group`. A store first reads its source and later writes its destination;
`wait_group.read` waits for the first only. Groups of a thread complete in the order of commitment;
so its reads are one queue and its writes another.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from emulator.instructions.registry import Closure, Decoder, Mask, instruction
from emulator.machine.async_operation import AsyncOperation
from emulator.machine.convergence import EACH_LANE
from emulator.machine.outcomes import Wait
from emulator.syntax.module import Immediate
from emulator.tcgen05.tensor_core import thread_of

if TYPE_CHECKING:
    from emulator.machine.execution import Cta, Warp
    from emulator.machine.memory import Bytes

Request = TypeVar("Request", bound=Hashable)


def same_requests(lanes: Iterable[int], requests: Iterable[Request]) -> dict[Request, list[int]]:
    """Lanes of a warp by what they ask for.

    Kernels of CuTe DSL issue a store with all lanes of a warp. 32 stores of the same bytes to the
    same place are one store: nobody could tell the difference.
    """
    found: dict[Request, list[int]] = {}
    for lane, request in zip(lanes, requests, strict=True):
        found.setdefault(request, []).append(lane)
    return found


@dataclass(eq=False)
class _Group:
    """Operations of a group that have not read their source, or not written their destination."""

    reading: int = 0
    writing: int = 0
    told: np.ndarray | None = None  # the clock of what has been read

    def start(self) -> None:
        """Take an operation in."""
        self.reading += 1
        self.writing += 1


class BulkGroups:
    """The groups of the threads of a CTA."""

    def __init__(self, cta: Cta) -> None:
        self._cta = cta
        self._open: dict[int, _Group] = {}
        self._committed: dict[int, list[_Group]] = {}

    def submit(
        self,
        warp: Warp,
        threads: Sequence[int],
        name: str,
        source: Bytes,
        targets: Sequence[Bytes],
        deliver: Callable[[np.ndarray, np.ndarray], None],
    ) -> None:
        """Start a store of a thread, or the same store of several threads of a warp at once.

        Parameters
        ----------
        warp : Warp
            The thread's.
        threads : sequence of int
            Of the CTA; the operation belongs to a group of each.
        name : str
            For messages.
        source : Bytes
            In shared memory.
        targets : sequence of Bytes
            What nobody may touch until it is complete.
        deliver : callable
            Puts the bytes of the source where they belong; gets which of them are undefined too.
        """
        groups = [self._open.setdefault(thread, _Group()) for thread in threads]
        for group in groups:
            group.start()
        clocks = self._cta.clocks

        def has_read() -> None:
            for group in groups:
                group.reading -= 1
                group.told = clocks.operation

        def has_written() -> None:
            for group in groups:
                group.writing -= 1

        held: list[np.ndarray] = []

        def read() -> None:
            held.extend((source.load(), source.undefined))

        reading = AsyncOperation(
            name,
            [read],
            complete=has_read,
            reads=[source],
            queue=("bulk reads", threads[0]),
            source=clocks.reading_source(("bulk", threads[0])),
        )

        def write() -> None:
            self._finish(reading)
            deliver(*held)

        writing = AsyncOperation(
            name,
            [write],
            complete=has_written,
            writes=targets,
            queue=("bulk writes", threads[0]),
            must_finish=False,
        )
        self._cta.submit(reading, warp)
        self._cta.submit(writing, warp)

    def _finish(self, reading: AsyncOperation) -> None:
        """Let a read, and those before it, happen."""
        pending = self._cta.pending
        while reading in pending:
            self._cta.advance(next(o for o in pending if o.queue == reading.queue), 0)

    def commit(self, thread: int) -> None:
        """Close the thread's open group."""
        group = self._open.pop(thread, None)
        self._committed.setdefault(thread, []).append(group or _Group())

    def _older(self, thread: int, recent: int) -> list[_Group]:
        """All groups of a thread but the `recent` last ones."""
        groups = self._committed.get(thread, [])
        return groups[: max(len(groups) - recent, 0)]

    def waited(self, thread: int, recent: int, *, read_only: bool) -> bool:
        """Whether all groups but the `recent` last ones have completed, or read their sources."""
        older = self._older(thread, recent)
        return not any(group.reading if read_only else group.writing for group in older)

    def finish(self, warp: Warp, lanes: np.ndarray, recent: int) -> None:
        """Lanes (by number) have waited: they know what has been read."""
        for lane in lanes.tolist():
            thread = thread_of(warp, lane)
            told = [g.told for g in self._older(thread, recent) if g.told is not None]
            if told:
                self._cta.clocks.acquire(warp, EACH_LANE[lane], told[-1])
            groups = self._committed.get(thread, [])
            while len(groups) > recent and not groups[0].writing:
                del groups[0]


@instruction("cp.async.bulk.commit_group")
def compile_commit_group(op: Decoder) -> Closure:
    """Close the group of every active thread."""
    op.expect_operands(0)

    def run(warp: Warp, mask: Mask) -> None:
        groups = warp.cta.extension(BulkGroups)
        for lane in np.flatnonzero(warp.lanes(mask)).tolist():
            groups.commit(thread_of(warp, lane))

    return run


@instruction("cp.async.bulk.wait_group")
def compile_wait_group(op: Decoder) -> Closure:
    """Wait for all groups of a thread but the last ones."""
    op.expect_operands(1)
    read_only = op.flag("read")
    operand = op.operands[0]
    if not isinstance(operand, Immediate):
        raise op.unsupported("a constant is needed")
    recent = operand.value

    def run(warp: Warp, mask: Mask) -> Wait | None:
        groups = warp.cta.extension(BulkGroups)
        lanes = np.flatnonzero(warp.lanes(mask))
        threads = [thread_of(warp, lane) for lane in lanes.tolist()]

        def ready() -> bool:
            return all(groups.waited(t, recent, read_only=read_only) for t in threads)

        def finish() -> None:
            groups.finish(warp, lanes, recent)

        if not ready():
            return Wait(ready, False, "waits for bulk async-groups", finish)
        finish()
        return None

    return run
