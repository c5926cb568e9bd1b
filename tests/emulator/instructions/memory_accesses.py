"""Loads and stores ("ld", "ld.global.nc", "ldu", "st", PTX ISA 9.7.9.8 to 9.7.9.11)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from emulator.errors import DataRace, UnwrittenRead
from emulator.machine.address_spaces import (
    LOCAL_WINDOW,
    PARAMETER_BYTES,
    PARAMETERS,
    SHARED_WINDOW,
)
from emulator.machine.convergence import EACH_LANE
from emulator.machine.memory import Region
from emulator.machine.outcomes import YIELD, Signal
from emulator.machine.registers import UNDEFINED, Place, origin_of, set_undefined, undefined_bits
from emulator.syntax.module import Address, Operand, Register, Symbol
from emulator.syntax.ptx_types import TYPE_BITS, UNSIGNED

from .registry import Closure, Decoder, Mask, MemoryOperand, instruction

if TYPE_CHECKING:
    from emulator.machine.execution import Warp

# Hints about caches: nothing that an emulator could see.
CACHE_HINTS = (
    *("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc"),
    *(f"L1::{name}" for name in ("evict_normal", "evict_unchanged", "evict_first", "evict_last")),
    "L1::no_allocate",
    *(f"L2::{name}" for name in ("evict_normal", "evict_first", "evict_last")),
    *(f"L2::{name}" for name in ("cache_hint", "64B", "128B", "256B")),
)
SPACES = ("global", "shared", "shared::cta", "shared::cluster", "local", "const", "param")
PARAMETER_SPACES = ("param::entry", "param::func")
SCOPES = ("cta", "cluster", "gpu", "sys")

# Which region holds some addresses of a space, and these addresses within the region.
Resolve = Callable[["Warp", np.ndarray, Mask], tuple[Region, np.ndarray]]

_WINDOW = np.uint64(SHARED_WINDOW)
_LOCAL = np.uint64(LOCAL_WINDOW)
_STRIDES = np.arange(32, dtype=np.uint64)


class Resolver:
    """Finds regions for the addresses of one instruction; remembers the last one."""

    def __init__(self, space: str) -> None:
        self.space = space
        self._last: Region | None = None
        self._launch: object = None

    def pieces(
        self, warp: Warp, addresses: np.ndarray, mask: Mask
    ) -> list[tuple[Region, np.ndarray, np.ndarray | None]]:
        """Split addresses of the active lanes by region.

        Returns
        -------
        list of (region, addresses within it, which of the given ones these are or None for all)
        """
        if self.space == "shared":
            return [(warp.cta.shared, addresses, None)]
        if self.space == "local":
            return [(warp.local, self._local(warp, addresses, mask), None)]
        low, high = int(addresses.min()), int(addresses.max())
        last = self._last if self._launch is warp.cta.launch else None
        if last is not None and last.base <= low and high < last.end:
            return [(last, addresses, None)]
        if low >= LOCAL_WINDOW and self.space == "generic":
            return self._windows(warp, addresses, mask)
        region = self._find(warp, low)
        if high >= region.end:
            return self._windows(warp, addresses, mask)
        self._last, self._launch = region, warp.cta.launch
        return [(region, addresses, None)]

    def _find(self, warp: Warp, address: int) -> Region:
        """The region of an address that is in no window."""
        launch = warp.cta.launch
        if 0 <= address - PARAMETERS < PARAMETER_BYTES and self.space in ("generic", "param"):
            return launch.parameters
        return launch.memory.find(address)

    def _local(self, warp: Warp, addresses: np.ndarray, mask: Mask) -> np.ndarray:
        """Addresses in a warp's local region: every lane has its own stretch."""
        stride = warp.local_stride
        if int(addresses.max()) >= stride:
            # Far outside, so that the region reports it.
            return addresses | np.uint64(1 << 40)
        lanes = _STRIDES if mask is None else _STRIDES[mask]
        return addresses + lanes * np.uint64(stride)

    def _windows(
        self, warp: Warp, addresses: np.ndarray, mask: Mask
    ) -> list[tuple[Region, np.ndarray, np.ndarray | None]]:
        """Any mix of windows and regions."""
        pieces: dict[int, tuple[Region, np.ndarray, list[int]]] = {}
        lanes = np.flatnonzero(warp.lanes(mask))
        for index, address in enumerate(addresses.tolist()):
            if address >= SHARED_WINDOW and self.space == "generic":
                region, within = warp.cta.shared, address - SHARED_WINDOW
            elif address >= LOCAL_WINDOW and self.space == "generic":
                one = np.zeros(32, bool)
                one[lanes[index]] = True
                local = np.array([address - LOCAL_WINDOW], np.uint64)
                region, within = warp.local, int(self._local(warp, local, one)[0])
            else:
                region, within = self._find(warp, address), address
            piece = pieces.setdefault(id(region), (region, addresses.copy(), []))
            piece[1][index] = within
            piece[2].append(index)
        return [
            (region, within[chosen], np.array(chosen)) for region, within, chosen in pieces.values()
        ]


