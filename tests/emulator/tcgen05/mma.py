"""`tcgen05.mma`: D = A * B + D in tensor memory, with or without block scaling.

Source: PTX ISA, "TensorCore 5th Generation Instructions: tcgen05.mma". Numerics: the ISA does not
fix how a tensor core sums. Here the products and the scaled products are exact, all K of them are
summed with D in float64, and the sum is rounded once to the type of D; with integer inputs (and
power-of-two scales) nothing is rounded, so such results hold bit for bit.

Not implemented, and refused by name: `.sp`, `.ws`, `.ashift`, `.cta_group::2`, K = 96.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from emulator.errors import TensorMemoryMisuse
from emulator.instructions.registry import Closure, Decoder, Mask, MemoryOperand, instruction
from emulator.numbers import number_formats as formats
from emulator.syntax.module import Address, Immediate, Vector

from .instruction_descriptors import (
    INPUT_TYPES,
    SCALE_VECTORS,
    InstructionDescriptor,
    decode_instruction_descriptor,
)
from .matrix_descriptors import DescriptorError
from .matrix_operands import (
    ROW_BYTES,
    ScaleOperand,
    SharedOperand,
    data_path_lanes,
    decode_tensor_memory_operand,
    scale_operand,
    shared_operand,
)
from .tensor_core import TensorCore, thread_of
from .tensor_memory import ALL_LANES, LANES, WORD, Footprint, lane_mask, split_address
from .tensor_order import TensorOperation

if TYPE_CHECKING:
    from emulator.machine.execution import Warp

COLLECTOR_USES = ("fill", "use", "lastuse", "discard")
PACKED_KINDS = ("mxf4", "mxf4nvf4")
MAX_SCALE_INPUT = 15
UNSPECIFIED = 0xFFA5 << 16  # upper half of a word that holds a 16-bit result

decode_descriptor = lru_cache(maxsize=1024)(decode_instruction_descriptor)


@dataclass(frozen=True)
class MmaRequest:
    """One MMA as a thread issues it.

    Attributes
    ----------
    descriptor : InstructionDescriptor
        Types and shape.
    d, a, b : int
        Tensor-memory address of D; of A or its descriptor; descriptor of B.
    a_in_tensor_memory : bool
        What `a` is.
    accumulate : bool
        Whether D is an input.
    input_shift : int
        D enters as `D * 2**-input_shift`.
    disabled : int
        Lanes of D that keep their values, as bits.
    scale_a, scale_b : int
        Tensor-memory addresses of the scale factors.
    scale_vector : int
        Scale factors to a row; 0 without block scaling.
    """

    descriptor: InstructionDescriptor
    d: int
    a: int
    b: int
    a_in_tensor_memory: bool
    accumulate: bool
    input_shift: int = 0
    disabled: int = 0
    scale_a: int = 0
    scale_b: int = 0
    scale_vector: int = 0


@lru_cache(maxsize=64)
def _result_lanes(rows: int, lane: int, disabled: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Rows of D that are written, their lanes, and these as bits."""
    lanes = data_path_lanes(rows, lane)
    kept = np.array([not disabled >> int(lane) & 1 for lane in lanes])
    return np.flatnonzero(kept), lanes[kept], lane_mask(lanes[kept])


def _columns(first: int, count: int) -> slice:
    """Byte offsets, within a lane, of a run of columns."""
    return slice(first * WORD, (first + count) * WORD)


