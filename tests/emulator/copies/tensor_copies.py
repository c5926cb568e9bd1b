"""`cp.async.bulk.tensor` and its reductions and prefetches, in tiled mode.

Source: PTX ISA, "Data Movement and Conversion Instructions: Tensor copy"; see `tensor_map` for what
a box is. Bytes of a box outside the tensor are zeros on the way in and not written on the way out.

Not implemented, and refused by name: `.im2col` and its variants, `.cta_group::2`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from emulator.errors import MissingProxyFence, UnsupportedInstruction
from emulator.instructions.mbarriers import BarrierOperand, MBarriers
from emulator.instructions.registry import Closure, Decoder, Mask, MemoryOperand, instruction
from emulator.machine.memory import GENERIC
from emulator.syntax.module import Address, Operand, Vector
from emulator.tcgen05.tensor_core import thread_of

from .bulk_copies import delivery, split, stores, submit_load, take_cache_policy, take_load_options
from .bulk_groups import BulkGroups
from .bulk_reductions import GLOBAL_TYPES
from .tensor_map import CELL, Box, DataType, TensorMap, TensorMapError
from .tensor_map_form import MAP_BYTES, unpack

if TYPE_CHECKING:
    from emulator.machine.execution import Cta, Warp
    from emulator.machine.memory import Bytes

MAP_ALIGNMENT = 64
DIMENSIONS = ("1d", "2d", "3d", "4d", "5d")
# Element types by which a tensor map's type is reduced.
REDUCTION_TYPES = {
    DataType.UINT32: "u32",
    DataType.INT32: "s32",
    DataType.UINT64: "u64",
    DataType.INT64: "s64",
    DataType.FLOAT16: "f16",
    DataType.BFLOAT16: "bf16",
    DataType.FLOAT32: "f32",
}


# What an H200 does to values on the way to shared memory (recorded).
_NAN_FILL = 0x7FF7  # every 16 bits outside of the tensor, of all types
_TENSOR_FLOATS = (DataType.TFLOAT32, DataType.TFLOAT32_FTZ)
_CONVERTED = (*_TENSOR_FLOATS, DataType.FLOAT32_FTZ)


@lru_cache(maxsize=256)
def _decode_map(form: bytes) -> TensorMap:
    """The tensor map in 128 bytes, checked."""
    try:
        tensor = unpack(form)
    except ValueError as error:
        raise TensorMapError(str(error)) from None
    tensor.check_supported()
    return tensor


def read_map(cta: Cta, address: int) -> TensorMap:
    """The tensor map at a generic address.

    Raises
    ------
    TensorMapError
        There is none, or the address is misaligned.
    """
    if address % MAP_ALIGNMENT:
        raise TensorMapError(f"a tensor map must be aligned to 64 bytes, got {address:#x}")
    region, start = cta.launch.region_of(cta, address)
    where = region.range(start, MAP_BYTES)
    if (region.shadow[where.where] & GENERIC).any():
        raise MissingProxyFence(
            f"{region.name}: a tensor map at {address:#x} that the generic proxy wrote, with no"
            " fence.proxy.tensormap that acquires it"
        )
    return _decode_map(where.load().tobytes())


@dataclass(frozen=True)
class _Coordinates:
    """The operand `[tensorMap, {c0, c1, ...}]`."""

    where: MemoryOperand
    slots: tuple[int, ...]
    by_rows: bool

    def request(self, warp: Warp, lane: int) -> tuple[int, tuple[int, ...]]:
        """A lane's address of a tensor map, and coordinates."""
        address = int(self.where.evaluate(warp, None)[lane])
        return address, tuple(int(warp.slots[slot][lane]) for slot in self.slots)

    def evaluate(self, warp: Warp, lane: int) -> tuple[TensorMap, Box]:
        """A lane's tensor map and the box at its coordinates."""
        address, coordinates = self.request(warp, lane)
        tensor = read_map(warp.cta, address)
        if self.by_rows:
            return tensor.of_rows(len(coordinates) - 1), tensor.locate_rows(*coordinates)
        return tensor, tensor.locate(coordinates)


def _take_coordinates(op: Decoder, operand: Operand) -> _Coordinates:
    """Take the number of dimensions and the tensor operand."""
    dimensions = 1 + DIMENSIONS.index(op.one_of(*DIMENSIONS))
    # One column, four rows.
    by_rows = op.one_of("tile", "tile::gather4", "tile::scatter4", default="tile") != "tile"
    if by_rows and dimensions != 2:
        raise op.unsupported("rows of a tensor that is no matrix")
    if not isinstance(operand, Address) or len(operand.extra) != 1:
        raise op.unsupported("a tensor map and coordinates are needed")
    vector = operand.extra[0]
    elements = vector.elements if isinstance(vector, Vector) else (vector,)
    if len(elements) != (5 if by_rows else dimensions):
        raise op.unsupported(f"{len(elements)} coordinates in {dimensions} dimensions")
    where = op.memory(Address(operand.base, operand.offset))
    return _Coordinates(where, tuple(op.source(element, np.int32) for element in elements), by_rows)


