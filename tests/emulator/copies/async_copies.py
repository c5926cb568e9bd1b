"""Non-bulk asynchronous copies ("cp.async", PTX ISA 9.7.9.25.3; arrivals, 9.7.13.15.15).

The copies of one instruction are one operation for all lanes; each of its steps moves the bytes of
some lanes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from emulator.errors import InFlightWrite, Misaligned
from emulator.instructions.mbarriers import barrier_operand
from emulator.instructions.memory_accesses import CACHE_HINTS, Resolver
from emulator.instructions.registry import Closure, Decoder, Mask, instruction
from emulator.machine.async_operation import AsyncOperation
from emulator.machine.memory import Bytes
from emulator.machine.outcomes import Wait
from emulator.syntax.module import Immediate, Register

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from emulator.machine.execution import Cta, Warp


@dataclass(eq=False)
class Copy:
    """The copies of one instruction.

    Attributes
    ----------
    operation : AsyncOperation
    mark : int
        Of the race detector, on the bytes that they write.
    targets : numpy array [32, bytes]
        The indices of these bytes, by lane.
    unseen : bool [32]
        Lanes whose copies these are and that have not waited for them.
    epochs : numpy array [32]
        In which the arrival of each lane comes that is the first to tell of them; 0 without one.
    """

    operation: AsyncOperation
    mark: int
    targets: np.ndarray
    unseen: np.ndarray
    epochs: np.ndarray = field(default_factory=lambda: np.zeros(32, np.uint32))


# Copies with the lanes that take part.
Copies = list[tuple[Copy, np.ndarray]]


@dataclass
class Group:
    """Copies that some lanes committed together."""

    lanes: np.ndarray
    copies: Copies = field(default_factory=list)

    def is_done(self, lanes: np.ndarray) -> bool:
        """Whether the copies of some lanes are complete."""
        return all(copy.operation.done or not (lanes & who).any() for copy, who in self.copies)


class CopyGroups:
    """The copies of a CTA's warps: those not committed, groups, and all not waited for."""

    def __init__(self, cta: Cta) -> None:
        self._cta = cta
        self._uncommitted: list[Copies] = [[] for _ in cta.warps]
        self._groups: list[list[Group]] = [[] for _ in cta.warps]
        self._unseen: list[list[Copy]] = [[] for _ in cta.warps]

    def add(self, warp: Warp, copy: Copy) -> None:
        """Lanes started copies."""
        self._uncommitted[warp.index].append((copy, copy.unseen.copy()))
        self._unseen[warp.index].append(copy)

    def commit(self, warp: Warp, lanes: np.ndarray) -> None:
        """Lanes commit what they started into a group."""
        group = Group(lanes.copy())
        left = []
        for copy, who in self._uncommitted[warp.index]:
            group.copies.append((copy, who & lanes))
            if (who & ~lanes).any():
                left.append((copy, who & ~lanes))
        self._uncommitted[warp.index] = left
        self._groups[warp.index].append(group)

    def waits(
        self, warp: Warp, lanes: np.ndarray, newest: int
    ) -> Iterator[tuple[Group, np.ndarray]]:
        """All but the newest groups of each of some lanes, with those lanes."""
        later = np.zeros(32, int)
        for group in reversed(self._groups[warp.index]):
            waits = group.lanes & lanes & (later >= newest)
            if waits.any():
                yield group, waits
            later += group.lanes

    def is_done(self, warp: Warp, lanes: np.ndarray, newest: int) -> bool:
        """Whether what lanes wait for is complete."""
        return all(group.is_done(waits) for group, waits in self.waits(warp, lanes, newest))

    def finish(self, warp: Warp, lanes: np.ndarray, newest: int) -> None:
        """Lanes have waited: they know what they copied."""
        epoch = self._cta.clocks.epochs[warp.index]
        for group, waits in self.waits(warp, lanes, newest):
            for copy, who in group.copies:
                self.see(warp, copy, who & waits, epoch)
        groups = self._groups[warp.index]
        while groups and not any((who & copy.unseen).any() for copy, who in groups[0].copies):
            del groups[0]

    def see(self, warp: Warp, copy: Copy, lanes: np.ndarray, epoch: int) -> None:
        """Lanes know, from an epoch on, of their part of some copies."""
        seen = np.flatnonzero(copy.unseen & lanes)
        epochs = np.where(copy.epochs > 0, copy.epochs, epoch)[seen]
        self._cta.races.end_copies(copy.mark, copy.targets[seen], warp, seen, epochs)
        copy.unseen[seen] = False

    def unseen(self, warp: Warp, lanes: np.ndarray) -> list[Copy]:
        """Copies of some lanes that have not waited for them."""
        unseen = [copy for copy in self._unseen[warp.index] if copy.unseen.any()]
        self._unseen[warp.index] = unseen
        return [copy for copy in unseen if (copy.unseen & lanes).any()]


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
        steps, reads, writes, undefined = _plan(
            warp, targets, sources, sizes, size.value, resolver, mask
        )
        races, lanes = warp.cta.races, warp.lanes(mask).copy()
        races.write(warp.index, targets.astype(np.uint64), size.value, np.flatnonzero(lanes))
        operation = AsyncOperation(
            name,
            steps,
            _nothing,
            reads=reads,
            writes=writes,
            async_proxy=False,
            undefined=undefined,
        )
        warp.cta.submit(operation, warp)
        where = np.zeros((32, size.value), np.int64)
        where[lanes] = targets[:, None] + np.arange(size.value)
        mark = races.begin_copies(where[lanes])
        warp.cta.extension(CopyGroups).add(warp, Copy(operation, mark, where, lanes))

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


