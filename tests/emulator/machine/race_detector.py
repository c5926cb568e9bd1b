"""Races of a CTA's threads for shared memory: found by what is ordered, not by what comes out.

Every warp counts epochs; a release (an arrival at a barrier) begins a new one. A clock says up to
which epoch of every thread somebody has been told of all that it did: an acquire (a wait at a
barrier that succeeds) takes over the clocks that were released there. Two accesses of the same byte
by two threads, at least one of them a write, are a race unless the later one's thread knew of the
earlier one ("Causality Order" and "Conflict and Data-races", PTX ISA 8.7 and 8.9.5).

Lanes of one warp are threads like any others: what lanes release is what these lanes know, and only
lanes that wait learn. They tell each other at `bar.warp.sync` and the barriers of the CTA, which
order memory; shuffles, votes, elections and aligned instructions do not promise to. What all lanes
of a warp know is kept once, in its row of clocks; what a lane knows beyond that, until the warp is
next told of it, apart.

Asynchronous operations belong to the lanes that started them, at that time; `cp.async` to lanes.
Atomic and other strong accesses order what their threads did before and after, each location by
itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from emulator.errors import DataRace

from .convergence import bits_of
from .memory import GENERIC

if TYPE_CHECKING:
    from .execution import Cta, Warp

_WARP = 32
_LANES = np.arange(_WARP)
_BITS = np.uint32(1) << np.arange(_WARP, dtype=np.uint32)
_SHIFTS = {1 << shift: np.uint64(shift) for shift in range(6)}


class RaceDetector:
    """The clocks of a CTA and, per byte of shared memory, who touched it last.

    Lanes are bool [32], clocks uint32 [threads].

    Attributes
    ----------
    operation_clock : numpy array
        Of the start of the asynchronous operation that is running.
    """

    def __init__(self, cta: Cta) -> None:
        self._shared = cta.shared
        count = -(-int(np.prod(cta.launch.block)) // _WARP)
        self._warps = count
        self._threads = count * _WARP
        self._epochs = [1] * count
        # Row w: what all lanes of warp w know; and per other warp its least known lane.
        self._common = np.zeros((count, self._threads), np.uint32)
        self._floors = np.zeros((count, count), np.uint32)
        self._beyond: list[dict[int, np.ndarray]] = [{} for _ in range(count)]
        size = len(cta.shared.storage)
        # The last write of each byte: epoch x threads + thread; 0 is long ago.
        self._writes = np.zeros(size, np.uint32)
        # The epoch of each warp's last reads of each byte, and the lanes as bits.
        self._reads = np.zeros((count, size), np.uint32)
        self._readers = np.zeros((count, size), np.uint32)
        # Earlier reads that the last ones do not imply: warp, epoch, lanes; by byte.
        self._earlier: dict[int, list[tuple[int, int, int]]] = {}
        self._locations: dict[int, np.ndarray] = {}
        self.operation_clock = self.no_clock()

    def no_clock(self) -> np.ndarray:
        """The clock of who knows nothing."""
        return np.zeros(self._threads, np.uint32)

    def run_operation(self, clock: np.ndarray | None) -> None:
        """An asynchronous operation takes a step; `clock` is of its start."""
        if clock is not None:
            self.operation_clock = clock

    def clock(self, warp: Warp, lanes: np.ndarray) -> np.ndarray:
        """What some lanes of a warp know together; a copy."""
        index = warp.index
        known: np.ndarray = self._common[index].copy()
        for lane, clock in self._beyond[index].items():
            if lanes[lane]:
                np.maximum(known, clock, out=known)
        known[index * _WARP : (index + 1) * _WARP][lanes] = self._epochs[index]
        return known

    def release(self, warp: Warp, lanes: np.ndarray) -> np.ndarray:
        """What some lanes tell at a barrier."""
        told = self.clock(warp, lanes)
        self._epochs[warp.index] += 1
        return told

    def acquire(self, warp: Warp, lanes: np.ndarray, clock: np.ndarray) -> None:
        """Some lanes learn what was told at a barrier."""
        common = self._common[warp.index]
        if not (warp.live & ~lanes).any():
            np.maximum(common, clock, out=common)
            self._floors[warp.index] = common.reshape(-1, _WARP).min(1)
        elif (clock > common).any():
            beyond = self._beyond[warp.index]
            for lane in np.flatnonzero(lanes).tolist():
                beyond[lane] = np.maximum(beyond.get(lane, common), clock)

    def synchronize(self, warp: Warp, lanes: np.ndarray) -> None:
        """Lanes of a warp meet: each learns what the others know."""
        self.acquire(warp, lanes, self.release(warp, lanes))
        if not (warp.live & ~lanes).any():
            self._beyond[warp.index].clear()

    def synchronize_location(self, warp: Warp, lanes: np.ndarray, address: int) -> None:
        """A strong access: learn what was told at the location, and tell there."""
        told = self._locations.get(address)
        if told is not None:
            self.acquire(warp, lanes, told)
        self._locations[address] = self.release(warp, lanes)

    def read(self, warp: int, addresses: np.ndarray, width: int, lanes: np.ndarray | None) -> None:
        """A warp reads `width` bytes at each address (uint64, aligned).

        `lanes` are the numbers of those that read, one for each address; None for all in order.

        Raises
        ------
        DataRace
        """
        rows = (addresses >> _SHIFTS[width]).view(np.int64)
        lanes = _LANES if lanes is None else lanes
        writes = self._writes.reshape(-1, width).take(rows, 0)
        if writes.any():
            self._check_writes(warp, writes, rows, lanes, "reads")
        self._note_read(warp, rows, width, lanes)

    def _note_read(self, warp: int, rows: np.ndarray, width: int, lanes: np.ndarray) -> None:
        epochs = self._reads[warp].reshape(-1, width)
        readers = self._readers[warp].reshape(-1, width)
        before, mine = epochs[rows], _BITS[lanes][:, None]
        recent = before > self._floors[warp, warp]
        if recent.any():
            places = rows[:, None] * width + np.arange(width)
            lasting = self._keep_readers(warp, places, before, readers[rows], mine, recent)
        else:
            lasting = np.uint32(0)
        epochs[rows] = self._epochs[warp]
        readers[rows] = lasting | mine
        # Lanes that read the same bytes have overwritten each other.
        if not (readers[rows] & mine).all():
            readers[rows] = lasting | ((rows[:, None] == rows) @ _BITS[lanes])[:, None]

    def _keep_readers(
        self,
        warp: int,
        places: np.ndarray,
        before: np.ndarray,
        sets: np.ndarray,
        mine: np.ndarray | np.uint32,
        recent: np.ndarray,
    ) -> np.ndarray:
        """The readers so far of the current epoch; remembers others that new ones do not imply."""
        fresh = before == self._epochs[warp]
        others = sets & ~mine
        lost = recent & ~fresh & (others != 0)
        if lost.any():
            for place, epoch, lanes in zip(
                places[lost].tolist(), before[lost].tolist(), others[lost].tolist(), strict=True
            ):
                self._earlier.setdefault(place, []).append((warp, epoch, lanes))
        return np.where(fresh, sets, np.uint32(0))

    def write(self, warp: int, addresses: np.ndarray, width: int, lanes: np.ndarray | None) -> None:
        """A warp writes; as `read`.

        Raises
        ------
        DataRace
        """
        rows = (addresses >> _SHIFTS[width]).view(np.int64)
        lanes = _LANES if lanes is None else lanes
        writes = self._writes.reshape(-1, width).take(rows, 0)
        if writes.any():
            self._check_writes(warp, writes, rows, lanes, "overwrites")
        reads = self._reads.reshape(self._warps, -1, width)[:, rows]
        unknown = reads > self._floors[warp][:, None, None]
        if unknown.any():
            self._check_reads(warp, reads, unknown, rows, lanes)
        if self._earlier:
            for row, lane in zip(rows.tolist(), lanes.tolist(), strict=True):
                known = self._lane_clock(warp, lane)
                self._check_earlier(warp, range(row * width, (row + 1) * width), known)
        thread = (warp * _WARP + lanes).astype(np.uint32)
        self._writes.reshape(-1, width)[rows] = (self._epochs[warp] * self._threads + thread)[
            :, None
        ]

    def _lane_clock(self, warp: int, lane: int) -> np.ndarray:
        known: np.ndarray = self._beyond[warp].get(lane, self._common[warp]).copy()
        np.maximum(known, self._common[warp], out=known)
        known[warp * _WARP + lane] = self._epochs[warp]
        return known

    def _check_writes(
        self, warp: int, writes: np.ndarray, rows: np.ndarray, lanes: np.ndarray, does: str
    ) -> None:
        """Insist that lanes know of the last writes of some bytes, [n, width]."""
        who, epochs = writes % self._threads, writes // self._threads
        unknown = epochs > self._common[warp].take(who)
        if not unknown.any():
            return
        unknown &= who != (warp * _WARP + lanes)[:, None]
        for lane, clock in self._beyond[warp].items():
            mine = lanes == lane
            unknown[mine] &= epochs[mine] > clock.take(who[mine])
        if unknown.any():
            index, byte = np.argwhere(unknown)[0]
            address = int(rows[index]) * writes.shape[1]
            self._raise(warp, int(who[index, byte]), address, does, "wrote")

    def _check_reads(
        self,
        warp: int,
        reads: np.ndarray,
        unknown: np.ndarray,
        rows: np.ndarray,
        lanes: np.ndarray,
    ) -> None:
        """Insist that lanes know of all last reads of some bytes, [warps, n, width]."""
        width = reads.shape[2]
        readers = self._readers.reshape(self._warps, -1, width)[:, rows]
        alone = (readers[warp] == _BITS[lanes][:, None]) & (reads[warp] > 0)
        unknown[warp] &= ~alone
        if not unknown.any():
            return
        others, indices, _ = unknown.nonzero()
        late = reads[unknown][:, None] > self._common[warp].reshape(-1, _WARP)[others]
        late &= (readers[unknown][:, None] & _BITS) != 0
        late[(others == warp)[:, None] & (lanes[indices][:, None] == _LANES)] = False
        for lane, clock in self._beyond[warp].items():
            mine = lanes[indices] == lane
            late[mine] &= reads[unknown][mine][:, None] > clock.reshape(-1, _WARP)[others[mine]]
        if late.any():
            entry, reader = np.argwhere(late)[0]
            address = int(rows[indices[entry]]) * width
            self._raise(
                warp, int(others[entry]) * _WARP + int(reader), address, "overwrites", "read"
            )

    def _check_earlier(self, warp: int, places: range | list[int], known: np.ndarray) -> None:
        """Insist that somebody who writes bytes knows of their earlier reads; forget these."""
        for place in [place for place in self._earlier if place in places]:
            for other, epoch, lanes in self._earlier[place]:
                reader = self._late_reader(other, epoch, lanes, known)
                if reader is not None:
                    self._raise(warp, reader, self._shared.origin + place, "overwrites", "read")
            del self._earlier[place]

    def _late_reader(self, warp: int, epoch: int, lanes: int, known: np.ndarray) -> int | None:
        """A thread, of those lanes of a warp that read in an epoch, whose read is not known."""
        late = (known[warp * _WARP : (warp + 1) * _WARP] < epoch) & ((_BITS & np.uint32(lanes)) > 0)
        return warp * _WARP + int(late.argmax()) if late.any() else None

    def _raise(self, warp: int, thread: int, address: int, does: str, did: str) -> None:
        other, lane = divmod(thread, _WARP)
        missing = (
            " with no bar.warp.sync since" if other == warp else ", and nothing orders the two"
        )
        raise DataRace(
            f"warp {warp} {does} shared offset {address:#x}, which lane {lane} of warp {other}"
            f" {did}{missing}"
        )

    def begin_async_read(self, warp: Warp, where: slice | np.ndarray, lanes: np.ndarray) -> None:
        """Lanes of a warp start an operation that reads bytes (by index of the storage).

        Raises
        ------
        DataRace
        """
        self._check_known(warp, where, self.clock(warp, lanes), "starts an operation that reads")
        index, mine = warp.index, np.uint32(bits_of(lanes))
        before, sets = self._reads[index][where], self._readers[index][where]
        recent = before > self._floors[index, index]
        lasting: np.ndarray | np.uint32 = np.uint32(0)
        if recent.any():
            places = _places(where)
            lasting = self._keep_readers(index, places, before, sets, mine, recent)
        self._reads[index][where] = self._epochs[index]
        self._readers[index][where] = lasting | mine

    def begin_async_write(self, warp: Warp, where: slice | np.ndarray, lanes: np.ndarray) -> None:
        """Lanes of a warp start an operation that writes bytes.

        Raises
        ------
        DataRace
        """
        does = "starts an operation that overwrites"
        known = self.clock(warp, lanes)
        self._check_known(warp, where, known, does)
        for other in range(self._warps):
            epochs = self._reads[other][where]
            late = epochs > known[other * _WARP : (other + 1) * _WARP].min()
            readers = self._readers[other][where] if late.any() else epochs
            while late.any():
                first = int(late.argmax())
                epoch, lanes_then = int(epochs[first]), int(readers[first])
                reader = self._late_reader(other, epoch, lanes_then, known)
                if reader is not None:
                    address = self._shared.origin + int(_places(where)[first])
                    self._raise(warp.index, reader, address, does, "read")
                late &= (epochs != epoch) | (readers != lanes_then)
        if self._earlier:
            at = range(where.start, where.stop) if isinstance(where, slice) else where.tolist()
            self._check_earlier(warp.index, at, known)
        self._writes[where] = 0

    def _check_known(
        self, warp: Warp, where: slice | np.ndarray, known: np.ndarray, does: str
    ) -> None:
        writes = self._writes[where]
        who, epochs = writes % self._threads, writes // self._threads
        unknown = epochs > known.take(who)
        if unknown.any():
            first = int(unknown.argmax())
            address = self._shared.origin + int(_places(where)[first])
            self._raise(warp.index, int(who[first]), address, does, "wrote")

    def fence_proxies(self, warp: Warp, lanes: np.ndarray) -> None:
        """A proxy fence of some lanes: it covers the writes that they know of."""
        low, high = self._shared.dirty
        if low < high:
            writes = self._writes[low:high]
            clock = self.clock(warp, lanes)
            known = writes // self._threads <= clock.take(writes % self._threads)
            keep = np.where(known, 0xFF ^ GENERIC, 0xFF).astype(np.uint8)
            self._shared.shadow[low:high] &= keep


def _places(where: slice | np.ndarray) -> np.ndarray:
    """Indices of the storage."""
    return np.arange(where.start, where.stop) if isinstance(where, slice) else where