def space_of(op: Decoder, operand: int = 0) -> str:
    """Take the state space modifier; `generic` without one. Kernel parameters are `param`."""
    name = op.one_of(*SPACES, *PARAMETER_SPACES, default="generic")
    if name.startswith("shared"):
        return "shared"
    if name.startswith("param"):
        address = op.operands[operand]
        base = address.base if isinstance(address, Address) else address
        if name == "param::entry":
            return "param"
        if isinstance(base, Symbol) and not op.linker.is_kernel_parameter(base.variable):
            return "local"
        return "param" if name == "param" else "local"
    return name


def access_order(op: Decoder, default: str) -> str:
    """Take the ordering of an access and its scope; gives the ordering."""
    order = op.one_of("weak", "volatile", "relaxed", "acquire", "release", "mmio", default=default)
    op.ignore(*SCOPES)
    return order


def vector_width(op: Decoder) -> int:
    """Take `.v2`, `.v4` or `.v8`."""
    return int(op.one_of("v2", "v4", "v8", default="v1")[1:])


@instruction("ld", "ldu")
def compile_ld(op: Decoder) -> Closure:
    space = space_of(op, 1)
    order = access_order(op, "weak")
    op.ignore(*CACHE_HINTS)
    type_name, count = op.element_type(vector_width(op))
    op.expect_operands(2, 3)  # the third one is a cache policy
    element = _element(op, type_name, count)
    elements = op.vector(0)
    if len(elements) != count:
        raise op.unsupported("the vector has another size")
    results = [op.extended_destination(e, type_name) for e in elements]
    note = undefined_noter(op, elements)
    loaded = (
        np.dtype(element).type
        if type_name[0] != "s"
        else np.dtype(f"i{TYPE_BITS[type_name] // 8}").type
    )
    return _load_closure(op.memory(1), Resolver(space), element, loaded, results, note, order)


def _load_closure(
    memory: MemoryOperand,
    resolver: Resolver,
    element: type,
    loaded: type,
    results: list[int],
    note_undefined: NoteUndefined,
    order: str,
) -> Closure:
    count = len(results)
    width = np.dtype(element).itemsize * count
    strong = order != "weak"
    # A load that may be polling ends the turn: somebody else must write what it waits for.
    outcome = YIELD if strong else None

    def run(warp: Warp, mask: Mask) -> Signal | None:
        addresses = memory.evaluate(warp, mask)
        pieces = resolver.pieces(warp, addresses, mask)
        undefined: list[np.ndarray] = []
        if len(pieces) == 1:
            region, within, _ = pieces[0]
            values = region.load(within, element, count, undefined)
        else:
            values = np.empty((len(addresses), count), element)
            bits = np.zeros((len(addresses), count), element)
            for region, within, chosen in pieces:
                found: list[np.ndarray] = []
                values[chosen] = region.load(within, element, count, found)
                if found:
                    bits[chosen] = found[0]
                    undefined = [bits]
        if undefined:
            note_undefined(warp, mask, undefined[0])
        for region, within, chosen in pieces:
            if region is warp.cta.shared:
                note_access(warp, within, width, mask, chosen, strong, writes=False)
        values = values.view(loaded)
        slots = warp.slots
        if mask is None:
            for column, result in enumerate(results):
                slots[result][:] = values[:, column]
        else:
            for column, result in enumerate(results):
                slots[result][mask] = values[:, column]
        return outcome

    return run


@instruction("st")
def compile_st(op: Decoder) -> Closure:
    space = space_of(op, 0)
    strong = access_order(op, "weak") != "weak"
    op.ignore(*CACHE_HINTS)
    type_name, count = op.element_type(vector_width(op))
    op.expect_operands(2, 3)
    element = _element(op, type_name, count)
    elements = op.vector(1)
    if len(elements) != count:
        raise op.unsupported("the vector has another size")
    if space in ("const", "param"):
        raise op.unsupported("the space cannot be written")
    places = [op.carried_source(e, element) for e in elements]
    return _store_closure(op.memory(0), Resolver(space), element, places, strong)


