"""Tensor copies: boxes with every swizzle there and back, borders, reductions, faults."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from emulator import errors
from emulator.machine.memory import Region
from emulator.programs.ptx_kernels import SEEDS, expect, initialize, kernel, run, wait

from .tensor_map import DataType, TensorMap, TensorMapError
from .tensor_map_form import pack

BASE = 0x1000_0000
LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
# 40 rows of 160 bytes, padded to 176; a box of 16 rows of 128 bytes.
PLANE = TensorMap(
    DataType.UINT8,
    BASE,
    dimensions=(160, 40),
    strides=(176,),
    box=(128, 16),
    element_strides=(1, 1),
)
BOX_BYTES = 2048
# Swizzle of the map, address bits changed and line bits they follow, by the ISA's tables.
SWIZZLES = {
    "none": (0, 128, lambda line, cell: cell),
    "32B": (1, 32, lambda line, cell: cell ^ line % 2),
    "64B": (2, 64, lambda line, cell: cell ^ line % 4),
    "128B": (3, 128, lambda line, cell: cell ^ line % 8),
    "128B-atom-32B": (4, 128, lambda line, cell: cell ^ 2 * (line % 4)),
    "128B-atom-64B": (6, 128, lambda line, cell: cell ^ 4 * (line % 2)),
}


def load_body(x: int, y: int, size: int, dump: int) -> str:
    """Load a box at (x, y), then copy `dump` bytes of shared memory out as they are."""
    return (
        initialize("full")
        + "    mov.b64 %rd5, map0;\n    cvta.param.u64 %rd5, %rd5;\n"
        + f"    mov.u32 %r10, {x};\n    mov.u32 %r11, {y};\n"
        + expect("full", size)
        + f"    @%p0 {LOAD} [smem], [%rd5, {{%r10, %r11}}], [full];\n"
        + wait("full", 0, "loaded")
        + f"""
    @%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [smem], {dump};
    @%p0 cp.async.bulk.commit_group;
    @%p0 cp.async.bulk.wait_group 0;
"""
    )


def plane_region(seed: int = 3) -> tuple[Region, np.ndarray]:
    """The tensor's memory, and its content as 40 rows of 160 bytes."""
    data = np.random.default_rng(seed).integers(1, 256, 40 * 176, dtype=np.uint8)
    return Region("tensor", BASE, data), data.reshape(40, 176)[:, :160]


def box_of(content: np.ndarray, x: int, y: int, width: int, height: int) -> np.ndarray:
    """The elements of a box, zeros outside, by single elements."""
    box = np.zeros((height, width), np.uint8)
    for i, j in itertools.product(range(height), range(width)):
        if 0 <= y + i < content.shape[0] and 0 <= x + j < content.shape[1]:
            box[i, j] = content[y + i, x + j]
    return box


@pytest.mark.parametrize("name", SWIZZLES)
def test_loads_place_cells_as_the_tables_say(name: str) -> None:
    swizzle, width, place = SWIZZLES[name]
    tensor = replace(PLANE, swizzle=swizzle, box=(width, 16))
    region, content = plane_region()
    out = Region("out", 0x2000_0000, 16 * width)
    ptx = kernel(load_body(16, 5, 16 * width, 16 * width), 2, maps=1)
    run(ptx, [region, out], maps=[pack(tensor)], seed=2)
    lines = box_of(content, 16, 5, width, 16).reshape(-1, 8, 16)  # lines of 8 cells of 16 bytes
    expected = np.empty_like(lines)
    for line, cell in itertools.product(range(len(lines)), range(8)):
        expected[line, place(line, cell)] = lines[line, cell]
    np.testing.assert_array_equal(out.data.reshape(lines.shape), expected)


STARTS = {
    "inside": (0, 0),
    "right": (96, 30),
    "left": (-16, -3),
    "below": (0, 39),
    "outside": (400, 3),
    "far-left": (-128, 0),
}