# What moves bytes, what they are read from, where they are written, which of these are undefined.
Plan = tuple[list["Callable[[], None]"], list[Bytes], list[Bytes], "Callable[[], list[np.ndarray]]"]


def _plan(
    warp: Warp,
    targets: np.ndarray,
    sources: np.ndarray,
    sizes: np.ndarray,
    size: int,
    resolver: Resolver,
    mask: Mask,
) -> Plan:
    """The steps of an instruction's copies."""
    shared = warp.cta.shared
    steps: list[Callable[[], None]] = []
    reads, writes = [], []
    flags: list[Callable[[], np.ndarray]] = []
    within = np.arange(size)
    # Lanes that copy the same bytes to the same place, as in NVIDIA's kernels, copy them once.
    alone = np.ones(len(targets), bool)
    if len(set(targets.tolist())) < len(targets):
        copies = np.stack((targets, sources.astype(np.int64), sizes))
        _, first = np.unique(copies, axis=1, return_index=True)
        alone = np.isin(np.arange(len(targets)), first)
        if len(set(targets[first].tolist())) < len(first):
            raise InFlightWrite("lanes copy different bytes to the same place")
    # Lanes of one size and region go together, in two steps.
    for kept in np.unique(sizes).tolist():
        chosen = np.flatnonzero((sizes == kept) & alone)
        if kept == 0:
            zeros = shared.bytes_at(targets[chosen, None] + within)
            writes.append(zeros)
            flags.append(partial(np.zeros, len(targets[chosen]) * size, bool))
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
                flags.append(lambda source=source, kept=kept: _padded(source.undefined, kept, size))
                steps.append(_copy(source, target, kept, size))
    return steps, reads, writes, lambda: [each() for each in flags]


def _fill(target: Bytes) -> Callable[[], None]:
    return lambda: target.store(np.zeros(len(target.where), np.uint8))


def _copy(source: Bytes, target: Bytes, kept: int, size: int) -> Callable[[], None]:
    return lambda: target.store(_padded(source.load(), kept, size))


def _padded(loaded: np.ndarray, kept: int, size: int) -> np.ndarray:
    """Zeros behind every `kept` bytes."""
    if kept == size:
        return loaded
    return np.pad(loaded.reshape(-1, kept), ((0, 0), (0, size - kept))).reshape(-1)


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
            groups.finish(warp, lanes, newest)
            return None
        return Wait(
            lambda: groups.is_done(warp, lanes, newest),
            False,
            "waits for groups of copies",
            lambda: groups.finish(warp, lanes, newest),
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

        groups, lanes = warp.cta.extension(CopyGroups), warp.lanes(mask).copy()
        copies, epoch = groups.unseen(warp, lanes), warp.cta.clocks.epochs[warp.index]
        for copy in copies:
            copy.epochs[(copy.epochs == 0) & lanes] = epoch

        def arrive() -> None:
            for copy in copies:
                groups.see(warp, copy, lanes, epoch)
            for barrier in barriers:
                barrier.arrive()

        earlier = [copy.operation for copy in copies if not copy.operation.done]
        warp.cta.submit(AsyncOperation(name, [], arrive, after=earlier, async_proxy=False), warp)
        warp.cta.clocks.begin_epoch(warp)

    return run
