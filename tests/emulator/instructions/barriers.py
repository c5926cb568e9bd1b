"""Barriers of a CTA, a cluster and a warp, and fences (PTX ISA 9.7.13.1 to 9.7.13.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from emulator.errors import DivergentExecution, PhaseError
from emulator.machine.convergence import Meeting, aligned, lanes_of
from emulator.machine.outcomes import Scatter, Wait

from .control import nothing
from .mbarriers import MBarriers
from .registry import Closure, Decoder, Mask, instruction

if TYPE_CHECKING:
    from collections.abc import Callable

    from emulator.machine.execution import Cta, Warp

_WARP = 32


class NamedBarrier:
    """One of a CTA's sixteen barriers. Threads arrive by warps: a warp counts as 32."""

    def __init__(self, cta: Cta, number: int) -> None:
        self._cta = cta
        self._number = number
        self.generation = 0
        self.results: dict[int, int] = {}  # lanes with a true predicate, by generation
        self._clocks: dict[int, np.ndarray] = {}  # what those who arrived know, by generation
        self._reset()

    def _reset(self) -> None:
        self.expected: int | None = None  # threads; 0 for the whole CTA
        self._arrived = 0
        self._arrived_warps: set[int] = set()
        self._partial: dict[int, np.ndarray] = {}
        self._votes: list[bool] = []

    def arrive(self, warp: Warp, lanes: np.ndarray, threads: int, votes: np.ndarray | None) -> int:
        """Lanes arrive; gives the generation to wait for the end of.

        Raises
        ------
        PhaseError
            The number of threads differs from that of earlier arrivals, or too many arrive.
        """
        if threads % _WARP:
            raise PhaseError(f"barrier {self._number}: {threads} threads, not a multiple of 32")
        if self.expected is None:
            self.expected = threads
        elif self.expected != threads:
            raise PhaseError(
                f"barrier {self._number}: {threads} threads, where others said {self.expected}"
            )
        generation = self.generation
        told = self._cta.clocks.release(warp, lanes)
        self._clocks[generation] = np.maximum(self._clocks.get(generation, told), told)
        if votes is not None:
            self._votes += votes[lanes].tolist()
        known = self._partial.get(warp.index)
        self._partial[warp.index] = lanes.copy() if known is None else known | lanes
        self.update()
        return generation

    def acquire(self, warp: Warp, lanes: np.ndarray, generation: int) -> None:
        """Lanes have waited for a generation."""
        self._cta.clocks.acquire(warp, lanes, self._clocks[generation])

    def update(self) -> None:
        """Count warps of which all lanes are here, and complete the barrier if it is."""
        if self.expected is None:
            return
        for index, lanes in list(self._partial.items()):
            if not (self._cta.warps[index].live & ~lanes).any():
                del self._partial[index]
                self._arrived += _WARP
                self._arrived_warps.add(index)
        if self._arrived == self._needed() and not self._partial:
            self.results[self.generation] = sum(self._votes)
            self.results.pop(self.generation - 2, None)
            self._clocks.pop(self.generation - 2, None)
            self.voters = len(self._votes)
            self.generation += 1
            self._cta.launch.events += 1
            self._reset()
        elif self.expected and self._arrived > self.expected:
            raise PhaseError(
                f"barrier {self._number}: {self._arrived} threads arrived, {self.expected} expected"
            )

    def _needed(self) -> int:
        """Threads that must arrive; without a count those that have not ended."""
        if self.expected:
            return self.expected
        running = {w.index for w in self._cta.warps if w.live.any()}
        return _WARP * len(running | self._arrived_warps)


class NamedBarriers:
    """A CTA's barriers."""

    def __init__(self, cta: Cta) -> None:
        self._barriers = [NamedBarrier(cta, number) for number in range(16)]

    def at(self, number: int) -> NamedBarrier:
        if number >= len(self._barriers):
            raise PhaseError(f"barrier {number} of 16")
        return self._barriers[number]

    def lanes_ended(self, warp: Warp) -> None:
        """Lanes that have ended are not waited for."""
        for barrier in self._barriers:
            barrier.update()


def _uniform(warp: Warp, mask: Mask, slot: int, what: str) -> int:
    """The value that all active lanes have in a slot."""
    values = warp.slots[slot][warp.lanes(mask)]
    if (values != values[0]).any():
        raise DivergentExecution(f"{what} differs between the lanes")
    return int(values[0])


class _BarrierOperands:
    """Barrier number, and number of threads (0 for all)."""

    def __init__(self, op: Decoder, first: int, with_threads: bool) -> None:
        self._number = op.source(first, np.uint32)
        self._threads = op.source(first + 1, np.uint32) if with_threads else None

    def barrier(self, warp: Warp, mask: Mask) -> NamedBarrier:
        return warp.cta.extension(NamedBarriers).at(
            _uniform(warp, mask, self._number, "the barrier's number")
        )

    def threads(self, warp: Warp, mask: Mask) -> int:
        if self._threads is None:
            return 0
        return _uniform(warp, mask, self._threads, "the number of threads")