@pytest.mark.parametrize("name", STARTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_outside_the_tensor_is_zero(name: str, seed: int) -> None:
    x, y = STARTS[name]
    region, content = plane_region()
    out = Region("out", 0x2000_0000, BOX_BYTES)
    ptx = kernel(load_body(x, y, BOX_BYTES, BOX_BYTES), 2, maps=1)
    run(ptx, [region, out], maps=[pack(PLANE)], seed=seed)
    np.testing.assert_array_equal(out.data.reshape(16, 128), box_of(content, x, y, 128, 16))


def test_padding_between_rows_is_never_read() -> None:
    """The tensor's memory ends with its last row, and the padding is poison."""
    region, content = plane_region()
    written = np.ones((40, 176), bool)
    written[:, 160:] = False
    poisoned = Region("tensor", BASE, region.data[: 39 * 176 + 160], written.ravel()[:-16])
    out = Region("out", 0x2000_0000, BOX_BYTES)
    run(
        kernel(load_body(64, 30, BOX_BYTES, BOX_BYTES), 2, maps=1),
        [poisoned, out],
        maps=[pack(PLANE)],
    )
    np.testing.assert_array_equal(out.data.reshape(16, 128), box_of(content, 64, 30, 128, 16))


def store_body(x: int, y: int, store: str = STORE) -> str:
    """Fill the box from global memory, then store it at (x, y)."""
    return (
        initialize("full")
        + "    mov.b64 %rd5, map0;\n    cvta.param.u64 %rd5, %rd5;\n"
        + f"    mov.u32 %r10, {x};\n    mov.u32 %r11, {y};\n"
        + expect("full", BOX_BYTES)
        + "    @%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        + f"[smem], [%rd1], {BOX_BYTES}, [full];\n"
        + wait("full", 0, "loaded")
        + f"""
    @%p0 {store} [%rd5, {{%r10, %r11}}], [smem];
    @%p0 cp.async.bulk.commit_group;
    @%p0 cp.async.bulk.wait_group 0;
"""
    )


@pytest.mark.parametrize("name", ["none", "128B", "128B-atom-32B"])
@pytest.mark.parametrize(("x", "y"), [(16, 5), (96, 30)], ids=["inside", "border"])
def test_stores_take_cells_from_where_loads_put_them(name: str, x: int, y: int) -> None:
    swizzle, _, place = SWIZZLES[name]
    box = np.random.default_rng(9).integers(0, 256, (16, 8, 16), dtype=np.uint8)
    shared = np.empty_like(box)
    for line, cell in itertools.product(range(16), range(8)):
        shared[line, place(line, cell)] = box[line, cell]
    tensor = Region("tensor", BASE, 40 * 176)
    source = Region("box", 0x2000_0000, shared)
    ptx = kernel(store_body(x, y), 2, maps=1)
    run(ptx, [tensor, source], maps=[pack(replace(PLANE, swizzle=swizzle))], seed=2)
    written, data = tensor.written.reshape(40, 176), tensor.data.reshape(40, 176)
    expected = np.zeros((40, 176), bool)
    expected[y : y + 16, x : min(x + 128, 160)] = True
    np.testing.assert_array_equal(written, expected)
    kept = box.reshape(16, 128)[: min(16, 40 - y), : min(128, 160 - x)]
    np.testing.assert_array_equal(data[y : y + 16, x : min(x + 128, 160)], kept)


def test_reductions_add_where_the_box_is_inside() -> None:
    tensor_map = replace(
        PLANE, data_type=DataType.UINT32, dimensions=(40, 40), strides=(176,), box=(32, 16)
    )
    box = np.arange(16 * 32, dtype=np.uint32)
    tensor = Region("tensor", BASE, np.full(40 * 44, 1000, np.uint32))
    reduce = STORE.replace("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor").replace(
        ".tile", ".add.tile"
    )
    ptx = kernel(store_body(16, 30, reduce), 2, maps=1)
    run(ptx, [tensor, Region("box", 0x2000_0000, box)], maps=[pack(tensor_map)], seed=2)
    expected = np.full((40, 44), 1000, np.uint32)
    expected[30:40, 16:40] += box.reshape(16, 32)[:10, :24]
    np.testing.assert_array_equal(tensor.data.view(np.uint32).reshape(40, 44), expected)


@pytest.mark.parametrize("rank", [1, 3, 4, 5])
def test_other_ranks(rank: int) -> None:
    """A box from the middle of a dense tensor whose outer dimensions have 3 elements."""
    dimensions = (64, *([3] * (rank - 1)))
    strides = tuple(64 * 3**i for i in range(rank - 1))
    tensor_map = TensorMap(
        DataType.UINT8, BASE, dimensions, strides, (32, *([2] * (rank - 1))), (1,) * rank
    )
    content = np.random.default_rng(1).integers(0, 256, 64 * 3 ** (rank - 1), dtype=np.uint8)
    coordinates = ", ".join(["%r10"] + ["%r11"] * (rank - 1))
    size = 32 * 2 ** (rank - 1)
    body = load_body(16, 1, size, size).replace("{%r10, %r11}", f"{{{coordinates}}}")
    ptx = kernel(body.replace("tensor.2d", f"tensor.{rank}d"), 2, maps=1)
    out = Region("out", 0x2000_0000, size)
    run(ptx, [Region("tensor", BASE, content), out], maps=[pack(tensor_map)])
    cube = content.reshape((3,) * (rank - 1) + (64,))
    box = cube[(slice(1, 3),) * (rank - 1) + (slice(16, 48),)]
    np.testing.assert_array_equal(out.data, box.ravel())


SOUND = load_body(16, 5, BOX_BYTES, BOX_BYTES)
FAULTS = {
    "no-wait": (wait("full", 0, "loaded"), "", errors.InFlightRead),
    "box-address": ("[smem], [%rd5", "[smem+64], [%rd5", TensorMapError),
    "too-few-bytes": (f", {BOX_BYTES};", f", {BOX_BYTES - 16};", errors.EmulationError),
    "rank": ("tensor.2d", "tensor.3d", errors.UnsupportedInstruction),
    "map-address": ("cvta.param.u64 %rd5, %rd5", "add.s64 %rd5, %rd5, 8", TensorMapError),
    "not-a-map": ("mov.b64 %rd5, map0;\n    cvta.param.u64", "mov.b64", TensorMapError),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_reported(name: str) -> None:
    old, new, error = FAULTS[name]
    assert old in SOUND
    body = SOUND.replace(old, new, 1)
    if name == "not-a-map":
        body = body.replace("mov.b64 %rd5, %rd5", "mov.b64 %rd5, %rd1")
    region, _ = plane_region()
    out = Region("out", 0x2000_0000, np.zeros(BOX_BYTES, np.uint8))
    with pytest.raises(error):
        run(kernel(body, 2, maps=1), [region, out], maps=[pack(PLANE)], seed=0)


REFUSED = {
    "im2col": LOAD.replace(".tile", ".im2col"),
    "gather4": LOAD.replace(".tile", ".tile::gather4"),
    "multicast-without-mask": LOAD + ".multicast::cluster",
    "cta_group": LOAD + ".cta_group::2",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_implemented_is_named(name: str) -> None:
    region, _ = plane_region()
    out = Region("out", 0x2000_0000, BOX_BYTES)
    with pytest.raises(errors.UnsupportedInstruction, match=r"cp\.async\.bulk\.tensor"):
        run(
            kernel(SOUND.replace(LOAD, REFUSED[name]), 2, maps=1), [region, out], maps=[pack(PLANE)]
        )


def test_what_lies_outside_of_floats_can_be_filled_with_nan() -> None:
    region, content = plane_region()
    filled = replace(
        PLANE, data_type=DataType.FLOAT16, dimensions=(80, 40), box=(64, 16), oob_fill=1
    )
    out = Region("out", 0x2000_0000, BOX_BYTES)
    run(
        kernel(load_body(48, 5, BOX_BYTES, BOX_BYTES), 2, maps=1),
        [region, out],
        maps=[pack(filled)],
    )
    rows = out.data.reshape(16, 128)
    np.testing.assert_array_equal(rows[:, :64], content[5:21, 96:160])
    assert (rows[:, 64:].view(np.uint16) == 0x7FF7).all()


def test_hints_are_only_checked() -> None:
    body = """
    mov.b64 %rd5, map0;
    cvta.param.u64 %rd5, %rd5;
    prefetch.tensormap [%rd5];
    mov.u32 %r10, 0;
    cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%rd5, {%r10, %r10}];
"""
    region, _ = plane_region()
    run(kernel(body, 1, maps=1), [region], maps=[pack(PLANE)])
    with pytest.raises(errors.UnsupportedInstruction):
        run(kernel(body.replace(".2d", ".1d"), 1, maps=1), [region], maps=[pack(PLANE)])
