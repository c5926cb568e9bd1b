"""Non-bulk asynchronous copies ("cp.async", PTX ISA 9.7.9.25.3; arrivals, 9.7.13.15.15).

The copies of one instruction are one operation for all lanes; each of its steps moves the bytes of
some lanes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from emulator.errors import Misaligned
from emulator.instructions.mbarriers import barrier_operand
from emulator.instructions.memory_accesses import CACHE_HINTS, Resolver
from emulator.instructions.registry import Closure, Decoder, Mask, instruction
from emulator.machine.execution import AsyncOperation
from emulator.machine.memory import Bytes
from emulator.machine.outcomes import Wait
from emulator.syntax.module import Immediate, Register

if TYPE_CHECKING:
    from collections.abc import Callable

    from emulator.machine.execution import Cta, Warp


@dataclass
class Group:
    """Copies that some lanes committed together: operations with the lanes that take part."""

    lanes: np.ndarray
    copies: list[tuple[AsyncOperation, np.ndarray]] = field(default_factory=list)

    def is_done(self, lanes: np.ndarray) -> bool:
        """Whether the copies of some lanes are complete."""
        return all(operation.done or not (lanes & who).any() for operation, who in self.copies)


class CopyGroups:
    """The copies of a CTA's warps: those not committed, groups, and all that are not done."""

    def __init__(self, cta: Cta) -> None:
        self._uncommitted: list[list[tuple[AsyncOperation, np.ndarray]]] = [[] for _ in cta.warps]
        self._groups: list[list[Group]] = [[] for _ in cta.warps]
        self._pending: list[list[tuple[AsyncOperation, np.ndarray]]] = [[] for _ in cta.warps]

    def add(self, warp: Warp, operation: AsyncOperation, lanes: np.ndarray) -> None:
        """Lanes started a copy."""
        self._uncommitted[warp.index].append((operation, lanes))
        self._pending[warp.index].append((operation, lanes))

    def commit(self, warp: Warp, lanes: np.ndarray) -> None:
        """Lanes commit what they started into a group."""
        group = Group(lanes.copy())
        left = []
        for operation, who in self._uncommitted[warp.index]:
            group.copies.append((operation, who & lanes))
            if (who & ~lanes).any():
                left.append((operation, who & ~lanes))
        self._uncommitted[warp.index] = left
        groups = self._groups[warp.index]
        groups.append(group)
        while groups and groups[0].is_done(groups[0].lanes):
            del groups[0]

    def is_done(self, warp: Warp, lanes: np.ndarray, newest: int) -> bool:
        """Whether all but the newest groups of each of some lanes are complete."""
        later = np.zeros(32, int)
        for group in reversed(self._groups[warp.index]):
            waits = group.lanes & lanes & (later >= newest)
            if waits.any() and not group.is_done(waits):
                return False
            later += group.lanes
        return True

    def pending(self, warp: Warp, lanes: np.ndarray) -> list[AsyncOperation]:
        """Copies of some lanes that are not done."""
        pending = [(op, who) for op, who in self._pending[warp.index] if not op.done]
        self._pending[warp.index] = pending
        return [op for op, who in pending if (who & lanes).any()]


@instruction("cp.async.ca", "cp.async.cg")
def compile_cp_async(op: Decoder) -> Closure:
    bypasses = op.instruction.parts[2] == "cg"
    if op.one_of("shared", "shared::cta") is None or not op.flag("global"):
        raise op.unsupported()
    has_policy = "L2::cache_hint" in op.modifiers
    op.ignore(*CACHE_HINTS)
    operands = op.expect_operands(3, 4, 5)
    size = op.operands[2]
    if not isinstance(size, Immediate) or size.value not in ((16,) if bypasses else (4, 8, 16)):
        raise op.unsupported("the size")
    target, source = op.memory(0), op.memory(1)
    kept = _source_sizes(op, size.value, operands - has_policy)
    resolver = Resolver("global")
    name = op.instruction.text

    def run(warp: Warp, mask: Mask) -> None:
        targets = target.evaluate(warp, mask).astype(np.int64)
        sources = source.evaluate(warp, mask)
        _check_alignment(targets, size.value)
        _check_alignment(sources, size.value)
        sizes = kept(warp, mask, len(targets))
        steps, reads, writes = _plan(warp, targets, sources, sizes, size.value, resolver, mask)
        warp.cta.races.write(
            warp.index, targets.astype(np.uint64), size.value, np.flatnonzero(warp.lanes(mask))
        )
        operation = AsyncOperation(
            name, steps, _nothing, reads=reads, writes=writes, async_proxy=False
        )
        warp.cta.submit(operation, warp)
        warp.cta.extension(CopyGroups).add(warp, operation, warp.lanes(mask).copy())

    return run


def _nothing() -> None:
    """A copy by itself signals nobody."""