def _take_alignment(op: Decoder, closure: Closure) -> Closure:
    """`bar` is always aligned, `barrier` where it says so."""
    is_aligned = op.flag("aligned") or op.instruction.parts[0] == "bar"
    return aligned(closure) if is_aligned else closure


@instruction("bar.sync", "bar.cta.sync", "barrier.sync", "barrier.cta.sync")
def compile_bar_sync(op: Decoder) -> Closure:
    operands = _BarrierOperands(op, 0, op.expect_operands(1, 2) == 2)

    def run(warp: Warp, mask: Mask) -> Wait:
        barrier = operands.barrier(warp, mask)
        threads = operands.threads(warp, mask)
        lanes = warp.lanes(mask)
        generation = barrier.arrive(warp, lanes, threads, None)
        return _wait_for(warp, lanes, barrier, generation)

    return _take_alignment(op, run)


def _wait_for(
    warp: Warp,
    lanes: np.ndarray,
    barrier: NamedBarrier,
    generation: int,
    deliver: Callable[[], None] | None = None,
) -> Wait:
    """Wait for a generation of a barrier; then learn what the others did, and take results."""

    def finish() -> None:
        barrier.acquire(warp, lanes, generation)
        if deliver is not None:
            deliver()

    return Wait(
        lambda: barrier.generation > generation, False, "waits at a barrier of the CTA", finish
    )


@instruction("bar.arrive", "bar.cta.arrive", "barrier.arrive", "barrier.cta.arrive")
def compile_bar_arrive(op: Decoder) -> Closure:
    op.expect_operands(2)
    operands = _BarrierOperands(op, 0, True)

    def run(warp: Warp, mask: Mask) -> None:
        threads = operands.threads(warp, mask)
        if not threads:
            raise PhaseError("barrier.arrive with 0 threads")
        operands.barrier(warp, mask).arrive(warp, warp.lanes(mask), threads, None)

    return _take_alignment(op, run)


@instruction("bar.red", "bar.cta.red", "barrier.red", "barrier.cta.red")
def compile_bar_red(op: Decoder) -> Closure:
    count = op.expect_operands(3, 4)
    operation = op.one_of("popc", "and", "or")
    counts = operation == "popc"
    op.one_of("u32" if counts else "pred")
    operands = _BarrierOperands(op, 1, count == 4)
    vote = op.source(count - 1, np.bool_)
    result = op.destination(0, np.uint32 if counts else np.bool_)

    def run(warp: Warp, mask: Mask) -> Wait:
        barrier = operands.barrier(warp, mask)
        threads = operands.threads(warp, mask)
        lanes = warp.lanes(mask)
        generation = barrier.arrive(warp, lanes, threads, warp.slots[vote])

        def deliver() -> None:
            votes = barrier.results[generation]
            value = {"popc": votes, "and": votes == barrier.voters, "or": votes > 0}[operation]
            warp.slots[result][lanes] = value

        return _wait_for(warp, lanes, barrier, generation, deliver)

    return _take_alignment(op, run)


@instruction("bar.warp.sync")
def compile_bar_warp_sync(op: Decoder) -> Closure:
    op.expect_operands(1)
    members = op.source(0, np.uint32)

    def run(warp: Warp, mask: Mask) -> Any:
        values = warp.slots[members]
        active = warp.lanes(mask)
        parts: list[tuple[np.ndarray, Any]] = []
        for value in np.unique(values[active]).tolist():
            group = active & (values == value)
            parts.append((group, _meet(warp, group, value)))
        return parts[0][1] if len(parts) == 1 else Scatter(parts)

    fast = b"\xff" * 128

    def run_converged(warp: Warp, mask: Mask) -> Any:
        if mask is None and warp.slots[members].tobytes() == fast:
            warp.cta.clocks.synchronize(warp, warp.lanes(mask))
            return None
        return run(warp, mask)

    return run_converged


def _meet(warp: Warp, group: np.ndarray, value: int) -> Wait | None:
    """Lanes arrive at a `bar.warp.sync` with one member mask."""
    named = lanes_of(value)
    if (group & ~named).any():
        raise DivergentExecution(f"a lane executes it with member mask {value:#x} without it")
    meeting = warp.meetings.setdefault(value, Meeting())
    meeting.arrived |= group
    if meeting.complete(warp, named):
        warp.cta.clocks.synchronize(warp, named)
        del warp.meetings[value]
        return None

    def forget() -> None:
        # Whoever comes next with this mask meets anew, even where lanes that ended completed it.
        if warp.meetings.get(value) is meeting:
            warp.cta.clocks.synchronize(warp, named)
            del warp.meetings[value]

    why = f"waits for lanes of {value:#x} at a barrier"
    return Wait(lambda: meeting.complete(warp, named), False, why, forget)


