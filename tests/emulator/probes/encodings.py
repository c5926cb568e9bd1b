"""Tensor maps for the driver to encode, and some for it to refuse.

Each argument is changed by itself, so that its place in the driver's form shows.
"""

from __future__ import annotations

from dataclasses import replace

from emulator.copies.tensor_map import DataType, TensorMap

from .probe import random_integers

BASE = TensorMap(
    data_type=DataType.BFLOAT16,
    address=0x7F12_3456_7890 & ~0xFF,
    dimensions=(1000, 2000, 300, 40, 5),
    strides=(2048, 4_096_000, 1_228_800_000, 49_152_000_000),
    box=(8, 1, 1, 1, 1),
    element_strides=(1, 1, 1, 1, 1),
)


def _of_rank(rank: int) -> TensorMap:
    return replace(
        BASE,
        dimensions=BASE.dimensions[:rank],
        strides=BASE.strides[: rank - 1],
        box=BASE.box[:rank],
        element_strides=BASE.element_strides[:rank],
    )


def _put(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def accepted_maps() -> list[TensorMap]:
    """Maps that a driver should take."""
    maps = [_of_rank(rank) for rank in range(1, 6)]
    maps += [replace(BASE, data_type=kind, box=(16, 1, 1, 1, 1)) for kind in range(13)]
    maps += [replace(BASE, swizzle=swizzle) for swizzle in range(7)]
    maps += [replace(BASE, l2_promotion=promotion) for promotion in range(4)]
    maps += [replace(BASE, oob_fill=1)]
    maps += [replace(BASE, interleave=1), replace(BASE, interleave=2, swizzle=1)]
    maps += [replace(BASE, address=BASE.address + offset) for offset in (16, 32, 1 << 44)]
    for axis in range(5):
        for size in (1, 2, 77, 2**31, 2**32):
            maps.append(replace(BASE, dimensions=_put(BASE.dimensions, axis, size)))
        for extent in (8, 16, 64, 136, 256):
            maps.append(replace(BASE, box=_put(BASE.box, axis, extent)))
        for step in range(1, 9):
            maps.append(replace(BASE, element_strides=_put(BASE.element_strides, axis, step)))
    for axis in range(4):
        for stride in (16, 2**20, 2**36 - 16, 2**36, 2**40 - 16):
            maps.append(replace(BASE, strides=_put(BASE.strides, axis, stride)))
    return [*maps, *_random_maps()]


def _random_maps() -> list[TensorMap]:
    """Everything changed at once."""
    maps = []
    for index in range(40):

        def draw(what: str, low: int, high: int, index: int = index) -> int:
            return int(random_integers(f"map {index} {what}", 1, low, high)[0])

        rank = draw("rank", 1, 6)
        axes = range(rank)
        maps.append(
            TensorMap(
                data_type=draw("type", 6, 13),
                address=draw("address", 1, 2**40) * 16,
                dimensions=tuple(draw(f"size {axis}", 1, 2**32) for axis in axes),
                strides=tuple(draw(f"stride {axis}", 1, 2**36) * 16 for axis in axes)[1:],
                box=(16, *(draw(f"box {axis}", 1, 257) for axis in axes))[:rank],
                element_strides=tuple(draw(f"step {axis}", 1, 9) for axis in axes),
                swizzle=draw("swizzle", 0, 2) * 3,
                l2_promotion=draw("promotion", 0, 4),
                oob_fill=draw("fill", 0, 2),
            )
        )
    return maps


def refused_maps() -> list[TensorMap]:
    """Maps that break one rule each of the driver's documentation."""
    return [
        replace(BASE, address=8),
        replace(BASE, strides=_put(BASE.strides, 0, 8)),
        replace(BASE, strides=_put(BASE.strides, 0, 2**40)),
        replace(BASE, dimensions=_put(BASE.dimensions, 0, 0)),
        replace(BASE, dimensions=_put(BASE.dimensions, 1, 2**32 + 1)),
        replace(BASE, box=_put(BASE.box, 0, 0)),
        replace(BASE, box=_put(BASE.box, 1, 257)),
        replace(BASE, box=_put(BASE.box, 0, 12)),
        replace(BASE, element_strides=_put(BASE.element_strides, 1, 9)),
        replace(BASE, element_strides=_put(BASE.element_strides, 1, 0)),
        replace(BASE, swizzle=1, box=_put(BASE.box, 0, 24)),
        replace(BASE, swizzle=2, box=_put(BASE.box, 0, 40)),
        replace(BASE, swizzle=3, box=_put(BASE.box, 0, 72)),
        replace(BASE, interleave=2, swizzle=0),
        replace(_of_rank(2), interleave=1),
        replace(BASE, data_type=DataType.UINT16, oob_fill=1),
        replace(BASE, data_type=DataType.U4_ALIGN_16B),
        replace(BASE, swizzle=7),
    ]
