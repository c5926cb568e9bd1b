"""Instruction descriptors of tcgen05.mma: types, shape and modifiers of an MMA.

Source: PTX ISA, "Instruction descriptor" (three tables by kind), "Matrix Shape" (which M, N and K),
"Transpose and Negate operations" and "Valid combinations of scale_vectorsize with types and
MMA-Kind".
"""

from dataclasses import dataclass

from emulator.errors import UnsupportedInstruction
from emulator.numbers import number_formats as formats

from .matrix_descriptors import DescriptorError, field

EIGHT_BIT_TYPES = {
    0: formats.E4M3,
    1: formats.E5M2,
    3: formats.E2M3,
    4: formats.E3M2,
    5: formats.E2M1,
}
INPUT_TYPES: dict[str, dict[int, formats.Format]] = {
    "f16": {0: formats.F16, 1: formats.BF16},
    "tf32": {2: formats.TF32},
    "f8f6f4": dict(EIGHT_BIT_TYPES),
    "i8": {0: formats.U8, 1: formats.S8},
    "mxf8f6f4": dict(EIGHT_BIT_TYPES),
    "mxf4": {1: formats.E2M1},
    "mxf4nvf4": {1: formats.E2M1},
}
OUTPUT_TYPES: dict[str, dict[int, formats.Format]] = {
    "f16": {0: formats.F16, 1: formats.F32},
    "tf32": {1: formats.F32},
    "f8f6f4": {0: formats.F16, 1: formats.F32},
    "i8": {2: formats.S32},
}
DEPTH = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}
SCALED_KINDS = ("mxf8f6f4", "mxf4", "mxf4nvf4")

# Scale factors per row and MMA, by kind and qualifier; "" is the default of the kind.
SCALE_VECTORS = {
    "mxf8f6f4": {"": 1, "scale_vec::1X": 1, "block32": 1},
    "mxf4": {"": 2, "scale_vec::2X": 2, "block32": 2},
    "mxf4nvf4": {"scale_vec::2X": 2, "block32": 2, "scale_vec::4X": 4, "block16": 4},
}
SCALE_IDS = {1: (0, 1, 2, 3), 2: (0, 2), 4: (0,)}


@dataclass(frozen=True)
class InstructionDescriptor:
    """What one dense `tcgen05.mma` computes.

    Attributes
    ----------
    kind : str
        MMA-kind without `kind::`.
    rows, columns, depth : int
        M, N and K.
    a_type, b_type, d_type : Format
        Element formats.
    negate_a, negate_b : bool
        Whether the elements of a matrix are negated.
    transpose_a, transpose_b : bool
        Whether a matrix in shared memory is MN-major.
    saturate : bool
        Whether integer results saturate.
    scale_type : Format or None
        Format of the scale factors of a block-scaled kind.
    scale_a_id, scale_b_id : int
        First byte of a scale word that is used.
    """

    kind: str
    rows: int
    columns: int
    depth: int
    a_type: formats.Format
    b_type: formats.Format
    d_type: formats.Format
    negate_a: bool
    negate_b: bool
    transpose_a: bool
    transpose_b: bool
    saturate: bool = False
    scale_type: formats.SmallFloat | None = None
    scale_a_id: int = 0
    scale_b_id: int = 0


class _Reader:
    """Takes fields out of a descriptor and refuses what is not allowed."""

    def __init__(self, word: int, kind: str) -> None:
        self.word = word
        self.kind = kind

    def refuse(self, reason: str) -> DescriptorError:
        """An error that names the descriptor."""
        return DescriptorError(f"instruction descriptor {self.word:#010x} of {self.kind}: {reason}")

    def number(self, low: int, high: int) -> int:
        """Bits `low` to `high`."""
        return field(self.word, low, high)

    def flag(self, bit: int) -> bool:
        """One bit."""
        return bool(self.word >> bit & 1)

    def zero(self, low: int, high: int, what: str = "reserved") -> None:
        """Demand that bits are 0."""
        if self.number(low, high):
            raise self.refuse(f"bits {low}-{high} ({what}) must be 0, got {self.number(low, high)}")

    def choose(
        self, low: int, high: int, choices: dict[int, formats.Format], what: str
    ) -> formats.Format:
        """The format that bits select."""
        value = self.number(low, high)
        if value not in choices:
            raise self.refuse(f"{what} is {value}, allowed are {sorted(choices)}")
        return choices[value]


def decode_instruction_descriptor(
    word: int, kind: str, scale_vector: int = 0
) -> InstructionDescriptor:
    """Decode the 32-bit descriptor of a dense MMA of `.cta_group::1`.

    Parameters
    ----------
    word : int
        The descriptor.
    kind : str
        MMA-kind without `kind::`.
    scale_vector : int
        Scale factors per row (1, 2, 4) of a block-scaled kind, else 0.

    Raises
    ------
    DescriptorError
        A field holds what the ISA does not allow.
    UnsupportedInstruction
        Sparse matrices, or K = 96.
    """
    read = _Reader(word, kind)
    if read.flag(2):
        raise UnsupportedInstruction(f"instruction descriptor {word:#010x}: sparse matrix")
    descriptor = _decode_scaled(read, scale_vector) if scale_vector else _decode_plain(read)
    _check_shape(read, descriptor)
    return descriptor


