"""mbarrier objects and their instructions ("mbarrier", PTX ISA 9.7.13.15)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from emulator.errors import DataRace, MissingProxyFence, OutOfBounds, PhaseError
from emulator.machine.address_spaces import SHARED_WINDOW, WINDOW_BYTES
from emulator.machine.clocks import WARP
from emulator.machine.convergence import EACH_LANE
from emulator.machine.outcomes import YIELD, Signal, Wait
from emulator.syntax.module import Sink

from .registry import Closure, Decoder, Mask, MemoryOperand, instruction

if TYPE_CHECKING:
    from emulator.machine.execution import Cta, Warp

MAXIMUM_COUNT = (1 << 20) - 1


class MBarrier:
    """One mbarrier object ("Contents of the mbarrier object").

    Attributes
    ----------
    phase : int
        The current, incomplete phase.
    expected, pending : int
        Arrivals of every phase, and those that the current phase still needs.
    transactions : int
        The tx-count.
    """

    def __init__(self, cta: Cta, offset: int, count: int, thread: int) -> None:
        self.name = f"mbarrier at shared offset {offset:#x} of CTA {cta.index}"
        self._cta = cta
        self.offset = offset
        self.phase = 0
        self.expected = count
        self.pending = count
        self.transactions = 0
        self._seen_complete = -1  # the last phase that a wait has found complete
        self._released = cta.clocks.nothing()  # what those who arrived know
        self._told = self._released  # as it was when the last phase completed
        self.source = cta.clocks.writing_source(("mbarrier", offset))
        self._made = thread, cta.clocks.epochs[thread // WARP]
        self._fenced = False
        self._strangers = np.ones((len(cta.warps), WARP), bool)  # who was not told that it is made
        self._strangers[thread // WARP, thread % WARP] = False

    def introduce(self, warp: Warp, lanes: np.ndarray) -> None:
        """Lanes use it: each must have been told that it is made.

        Raises
        ------
        DataRace
        """
        strangers = self._strangers[warp.index]
        if not (strangers & lanes).any():
            return
        thread, epoch = self._made
        clocks = self._cta.clocks
        if clocks.common[warp.index, clocks.columns + thread] >= epoch:
            strangers[:] = False
            return
        for lane in np.flatnonzero(strangers & lanes).tolist():
            # `fence.mbarrier_init` makes it visible, so that barriers with `.relaxed` will do.
            if clocks.of(warp, EACH_LANE[lane])[clocks.columns + thread] < epoch:
                raise DataRace(
                    f"{self.name} is used by lane {lane} of warp {warp.index}, and nothing orders"
                    f" that after its initialization by lane {thread % WARP} of warp"
                    f" {thread // WARP}"
                )
            strangers[lane] = False

    def arrive(
        self,
        count: int = 1,
        *,
        may_complete: bool = True,
        drop: bool = False,
        told: np.ndarray | None = None,
    ) -> None:
        """An arrive-on operation, of a thread that releases `told` or a running operation (None).

        Raises
        ------
        PhaseError
            More arrivals than the phase expects; a phase of which nobody saw the last one complete;
            a `.noComplete` that completes.
        """
        if self.phase > 0 and self._seen_complete < self.phase - 1:
            raise PhaseError(
                f"{self.name}: an arrival in phase {self.phase}, but no wait has seen phase"
                f" {self.phase - 1} complete"
            )
        if not 1 <= count <= self.pending:
            raise PhaseError(
                f"{self.name}: {count} arrivals in phase {self.phase}, which still expects"
                f" {self.pending} of {self.expected}"
            )
        self._release(told)
        if drop:
            self.expected -= count
        self.pending -= count
        self._complete_phase()
        if not may_complete and self.pending == self.expected:
            raise PhaseError(f"{self.name}: an arrival with .noComplete completes the phase")

    def _release(self, told: np.ndarray | None) -> None:
        told = self._cta.clocks.operation if told is None else told
        np.maximum(self._released, told, out=self._released)

    def acquire(self, warp: Warp, lanes: np.ndarray, *, relaxed: bool) -> None:
        """Lanes have seen a phase complete: what those who arrived did is known to them."""
        self._cta.clocks.acquire(warp, lanes, self._told, relaxed=relaxed)

    def expect_arrival(self) -> None:
        """One more pending arrival in this phase (`cp.async.mbarrier.arrive` without `.noinc`)."""
        self.pending += 1
        if self.pending > MAXIMUM_COUNT:
            raise PhaseError(f"{self.name}: {self.pending} pending arrivals")

    def expect_transactions(self, count: int) -> None:
        """An expect-tx operation; the count is mostly of bytes."""
        self._change_transactions(count)

    def complete_transactions(self, count: int, told: np.ndarray | None = None) -> None:
        """A complete-tx operation; `told` as in `arrive`."""
        self._release(told)
        self._change_transactions(-count)
        self._complete_phase()

    def _change_transactions(self, change: int) -> None:
        self.transactions += change
        if abs(self.transactions) > MAXIMUM_COUNT:
            raise PhaseError(f"{self.name}: a tx-count of {self.transactions}")

    def _complete_phase(self) -> None:
        self._cta.launch.events += 1
        if self.pending == 0 and self.transactions == 0:
            self.phase += 1
            self.pending = self.expected
            self._told = self._released.copy()

    def is_complete(self, phase: int) -> bool:
        """Whether a phase is complete: the current one (no) or the one before (yes).

        Raises
        ------
        PhaseError
            It is neither of these two.
        """
        if not self.phase - 1 <= phase <= self.phase:
            raise PhaseError(
                f"{self.name}: a test of phase {phase} while phase {self.phase} is current"
            )
        if phase < self.phase:
            self._seen_complete = max(self._seen_complete, phase)
        return phase < self.phase

    def phase_of_parity(self, parity: int) -> int:
        """The phase that a parity stands for: the current one or the one before."""
        return self.phase if self.phase % 2 == parity else self.phase - 1

    def fence(self, clock: np.ndarray) -> None:
        """The initialization is now visible to the async proxy, if who fences knows of it."""
        thread, epoch = self._made
        self._fenced = self._fenced or bool(clock[thread] >= epoch)

    def note_asynchronous_use(self, what: str) -> None:
        """Note that no fence lies between the initialization and use by an asynchronous operation.

        These access mbarriers through the generic proxy; still the ISA's examples have a fence.

        Raises
        ------
        MissingProxyFence
            With `strict`.
        """
        if not self._fenced:
            note = f"mbarrier.init -> {what} without a fence"
            self._cta.launch.note(note, MissingProxyFence, f": {self.name}")

    @property
    def state(self) -> int:
        """What an arrival returns: phase and pending count."""
        return (self.phase & 0xFFFFFFFF) << 32 | self.pending


class MBarriers:
    """The live mbarrier objects of a CTA, by their shared memory offset."""

    def __init__(self, cta: Cta) -> None:
        self._cta = cta
        self._live: dict[int, MBarrier] = {}

    def initialize(self, offset: int, count: int, thread: int) -> None:
        """`mbarrier.init` of a thread of the CTA."""
        self._check_place(offset)
        if offset in self._live:
            raise PhaseError(f"{self._live[offset].name} is initialized twice, without inval")
        if not 1 <= count <= MAXIMUM_COUNT:
            raise PhaseError(f"an mbarrier of {count} arrivals")
        for other in (offset - 4, offset + 4):
            if other in self._live:
                raise PhaseError(f"{self._live[other].name} overlaps a new one")
        shared = self._cta.shared
        # A plain store at the same place checks what else may be going on there.
        shared.store(np.array([offset], np.uint64), np.zeros((1, 1), np.uint64))
        shared.mark_barrier(offset, True)
        self._live[offset] = MBarrier(self._cta, offset, count, thread)

    def invalidate(self, offset: int) -> None:
        """`mbarrier.inval`"""
        self.at(offset)
        del self._live[offset]
        self._cta.shared.mark_barrier(offset, False)

    def at(self, offset: int) -> MBarrier:
        """The mbarrier object at an offset into shared memory.

        Raises
        ------
        PhaseError
            There is none.
        """
        barrier = self._live.get(offset)
        if barrier is None:
            self._check_place(offset)
            raise PhaseError(f"no mbarrier is initialized at shared offset {offset:#x}")
        return barrier

    def _check_place(self, offset: int) -> None:
        self._cta.shared.range(offset, 8)
        if offset % 8:
            raise PhaseError(f"an mbarrier at {offset:#x}, which is no multiple of 8")

    def fence(self, warp: Warp, mask: Mask) -> None:
        """Make the initializations that lanes know of visible to the async proxy."""
        clock = warp.cta.clocks.of(warp, warp.lanes(mask))
        for barrier in self._live.values():
            barrier.fence(clock)


def shared_offsets(op_space: str, addresses: np.ndarray) -> list[int]:
    """Offsets into shared memory of shared or generic addresses.

    Raises
    ------
    OutOfBounds
        A generic address outside the shared window.
    """
    offsets: list[int] = addresses.tolist()
    if op_space == "shared":
        return offsets
    for address in offsets:
        if not SHARED_WINDOW <= address < SHARED_WINDOW + WINDOW_BYTES:
            raise OutOfBounds(f"generic address {address:#x} is not in shared memory")
    return [address - SHARED_WINDOW for address in offsets]


class BarrierOperand:
    """The address operand of an mbarrier."""

    def __init__(self, space: str, memory: MemoryOperand) -> None:
        self._space = space
        self._memory = memory

    def offsets(self, warp: Warp, mask: Mask) -> list[int]:
        """The shared memory offset for each active lane."""
        return shared_offsets(self._space, self._memory.evaluate(warp, mask))

    def barriers(self, warp: Warp, mask: Mask) -> list[MBarrier]:
        """The mbarrier object for each active lane."""
        live = warp.cta.extension(MBarriers)
        found = [live.at(offset) for offset in self.offsets(warp, mask)]
        if all(barrier is found[0] for barrier in found):
            found[0].introduce(warp, warp.lanes(mask))
        else:
            for barrier, lane in zip(found, np.flatnonzero(warp.lanes(mask)), strict=True):
                barrier.introduce(warp, EACH_LANE[lane])
        return found


def barrier_operand(op: Decoder, operand: int) -> BarrierOperand:
    """Take the space modifier and the address operand of an mbarrier."""
    space = op.one_of("shared", "shared::cta", "shared::cluster", default="generic")
    return BarrierOperand(space.partition("::")[0], op.memory(operand))


def _take_semantics(op: Decoder, *allowed: str) -> str:
    """Take ordering, scope and type; gives the ordering, the first one where none is there."""
    order = op.one_of(*allowed, default=allowed[0])
    op.ignore("cta", "cluster")
    op.one_of("b64")
    return order


def _active(warp: Warp, mask: Mask, slot: int) -> list[int]:
    values = warp.slots[slot]
    return (values if mask is None else values[mask]).tolist()


@instruction("mbarrier.init")
def compile_init(op: Decoder) -> Closure:
    op.expect_operands(2)
    where = barrier_operand(op, 0)
    op.one_of("b64")
    count = op.source(1, np.uint32)

    def run(warp: Warp, mask: Mask) -> None:
        barriers = warp.cta.extension(MBarriers)
        given = list(zip(where.offsets(warp, mask), _active(warp, mask, count), strict=True))
        alike = dict(zip(reversed(given), np.flatnonzero(warp.lanes(mask))[::-1], strict=True))
        if len(alike) < len(given):
            warp.cta.launch.note("mbarrier.init by several lanes alike", PhaseError)
        for (offset, expected), lane in alike.items():
            barriers.initialize(offset, expected, warp.index * WARP + int(lane))

    return run


@instruction("mbarrier.inval")
def compile_inval(op: Decoder) -> Closure:
    op.expect_operands(1)
    where = barrier_operand(op, 0)
    op.one_of("b64")

    def run(warp: Warp, mask: Mask) -> None:
        for offset in where.offsets(warp, mask):
            warp.cta.extension(MBarriers).invalidate(offset)

    return run


@instruction("mbarrier.expect_tx", "mbarrier.complete_tx")
def compile_transactions(op: Decoder) -> Closure:
    op.expect_operands(2)
    expects = op.instruction.parts[1] == "expect_tx"
    where = barrier_operand(op, 0)
    _take_semantics(op, "relaxed")
    count = op.source(1, np.uint32)

    def run(warp: Warp, mask: Mask) -> None:
        counts = _active(warp, mask, count)
        for barrier, transactions in zip(where.barriers(warp, mask), counts, strict=True):
            if expects:
                barrier.expect_transactions(transactions)
            else:
                barrier.complete_transactions(transactions, warp.cta.clocks.nothing())

    return run


@instruction("mbarrier.arrive", "mbarrier.arrive_drop")
def compile_arrive(op: Decoder) -> Closure:
    operands = op.expect_operands(2, 3)
    drop = op.instruction.parts[1] == "arrive_drop"
    expects = op.flag("expect_tx")
    may_complete = not op.flag("noComplete")
    where = barrier_operand(op, 1)
    relaxed = _take_semantics(op, "release", "relaxed") == "relaxed"
    if (expects or not may_complete) and operands != 3:
        raise op.unsupported("a count is needed")
    amount = op.source(2, np.uint32) if operands == 3 else op.slots.constant(1, np.uint32)
    result = None if isinstance(op.operands[0], Sink) else op.destination(0, np.uint64)

    def run(warp: Warp, mask: Mask) -> None:
        states = []
        amounts = _active(warp, mask, amount)
        clocks = warp.cta.clocks
        lanes = np.flatnonzero(warp.lanes(mask))
        for barrier, value, lane in zip(where.barriers(warp, mask), amounts, lanes, strict=True):
            states.append(barrier.state)
            if expects:
                barrier.expect_transactions(value)
            told = clocks.release(warp, EACH_LANE[lane], relaxed=relaxed)
            barrier.arrive(1 if expects else value, may_complete=may_complete, drop=drop, told=told)
        if result is not None:
            warp.slots[result][warp.lanes(mask)] = states

    return run


@instruction("mbarrier.pending_count")
def compile_pending_count(op: Decoder) -> Closure:
    op.expect_operands(2)
    op.one_of("b64")
    result, state = op.destination(0, np.uint32), op.source(1, np.uint64)

    def run(warp: Warp, mask: Mask) -> None:
        lanes = warp.lanes(mask)
        warp.slots[result][lanes] = warp.slots[state][lanes] & np.uint64(0xFFFFFFFF)

    return run


@instruction("mbarrier.test_wait", "mbarrier.try_wait")
def compile_wait(op: Decoder) -> Closure:
    op.expect_operands(3, 4)  # the fourth is a time hint
    blocks = op.instruction.parts[1] == "try_wait"
    by_parity = op.flag("parity")
    where = barrier_operand(op, 1)
    relaxed = _take_semantics(op, "acquire", "relaxed") == "relaxed"
    result = op.destination(0, np.bool_)
    wanted = op.source(2, np.uint32 if by_parity else np.uint64)

    def phases(warp: Warp, mask: Mask, barriers: list[MBarrier]) -> list[int]:
        values = _active(warp, mask, wanted)
        if not by_parity:
            return [value >> 32 for value in values]
        return [
            barrier.phase_of_parity(_parity(barrier, value))
            for barrier, value in zip(barriers, values, strict=True)
        ]

    def run(warp: Warp, mask: Mask) -> Any:
        barriers = where.barriers(warp, mask)
        tested = phases(warp, mask, barriers)
        complete = [b.is_complete(p) for b, p in zip(barriers, tested, strict=True)]
        warp.slots[result][warp.lanes(mask)] = complete
        if any(complete):
            lanes = np.flatnonzero(warp.lanes(mask))
            for barrier, done in set(zip(barriers, complete, strict=True)):
                if done:
                    waited = np.zeros(32, bool)
                    waited[lanes[[each is barrier for each in barriers]]] = True
                    barrier.acquire(warp, waited, relaxed=relaxed)
        if all(complete):
            return None
        return _incomplete(warp, barriers, tested, complete) if blocks else YIELD

    return run


def _parity(barrier: MBarrier, value: int) -> int:
    if value > 1:
        raise PhaseError(f"{barrier.name}: a test of parity {value}")
    return value


def _incomplete(
    warp: Warp, barriers: list[MBarrier], tested: list[int], complete: list[bool]
) -> Wait | Signal:
    """What a try_wait does where a phase is not complete: suspend, or give up early."""
    fragment, cta = warp.fragment, warp.cta
    if fragment.expired:
        fragment.expired = False
        return YIELD
    # Lanes that are suspended must not hold up those whose phase is complete.
    if any(complete) or cta.generator.random() < cta.launch.spurious_failures:
        return YIELD
    waits = set(zip(barriers, tested, strict=True))
    return Wait(
        ready=lambda: any(barrier.phase > phase for barrier, phase in waits),
        retry=True,
        why=f"waits for phase {tested[0]} of {barriers[0].name}, which expects"
        f" {barriers[0].pending} more arrivals and {barriers[0].transactions} more transactions",
        may_expire=True,
    )