def _source_sizes(op: Decoder, size: int, operands: int) -> Callable[[Warp, Mask, int], np.ndarray]:
    """How many bytes each active lane copies; the rest becomes zero."""
    if operands == 3:
        return lambda warp, mask, count: np.full(count, size)
    operand = op.operands[3]
    if isinstance(operand, Register) and operand.type == "pred":
        ignored = op.source(operand, np.bool_)
        return lambda warp, mask, count: np.where(warp.slots[ignored][warp.lanes(mask)], 0, size)
    given = op.source(operand, np.uint32)

    def sizes(warp: Warp, mask: Mask, count: int) -> np.ndarray:
        values = warp.slots[given][warp.lanes(mask)].astype(np.int64)
        if (values > size).any():
            raise op.unsupported(f"a source size of {values.max()} for {size} bytes")
        return values

    return sizes


def _check_alignment(addresses: np.ndarray, size: int) -> None:
    wrong = addresses % addresses.dtype.type(size) != 0
    if wrong.any():
        raise Misaligned(f"address {int(addresses[wrong][0]):#x} is no multiple of {size}")


Step = tuple[list["Callable[[], None]"], list[Bytes], list[Bytes]]


def _plan(
    warp: Warp,
    targets: np.ndarray,
    sources: np.ndarray,
    sizes: np.ndarray,
    size: int,
    resolver: Resolver,
    mask: Mask,
) -> Step:
    """The steps of an instruction's copies, what they read and what they write."""
    shared = warp.cta.shared
    steps: list[Callable[[], None]] = []
    reads, writes = [], []
    within = np.arange(size)
    # Lanes of one size and region go together, in two steps.
    for kept in np.unique(sizes).tolist():
        chosen = np.flatnonzero(sizes == kept)
        if kept == 0:
            zeros = shared.bytes_at(targets[chosen, None] + within)
            writes.append(zeros)
            steps.append(_fill(zeros))
            continue
        for region, addresses, subset in resolver.pieces(warp, sources[chosen], mask):
            lanes = chosen if subset is None else chosen[subset]
            starts = addresses.astype(np.int64)
            for half in (slice(0, None, 2), slice(1, None, 2)):
                if not len(lanes[half]):
                    continue
                source = region.bytes_at(starts[half, None] + within[:kept])
                target = shared.bytes_at(targets[lanes[half], None] + within)
                reads.append(source)
                writes.append(target)
                steps.append(_copy(source, target, kept, size))
    return steps, reads, writes


def _fill(target: Bytes) -> Callable[[], None]:
    return lambda: target.store(np.zeros(len(target.where), np.uint8))


def _copy(source: Bytes, target: Bytes, kept: int, size: int) -> Callable[[], None]:
    def run() -> None:
        loaded = source.load()
        if kept < size:
            loaded = np.pad(loaded.reshape(-1, kept), ((0, 0), (0, size - kept))).reshape(-1)
        target.store(loaded)

    return run


@instruction("cp.async.commit_group")
def compile_commit_group(op: Decoder) -> Closure:
    op.expect_operands(0)

    def run(warp: Warp, mask: Mask) -> None:
        warp.cta.extension(CopyGroups).commit(warp, warp.lanes(mask))

    return run


@instruction("cp.async.wait_group", "cp.async.wait_all")
def compile_wait_group(op: Decoder) -> Closure:
    waits_all = op.instruction.parts[2] == "wait_all"
    op.expect_operands(0 if waits_all else 1)
    newest = 0
    if not waits_all:
        count = op.operands[0]
        if not isinstance(count, Immediate):
            raise op.unsupported("the number of groups is no constant")
        newest = count.value

    def run(warp: Warp, mask: Mask) -> Wait | None:
        groups = warp.cta.extension(CopyGroups)
        lanes = warp.lanes(mask).copy()
        if waits_all:
            groups.commit(warp, lanes)
        if groups.is_done(warp, lanes, newest):
            return None
        return Wait(
            lambda: groups.is_done(warp, lanes, newest), False, "waits for groups of copies"
        )

    return run


@instruction("cp.async.mbarrier.arrive")
def compile_mbarrier_arrive(op: Decoder) -> Closure:
    op.expect_operands(1)
    counted = op.flag("noinc")
    where = barrier_operand(op, 0)
    op.one_of("b64")
    name = op.instruction.text

    def run(warp: Warp, mask: Mask) -> None:
        barriers = where.barriers(warp, mask)
        if not counted:
            for barrier in barriers:
                barrier.expect_arrival()

        def arrive() -> None:
            for barrier in barriers:
                barrier.arrive()

        earlier = warp.cta.extension(CopyGroups).pending(warp, warp.lanes(mask))
        warp.cta.submit(AsyncOperation(name, [], arrive, after=earlier, async_proxy=False), warp)

    return run
