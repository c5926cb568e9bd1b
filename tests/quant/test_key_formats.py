"""Every study format: its bytes, its encoding of 8 hand-made keys, and how much it loses."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sdsa_quant.errors import InputError
from sdsa_quant.formats.key_formats import KEY_FORMATS, key_format

NAMES = list(KEY_FORMATS)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_per_key_are_those_of_the_stored_tensors(
    name: str, generator: torch.Generator
) -> None:
    keys = torch.randn(10, 128, generator=generator).bfloat16()
    stored = KEY_FORMATS[name].encode(keys)
    assert sum(tensor.nbytes for tensor in stored) == 10 * KEY_FORMATS[name].bytes_per_key


@pytest.mark.parametrize("name", NAMES)
def test_a_key_does_not_depend_on_its_neighbours(name: str, generator: torch.Generator) -> None:
    keys = torch.randn(33, 128, generator=generator).bfloat16()
    whole = KEY_FORMATS[name].round_trip(keys)
    assert whole.dtype == torch.float32
    alone = torch.cat([KEY_FORMATS[name].round_trip(key[None]) for key in keys])
    assert torch.equal(whole, alone)


# By hand: one key whose first values are 6, 4.5, 1.25, 0.3 and whose others are 0.
#   bf16:   6, 4.5, 1.25, 0.30078125 (0.3 rounded to 8 bits)
#   nvfp4:  scale 1: 6, 4.5 to 4, 1.25 (a tie) to 1, 0.3 to 0.5
#   4over6: scale 1.5: 6, 4.5, 1.25/1.5 = .83 to 1 x 1.5, 0.3/1.5 = .2 to 0; its squared error
#           .0625 + .09 is less than .25 + .0625 + .04
#   mxfp4:  exponent of 6 is 2, scale 1: as nvfp4
#   fp8:    scale 6/448; 4.5 x 448/6 = 336, a tie between 320 and 352: even mantissa, 320 (x 6/448 =
#           4.2857); 1.25 x 448/6 = 93.33 to 96 (1.2857); 0.3 x 448/6 = 22.4 to 22 (0.29464)
HAND = {
    "bf16": [6.0, 4.5, 1.25, 0.30078125],
    "nvfp4": [6.0, 4.0, 1.0, 0.5],
    "nvfp4-mixed": [6.0, 4.0, 1.0, 0.5],
    "nvfp4-4over6": [6.0, 4.5, 1.5, 0.0],
    "mxfp4": [6.0, 4.0, 1.0, 0.5],
    "fp8": [6.0, 320 * 6 / 448, 96 * 6 / 448, 22 * 6 / 448],
}


@pytest.mark.parametrize("name", NAMES)
def test_one_key_by_hand(name: str) -> None:
    key = torch.zeros(128)
    key[:4] = torch.tensor([6.0, 4.5, 1.25, 0.3])
    decoded = KEY_FORMATS[name].round_trip(key)
    assert decoded[:4].tolist() == pytest.approx(HAND[name], rel=1e-6)
    assert not decoded[4:].any()


def test_formats_lose_as_much_as_their_bits_say(generator: torch.Generator) -> None:
    keys = torch.randn(2000, 128, generator=generator).bfloat16()

    def error(name: str) -> float:
        return float((KEY_FORMATS[name].round_trip(keys) - keys.float()).norm() / keys.norm())

    assert error("bf16") == 0
    assert 0 < error("fp8") < 0.03 < error("nvfp4-4over6") < error("nvfp4") < error("mxfp4") < 0.13


def test_query_rows_stay_bf16_only_where_they_should() -> None:
    assert {name for name in NAMES if not KEY_FORMATS[name].quantizes_query} == {
        "bf16",
        "nvfp4-mixed",
    }


def test_formats_are_frozen_and_named() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        KEY_FORMATS["fp8"].name = "other"  # type: ignore[misc]
    with pytest.raises(InputError, match=r"format must be one of bf16, nvfp4, .*, got 'int8'"):
        key_format("int8")
