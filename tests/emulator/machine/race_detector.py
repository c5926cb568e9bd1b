"""Races of a CTA's threads for shared memory: found by what is ordered, not by what comes out.

Two accesses of the same byte by two threads, at least one of them a write, are a race unless the
later one's thread knew of the earlier one ("Conflict and Data-races", PTX ISA 8.7); `clocks` says
who knows what.

Asynchronous operations belong to the lanes that started them, at that time, and, once complete, to
their source: nobody knows of them who does not wait for what the source signals. Atomic and other
strong accesses order what their threads did before and after, each location by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from emulator.errors import DataRace

from .clocks import WARP, Clocks
from .convergence import bits_of
from .memory import GENERIC

if TYPE_CHECKING:
    from .async_operation import AsyncOperation
    from .execution import Cta, Warp

_LANES = np.arange(WARP)
_BITS = np.uint32(1) << np.arange(WARP, dtype=np.uint32)
_SHIFTS = {1 << shift: np.uint64(shift) for shift in range(6)}


class RaceDetector:
    """The clocks of a CTA and, per byte of shared memory, who touched it last.

    Attributes
    ----------
    clocks : Clocks
    """

    def __init__(self, cta: Cta) -> None:
        self._shared = cta.shared
        self.clocks = Clocks(cta)
        count, self._columns = self.clocks.warps, self.clocks.columns
        self._common, self._beyond = self.clocks.common, self.clocks.beyond
        self._floors, self._epochs = self.clocks.floors, self.clocks.epochs
        size = len(cta.shared.storage)
        # The last write of each byte: epoch x columns + column of the clocks; 0 is long ago.
        self._writes = np.zeros(size, np.uint32)
        # The epoch of each warp's last reads of each byte, and the lanes as bits; then of sources'.
        self._reads = np.zeros((count + 1, size), np.uint32)
        self._readers = np.zeros((count + 1, size), np.uint32)
        self._copies = 0
        # Earlier reads that the last ones do not imply: warp, epoch, lanes; by byte.
        self._earlier: dict[int, list[tuple[int, int, int]]] = {}

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
                known = self._earlier.setdefault(place, [])
                known[:] = [each for each in known if each[0] != warp or each[2] != lanes]
                known.append((warp, epoch, lanes))
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
        reads = self._reads.reshape(len(self._reads), -1, width)[:, rows]
        unknown = reads > self._floors[warp][:, None, None]
        if unknown.any():
            self._check_reads(warp, reads, unknown, rows, lanes)
        if self._earlier:
            for row, lane in zip(rows.tolist(), lanes.tolist(), strict=True):
                known = self._lane_clock(warp, lane)
                self._check_earlier(warp, range(row * width, (row + 1) * width), known)
        thread = (warp * WARP + lanes).astype(np.uint32)
        self._writes.reshape(-1, width)[rows] = (self._epochs[warp] * self._columns + thread)[
            :, None
        ]

    def _lane_clock(self, warp: int, lane: int) -> np.ndarray:
        known: np.ndarray = self._beyond[warp].get(lane, self._common[warp]).copy()
        np.maximum(known, self._common[warp], out=known)
        known[warp * WARP + lane] = self._epochs[warp]
        return known

    def _check_writes(
        self, warp: int, writes: np.ndarray, rows: np.ndarray, lanes: np.ndarray, does: str
    ) -> None:
        """Insist that lanes know of the last writes of some bytes, [n, width]."""
        who, epochs = writes % self._columns, writes // self._columns
        unknown = epochs > self._common[warp].take(who)
        if not unknown.any():
            return
        unknown &= who != (warp * WARP + lanes)[:, None]
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
        readers = self._readers.reshape(len(self._reads), -1, width)[:, rows]
        alone = (readers[warp] == _BITS[lanes][:, None]) & (reads[warp] > 0)
        unknown[warp] &= ~alone
        if not unknown.any():
            return
        others, indices, _ = unknown.nonzero()
        late = reads[unknown][:, None] > self._common[warp].reshape(-1, WARP)[others]
        late &= (readers[unknown][:, None] & _BITS) != 0
        late[(others == warp)[:, None] & (lanes[indices][:, None] == _LANES)] = False
        for lane, clock in self._beyond[warp].items():
            mine = lanes[indices] == lane
            late[mine] &= reads[unknown][mine][:, None] > clock.reshape(-1, WARP)[others[mine]]
        if late.any():
            entry, reader = np.argwhere(late)[0]
            address = int(rows[indices[entry]]) * width
            self._raise(
                warp, int(others[entry]) * WARP + int(reader), address, "overwrites", "read"
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
        late = (known[warp * WARP : (warp + 1) * WARP] < epoch) & ((_BITS & np.uint32(lanes)) > 0)
        return warp * WARP + int(late.argmax()) if late.any() else None

    def _raise(self, warp: int, thread: int, address: int, does: str, did: str) -> None:
        other, lane = divmod(thread, WARP)
        who = f"lane {lane} of warp {other}"
        missing = ", and nothing orders the two"
        if other == warp:
            missing = " with no bar.warp.sync since"
        elif other >= self.clocks.warps:
            who, missing = "an asynchronous operation", ", and nothing says that it is complete"
        raise DataRace(f"warp {warp} {does} shared offset {address:#x}, which {who} {did}{missing}")

    def begin_async_read(self, warp: Warp, where: slice | np.ndarray, lanes: np.ndarray) -> None:
        """Lanes of a warp start an operation that reads bytes (by index of the storage).

        Raises
        ------
        DataRace
        """
        self._check_known(
            warp, where, self.clocks.of(warp, lanes), "starts an operation that reads"
        )
        self._note_reads(warp.index, where, bits_of(lanes), self._floors[warp.index, warp.index])

    def _note_reads(self, index: int, where: slice | np.ndarray, bits: int, floor: int) -> None:
        """Lanes of a warp, or sources, read bytes in the current epoch."""
        mine = np.uint32(bits)
        before, sets = self._reads[index][where], self._readers[index][where]
        recent = before > floor
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
        known = self.clocks.of(warp, lanes)
        self._check_known(warp, where, known, does)
        for other in range(len(self._reads)):
            epochs = self._reads[other][where]
            late = epochs > known[other * WARP : (other + 1) * WARP].min()
            readers = self._readers[other][where] if late.any() else epochs
            while late.any():
                first = int(late.argmax())
                epoch, lanes_then = int(epochs[first]), int(readers[first])
                reader = self._late_reader(other, epoch, lanes_then, known)
                if reader is not None:
                    address = self._shared.origin + int(_places(where)[first])
                    self._refuse_copy(warp, reader, epoch, known, address, does)
                late &= (epochs != epoch) | (readers != lanes_then)
        if self._earlier:
            at = range(where.start, where.stop) if isinstance(where, slice) else where.tolist()
            self._check_earlier(warp.index, at, known)
        self._writes[where] = 0

    def _refuse_copy(
        self, warp: Warp, reader: int, epoch: int, known: np.ndarray, address: int, does: str
    ) -> None:
        """An operation overwrites what a thread read: a note where its warp told of that epoch."""
        first = reader // WARP * WARP
        try:
            self._raise(warp.index, reader, address, does, "read")
        except DataRace as error:
            if (
                first // WARP >= self.clocks.warps
                or not (known[first : first + WARP] >= epoch).any()
            ):
                raise
            what = "a copy over what lanes read, of which another lane told without bar.warp.sync"
            warp.cta.launch.note(what, DataRace, f": {error}")

    def begin_copies(self, where: np.ndarray) -> int:
        """Copies of `cp.async` start to write bytes, which nobody knows before a wait; a mark."""
        self._copies += 1
        mark = self._copies * self._columns + self._columns - 1
        self._writes[where] = mark
        return mark

    def end_copies(
        self, mark: int, where: np.ndarray, warp: Warp, lanes: np.ndarray, epochs: np.ndarray
    ) -> None:
        """Lanes (by number) know of copies from epochs on, each of its row, [n, bytes]."""
        written = epochs * self._columns + warp.index * WARP + lanes
        mine = self._writes[where] == mark
        self._writes[where[mine]] = np.broadcast_to(written[:, None], where.shape)[mine]

    def complete(self, operation: AsyncOperation) -> None:
        """An operation is complete, which only its source tells."""
        clocks, source = self.clocks, operation.source
        clocks.run(operation.clock)
        if source is None:
            return
        epoch = clocks.complete(source)
        told = clocks.completions(source)
        clocks.operation = np.maximum(clocks.operation, told)
        for written in operation.writes:
            if written.region is self._shared:
                self._writes[written.where] = epoch * self._columns + source
        for read in operation.reads:
            if read.region is self._shared:
                self._note_reads(clocks.reader, read.where, 1 << source % WARP, 0)

    def _check_known(
        self, warp: Warp, where: slice | np.ndarray, known: np.ndarray, does: str
    ) -> None:
        writes = self._writes[where]
        who, epochs = writes % self._columns, writes // self._columns
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
            clock = self.clocks.of(warp, lanes)
            known = writes // self._columns <= clock.take(writes % self._columns)
            keep = np.where(known, 0xFF ^ GENERIC, 0xFF).astype(np.uint8)
            self._shared.shadow[low:high] &= keep


def _places(where: slice | np.ndarray) -> np.ndarray:
    """Indices of the storage."""
    return np.arange(where.start, where.stop) if isinstance(where, slice) else where
