"""Races of a CTA's warps for shared memory: found by what is ordered, not by what comes out.

Every warp counts epochs; a release (an arrival at a barrier) begins a new one. A warp's clock says
up to which epoch of every warp it has been told of all that these did: an acquire (a wait at a
barrier that succeeds) takes over the clocks that were released there. Two accesses of the same byte
by two warps, at least one of them a write, are a race unless the later one's warp knew of the
earlier one ("Causality Order" and "Conflict and Data-races", PTX ISA 8.7 and 8.9.5).

Lanes of one warp are ordered by its releases and by `bar.warp.sync`: what is true of two warps is
true of two lanes in the same epoch. This is too generous where one lane arrives for its warp and no
`bar.warp.sync` precedes: the other lanes' accesses count as released with it.

Asynchronous operations belong to the warp that started them, at that time; `cp.async` to lanes.
Atomic and other strong accesses order what their threads did before and after, each location by
itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .errors import DataRace
from .memory import GENERIC

if TYPE_CHECKING:
    from .execution import Cta
    from .memory import Region

_SEVERAL = 255  # lanes have read a byte
_LANES = np.arange(32, dtype=np.uint8)
_SHIFTS = {1 << shift: np.uint64(shift) for shift in range(6)}


class RaceDetector:
    """The clocks of a CTA and, per byte of shared memory, who touched it last.

    Attributes
    ----------
    actor : int or None
        The warp that is running; None while an asynchronous operation is.
    """

    def __init__(self, cta: Cta) -> None:
        self._shared = cta.shared
        count = -(-int(np.prod(cta.launch.block)) // 32)
        self._warps = count
        # Row w: what warp w knows of; everybody is in epoch 1 and knows of epoch 0.
        self._clocks = np.zeros((count, count), np.int64)
        np.fill_diagonal(self._clocks, 1)
        size = len(cta.shared.storage)
        # The last write of each byte: epoch x warps + warp, and the lane; 0 is long ago.
        self._writes = np.zeros(size, np.uint32)
        self._lanes = np.zeros(size, np.uint8)
        # The epoch of each warp's last read of each byte, and the lane or `_SEVERAL`.
        self._reads = np.zeros((count, size), np.uint32)
        self._read_lanes = np.zeros((count, size), np.uint8)
        self._locations: dict[int, np.ndarray] = {}
        self.actor: int | None = None
        self._operation_clock = np.zeros(count, np.int64)

    def run_operation(self, clock: np.ndarray | None) -> None:
        """An asynchronous operation takes a step; `clock` is of its start."""
        self.actor = None
        if clock is not None:
            self._operation_clock = clock

    def clock(self, warp: int) -> np.ndarray:
        """A copy of what a warp knows, for an operation that it starts."""
        copy: np.ndarray = self._clocks[warp].copy()
        return copy

    def release(self, warp: int | None = None) -> np.ndarray:
        """What a warp, or whoever is running, tells at a barrier."""
        warp = self.actor if warp is None else warp
        if warp is None:
            return self._operation_clock
        told = self.clock(warp)
        self._clocks[warp, warp] += 1
        return told

    def acquire(self, warp: int, clock: np.ndarray) -> None:
        """A warp learns what was told at a barrier; its lanes know of each other, too."""
        np.maximum(self._clocks[warp], clock, out=self._clocks[warp])
        self._clocks[warp, warp] += 1

    def synchronize_location(self, warp: int, address: int) -> None:
        """A strong access: learn what was told at the location, and tell there."""
        told = self._locations.get(address)
        if told is not None:
            self.acquire(warp, told)
        self._locations[address] = self.release(warp)

    def read(self, warp: int, addresses: np.ndarray, width: int, lanes: np.ndarray | None) -> None:
        """A warp reads `width` bytes at each address (uint64, aligned); its lanes, None for all.

        Raises
        ------
        DataRace
        """
        rows = (addresses >> _SHIFTS[width]).view(np.int64)
        writes = self._writes.reshape(-1, width).take(rows, 0)
        if writes.any():
            self._check_writes(warp, writes, rows, width, lanes, "reads")
        self._note_read(warp, rows, width, _LANES if lanes is None else lanes)

    def _note_read(self, warp: int, rows: np.ndarray, width: int, lanes: np.ndarray) -> None:
        own = self._clocks[warp, warp]
        epochs = self._reads[warp].reshape(-1, width)
        readers = self._read_lanes[warp].reshape(-1, width)
        mine = lanes.astype(np.uint8)[:, None]
        others = (epochs[rows] == own) & (readers[rows] != mine)
        epochs[rows] = own
        readers[rows] = np.where(others, np.uint8(_SEVERAL), mine)
        # Lanes that read the same bytes have overwritten each other.
        shared = readers[rows] != mine
        if shared.any():
            readers[rows] = np.where(shared, np.uint8(_SEVERAL), readers[rows])

    def write(self, warp: int, addresses: np.ndarray, width: int, lanes: np.ndarray | None) -> None:
        """A warp writes; as `read`.

        Raises
        ------
        DataRace
        """
        rows = (addresses >> _SHIFTS[width]).view(np.int64)
        writes = self._writes.reshape(-1, width).take(rows, 0)
        if writes.any():
            self._check_writes(warp, writes, rows, width, lanes, "overwrites")
        reads = self._reads.reshape(self._warps, -1, width)[:, rows]
        self._check_reads(warp, reads, addresses)
        own = int(self._clocks[warp, warp])
        mine = (_LANES if lanes is None else lanes).astype(np.uint8)[:, None]
        readers = self._read_lanes[warp].reshape(-1, width)[rows]
        foreign = (reads[warp] == own) & (readers != mine)
        if foreign.any():
            index = int(np.argwhere(foreign)[0][0])
            self._raise_lane(warp, int(mine[index, 0]), int(addresses[index]), "overwrites", "read")
        self._writes.reshape(-1, width)[rows] = own * self._warps + warp
        self._lanes.reshape(-1, width)[rows] = mine

    def _check_writes(
        self,
        warp: int,
        writes: np.ndarray,
        rows: np.ndarray,
        width: int,
        lanes: np.ndarray | None,
        does: str,
    ) -> None:
        """Insist that a warp knows of the last writes of some bytes, [n, width]."""
        who, epochs = writes % self._warps, writes // self._warps
        unknown = epochs > self._clocks[warp].take(who)
        if unknown.any():
            place = np.argwhere(unknown)[0]
            self._raise(warp, int(who[tuple(place)]), rows[place[0]] * width, does, "wrote")
        fresh = writes == self._clocks[warp, warp] * self._warps + warp
        if fresh.any():
            mine = (_LANES if lanes is None else lanes)[:, None]
            foreign = fresh & (self._lanes.reshape(-1, width)[rows] != mine)
            if foreign.any():
                index = int(np.argwhere(foreign)[0][0])
                self._raise_lane(warp, int(mine[index, 0]), int(rows[index]) * width, does, "wrote")

    def _check_reads(self, warp: int, reads: np.ndarray, addresses: np.ndarray) -> None:
        """Insist that a warp knows of all last reads of some bytes, [warps, n, width]."""
        unknown = reads > self._clocks[warp][:, None, None]
        if unknown.any():
            other, index, _ = np.argwhere(unknown)[0]
            self._raise(warp, int(other), addresses[index], "overwrites", "read")

    def _raise(self, warp: int, other: int, address: int, does: str, did: str) -> None:
        raise DataRace(
            f"warp {warp} {does} shared offset {int(address):#x}, which warp {other} {did},"
            " and nothing orders the two"
        )

    def _raise_lane(self, warp: int, lane: int, address: int, does: str, did: str) -> None:
        raise DataRace(
            f"lane {lane} of warp {warp} {does} shared offset {address:#x}, which another lane"
            f" {did} with no bar.warp.sync since"
        )

    def begin_async_read(self, warp: int, where: slice | np.ndarray, lane: int | None) -> None:
        """A warp starts an operation that reads bytes (by index of the storage).

        `lane` is the one that starts it, where it is one.

        Raises
        ------
        DataRace
        """
        self._check_known(warp, where, lane, "starts an operation that reads")
        self._reads[warp][where] = self._clocks[warp, warp]
        self._read_lanes[warp][where] = _SEVERAL if lane is None else lane

    def begin_async_write(self, warp: int, where: slice | np.ndarray, lane: int | None) -> None:
        """A warp starts an operation that writes bytes.

        Raises
        ------
        DataRace
        """
        self._check_known(warp, where, lane, "starts an operation that overwrites")
        own = self._clocks[warp, warp]
        if lane is not None:
            foreign = (self._reads[warp][where] == own) & (self._read_lanes[warp][where] != lane)
            if foreign.any():
                address = _address(self._shared, where, int(np.flatnonzero(foreign)[0]))
                self._raise_lane(warp, lane, address, "starts an operation that overwrites", "read")
        for other in range(self._warps):
            if (self._reads[other][where] > self._clocks[warp, other]).any():
                first = np.flatnonzero(self._reads[other][where] > self._clocks[warp, other])[0]
                address = _address(self._shared, where, int(first))
                self._raise(warp, other, address, "starts an operation that overwrites", "read")
        self._writes[where] = 0

    def _check_known(
        self, warp: int, where: slice | np.ndarray, lane: int | None, does: str
    ) -> None:
        writes = self._writes[where]
        who, epochs = writes % self._warps, writes // self._warps
        unknown = epochs > self._clocks[warp].take(who)
        if unknown.any():
            first = int(np.flatnonzero(unknown)[0])
            self._raise(warp, int(who[first]), _address(self._shared, where, first), does, "wrote")
        own = self._clocks[warp, warp] * self._warps + warp
        foreign = (writes == own) & (self._lanes[where] != lane)
        if lane is not None and foreign.any():
            first = int(np.flatnonzero(foreign)[0])
            self._raise_lane(warp, lane, _address(self._shared, where, first), does, "wrote")

    def fence_proxies(self, warp: int) -> None:
        """A proxy fence of a warp: it covers the writes that the warp knows of."""
        low, high = self._shared.dirty
        if low < high:
            writes = self._writes[low:high]
            known = writes // self._warps <= self._clocks[warp].take(writes % self._warps)
            keep = np.where(known, 0xFF ^ GENERIC, 0xFF).astype(np.uint8)
            self._shared.shadow[low:high] &= keep


def _address(region: Region, where: slice | np.ndarray, index: int) -> int:
    """The address of one of some bytes."""
    at = where.start + index if isinstance(where, slice) else int(where[index])
    return region.origin + at