class ClusterBarrier:
    """The barrier of a cluster of one CTA ("barrier.cluster", PTX ISA 9.7.13.3)."""

    def __init__(self, cta: Cta) -> None:
        self._cta = cta
        self.phase = 0
        self._arrived = [np.zeros(32, bool) for _ in cta.warps]
        self._arrival_phase = [np.full(32, -1) for _ in cta.warps]
        self._waited = [np.ones(32, bool) for _ in cta.warps]
        self._clock = cta.clocks.nothing()

    def arrive(self, warp: Warp, lanes: np.ndarray, relaxed: bool) -> None:
        """Lanes arrive."""
        told = self._cta.clocks.release(warp, lanes, relaxed=relaxed)
        np.maximum(self._clock, told, out=self._clock)
        if (lanes & ~self._waited[warp.index]).any():
            raise PhaseError("barrier.cluster.arrive twice, with no wait between")
        self._arrived[warp.index] |= lanes
        self._waited[warp.index] &= ~lanes
        self._arrival_phase[warp.index][lanes] = self.phase
        self.lanes_ended(warp)

    def lanes_ended(self, warp: Warp) -> None:
        """Complete the phase once every lane that has not ended is here."""
        missing = any(
            (other.live & ~arrived).any()
            for other, arrived in zip(self._cta.warps, self._arrived, strict=True)
        )
        if not missing and any(arrived.any() for arrived in self._arrived):
            self.phase += 1
            self._cta.launch.events += 1
            for arrived in self._arrived:
                arrived[:] = False

    def wait(self, warp: Warp, lanes: np.ndarray) -> Wait:
        """Lanes wait for the phase of their arrival."""
        if (lanes & self._waited[warp.index]).any():
            raise PhaseError("barrier.cluster.wait with no arrival before it")
        self._waited[warp.index] |= lanes
        phase = int(self._arrival_phase[warp.index][lanes].max())

        def acquire() -> None:
            self._cta.clocks.acquire(warp, lanes, self._clock)

        why = "waits at the barrier of the cluster"
        return Wait(lambda: self.phase > phase, False, why, acquire)


@instruction("barrier.cluster.arrive", "barrier.cluster.wait")
def compile_cluster_barrier(op: Decoder) -> Closure:
    op.expect_operands(0)
    arrives = op.instruction.parts[2] == "arrive"
    relaxed = op.flag("relaxed")
    op.ignore("release" if arrives else "acquire")
    if relaxed and not arrives:
        raise op.unsupported()
    is_aligned = op.flag("aligned")

    def run(warp: Warp, mask: Mask) -> Any:
        barrier = warp.cta.extension(ClusterBarrier)
        if arrives:
            barrier.arrive(warp, warp.lanes(mask), relaxed)
            return None
        return barrier.wait(warp, warp.lanes(mask))

    return aligned(run) if is_aligned else run


@instruction("membar", "fence")
def compile_fence(op: Decoder) -> Closure:
    """Memory of the emulator is sequentially consistent: nothing is left to order."""
    op.expect_operands(0)
    if op.instruction.parts[0] == "membar":
        op.one_of("cta", "gl", "sys")
    else:
        op.one_of("sc", "acq_rel", "acquire", "release", default="acq_rel")
        op.one_of("cta", "cluster", "gpu", "sys")
        op.ignore("sync_restrict::shared::cta", "sync_restrict::shared::cluster")
    return nothing


@instruction("fence.mbarrier_init")
def compile_fence_mbarrier_init(op: Decoder) -> Closure:
    op.expect_operands(0)
    op.one_of("release")
    op.one_of("cluster")

    def run(warp: Warp, mask: Mask) -> None:
        warp.cta.extension(MBarriers).fence(warp, mask)

    return run


@instruction("fence.proxy.async", "membar.proxy.async", "fence.proxy.async::generic")
def compile_fence_proxy_async(op: Decoder) -> Closure:
    op.expect_operands(0)
    if op.instruction.opcode.startswith("fence.proxy.async::generic"):
        op.one_of("acquire", "release")
        space = op.one_of("sync_restrict::shared::cta", "sync_restrict::shared::cluster")
        op.one_of("cluster")
        space = "shared"
    else:
        space = op.one_of("global", "shared::cta", "shared::cluster", default="all")

    def run(warp: Warp, mask: Mask) -> None:
        cta = warp.cta
        if space in ("global", "all"):
            cta.launch.memory.proxy_fence()
        if space != "global":
            cta.races.fence_proxies(warp, warp.lanes(mask))
            cta.extension(MBarriers).fence(warp, mask)

    return run


@instruction("fence.proxy.alias", "membar.proxy.alias")
def compile_fence_proxy_alias(op: Decoder) -> Closure:
    """No two addresses are the same memory here."""
    op.expect_operands(0)
    return nothing
