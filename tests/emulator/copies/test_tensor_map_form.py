"""The form and the rules of tensor maps, against what an H200's driver wrote and refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from emulator.probes.encodings import BASE, accepted_maps, refused_maps
from emulator.probes.h200_record import h200_record

from .tensor_map import DataType, TensorMap
from .tensor_map_form import MAP_BYTES, pack, unpack
from .tensor_map_rules import reason_refused

HOPPER, BLACKWELL = (9, 0), (10, 0)
READ_BYTES = 64  # of a form; the driver keeps notes of its own behind them


def _recorded() -> list[tuple[TensorMap, bytes]]:
    forms = h200_record().outputs["maps/accepted"]
    return [
        (tensor_map, form.tobytes())
        for tensor_map, form in zip(accepted_maps(), forms, strict=True)
        if form.any()
    ]


def test_the_form_is_the_drivers() -> None:
    recorded = _recorded()
    assert len(recorded) > 160
    for tensor_map, form in recorded:
        assert pack(tensor_map)[:READ_BYTES] == form[:READ_BYTES]
        assert unpack(form) == tensor_map
        assert reason_refused(tensor_map, HOPPER) is None


def test_the_rules_are_the_drivers() -> None:
    taken = h200_record().outputs["maps/taken"]
    maps = refused_maps()
    # The driver takes one map that its reference forbids: an interleave without its swizzle.
    assert [maps[index].interleave for index, each in enumerate(taken) if each] == [2]
    assert all(reason_refused(tensor_map, HOPPER) for tensor_map in maps)


@pytest.mark.parametrize("swizzle", [4, 5, 6])
def test_swizzles_of_wider_atoms_need_sm100(swizzle: int) -> None:
    tensor_map = replace(BASE, swizzle=swizzle)
    assert reason_refused(tensor_map, BLACKWELL) is None
    assert unpack(pack(tensor_map)) == tensor_map
    reason = reason_refused(tensor_map, HOPPER)
    assert reason == f"swizzles go from 0 to 3 on this device, got {swizzle}"


def test_padded_types_have_no_known_form() -> None:
    with pytest.raises(ValueError, match="of U6_ALIGN_16B is not known"):
        pack(replace(BASE, data_type=DataType.U6_ALIGN_16B))


@pytest.mark.parametrize(
    ("word", "bits"),
    [(2, 1), (2, 5 << 4), (2, 15 << 7), (2, 1 << 22), (13, 1 << 15), (15, 1)],
    ids=["kind", "rank", "type", "unused", "unused-13", "unused-15"],
)
def test_what_is_no_tensor_map_is_refused(word: int, bits: int) -> None:
    form = bytearray(pack(replace(BASE, data_type=DataType.UINT8)))
    value = int.from_bytes(form[4 * word : 4 * word + 4], "little") | bits
    form[4 * word : 4 * word + 4] = value.to_bytes(4, "little")
    with pytest.raises(ValueError, match="not a tensor map"):
        unpack(bytes(form))


def test_a_tensor_map_has_128_bytes() -> None:
    with pytest.raises(ValueError, match="128 bytes, got 64"):
        unpack(bytes(MAP_BYTES // 2))
