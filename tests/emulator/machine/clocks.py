"""What every thread of a CTA has been told of what the others did.

Every warp counts epochs; a release (an arrival at a barrier) begins a new one. A clock says up to
which epoch of every thread somebody knows of all that it did: an acquire (a wait at a barrier that
succeeds) takes over the clocks that were released there ("Causality Order", PTX ISA 8.9.5).

Lanes of one warp are threads like any others: what lanes release is what these lanes know, and only
lanes that wait learn. They tell each other at `bar.warp.sync` and the barriers of the CTA, which
order memory; shuffles, votes, elections and aligned instructions do not promise to. What all lanes
of a warp know is kept once, in its row of clocks; what a lane knows beyond that, until the warp is
next told of it, apart.

Asynchronous operations complete by themselves, so each completion is an epoch of a *source* that
only what signals it carries: the mbarrier of a copy, the commit of MMAs, the wait for a group.

A clock has two halves. The first is of memory. The second is of time alone: barriers with
`.relaxed` carry it too, which is enough for tensor memory between the two `tcgen05.fence`s.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .execution import Cta, Warp

WARP = 32
_BARRIER_WARPS = 3


class Clocks:
    """The clocks of a CTA: uint32 [2 x columns]. Lanes are bool [32].

    Columns are those of threads, then of sources: 32 that read, 95 that write, and one that never
    tells. Where sources outnumber these some share a column, and tell of each other.

    Attributes
    ----------
    warps, columns : int
    reader : int
        The warp whose columns are those of sources that read.
    epochs : list of int
        Of every warp, and of the sources that read.
    common : numpy array [warps, 2 x columns]
        What all lanes of a warp know.
    beyond : list of dict
        What lanes of a warp know beyond that.
    floors : numpy array [warps, warps + 1]
        Of every warp's common knowledge, the least about each warp and the reader.
    operation : numpy array
        The clock of the asynchronous operation that is running.
    """

    def __init__(self, cta: Cta) -> None:
        self.warps = self.reader = -(-int(np.prod(cta.launch.block)) // WARP)
        self.columns = WARP * (self.warps + 1 + _BARRIER_WARPS)
        self.epochs = [1] * (self.warps + 1)
        self.common = np.zeros((self.warps, 2 * self.columns), np.uint32)
        self.beyond: list[dict[int, np.ndarray]] = [{} for _ in range(self.warps)]
        self.floors = np.zeros((self.warps, self.warps + 1), np.uint32)
        self.operation = self.nothing()
        self._locations: dict[int, np.ndarray] = {}
        self._sources: dict[Hashable, int] = {}
        self._completed = np.zeros(self.columns, np.uint32)  # of every source

    def nothing(self) -> np.ndarray:
        """The clock of who knows nothing."""
        return np.zeros(2 * self.columns, np.uint32)

    def of(self, warp: Warp, lanes: np.ndarray) -> np.ndarray:
        """What some lanes of a warp know together; a copy."""
        index = warp.index
        known: np.ndarray = self.common[index].copy()
        for lane, clock in self.beyond[index].items():
            if lanes[lane]:
                np.maximum(known, clock, out=known)
        own = known.reshape(2, -1)[:, index * WARP : (index + 1) * WARP]
        own[:, lanes] = self.epochs[index]
        return known

    def release(self, warp: Warp, lanes: np.ndarray, *, relaxed: bool = False) -> np.ndarray:
        """What some lanes tell at a barrier."""
        told = self.of(warp, lanes)
        self.epochs[warp.index] += 1
        if relaxed:
            told[: self.columns] = 0
        return told

    def begin_epoch(self, warp: Warp) -> None:
        """What the warp does from here on is not told by what it has started."""
        self.epochs[warp.index] += 1

    def acquire(
        self, warp: Warp, lanes: np.ndarray, clock: np.ndarray, *, relaxed: bool = False
    ) -> None:
        """Some lanes learn what was told at a barrier."""
        if relaxed:
            clock = clock.copy()
            clock[: self.columns] = 0
        common = self.common[warp.index]
        if not (warp.live & ~lanes).any():
            np.maximum(common, clock, out=common)
            threads = common[: WARP * (self.warps + 1)]
            self.floors[warp.index] = threads.reshape(-1, WARP).min(1)
        elif (clock > common).any():
            beyond = self.beyond[warp.index]
            for lane in np.flatnonzero(lanes).tolist():
                beyond[lane] = np.maximum(beyond.get(lane, common), clock)

    def synchronize(self, warp: Warp, lanes: np.ndarray) -> None:
        """Lanes of a warp meet: each learns what the others know."""
        self.acquire(warp, lanes, self.release(warp, lanes))
        if not (warp.live & ~lanes).any():
            self.beyond[warp.index].clear()

    def synchronize_location(self, warp: Warp, lanes: np.ndarray, address: int) -> None:
        """A strong access: learn what was told at the location, and tell there."""
        told = self._locations.get(address)
        if told is not None:
            self.acquire(warp, lanes, told)
        self._locations[address] = self.release(warp, lanes)

    def reading_source(self, key: Hashable) -> int:
        """The column of asynchronous operations that read, such as those of one queue."""
        known = sum(1 for column in self._sources.values() if column // WARP == self.reader)
        return self._sources.setdefault(key, self.reader * WARP + known % WARP)

    def writing_source(self, key: Hashable) -> int:
        """The column of asynchronous operations that write, such as those of one mbarrier."""
        first, count = WARP * (self.warps + 1), WARP * _BARRIER_WARPS - 1
        known = sum(1 for column in self._sources.values() if column >= first)
        return self._sources.setdefault(key, first + known % count)

    def complete(self, source: int) -> int:
        """A source's next epoch: one of its operations has completed."""
        if source // WARP == self.reader:
            self.epochs[self.reader] += 1
            self._completed[source] = self.epochs[self.reader]
        else:
            self._completed[source] += 1
        return int(self._completed[source])

    def completed(self, source: int) -> int:
        """A source's last epoch."""
        return int(self._completed[source])

    def completions(self, source: int) -> np.ndarray:
        """The clock of who knows of all that a source has completed."""
        told = self.nothing()
        told.reshape(2, -1)[:, source] = self._completed[source]
        return told

    def run(self, clock: np.ndarray | None) -> None:
        """An asynchronous operation takes a step; `clock` is of its start."""
        if clock is not None:
            self.operation = clock
