"""Memory of an emulated kernel: regions of bytes, each byte with a shadow that catches misuse.

The shadow of a byte is a set of flags:

* ``UNWRITTEN``: nothing has written it, or what was written there is undefined itself. Loads and
  copies carry this on (see `registers`); using it is an error.
* ``FORBIDDEN``: nobody may read it, whatever comes of it.
* ``ASYNC_WRITE``: an asynchronous operation will write it. Touching it is an error.
* ``ASYNC_READ``: an asynchronous operation will read it. Writing it is an error.
* ``GENERIC``: the generic proxy wrote it and no proxy fence followed. The async proxy touching it
  is an error ("Proxies", PTX ISA 8.6).
* ``BARRIER``: it belongs to a live mbarrier object. Plain accesses are an error ("Contents of the
  mbarrier object" are opaque).
* ``OUTSIDE``: padding around a region.

Addresses here are those of one state space; `address_spaces` maps generic addresses to them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from emulator.errors import (
    EmulationError,
    InFlightRead,
    InFlightWrite,
    Misaligned,
    MissingProxyFence,
    OutOfBounds,
    PhaseError,
    UnwrittenRead,
)

UNWRITTEN, ASYNC_WRITE, ASYNC_READ, GENERIC, BARRIER, FORBIDDEN = 1, 2, 4, 8, 16, 32
OUTSIDE = 128
READ_FAULTS = UNWRITTEN | ASYNC_WRITE | BARRIER | FORBIDDEN | OUTSIDE
WRITE_FAULTS = ASYNC_WRITE | ASYNC_READ | BARRIER | OUTSIDE

# The widest access: a vector of 32 bytes.
_ROUND = 32
_POISON = 0xA5


@dataclass(frozen=True)
class Bytes:
    """Some bytes of a region: what an asynchronous operation reads or writes.

    `where` indexes the region's storage; make one with `Region.range` or `Region.bytes_at`.
    """

    region: Region
    where: slice | np.ndarray

    def load(self) -> np.ndarray:
        """A copy of the bytes, uint8, in the order of `where`."""
        return self.region.storage[self.where].copy()

    def store(self, values: np.ndarray) -> None:
        """Put bytes there; says nothing to the shadow."""
        self.region.storage[self.where] = values

    @property
    def undefined(self) -> np.ndarray:
        """Which of the bytes nothing has written, bool."""
        return (self.region.shadow[self.where] & UNWRITTEN) != 0


class Region:
    """Bytes at consecutive addresses.

    Parameters
    ----------
    name : str
        For messages.
    base : int
        Address of the first byte.
    data : bytes or numpy array of any type, or int
        Its contents, copied, all of them written; an integer gives that many poisoned bytes.
    readable : numpy array of bool or None
        Which bytes of `data` may be read, where not all.
    """

    def __init__(
        self,
        name: str,
        base: int,
        data: bytes | np.ndarray | int,
        readable: np.ndarray | None = None,
    ) -> None:
        self.name = name
        self.base = base
        if isinstance(data, int):
            content = np.full(data, _POISON, np.uint8)
            flags: np.ndarray | int = UNWRITTEN
        else:
            raw = data.tobytes() if isinstance(data, np.ndarray) else bytes(data)
            content = np.frombuffer(raw, np.uint8)
            flags = 0 if readable is None else np.where(readable.reshape(-1), 0, FORBIDDEN)
        self.size = len(content)
        self.end = base + self.size
        front = base % _ROUND
        self.origin = base - front
        total = -(-(front + self.size) // _ROUND) * _ROUND
        self.storage = np.zeros(total, np.uint8)
        self.shadow = np.full(total, OUTSIDE, np.uint8)
        self._inside = slice(front, front + self.size)
        self.storage[self._inside] = content
        self.shadow[self._inside] = flags
        self._readers: np.ndarray | None = None
        self._dirty = (total, 0)  # bounds of the bytes that may be GENERIC
        self._views: dict[tuple[type, int], tuple[np.ndarray, np.ndarray, int]] = {}
        self._origin64 = np.uint64(self.origin)

    @property
    def data(self) -> np.ndarray:
        """The bytes, uint8; a view."""
        return self.storage[self._inside]

    @property
    def dirty(self) -> tuple[int, int]:
        """Bounds, as indices of the storage, of the bytes that may need a proxy fence."""
        return self._dirty

    @property
    def written(self) -> np.ndarray:
        """Which bytes have been written, bool."""
        return (self.shadow[self._inside] & UNWRITTEN) == 0

    def _view(self, element: type, count: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Storage and shadow as rows of `count` elements, and log2 of a row's bytes."""
        key = (element, count)
        views = self._views.get(key)
        if views is None:
            width = np.dtype(element).itemsize
            shape = (-1, count)
            shadow_type = f"u{width}"
            views = (
                self.storage.view(element).reshape(shape),
                self.shadow.view(shadow_type).reshape(shape),
                (width * count).bit_length() - 1,
            )
            self._views[key] = views
        return views

    def load(
        self,
        addresses: np.ndarray,
        element: type,
        count: int = 1,
        undefined: list[np.ndarray] | None = None,
    ) -> np.ndarray:
        """What plain loads of vectors give.

        Parameters
        ----------
        addresses : uint64 [n]
        element : numpy integer type
        count : int
            Elements of a vector; elements x count is a power of two of at most 32 bytes.
        undefined : list or None
            Gets, where something is unwritten, the bits of it in the result; None refuses that.

        Returns
        -------
        numpy array [n, count] of `element`

        Raises
        ------
        OutOfBounds, Misaligned, UnwrittenRead, InFlightRead, PhaseError
        """
        storage, shadow, shift = self._view(element, count)
        rows = self._rows(addresses, storage, shift)
        faults = shadow.take(rows, 0) & _SPREAD[READ_FAULTS, shadow.dtype.itemsize]
        if any(faults.tobytes()):
            found = int(np.bitwise_or.reduce(faults.view(np.uint8), axis=None))
            if undefined is None or found != UNWRITTEN:
                raise self._fault(addresses, 1 << shift, READ_FAULTS)
            undefined.append((faults.view(np.uint8) * np.uint8(0xFF)).view(faults.dtype))
        return storage.take(rows, 0)

    def store(
        self, addresses: np.ndarray, values: np.ndarray, undefined: np.ndarray | None = None
    ) -> None:
        """Plain stores of vectors: `values` is [n, count] of unsigned integers.

        So is `undefined`: which bits of them are undefined, if any.

        Raises
        ------
        OutOfBounds, Misaligned, InFlightWrite, PhaseError
        """
        storage, shadow, shift = self._view(values.dtype.type, values.shape[1])
        rows = self._rows(addresses, storage, shift)
        width = shadow.dtype.itemsize
        faults = shadow.take(rows, 0) & _SPREAD[WRITE_FAULTS, width]
        if any(faults.tobytes()):
            raise self._fault(addresses, 1 << shift, WRITE_FAULTS)
        storage[rows] = values
        shadow[rows] = _SPREAD[GENERIC, width]
        if undefined is not None:
            partly = np.ascontiguousarray(undefined).view(np.uint8) != 0
            shadow[rows] |= (partly * np.uint8(UNWRITTEN)).view(shadow.dtype)
        first, last = int(rows.min()) << shift, (int(rows.max()) + 1) << shift
        low, high = self._dirty
        self._dirty = (min(low, first), max(high, last))

    def holds(self, addresses: np.ndarray, values: np.ndarray) -> bool:
        """Whether a plain store of these values would change nothing.

        Raises
        ------
        OutOfBounds, Misaligned
        """
        storage, _, shift = self._view(values.dtype.type, values.shape[1])
        return bool((storage.take(self._rows(addresses, storage, shift), 0) == values).all())

    def _rows(self, addresses: np.ndarray, storage: np.ndarray, shift: int) -> np.ndarray:
        """Row numbers of addresses."""
        offsets = addresses - self._origin64
        if shift:
            if int(np.bitwise_or.reduce(addresses)) & ((1 << shift) - 1):
                raise self._misaligned(addresses, 1 << shift)
            offsets >>= _SHIFTS[shift]
        rows = offsets.view(np.int64)
        # Below the origin the subtraction wraps around, to far above the end.
        if int(offsets.max()) >= len(storage):
            raise self._fault(addresses, 1 << shift, OUTSIDE)
        return rows

    def _misaligned(self, addresses: np.ndarray, width: int) -> EmulationError:
        wrong = addresses[addresses % np.uint64(width) != 0]
        return Misaligned(f"{self.name}: address {int(wrong[0]):#x} is no multiple of {width}")

    def _fault(self, addresses: np.ndarray, width: int, faults: int) -> EmulationError:
        """The error of the first of some addresses whose access is a fault."""
        for address in addresses.tolist():
            if not self.base <= address <= self.end - width:
                return OutOfBounds(
                    f"{self.name}: {width} bytes at {address:#x} are outside"
                    f" {self.base:#x} to {self.end:#x}"
                )
            start = address - self.origin
            found = np.bitwise_or.reduce(self.shadow[start : start + width]) & faults
            if found:
                return _describe(int(found), f"{self.name}: {width} bytes at {address:#x}", faults)
        raise AssertionError("no fault among the addresses")

    def range(self, start: int, size: int) -> Bytes:
        """`size` bytes from an address on.

        Raises
        ------
        OutOfBounds
        """
        if not (self.base <= start and start + size <= self.end):
            raise OutOfBounds(
                f"{self.name}: {size} bytes at {start:#x} are outside"
                f" {self.base:#x} to {self.end:#x}"
            )
        return Bytes(self, slice(start - self.origin, start - self.origin + size))

    def bytes_at(self, addresses: np.ndarray) -> Bytes:
        """The bytes at some addresses, in this order.

        Raises
        ------
        OutOfBounds
        """
        addresses = np.asarray(addresses, np.int64).reshape(-1)
        outside = (addresses < self.base) | (addresses >= self.end)
        if outside.any():
            raise OutOfBounds(
                f"{self.name}: address {int(addresses[outside][0]):#x} is outside"
                f" {self.base:#x} to {self.end:#x}"
            )
        return Bytes(self, addresses - self.origin)

    def begin_async_read(self, where: slice | np.ndarray, async_proxy: bool, what: str) -> bool:
        """Check and mark bytes that an asynchronous operation will read.

        Returns
        -------
        bool
            Whether some of them are unwritten.
        """
        found = int(np.bitwise_or.reduce(self.shadow[where], initial=0))
        faults = FORBIDDEN | ASYNC_WRITE | BARRIER | (GENERIC if async_proxy else 0)
        if found & faults:
            raise _describe(found & faults, f"{self.name}: {what} reads bytes", READ_FAULTS)
        if self._readers is None:
            self._readers = np.zeros(len(self.storage), np.uint16)
        self._readers[where] += 1
        self.shadow[where] |= ASYNC_READ
        return bool(found & UNWRITTEN)

    def end_async_read(self, where: slice | np.ndarray) -> None:
        """The asynchronous operation has read the bytes."""
        assert self._readers is not None
        self._readers[where] -= 1
        left = np.where(self._readers[where] > 0, 0xFF, 0xFF ^ ASYNC_READ).astype(np.uint8)
        self.shadow[where] &= left

    def begin_async_write(self, where: slice | np.ndarray, what: str) -> bool:
        """Check and mark bytes that an asynchronous operation will write.

        Returns
        -------
        bool
            Whether the generic proxy wrote some of them with no proxy fence since.
        """
        found = int(np.bitwise_or.reduce(self.shadow[where], initial=0))
        faults = ASYNC_WRITE | ASYNC_READ | BARRIER
        if found & faults:
            raise _describe(found & faults, f"{self.name}: {what} writes bytes", WRITE_FAULTS)
        self.shadow[where] |= ASYNC_WRITE
        return bool(found & GENERIC)

    def end_async_write(self, where: slice | np.ndarray, async_proxy: bool) -> None:
        """The asynchronous operation has written the bytes."""
        self.shadow[where] &= 0xFF ^ (ASYNC_WRITE | UNWRITTEN | GENERIC | FORBIDDEN)
        if not async_proxy:
            self.shadow[where] |= GENERIC
            first, last = (
                (where.start, where.stop)
                if isinstance(where, slice)
                else (int(where.min()), int(where.max()) + 1)
            )
            self._dirty = (min(self._dirty[0], first), max(self._dirty[1], last))

    def proxy_fence(self) -> None:
        """What the generic proxy wrote is now visible to the async proxy."""
        low, high = self._dirty
        if low < high:
            self.shadow[low:high] &= 0xFF ^ GENERIC
        self._dirty = (len(self.storage), 0)

    def mark_barrier(self, start: int, live: bool) -> None:
        """Say that 8 bytes are, or no longer are, a live mbarrier object."""
        where = slice(start - self.origin, start - self.origin + 8)
        self.shadow[where] = BARRIER if live else UNWRITTEN