class _Mma:
    """The execution of one request."""

    def __init__(self, core: TensorCore, request: MmaRequest) -> None:
        self.core = core
        self.request = request
        what = request.descriptor
        self.what = what
        lane, self.d_column = split_address(request.d)
        self.rows, self.lanes, lane_bits = _result_lanes(what.rows, lane, request.disabled)
        self.result = Footprint(lane_bits, self.d_column, self.d_column + what.columns)
        self.reads: list[Footprint] = [self.result] if request.accumulate else []
        self.shared_a = self._place_a()
        self.shared_b = shared_operand(
            request.b,
            what.b_type,
            what.columns,
            what.depth,
            transposed=what.transpose_b,
            packed=what.kind in PACKED_KINDS,
        )
        self.scales = self._place_scales()

    def _place_a(self) -> SharedOperand | None:
        """A in shared memory, or None after noting its cells in tensor memory."""
        request, what = self.request, self.what
        if not request.a_in_tensor_memory:
            return shared_operand(
                request.a,
                what.a_type,
                what.rows,
                what.depth,
                transposed=what.transpose_a,
                packed=what.kind in PACKED_KINDS,
            )
        if what.transpose_a:
            raise DescriptorError("A in tensor memory cannot be transposed")
        lane, self.a_column = split_address(request.a)
        if lane != split_address(request.d)[0]:
            raise DescriptorError(f"A starts at lane {lane}, D does not")
        self.a_lanes = data_path_lanes(what.rows, lane)
        cells = ROW_BYTES // WORD
        self.reads.append(Footprint(lane_mask(self.a_lanes), self.a_column, self.a_column + cells))
        return None

    def _place_scales(self) -> tuple[ScaleOperand, ScaleOperand] | None:
        """The scale factors of A and B, after noting their cells."""
        request, what = self.request, self.what
        if not request.scale_vector:
            return None
        scales = (
            scale_operand(request.scale_a, what.rows, what.scale_a_id, request.scale_vector),
            scale_operand(request.scale_b, what.columns, what.scale_b_id, request.scale_vector),
        )
        if scales[1].column % 2:
            what = "tcgen05.mma with scale factors of B from an odd column"
            self.core.cta.launch.note(what, TensorMemoryMisuse)
        for scale in scales:
            self.reads.append(Footprint(ALL_LANES, scale.column, scale.column + scale.columns))
        return scales

    def submit(self, warp: Warp, thread: int, name: str) -> None:
        """Issue it."""
        what = self.what
        shared = self.core.cta.shared
        operands = [operand for operand in (self.shared_a, self.shared_b) if operand is not None]
        self.reads_of_shared = [shared.bytes_at(operand.addresses) for operand in operands]
        operation = TensorOperation(
            "mma",
            range(thread, thread + 1),
            self.reads,
            [self.result],
            pipeline=(self.request.d, what.rows, what.columns, what.depth),
        )
        self.core.submit(warp, operation, self.perform, self.reads_of_shared, name)

    def perform(self) -> None:
        """Multiply and accumulate."""
        self.undefined: list[np.ndarray] = []
        a, b = self._inputs()
        result = a @ b.T
        what, memory = self.what, self.core.memory
        columns = _columns(self.d_column, what.columns)
        undefined: np.ndarray = np.zeros(result.shape, bool)
        for rows_or_columns in self.undefined:
            undefined |= rows_or_columns
        if len(self.rows) < what.rows:
            result, undefined = result[self.rows], undefined[self.rows]
        if self.request.accumulate:
            data, flags = memory.read(self.lanes, columns)
            words = np.ascontiguousarray(data).view(np.uint32)
            result += self._decode(words) * 2.0**-self.request.input_shift
            if flags is not None:
                undefined = undefined | flags.reshape(*words.shape, WORD).any(-1)
        words = self._encode(result)
        flags = np.repeat(undefined, WORD, 1) if undefined.any() else None
        memory.write(self.lanes, columns, words.view(np.uint8), flags)

    def _note_undefined(self, flags: np.ndarray | None, axis: int) -> None:
        """Rows of A (axis 0), or of B (axis 1), some of which is undefined: flags `[rows, ...]`."""
        if flags is not None and flags.any():
            rows = flags.reshape(len(flags), -1).any(1)
            self.undefined.append(np.expand_dims(rows, 1 - axis))

    def _inputs(self) -> tuple[np.ndarray, np.ndarray]:
        """A `[M, K]` and B `[N, K]`, negated and scaled."""
        what = self.what
        *a_bytes, b_bytes = [where.load() for where in self.reads_of_shared]
        for axis, operand in ((0, self.shared_a), (1, self.shared_b)):
            if operand is not None:
                place = self.reads_of_shared[0 if axis == 0 else -1]
                self._note_undefined(place.undefined.reshape(operand.addresses.shape), axis)
        b = self.shared_b.decode(b_bytes.reshape(self.shared_b.addresses.shape))
        if self.shared_a is not None:
            a = self.shared_a.decode(a_bytes[0].reshape(self.shared_a.addresses.shape))
        else:
            columns = _columns(self.a_column, ROW_BYTES // WORD)
            stored, flags = self.core.memory.read(self.a_lanes, columns)
            self._note_undefined(flags, 0)
            a = decode_tensor_memory_operand(stored, what.a_type, what.kind)
        a = -a if what.negate_a else a
        b = -b if what.negate_b else b
        if self.scales is not None:
            assert what.scale_type is not None
            values = []
            for axis, scale in enumerate(self.scales):
                factors, flags = scale.read(self.core.memory, what.scale_type)
                self._note_undefined(flags, axis)
                values.append(_scale((a, b)[axis], factors))
            a, b = values
        return a, b

    def _decode(self, words: np.ndarray) -> np.ndarray:
        """Values of D."""
        if self.what.d_type is formats.F16:
            return formats.F16.decode(words.astype(np.uint16))
        return self.what.d_type.decode(words)

    def _encode(self, values: np.ndarray) -> np.ndarray:
        """Words `[rows, N]` of D."""
        if self.what.d_type is formats.F32:
            return formats.to_f32_bits(values)
        if self.what.d_type is formats.F16:
            return formats.to_f16_bits(values).astype(np.uint32) | np.uint32(UNSPECIFIED)
        return formats.to_s32_bits(values, saturate=self.what.saturate)


def _scale(matrix: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Multiply equal chunks of each row by the row's scale factors."""
    chunks = matrix.reshape(*scales.shape, -1) * scales[:, :, None]
    return chunks.reshape(matrix.shape)


@dataclass(frozen=True)
class _Operands:
    """Where a `tcgen05.mma` finds its operands: addresses, slots and constants."""

    kind: str
    scale_vector: int
    collector: str
    d: MemoryOperand
    a: MemoryOperand | int
    b: int
    descriptor: int
    accumulate: int
    disabled: tuple[int, ...]
    input_shift: int
    scales: tuple[MemoryOperand, ...]

    def request(self, warp: Warp, lane: int) -> MmaRequest:
        """What the thread of a lane issues."""
        slots = warp.slots
        words = [int(slots[slot][lane]) for slot in self.disabled]
        scale_a, scale_b = [_address(warp, scale, lane) for scale in self.scales] or (0, 0)
        return MmaRequest(
            decode_descriptor(int(slots[self.descriptor][lane]), self.kind, self.scale_vector),
            _address(warp, self.d, lane),
            _address(warp, self.a, lane),
            int(slots[self.b][lane]),
            isinstance(self.a, MemoryOperand),
            bool(slots[self.accumulate][lane]),
            self.input_shift,
            sum(word << 32 * i for i, word in enumerate(words)),
            scale_a,
            scale_b,
            self.scale_vector,
        )


def _address(warp: Warp, operand: MemoryOperand | int, lane: int) -> int:
    """A tensor-memory address of one lane, or the descriptor in a slot."""
    if isinstance(operand, int):
        return int(warp.slots[operand][lane])
    return int(operand.evaluate(warp, None)[lane]) & 0xFFFFFFFF


def _decode_operands(op: Decoder) -> _Operands:
    """Take a `tcgen05.mma` apart."""
    op.one_of("cta_group::1")
    kind = op.one_of(*(f"kind::{name}" for name in INPUT_TYPES)).removeprefix("kind::")
    collector = op.one_of(*(f"collector::a::{use}" for use in COLLECTOR_USES), default="discard")
    scaled = op.flag("block_scale")
    if scaled != (kind in SCALE_VECTORS):
        raise op.unsupported(f"kind {kind} {'with' if scaled else 'without'} .block_scale")
    vector = _scale_vector(op, kind) if scaled else 0
    a = op.operands[1]
    rest = list(op.operands[4:])
    scales = tuple(op.memory(operand) for operand in rest[:2]) if scaled else ()
    rest = rest[len(scales) :]
    disabled: tuple[int, ...] = ()
    if rest and isinstance(rest[0], Vector) and not scaled:
        disabled = tuple(op.source(word, np.uint32) for word in op.vector(rest.pop(0)))
        if len(disabled) != LANES // 32:
            raise op.unsupported(f"{len(disabled)} words of disable-output-lane")
    if len(rest) not in ((1,) if scaled else (1, 2)):
        raise op.unsupported(f"{len(op.operands)} operands")
    return _Operands(
        kind,
        vector,
        collector.removeprefix("collector::a::"),
        op.memory(0),
        op.memory(a) if isinstance(a, Address) else op.source(a, np.uint64),
        op.source(2, np.uint64),
        op.source(3, np.uint32),
        op.source(rest[0], np.bool_),
        disabled,
        _input_shift(op, kind, rest[1]) if len(rest) == 2 else 0,
        scales,
    )


def _scale_vector(op: Decoder, kind: str) -> int:
    """Scale factors to a row, from the qualifier or the kind's default."""
    choices = SCALE_VECTORS[kind]
    return choices[op.one_of(*choices, default="" if "" in choices else None)]


def _input_shift(op: Decoder, kind: str, operand: object) -> int:
    """The immediate `scale-input-d`."""
    if kind not in ("f16", "tf32") or not isinstance(operand, Immediate):
        raise op.unsupported("scale-input-d")
    if not 0 <= operand.value <= MAX_SCALE_INPUT:
        raise op.unsupported(f"scale-input-d is 0 to {MAX_SCALE_INPUT}")
    return operand.value


@instruction("tcgen05.mma")
def compile_mma(op: Decoder) -> Closure:
    """One MMA for every active lane."""
    operands = _decode_operands(op)
    name = op.instruction.text

    def run(warp: Warp, mask: Mask) -> None:
        core = warp.cta.extension(TensorCore)
        for lane in np.flatnonzero(warp.lanes(mask)).tolist():
            request = operands.request(warp, lane)
            core.collect(
                operands.collector, (request.a, request.descriptor.rows, request.descriptor.depth)
            )
            _Mma(core, request).submit(warp, thread_of(warp, lane), name)

    return run