# Says which bits, [n, registers], of the registers of a load the active lanes loaded undefined.
NoteUndefined = Callable[["Warp", Mask, np.ndarray], None]


def undefined_noter(op: Decoder, registers: Sequence[Operand]) -> NoteUndefined:
    """How an instruction that loads registers notes that bits of them are undefined."""
    names = [each.name if isinstance(each, Register) else None for each in registers]
    origin = f"{op.instruction.text} line {op.instruction.line}"

    def note(warp: Warp, mask: Mask, bits: np.ndarray) -> None:
        lanes = warp.lanes(mask)
        warp.loaded_undefined = origin
        for name, column in zip(names, bits.T, strict=True):
            every = np.zeros(32, np.uint64)
            every[lanes] = column
            set_undefined(warp, name, lanes, every)

    return note


def stored_undefined(
    warp: Warp, places: Sequence[Place], mask: Mask, dtype: type
) -> np.ndarray | None:
    """Which bits, [n, registers], of what the active lanes store are undefined; None where none."""
    if not warp.undefined:
        return None
    bits = np.stack([undefined_bits(warp, each)[warp.lanes(mask)] for each in places], axis=1)
    return bits.astype(dtype) if bits.any() else None


def note_access(
    warp: Warp,
    within: np.ndarray,
    width: int,
    mask: Mask,
    chosen: np.ndarray | None,
    strong: bool,
    *,
    writes: bool,
) -> None:
    """Tell the race detector of an access of shared memory.

    `chosen` are the indices, among the active lanes, of those that access it; None for all.
    """
    races = warp.cta.races
    lanes = None if mask is None and chosen is None else np.flatnonzero(warp.lanes(mask))
    if lanes is not None and chosen is not None:
        lanes = lanes[chosen]
    if strong:
        each = EACH_LANE if lanes is None else EACH_LANE[lanes]
        for address, lane in zip(within.tolist(), each, strict=True):
            races.clocks.synchronize_location(warp, lane, address)
        return
    note = races.write if writes else races.read
    note(warp.index, within, width, lanes)


def store_to_shared(
    warp: Warp,
    within: np.ndarray,
    values: np.ndarray,
    undefined: np.ndarray | None,
    mask: Mask,
    chosen: np.ndarray | None = None,
    *,
    strong: bool = False,
) -> None:
    """Store vectors, and their undefined bits, to shared memory; see `note_access`.

    Raises
    ------
    DataRace
        Unless it changes nothing, as where warps of Triton's kernels store what others have stored.
    """
    region = warp.cta.shared
    changes = not region.holds(within, values)
    region.store(within, values, undefined)
    try:
        width = values.dtype.itemsize * values.shape[1]
        note_access(warp, within, width, mask, chosen, strong, writes=True)
    except DataRace as error:
        if changes:
            raise
        warp.cta.launch.note("st of what is there already, in no order", DataRace, f": {error}")


def _store_closure(
    memory: MemoryOperand, resolver: Resolver, element: type, places: list[Place], strong: bool
) -> Closure:
    sources, count = [each.slot for each in places], len(places)

    def run(warp: Warp, mask: Mask) -> None:
        addresses = memory.evaluate(warp, mask)
        values: np.ndarray = np.empty((len(addresses), count), element)
        slots = warp.slots
        if mask is None:
            for column, source in enumerate(sources):
                values[:, column] = slots[source]
        else:
            for column, source in enumerate(sources):
                values[:, column] = slots[source][mask]
        undefined = stored_undefined(warp, places, mask, element)
        for region, within, chosen in resolver.pieces(warp, addresses, mask):
            part = values if chosen is None else values[chosen]
            bits = undefined if undefined is None or chosen is None else undefined[chosen]
            if region is warp.cta.shared:
                store_to_shared(warp, within, part, bits, mask, chosen, strong=strong)
                continue
            if bits is not None and bits.any() and region is not warp.local:
                what = f"{region.name}: what is stored depends on {UNDEFINED}"
                raise UnwrittenRead(what + origin_of(warp))
            region.store(within, part, bits)
        warp.cta.launch.events += 1

    return run


def _element(op: Decoder, type_name: str, count: int) -> type:
    bits = TYPE_BITS[type_name]
    if bits not in UNSIGNED or bits * count > 256:
        raise op.unsupported(f"{count} elements of .{type_name}")
    return UNSIGNED[bits]