def _round_to_tensor_floats(content: np.ndarray) -> np.ndarray:
    """FP32 values rounded to the nearest TF32, bytes to bytes.

    Raises
    ------
    UnsupportedInstruction
        A value is a tie, infinite or NaN: none was recorded.
    """
    bits = np.ascontiguousarray(content).view(np.uint32)
    tie = bits & np.uint32(0x1FFF) == 0x1000
    if (tie | (bits & np.uint32(0x7F80_0000) == 0x7F80_0000)).any():
        raise UnsupportedInstruction("a tensor copy of ties, infinities or NaN to TF32")
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFF_E000)).view(np.uint8)


class _GlobalBox:
    """The bytes of a box that lie inside the tensor, in global memory."""

    def __init__(self, cta: Cta, box: Box) -> None:
        self.box = box
        self.inside = np.flatnonzero(box.row_inside)
        self.columns = slice(box.inner_start, box.inner_stop)
        width = box.inner_stop - box.inner_start
        self.empty = not len(self.inside) or width == 0
        if self.empty:
            return
        starts = box.row_addresses[self.inside] + box.inner_start
        region = cta.launch.memory.find(int(starts[0]))
        packed = starts[0] + np.arange(len(starts)) * width
        if np.array_equal(starts, packed):
            self.bytes: Bytes = region.range(int(starts[0]), len(starts) * width)
        else:
            self.bytes = region.bytes_at(starts[:, None] + np.arange(width))

    def ranges(self) -> list[Bytes]:
        """What an operation touches."""
        return [] if self.empty else [self.bytes]

    def undefined(self) -> np.ndarray:
        """Which bytes of the box, as `load` gives them, nothing has written."""
        flags = np.zeros((len(self.box.row_addresses), self.box.row_bytes), bool)
        if not self.empty:
            flags[self.inside, self.columns] = self.bytes.undefined.reshape(len(self.inside), -1)
        return flags

    def load(self, tensor: TensorMap) -> np.ndarray:
        """The whole box as shared memory gets it, uint8 `[rows, row_bytes]`."""
        box = self.box
        shape = len(box.row_addresses), box.row_bytes
        data = np.full((shape[0], shape[1] // 2), _NAN_FILL if tensor.oob_fill else 0, np.uint16)
        data = data.view(np.uint8)
        if not self.empty:
            content = self.bytes.load()
            if tensor.data_type in _TENSOR_FLOATS:
                content = _round_to_tensor_floats(content)
            data[self.inside, self.columns] = content.reshape(len(self.inside), -1)
        return data

    def within(self, data: np.ndarray) -> np.ndarray:
        """Those bytes of a box `[rows, row_bytes]` that lie inside the tensor."""
        return data[self.inside, self.columns].reshape(-1)


def _cell_rows(cta: Cta) -> np.ndarray:
    """Shared memory as rows of 16 bytes, from its origin on; a view."""
    return cta.shared.storage.reshape(-1, CELL)


def _shared_box(cta: Cta, tensor: TensorMap, start: int) -> tuple[Bytes, np.ndarray]:
    """The bytes of a box in shared memory, and where in them each of its 16-byte cells is."""
    cells = tensor.shared_cells(start).reshape(-1)
    if tensor.shared_pitch == tensor.row_bytes:
        return cta.shared.range(start, tensor.box_bytes), (cells - start) // CELL
    return cta.shared.bytes_at(cells[:, None] + np.arange(CELL)), np.arange(len(cells))


@instruction("cp.async.bulk.tensor")
def compile_tensor(op: Decoder) -> Closure:
    """Copies between global tensors and boxes in shared memory."""
    if op.flag("bulk_group"):
        op.one_of("global")
        op.one_of("shared::cta")
        return _compile_store(op, None)
    op.one_of("mbarrier::complete_tx::bytes")
    op.one_of("shared::cluster", "shared::cta")
    op.one_of("global")
    op.flag("cta_group::1")
    return _compile_load(op)


def _compile_load(op: Decoder) -> Closure:
    """From a global tensor to shared memory, completing on an mbarrier."""
    ranks = take_load_options(op, 3)
    target, tensor = op.memory(0), _take_coordinates(op, op.operands[1])
    barriers = BarrierOperand("shared", op.memory(2))
    name = op.instruction.text

    def run(warp: Warp, mask: Mask) -> None:
        lanes = np.flatnonzero(warp.lanes(mask)).tolist()
        offsets = barriers.offsets(warp, mask)
        for lane, to, barrier in zip(
            lanes, target.evaluate(warp, mask).tolist(), offsets, strict=True
        ):
            ranks.check(warp, lane)
            _start_load(warp, name, to, *tensor.evaluate(warp, lane), barrier)

    return run


def _start_load(warp: Warp, name: str, to: int, tensor: TensorMap, box: Box, barrier: int) -> None:
    """Start the load of one box."""
    tensor.check_shared_address(to)
    cta = warp.cta
    source = _GlobalBox(cta, box)
    target, order = _shared_box(cta, tensor, to)
    rows = ((tensor.shared_cells(to) - cta.shared.origin) // CELL).reshape(-1)

    def move(piece: slice) -> Callable[[], None]:
        def run() -> None:
            _cell_rows(cta)[rows[piece]] = source.load(tensor).reshape(-1, CELL)[piece]

        return run

    pieces = [(move(piece), (piece.stop - piece.start) * CELL) for piece in split(cta, len(rows))]

    def undefined() -> np.ndarray:
        flags = np.empty((len(order), CELL), bool)
        flags[order] = source.undefined().reshape(-1, CELL)
        return flags.reshape(-1)

    found = cta.extension(MBarriers).at(barrier)
    submit_load(warp, name, source.ranges(), target, pieces, found, undefined)


def _compile_store(op: Decoder, reduction: str | None) -> Closure:
    """From shared memory to a global tensor, in a bulk async-group."""
    take_cache_policy(op, 2)
    tensor, source = _take_coordinates(op, op.operands[0]), op.memory(1)
    name = op.instruction.text

    def run(warp: Warp, mask: Mask) -> None:
        lanes = np.flatnonzero(warp.lanes(mask)).tolist()
        places = [tensor.request(warp, lane) for lane in lanes]
        requests = zip(places, source.evaluate(warp, mask).tolist(), strict=True)
        for chosen, (_, start) in stores(lanes, requests, reduction is not None):
            threads = [thread_of(warp, lane) for lane in chosen]
            _start_store(warp, threads, name, start, *tensor.evaluate(warp, chosen[0]), reduction)

    return run


def _start_store(
    warp: Warp,
    threads: list[int],
    name: str,
    start: int,
    tensor: TensorMap,
    box: Box,
    reduction: str | None,
) -> None:
    """Start the store, or reduction, of one box."""
    tensor.check_shared_address(start)
    cta = warp.cta
    if box.starts_before:
        # The ISA does not say so, but an H200 stops with an illegal instruction (recorded).
        raise TensorMapError("a box must not be written at negative coordinates")
    if tensor.data_type in _CONVERTED or (reduction is not None and box.splits_a_cell):
        raise UnsupportedInstruction(f"{name}: writing converted types, or reducing parts of cells")
    # The ISA says that what lies outside is not written, but an H200 writes whole cells (recorded).
    place = _GlobalBox(cta, box.in_whole_cells())
    source, order = _shared_box(cta, tensor, start)
    targets: list[Bytes] = []
    store: Callable[[np.ndarray, np.ndarray], None] = lambda data, undefined: None  # noqa: E731
    if not place.empty:
        how = None if reduction is None else (reduction, _reduction_type(tensor, reduction))
        targets, store = delivery(place.bytes, how)

    def deliver(*data_and_flags: np.ndarray) -> None:
        rows = [each.reshape(-1, CELL)[order] for each in data_and_flags]
        if not place.empty:
            store(*(place.within(each.reshape(-1, tensor.row_bytes)) for each in rows))

    groups = cta.extension(BulkGroups)
    groups.submit(warp, threads, name, source, targets, deliver)


def _reduction_type(tensor: TensorMap, reduction: str) -> str:
    """The element type of a reduction.

    Raises
    ------
    UnsupportedInstruction
        The operation does not take the tensor map's type.
    """
    name = REDUCTION_TYPES.get(DataType(tensor.data_type), "")
    bits = {"u32": "b32", "s32": "b32", "u64": "b64", "s64": "b64"}.get(name)
    for candidate in (name, bits):
        if candidate in GLOBAL_TYPES[reduction]:
            return candidate
    raise UnsupportedInstruction(
        f"cp.reduce.async.bulk.tensor .{reduction} of {DataType(tensor.data_type).name}"
    )


@instruction("cp.reduce.async.bulk.tensor")
def compile_reduce_tensor(op: Decoder) -> Closure:
    """Reductions from shared memory to a global tensor."""
    op.one_of("global")
    op.one_of("shared::cta")
    op.one_of("bulk_group")
    return _compile_store(op, op.one_of(*GLOBAL_TYPES))


@instruction("cp.async.bulk.prefetch.tensor")
def compile_prefetch_tensor(op: Decoder) -> Closure:
    """A hint: only the tensor map and the coordinates are checked."""
    op.one_of("L2")
    op.one_of("global")
    take_cache_policy(op, 1)
    tensor = _take_coordinates(op, op.operands[0])

    def run(warp: Warp, mask: Mask) -> None:
        for lane in np.flatnonzero(warp.lanes(mask)).tolist():
            tensor.evaluate(warp, lane)

    return run


@instruction("prefetch.tensormap", "prefetch.param.tensormap", "prefetch.const.tensormap")
def compile_prefetch_map(op: Decoder) -> Closure:
    """A hint: only the tensor map is checked."""
    op.expect_operands(1)
    where = op.memory(0)

    def run(warp: Warp, mask: Mask) -> None:
        for address in where.evaluate(warp, mask).tolist():
            read_map(warp.cta, address)

    return run
