"""How the warps of a tcgen05 kernel meet: rings of slots that are filled and emptied in turn."""

from typing import NamedTuple

import cutlass
from cutlass import Int32

from sdsa_kernels.cute.ptx import BARRIER_BYTES, barrier_wait
from sdsa_kernels.cute.schedule import WARP, scratch_bytes

from .tiles import SharedMap, TileFormat

STORE_WARPS = 4  # warp i reads lanes 32 i .. 32 i + 31 of tensor memory
MMA_WARP = 4
COPY_WARP = 5
THREADS = WARP * 6


def shared_map(tile: TileFormat) -> SharedMap:
    """Where a CTA has things in shared memory."""
    return SharedMap(tile, scratch_bytes(THREADS))


class Slot(NamedTuple):
    """A place in a ring, and the parity of the barrier phase that fills it next."""

    index: Int32
    parity: Int32


def first_slot() -> Slot:
    return Slot(Int32(0), Int32(0))


def next_slot(slot: Slot, slots: int) -> Slot:
    last = slot.index == slots - 1
    return Slot(
        cutlass.select_(last, Int32(0), slot.index + 1),
        cutlass.select_(last, slot.parity ^ 1, slot.parity),
    )


def wait_full(barriers: Int32, slot: Slot) -> None:
    """Until a slot is filled."""
    barrier_wait(barriers + slot.index * BARRIER_BYTES, slot.parity)


def wait_empty(barriers: Int32, slot: Slot) -> None:
    """Until what a slot was filled with before is done with.

    Of a slot that was never filled this is true at once: its barrier has no phase before.
    """
    barrier_wait(barriers + slot.index * BARRIER_BYTES, slot.parity ^ 1)
