"""E2M1 codes against a slow encoder and every byte."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdsa_quant.errors import DtypeError, InputError
from sdsa_quant.formats import e2m1


def nearest_code(value: float) -> int:
    """Nearest of the eight magnitudes; on a tie the even code wins."""
    distances = [abs(min(abs(value), 6.0) - m) for m in e2m1.MAGNITUDES]
    least = min(distances)
    nearest = [code for code, distance in enumerate(distances) if distance == least]
    code = nearest[0] if len(nearest) == 1 else next(c for c in nearest if c % 2 == 0)
    return code | (8 if math.copysign(1.0, value) < 0 else 0)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_encode_is_nearest_even(values: list[float]) -> None:
    codes = e2m1.encode(torch.tensor(values, dtype=torch.float32))
    assert codes.tolist() == [nearest_code(value) for value in values]


@pytest.mark.parametrize(
    ("value", "code"),
    [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6), (1e30, 7)],
)
def test_ties_and_saturation(value: float, code: int) -> None:
    both = e2m1.encode(torch.tensor([value, -value]))
    assert both.tolist() == [code, code | 8]


def test_steps_next_to_each_tie() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    below = torch.nextafter(ties, torch.zeros_like(ties))
    above = torch.nextafter(ties, torch.full_like(ties, 10.0))
    assert e2m1.encode(below).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert e2m1.encode(above).tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_negative_zero_keeps_its_sign_and_the_caller_its_tensor() -> None:
    values = torch.tensor([-0.0, 0.0, -0.1])
    before = values.clone()
    assert e2m1.encode(values).tolist() == [8, 0, 8]
    assert torch.equal(values.view(torch.int32), before.view(torch.int32))


def test_decode_inverts_encode() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = e2m1.decode(codes)
    assert torch.equal(e2m1.encode(values), codes)


def test_every_byte_unpacks_and_packs() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(4, 64)
    codes = e2m1.unpack(packed)
    assert codes.shape == (4, 128)
    assert torch.equal(codes[..., 0::2], packed % 16)
    assert torch.equal(codes[..., 1::2], packed // 16)
    assert torch.equal(e2m1.pack(codes), packed)
    assert torch.equal(e2m1.pack(codes.int()), packed)
    in_place = torch.empty_like(packed)
    e2m1.pack_in_place(codes.int(), in_place)
    assert torch.equal(in_place, packed)


def test_every_byte_unpacks_to_float16() -> None:
    packed = torch.arange(256, dtype=torch.uint8)
    values = e2m1.unpack_float16(packed).float() * e2m1.UNPACKED_UNIT
    expected = e2m1.decode(e2m1.unpack(packed))
    assert torch.equal(values.view(torch.int32), expected.view(torch.int32))  # signs of 0 too


def test_odd_codes_are_refused() -> None:
    with pytest.raises(InputError, match=r"even last dimension, got \[3\]"):
        e2m1.pack(torch.zeros(3, dtype=torch.int32))


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(DtypeError, match=r"must be float32, got torch\.bfloat16"):
        e2m1.encode(torch.zeros(2, dtype=torch.bfloat16))