_SHIFTS = [np.uint64(shift) for shift in range(6)]
_SPREAD = {
    (flags, width): np.frombuffer(bytes([flags] * width), f"u{width}")[0]
    for flags in (READ_FAULTS, WRITE_FAULTS, GENERIC)
    for width in (1, 2, 4, 8)
}


def _describe(found: int, what: str, faults: int) -> EmulationError:
    """The error for a byte's flags."""
    if found & OUTSIDE:
        return OutOfBounds(f"{what} that do not belong to the kernel")
    if found & ASYNC_WRITE:
        kind = InFlightRead if faults == READ_FAULTS else InFlightWrite
        return kind(f"{what} that an asynchronous operation may still be writing")
    if found & ASYNC_READ:
        return InFlightWrite(f"{what} that an asynchronous operation may still be reading")
    if found & BARRIER:
        return PhaseError(f"{what} of a live mbarrier object")
    if found & FORBIDDEN:
        return UnwrittenRead(f"{what} that must not be read")
    if found & GENERIC:
        return MissingProxyFence(f"{what} that the generic proxy wrote with no proxy fence since")
    return UnwrittenRead(f"{what} that nothing has written")


class AddressSpace:
    """The regions of one state space, by address."""

    def __init__(self, name: str, regions: Sequence[Region] = ()) -> None:
        self.name = name
        self.regions: list[Region] = []
        self._bases: list[int] = []
        for region in regions:
            self.add(region)

    def add(self, region: Region) -> None:
        """Add a region.

        Raises
        ------
        ValueError
            It overlaps another one.
        """
        index = bisect_right(self._bases, region.base)
        neighbours = self.regions[max(index - 1, 0) : index + 1]
        for other in neighbours:
            if region.base < other.end and other.base < region.end:
                raise ValueError(f"regions {region.name} and {other.name} overlap")
        self.regions.insert(index, region)
        self._bases.insert(index, region.base)

    def find(self, address: int) -> Region:
        """The region that holds an address.

        Raises
        ------
        OutOfBounds
        """
        index = bisect_right(self._bases, address) - 1
        if index >= 0 and address < self.regions[index].end:
            return self.regions[index]
        near = self.regions[max(index - 1, 0) : index + 3]
        known = ", ".join(f"{each.name} {each.base:#x} to {each.end:#x}" for each in near)
        raise OutOfBounds(
            f"{self.name} address {address:#x} is in no region that the launch was given (near it:"
            f" {known or 'none'})"
        )

    def proxy_fence(self) -> None:
        """A proxy fence for every region."""
        for region in self.regions:
            region.proxy_fence()
