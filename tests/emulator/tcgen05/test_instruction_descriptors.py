"""Instruction descriptors, built bit by bit from the ISA's tables."""

import pytest

from emulator.errors import UnsupportedInstruction
from emulator.numbers import number_formats as formats

from .instruction_descriptors import decode_instruction_descriptor
from .matrix_descriptors import DescriptorError


def plain(m: int, n: int, *, d: int = 1, a: int = 0, b: int = 0, extra: int = 0) -> int:
    """Table of kinds tf32, f16, f8f6f4 and i8."""
    return d << 4 | a << 7 | b << 10 | (n >> 3) << 17 | (m >> 4) << 24 | extra


def scaled(
    n: int, *, a: int = 1, b: int = 1, sfa: int = 0, sfb: int = 0, ue8m0: int = 0, extra: int = 0
) -> int:
    """Tables of the block-scaled kinds, M = 128."""
    word = sfb << 4 | a << 7 | b << 10 | (n >> 3) << 17 | ue8m0 << 23
    return word | (128 >> 7) << 27 | sfa << 29 | extra


def test_f16_fields() -> None:
    word = plain(128, 8, a=1, b=0, extra=1 << 14 | 1 << 15)
    decoded = decode_instruction_descriptor(word, "f16")
    assert (decoded.rows, decoded.columns, decoded.depth) == (128, 8, 16)
    assert (decoded.a_type, decoded.b_type, decoded.d_type) == (
        formats.BF16,
        formats.F16,
        formats.F32,
    )
    assert (decoded.negate_a, decoded.negate_b) == (False, True)
    assert (decoded.transpose_a, decoded.transpose_b) == (True, False)


ACCEPTED = {
    "f16-to-f16": ("f16", 0, plain(64, 256, d=0), (64, 256, 16), formats.F16),
    "tf32": ("tf32", 0, plain(64, 16, a=2, b=2), (64, 16, 8), formats.TF32),
    "e3m2": ("f8f6f4", 0, plain(128, 24, a=4, b=5), (128, 24, 32), formats.E3M2),
    "s8": ("i8", 0, plain(128, 48, d=2, a=1, extra=1 << 3), (128, 48, 32), formats.S8),
    "mxf8": ("mxf8f6f4", 1, scaled(8, a=0, b=3, sfa=3, sfb=2, ue8m0=1), (128, 8, 32), formats.E4M3),
    "mxf4": ("mxf4", 2, scaled(256, sfa=2, ue8m0=1), (128, 256, 64), formats.E2M1),
    "nvf4": ("mxf4nvf4", 4, scaled(8), (128, 8, 64), formats.E2M1),
    "nvf4-ue8m0": ("mxf4nvf4", 4, scaled(8, ue8m0=1), (128, 8, 64), formats.E2M1),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_shapes_and_types(name: str) -> None:
    kind, vector, word, shape, a_type = ACCEPTED[name]
    decoded = decode_instruction_descriptor(word, kind, vector)
    assert (decoded.rows, decoded.columns, decoded.depth) == shape
    assert decoded.a_type is a_type


def test_scale_fields() -> None:
    word = scaled(8, a=0, b=3, sfa=3, sfb=2, ue8m0=1)
    decoded = decode_instruction_descriptor(word, "mxf8f6f4", 1)
    assert (decoded.scale_a_id, decoded.scale_b_id) == (3, 2)
    assert decoded.scale_type is formats.UE8M0
    assert decode_instruction_descriptor(scaled(8), "mxf4nvf4", 4).scale_type is formats.UE4M3


REFUSED = {
    "m": ("f16", 0, plain(96, 8), "M = 96"),
    "m-scaled": ("mxf4nvf4", 4, scaled(8) ^ 1 << 27, "M = 0"),
    "n": ("f16", 0, plain(128, 0), "N = 0"),
    "n-264": ("f16", 0, plain(128, 264), "N = 264"),
    "n-i8": ("i8", 0, plain(128, 40, d=2), "N = 40"),
    "n-transposed": ("f8f6f4", 0, plain(128, 24, extra=1 << 16), "N = 24 with 8-bit MN-major B"),
    "transposed-6-bit": ("f8f6f4", 0, plain(128, 16, b=4, extra=1 << 16), "MN-major B of 6-bit"),
    "type": ("f16", 0, plain(128, 8, a=2), "type of A is 2"),
    "result": ("tf32", 0, plain(128, 8, d=0, a=2, b=2), "type of D is 0"),
    "bf16-result": ("f16", 0, plain(128, 8, d=0, a=1, b=1), "BF16 inputs need an F32 result"),
    "negate-i8": ("i8", 0, plain(128, 8, d=2, extra=1 << 13), "bits 13-14"),
    "saturate-f16": ("f16", 0, plain(128, 8, extra=1 << 3), "bits 3-3"),
    "shift": ("f16", 0, plain(128, 8, extra=1 << 30), "bits 30-31"),
    "reserved-23": ("f16", 0, plain(128, 8, extra=1 << 23), "bits 23-23"),
    "reserved-24": ("mxf4nvf4", 4, scaled(8, extra=1 << 24), "bits 24-26"),
    "transposed-4-bit": ("mxf4nvf4", 4, scaled(8, extra=1 << 15), "bits 15-16"),
    "id-4x": ("mxf4nvf4", 4, scaled(8, sfa=2), "scale factor id 2 of A with 4"),
    "id-2x": ("mxf4", 2, scaled(8, sfb=1, ue8m0=1), "scale factor id 1 of B with 2"),
    "ue4m3-2x": ("mxf4nvf4", 2, scaled(8), "UE4M3 scales, 2 to a row"),
    "ue4m3-mxf8": ("mxf8f6f4", 1, scaled(8), "UE4M3 scales, 1 to a row"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_fields_that_are_refused(name: str) -> None:
    kind, vector, word, message = REFUSED[name]
    with pytest.raises(DescriptorError, match=message):
        decode_instruction_descriptor(word, kind, vector)


def test_what_is_not_implemented_is_named() -> None:
    with pytest.raises(UnsupportedInstruction, match="sparse"):
        decode_instruction_descriptor(plain(128, 8, extra=1 << 2), "f16")
    with pytest.raises(UnsupportedInstruction, match="K = 96"):
        decode_instruction_descriptor(scaled(8, extra=1 << 31), "mxf4nvf4", 4)
