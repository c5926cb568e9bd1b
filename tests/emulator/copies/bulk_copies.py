"""`cp.async.bulk`, `cp.reduce.async.bulk` and `cp.async.bulk.prefetch` without tensor maps.

Source: PTX ISA, "Data Movement and Conversion Instructions: Bulk copy". Copies to shared memory
arrive in pieces, in any order, and report their bytes to the mbarrier piece by piece.

Not implemented, and refused by name: `.cp_mask`, and copies from shared memory to that of another
CTA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from emulator.errors import Misaligned, UnwrittenRead
from emulator.instructions.mbarriers import BarrierOperand, MBarrier, MBarriers
from emulator.instructions.registry import Closure, Decoder, Mask, instruction
from emulator.machine.async_operation import AsyncOperation
from emulator.machine.memory import Bytes
from emulator.machine.registers import UNDEFINED
from emulator.syntax.ptx_types import TYPE_BITS
from emulator.tcgen05.tensor_core import thread_of

from .bulk_groups import BulkGroups, Request, same_requests
from .bulk_reductions import GLOBAL_TYPES, INTEGERS, reduce_bytes
from .multicast import Multicast, take_multicast

if TYPE_CHECKING:
    from emulator.machine.execution import Cta, Warp

UNIT = 16  # bytes: alignment of addresses and of sizes
MAX_PIECES = 3
SHARED_SPACES = ("shared::cluster", "shared::cta")


class Arrival:
    """Reports the bytes of one copy to its mbarrier, piece by piece."""

    def __init__(self, cta: Cta, barrier: MBarrier, size: int) -> None:
        barrier.note_asynchronous_use("bulk copy")
        self._barrier = barrier
        self._left = size

    def piece(self, size: int) -> None:
        """A piece has arrived; the last one is reported when the whole copy is complete."""
        if size < self._left:
            self._left -= size
            self._barrier.complete_transactions(size)

    def complete(self) -> None:
        """The copy is complete."""
        self._barrier.complete_transactions(self._left)


def split(cta: Cta, units: int) -> list[slice]:
    """Cut a number of units into one to `MAX_PIECES` runs, as the seed decides."""
    pieces = min(int(cta.generator.integers(1, MAX_PIECES + 1)), max(units, 1))
    cuts = np.sort(cta.generator.choice(np.arange(1, units), pieces - 1, replace=False))
    bounds = [0, *cuts.tolist(), units]
    return [slice(first, stop) for first, stop in pairwise(bounds)]


def take_spaces(op: Decoder) -> tuple[str, str]:
    """Take the spaces of destination and source, in this order."""
    found = [name for name in op.modifiers if name in ("global", *SHARED_SPACES)]
    if len(found) != 2:
        raise op.unsupported("destination and source spaces are needed")
    for name in found:
        op.modifiers.remove(name)
    return found[0], found[1]


def take_cache_policy(op: Decoder, operands: int) -> None:
    """Take `.L2::cache_hint`, and insist on `operands` operands besides its policy."""
    op.expect_operands(operands + op.flag("L2::cache_hint"))


def take_load_options(op: Decoder, operands: int) -> Multicast:
    """Take multicast and cache hint of a load with `operands` operands besides mask and policy."""
    ranks = take_multicast(op, operands)
    take_cache_policy(op, operands + (ranks.slot is not None))
    return ranks


def check_unit(what: str, *values: int) -> None:
    """Refuse addresses and sizes that are no multiples of 16.

    Raises
    ------
    Misaligned
        One is not.
    """
    for value in values:
        if value % UNIT:
            raise Misaligned(f"{what} needs multiples of {UNIT} bytes, got {value:#x}")


def global_bytes(cta: Cta, address: int, size: int) -> Bytes:
    """A run of global memory."""
    return cta.launch.memory.find(address).range(address, size)


def submit_load(
    warp: Warp,
    name: str,
    source: Sequence[Bytes],
    target: Bytes,
    pieces: Sequence[tuple[Callable[[], None], int]],
    barrier: MBarrier,
    undefined: Callable[[], np.ndarray],
) -> None:
    """Start a copy to shared memory.

    Parameters
    ----------
    warp : Warp
        Of the thread that issues it.
    name : str
        For messages.
    source : sequence of Bytes
        What it reads.
    target : Bytes
        What it writes.
    pieces : sequence of (callable, int)
        What moves a piece, and the piece's bytes.
    barrier : MBarrier
        Told of every piece.
    undefined : callable
        Which bytes of the target are undefined, where some of the source are.
    """
    barrier.introduce(warp, warp.executing_lanes())
    arrival = Arrival(warp.cta, barrier, sum(size for _, size in pieces))

    def step(move: Callable[[], None], size: int) -> Callable[[], None]:
        def run() -> None:
            move()
            arrival.piece(size)

        return run

    steps = [step(move, size) for move, size in pieces]
    operation = AsyncOperation(
        name,
        steps,
        arrival.complete,
        reads=source,
        writes=[target],
        source=barrier.source,
        undefined=lambda: [undefined()],
    )
    warp.cta.submit(operation, warp)
    warp.cta.clocks.begin_epoch(warp)


@instruction("cp.async.bulk")
def compile_bulk(op: Decoder) -> Closure:
    """Copies between global and shared memory."""
    target, source = take_spaces(op)
    if source == "global":
        return _compile_load(op)
    if target == "global":
        return _compile_store(op, None)
    raise op.unsupported("shared memory of another CTA")


def _compile_load(op: Decoder) -> Closure:
    """From global to shared memory, completing on an mbarrier."""
    ranks = take_load_options(op, 4)
    op.one_of("mbarrier::complete_tx::bytes")
    target, source, size = op.memory(0), op.memory(1), op.source(2, np.uint32)
    barriers = BarrierOperand("shared", op.memory(3))
    name = op.instruction.text

    def run(warp: Warp, mask: Mask) -> None:
        lanes = np.flatnonzero(warp.lanes(mask)).tolist()
        requests = zip(
            lanes,
            target.evaluate(warp, mask).tolist(),
            source.evaluate(warp, mask).tolist(),
            warp.slots[size][lanes].tolist(),
            barriers.offsets(warp, mask),
            strict=True,
        )
        for lane, to, start, length, barrier in requests:
            ranks.check(warp, lane)
            _start_load(warp, name, to, start, length, barrier)

    return run


def _start_load(warp: Warp, name: str, to: int, start: int, length: int, barrier: int) -> None:
    """Start one copy of `length` bytes."""
    check_unit("cp.async.bulk", to, start, length)
    cta = warp.cta
    source, target = global_bytes(cta, start, length), cta.shared.range(to, length)

    def move(piece: slice) -> Callable[[], None]:
        first, size = piece.start * UNIT, (piece.stop - piece.start) * UNIT
        part, place = global_bytes(cta, start + first, size), cta.shared.range(to + first, size)
        return lambda: place.store(part.load())

    pieces = [
        (move(piece), (piece.stop - piece.start) * UNIT)
        for piece in (split(cta, length // UNIT) if length else [])
    ]
    found = cta.extension(MBarriers).at(barrier)
    submit_load(warp, name, [source], target, pieces, found, lambda: source.undefined)


def _compile_store(op: Decoder, reduction: tuple[str, str] | None) -> Closure:
    """From shared to global memory, in a bulk async-group; with or without a reduction."""
    take_cache_policy(op, 3)
    op.one_of("bulk_group")
    target, source, size = op.memory(0), op.memory(1), op.source(2, np.uint32)
    name = op.instruction.text

    def run(warp: Warp, mask: Mask) -> None:
        lanes = np.flatnonzero(warp.lanes(mask)).tolist()
        requests = zip(
            target.evaluate(warp, mask).tolist(),
            source.evaluate(warp, mask).tolist(),
            warp.slots[size][lanes].tolist(),
            strict=True,
        )
        cta = warp.cta
        for chosen, (to, start, length) in stores(lanes, requests, reduction is not None):
            check_unit(name, to, start, length)
            targets, deliver = delivery(global_bytes(cta, to, length), reduction)
            groups = cta.extension(BulkGroups)
            where = cta.shared.range(start, length)
            threads = [thread_of(warp, lane) for lane in chosen]
            groups.submit(warp, threads, name, where, targets, deliver)

    return run


def stores(
    lanes: Sequence[int], requests: Iterable[Request], reduces: bool
) -> list[tuple[list[int], Request]]:
    """What to do for which lanes: each reduction for itself, stores of the same bytes once."""
    if reduces:
        return [([lane], request) for lane, request in zip(lanes, requests, strict=True)]
    return [(chosen, request) for request, chosen in same_requests(lanes, requests).items()]


def delivery(
    place: Bytes, reduction: tuple[str, str] | None
) -> tuple[list[Bytes], Callable[[np.ndarray, np.ndarray], None]]:
    """How bytes reach a place in global memory, and what nobody may touch meanwhile.

    Reductions of the same place may be in flight together, each atomic for itself; so nothing is
    marked.
    """

    def deliver(data: np.ndarray, undefined: np.ndarray) -> None:
        if undefined.any():
            raise UnwrittenRead(f"{place.region.name}: what is stored depends on {UNDEFINED}")
        if reduction is not None:
            if place.undefined.any():
                raise UnwrittenRead(f"{place.region.name}: a reduction of bytes of {UNDEFINED}")
            data = reduce_bytes(*reduction, place.load(), data)
        place.store(data)

    return [place] if reduction is None else [], deliver


@instruction("cp.reduce.async.bulk")
def compile_reduce(op: Decoder) -> Closure:
    """Reductions from shared to global memory."""
    target, _ = take_spaces(op)
    if target != "global":
        raise op.unsupported("shared memory of another CTA")
    operation = op.one_of(*GLOBAL_TYPES)
    type_name = op.one_of(*TYPE_BITS)
    flushes_not = op.flag("noftz")
    if type_name not in GLOBAL_TYPES[operation] and not _is_bits_alias(operation, type_name):
        raise op.unsupported(f".{operation}.{type_name}")
    if flushes_not != (operation == "add" and type_name in ("f16", "bf16")):
        raise op.unsupported(".noftz belongs to .add of .f16 and .bf16")
    return _compile_store(op, (operation, type_name))


def _is_bits_alias(operation: str, type_name: str) -> bool:
    """Whether an integer type names the bits of a bitwise operation."""
    return operation in ("and", "or", "xor") and type_name in INTEGERS


@instruction("cp.async.bulk.prefetch.L2")
def compile_prefetch(op: Decoder) -> Closure:
    """A hint: only its operands are checked."""
    op.one_of("global")
    take_cache_policy(op, 2)
    source, size = op.memory(0), op.source(1, np.uint32)

    def run(warp: Warp, mask: Mask) -> None:
        sizes = warp.slots[size][warp.lanes(mask)].tolist()
        for start, length in zip(source.evaluate(warp, mask).tolist(), sizes, strict=True):
            check_unit("cp.async.bulk.prefetch", start, length)
            global_bytes(warp.cta, start, length)

    return run