def _decode_plain(read: _Reader) -> InstructionDescriptor:
    """Kinds f16, tf32, f8f6f4 and i8."""
    kind = read.kind
    read.zero(0, 1, "sparsity selector")
    for bit in (6, 23, 29):
        read.zero(bit, bit)
    read.zero(30, 31, "maximum shift of .ws")
    if kind != "i8":
        read.zero(3, 3, "saturate")
    else:
        read.zero(13, 14, "negate")
    descriptor = InstructionDescriptor(
        kind=kind,
        rows=read.number(24, 28) << 4,
        columns=read.number(17, 22) << 3,
        depth=DEPTH[kind],
        a_type=read.choose(7, 9, INPUT_TYPES[kind], "type of A"),
        b_type=read.choose(10, 12, INPUT_TYPES[kind], "type of B"),
        d_type=read.choose(4, 5, OUTPUT_TYPES[kind], "type of D"),
        negate_a=read.flag(13),
        negate_b=read.flag(14),
        transpose_a=read.flag(15),
        transpose_b=read.flag(16),
        saturate=read.flag(3),
    )
    if descriptor.d_type is formats.F16 and formats.BF16 in (descriptor.a_type, descriptor.b_type):
        raise read.refuse("BF16 inputs need an F32 result")
    return descriptor


def _decode_scaled(read: _Reader, scale_vector: int) -> InstructionDescriptor:
    """Kinds mxf8f6f4, mxf4 and mxf4nvf4."""
    kind = read.kind
    read.zero(0, 1)
    for bit in (3, 6):
        read.zero(bit, bit)
    read.zero(24, 26)
    if kind == "mxf8f6f4":
        read.zero(31, 31)
    else:
        read.zero(12, 12)
        read.zero(15, 16, "transpose")
        if read.flag(31):
            raise UnsupportedInstruction(f"instruction descriptor {read.word:#010x}: K = 96")
    scale_ids = read.number(29, 30), read.number(4, 5)
    for scale_id, matrix in zip(scale_ids, "AB", strict=True):
        if scale_id not in SCALE_IDS[scale_vector]:
            raise read.refuse(
                f"scale factor id {scale_id} of {matrix} with {scale_vector} scales to a row"
            )
    return InstructionDescriptor(
        kind=kind,
        rows=read.number(27, 28) << 7,
        columns=read.number(17, 22) << 3,
        depth=DEPTH[kind],
        a_type=read.choose(7, 9, INPUT_TYPES[kind], "type of A"),
        b_type=read.choose(10, 12 if kind == "mxf8f6f4" else 11, INPUT_TYPES[kind], "type of B"),
        d_type=formats.F32,
        negate_a=read.flag(13),
        negate_b=read.flag(14),
        transpose_a=read.flag(15),
        transpose_b=read.flag(16),
        scale_type=_scale_type(read, scale_vector),
        scale_a_id=scale_ids[0],
        scale_b_id=scale_ids[1],
    )


def _scale_type(read: _Reader, scale_vector: int) -> formats.SmallFloat:
    """UE8M0 where bit 23 is set; UE4M3 else, which only mxf4nvf4 with 4 scales to a row has."""
    if read.flag(23):
        return formats.UE8M0
    if read.kind != "mxf4nvf4" or scale_vector != 4:
        raise read.refuse(f"UE4M3 scales, {scale_vector} to a row")
    return formats.UE4M3


def _check_shape(read: _Reader, descriptor: InstructionDescriptor) -> None:
    """M and N of the table "Various combinations of .kind and shapes", `.cta_group::1`, dense."""
    rows, columns = descriptor.rows, descriptor.columns
    if rows not in ((128,) if descriptor.kind in SCALED_KINDS else (64, 128)):
        raise read.refuse(f"M = {rows}")
    if not 8 <= columns <= 256:
        raise read.refuse(f"N = {columns}")
    if descriptor.kind == "i8" and columns > 32 and columns % 16:
        raise read.refuse(f"N = {columns}")
    if descriptor.transpose_b and descriptor.b_type.bits == 8 and columns % 16:
        raise read.refuse(f"N = {columns} with 8-bit MN-major B")
    for transposed, format_, matrix in (
        (descriptor.transpose_a, descriptor.a_type, "A"),
        (descriptor.transpose_b, descriptor.b_type, "B"),
    ):
        if transposed and format_.bits < 8:
            raise read.refuse(f"MN-major {matrix} of {format_.bits}-bit elements")
