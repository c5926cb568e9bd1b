"""Tensor maps that a kernel makes itself: every field, and the fences that publish them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from emulator import errors
from emulator.machine.memory import Region
from emulator.programs.ptx_kernels import SEEDS, expect, initialize, kernel, run, wait

from .tensor_map import DataType, TensorMap, TensorMapError
from .tensor_map_form import pack
from .test_tensor_copies import BASE, BOX_BYTES, PLANE, load_body, plane_region

MAP = 0x6000_0000
COPY = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
ACQUIRE = "    fence.proxy.tensormap::generic.acquire.gpu [%rd2], 128;\n"
# Every field, as `tensormap.replace` takes it.
FIELDS = {
    "global_address": f"b64 [smem+4096], {BASE}",
    "rank": "b32 [smem+4096], 1",
    "elemtype": "b32 [smem+4096], 0",
    "interleave_layout": "b32 [smem+4096], 0",
    "swizzle_mode": "b32 [smem+4096], 3",
    "swizzle_atomicity": "b32 [smem+4096], 0",
    "fill_mode": "b32 [smem+4096], 0",
    "global_dim": "b32 [smem+4096], 0, 160; b32 [smem+4096], 1, 40",
    "global_stride": "b64 [smem+4096], 0, 176",
    "element_stride": "b32 [smem+4096], 0, 1; b32 [smem+4096], 1, 1",
    "box_dim": "b32 [smem+4096], 0, 128; b32 [smem+4096], 1, 16",
}


def making(*left_out: str) -> str:
    """Make the map of `PLANE`, swizzled, at %rd2, and load a box with it."""
    text = "    @%p0 st.bulk.weak.shared::cta [smem+4096], 128, 0;\n    bar.warp.sync -1;\n"
    for field, operands in FIELDS.items():
        if field not in left_out:
            for each in operands.split("; "):
                text += f"    @%p0 tensormap.replace.tile.{field}.shared::cta.b1024.{each};\n"
    text += f"    bar.warp.sync -1;\n    {COPY} [%rd2], [smem+4096], 128;\n{ACQUIRE}"
    load = load_body(32, 8, BOX_BYTES, BOX_BYTES)
    return text + load.replace("mov.b64 %rd5, map0", "mov.b64 %rd5, %rd2").replace(
        "    cvta.param.u64 %rd5, %rd5;\n", ""
    )


def box_by(body: str, seed: int = 0) -> np.ndarray:
    region, _ = plane_region()
    out = Region("out", 0x2000_0000, BOX_BYTES)
    run(kernel(body, 3), [region, out, Region("map", MAP, 128)], seed=seed)
    return out.data.copy()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_map_that_a_kernel_makes_is_the_map_of_the_driver(seed: int) -> None:
    region, _ = plane_region()
    out = Region("out", 0x2000_0000, BOX_BYTES)
    form = pack(replace(PLANE, swizzle=3))
    body = load_body(32, 8, BOX_BYTES, BOX_BYTES)
    run(kernel(body, 2, maps=1), [region, out], maps=[form])
    np.testing.assert_array_equal(box_by(making(), seed), out.data)


@pytest.mark.parametrize("field", ["global_address", "box_dim", "global_dim", "global_stride"])
def test_every_field_counts(field: str) -> None:
    """Without it the box is another, or what is left is not a map."""
    try:
        box = box_by(making(field))
    except errors.EmulationError:
        return
    assert not np.array_equal(box, box_by(making()))


def test_a_map_needs_a_fence_that_acquires_it() -> None:
    with pytest.raises(errors.MissingProxyFence, match=r"no fence\.proxy\.tensormap"):
        box_by(making().replace(ACQUIRE, ""))


def test_a_map_of_what_nobody_wrote_is_not_published() -> None:
    text = making().replace("@%p0 st.bulk.weak.shared::cta [smem+4096], 128, 0;", "")
    with pytest.raises(errors.UnwrittenRead, match="nothing has written"):
        box_by(text)


@pytest.mark.parametrize("changes", [{}, {"data_type": 11, "address": 0x7F12_3456_7890}])
def test_fields_lie_where_the_driver_writes_them(changes: dict[str, int]) -> None:
    """From a map of ones in every field to one that differs in all."""
    from .tensor_map_form import replace_field

    target = replace(
        TensorMap(
            DataType.BFLOAT16, 0x1000, (640, 320, 7), (1280, 1 << 37), (64, 32, 5), (1, 2, 3)
        ),
        swizzle=2,
        **changes,
    )
    words = np.frombuffer(pack(PLANE), np.uint8).copy()

    def change(name: str, value: int, axis: int = 0) -> None:
        for word, bits in replace_field(words, name, axis, value):
            words.view(np.uint32)[word] = bits

    change("global_address", target.address)
    change("rank", target.rank - 1)
    change("elemtype", {9: 10, 11: 11}[target.data_type])
    change("swizzle_mode", 2)
    for axis in range(3):
        change("global_dim", target.dimensions[axis], axis)
        change("box_dim", target.box[axis], axis)
        change("element_stride", target.element_strides[axis], axis)
    for axis, stride in enumerate(target.strides):
        change("global_stride", stride, axis)
    assert words.tobytes() == pack(target)


ROWS = [3, 39, 0, 17]
BY_ROWS = """
    mov.b64 %rd5, map0;
    cvta.param.u64 %rd5, %rd5;
    mov.u32 %r10, 32;
    mov.u32 %r11, 3; mov.u32 %r12, 39; mov.u32 %r13, 0; mov.u32 %r14, 17;
"""
GATHER = "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes"
SCATTER = "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group"
PLACE = "[%rd5, {%r10, %r11, %r12, %r13, %r14}]"


def by_rows(box: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The tensor before and after rows of it were gathered, changed and scattered."""
    body = initialize("full") + BY_ROWS + expect("full", 512)
    body += f"    @%p0 {GATHER} [smem], {PLACE}, [full];\n" + wait("full", 0, "loaded")
    body += """
    shl.b32 %r15, %r0, 4; add.u32 %r15, %r15, smem;
    ld.shared.v4.b32 {%r16, %r17, %r18, %r19}, [%r15];
    not.b32 %r16, %r16; not.b32 %r17, %r17; not.b32 %r18, %r18; not.b32 %r19, %r19;
    st.shared.v4.b32 [%r15], {%r16, %r17, %r18, %r19};
    fence.proxy.async.shared::cta; bar.warp.sync -1;
""".replace("add.u32 %r15, %r15, smem", "mov.u32 %r20, smem; add.u32 %r15, %r15, %r20")
    body += f"    @%p0 {SCATTER} {PLACE}, [smem];\n"
    body += "    @%p0 cp.async.bulk.commit_group;\n    @%p0 cp.async.bulk.wait_group 0;\n"
    region, content = plane_region()
    run(kernel(body, 1, maps=1), [region], maps=[pack(replace(PLANE, box=box, swizzle=3))])
    return content, region.data.reshape(40, 176)[:, :160]


def test_rows_are_gathered_and_scattered() -> None:
    before, after = by_rows((128, 1))
    expected = before.copy()
    expected[ROWS, 32:] ^= 0xFF
    np.testing.assert_array_equal(after, expected)


def test_rows_need_a_map_of_rows() -> None:
    with pytest.raises(TensorMapError, match="boxes of one row"):
        by_rows((128, 16))
