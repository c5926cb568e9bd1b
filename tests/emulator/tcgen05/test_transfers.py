"""tcgen05.ld, .st and .cp: every shape, written and read by kernels of one warpgroup."""

from __future__ import annotations

import numpy as np
import pytest

from emulator import errors
from emulator.machine.memory import Region
from emulator.programs.ptx_kernels import SEEDS, expect, initialize, kernel, run, wait
from emulator.programs.tcgen05_kernels import (
    AFTER,
    ALLOCATE,
    COMMIT,
    DEALLOCATE,
    SHARED,
    THREADS,
    descriptor_register,
    read_back,
)

from .canonical_layouts import Canonical, encode_descriptor

# %rd6 is where a thread keeps its 1024 bytes of output.
OUTPUT = """
    shl.b32 %r33, %r0, 10;
    mov.b64 %rd6, {%r33, 0};
    add.s64 %rd6, %rd6, %rd0;
"""
# Registers of .x1, and the cell of (thread, register) of .xN, from the figures of the ISA.
SHAPES = {
    "32x32b": (1, lambda t, r: (t, r)),
    "16x64b": (1, lambda t, r: (t // 4 + t % 2 * 8, t // 2 % 2 + 2 * r)),
    "16x128b": (2, lambda t, r: (t // 4 + r % 2 * 8, t % 4 + r // 2 * 4)),
    "16x256b": (4, lambda t, r: (t // 4 + r // 2 % 2 * 8, t % 4 * 2 + r % 2 + r // 4 * 8)),
    "16x32bx2": (1, lambda t, r: (t % 16, t // 16 * 24 + r)),
}


def names(first: int, count: int) -> str:
    """A vector of registers."""
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def fill(columns: int) -> str:
    """Every lane's cells hold lane * 1000 + column, stored as 32x32b."""
    text = "    mul.lo.u32 %r50, %r0, 1000;\n"
    for first in range(0, columns, 8):
        for i in range(8):
            text += f"    add.u32 %r{100 + i}, %r50, {first + i};\n"
        text += f"    add.u32 %r22, %r21, {first};\n"
        text += f"    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r22], {names(100, 8)};\n"
    return text + "    tcgen05.wait::st.sync.aligned;\n"


def store_registers(count: int) -> str:
    """Write %r100, %r101, ... to the thread's output."""
    return "".join(f"    st.global.b32 [%rd6+{4 * i}], %r{100 + i};\n" for i in range(count))


def output(body: str, seed: int = 0) -> np.ndarray:
    """Run a body between allocation and deallocation; uint32 `[128 threads, 256]`."""
    out = Region("out", 0x5000_0000, np.zeros(THREADS * 1024, np.uint8))
    text = ALLOCATE + OUTPUT + body + DEALLOCATE
    run(kernel(text, 1, SHARED), [out], block=THREADS, seed=seed)
    return out.data.view(np.uint32).reshape(THREADS, 256)


@pytest.mark.parametrize("repeats", [1, 2, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_loads(shape: str, repeats: int) -> None:
    per_one, cell = SHAPES[shape]
    count = per_one * repeats
    split = ", 24" if shape == "16x32bx2" else ""
    load = (
        f"    tcgen05.ld.sync.aligned.{shape}.x{repeats}.b32 {names(100, count)}, [%r21]{split};\n"
    )
    body = fill(64) + load + "    tcgen05.wait::ld.sync.aligned;\n" + store_registers(count)
    found = output(body, seed=repeats)
    for thread, register in np.ndindex(THREADS, count):
        lane, column = cell(thread % 32, register)
        expected = (thread // 32 * 32 + lane) * 1000 + column
        assert found[thread, register] == expected, (thread, register)


def test_the_upper_sixteen_lanes_of_a_quarter() -> None:
    body = (
        fill(8)
        + "    add.u32 %r23, %r21, 1048576;\n"
        + "    tcgen05.ld.sync.aligned.16x128b.x1.b32 {%r100, %r101}, [%r23];\n"
        + "    tcgen05.wait::ld.sync.aligned;\n"
        + store_registers(2)
    )
    found = output(body)
    assert found[0, 0] == 16_000
    assert found[127, 1] == (96 + 16 + 15) * 1000 + 3


@pytest.mark.parametrize("shape", SHAPES)
def test_stores(shape: str) -> None:
    """Registers hold thread * 100 + register; read back lane by lane."""
    per_one, cell = SHAPES[shape]
    count = per_one * 4
    split = "24, " if shape == "16x32bx2" else ""
    text = fill(64) + "    mul.lo.u32 %r51, %r0, 100;\n"
    for i in range(count):
        text += f"    add.u32 %r{100 + i}, %r51, {i};\n"
    text += f"    tcgen05.st.sync.aligned.{shape}.x4.b32 [%r21], {split}{names(100, count)};\n"
    text += "    tcgen05.wait::st.sync.aligned;\n" + read_back(64)
    found = output(text)[:, :64]
    expected = np.arange(128)[:, None] * 1000 + np.arange(64)
    for thread, register in np.ndindex(THREADS, count):
        lane, column = cell(thread % 32, register)
        expected[thread // 32 * 32 + lane, column] = thread * 100 + register
    np.testing.assert_array_equal(found, expected)


def test_packing_and_unpacking_of_halves() -> None:
    body = (
        fill(8)
        + """
    mov.b32 %r60, 0x12345678;
    mov.b32 %r61, 0x9abcdef0;
    tcgen05.st.sync.aligned.32x32b.x2.unpack::16b.b32 [%r21], {%r60, %r61};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x4.pack::16b.b32 {%r100, %r101, %r102, %r103}, [%r21];
    tcgen05.wait::ld.sync.aligned;
"""
    )
    found = output(body + store_registers(4))
    assert (found[:, :2] == [0x12345678, 0x9ABCDEF0]).all()
    lanes = np.arange(128) * 1000
    np.testing.assert_array_equal(found[:, 2], (lanes + 4) & 0xFFFF | (lanes + 5 & 0xFFFF) << 16)
    unpacked = output(body.split("    tcgen05.ld")[0] + read_back(8))[:, :4] & 0xFFFF
    assert (unpacked == [0x5678, 0x1234, 0xDEF0, 0x9ABC]).all()


# Shape of a copy: rows, 16-byte cells to a row, row that arrives in each lane.
COPIES = {
    "128x256b": (128, 2, lambda lane: lane),
    "128x128b": (128, 1, lambda lane: lane),
    "64x128b.warpx2::02_13": (64, 1, lambda lane: lane % 64),
    "64x128b.warpx2::01_23": (64, 1, lambda lane: lane % 32 + lane // 64 * 32),
    "32x128b.warpx4": (32, 1, lambda lane: lane % 32),
}


def copy_body(shape: str, word: int, columns: int, size: int) -> str:
    """Load an image, copy it to tensor memory, read back."""
    return (
        initialize("full", "empty")
        + expect("full", size)
        + "    @%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        + f"[smem], [%rd1], {size}, [full];\n"
        + wait("full", 0, "loaded")
        + descriptor_register("%rd10", 0, word)
        + f"    @%p0 tcgen05.cp.cta_group::1.{shape} [%r20], %rd10;\n"
        + COMMIT
        + wait("empty", 0, "copied")
        + AFTER
        + read_back(8)[: None if columns == 8 else read_back(8).index("    st.global.v4")]
        + ("" if columns == 8 else "    st.global.v4.b32 [%rd6], {%r100, %r101, %r102, %r103};\n")
    )


@pytest.mark.parametrize("mode", [0, 6, 4, 2], ids=["none", "32B", "64B", "128B"])
@pytest.mark.parametrize("shape", COPIES)
def test_copies(shape: str, mode: int) -> None:
    rows, cells, source = COPIES[shape]
    # A K-major matrix of 16-bit elements; rows of a swizzled image are as long as the swizzle.
    elements = np.random.default_rng(7).integers(0, 256, (rows, 16, 2), dtype=np.uint8)
    layout = Canonical(mode, True)
    stride = 8 * 16 * (2 if mode == 0 else 1 << layout.bits)
    image = layout.place(elements, 2, 128, stride, rows // 8 * stride)
    body = copy_body(shape, encode_descriptor(0, 128, stride, mode), 4 * cells, image.size)
    if cells == 1:  # only four columns arrive
        body = body.replace("32x32b.x8.b32", "32x32b.x4.b32").replace(names(100, 8), names(100, 4))
    out = Region("out", 0x5000_0000, np.zeros(THREADS * 1024, np.uint8))
    memory = [out, Region("image", 0x6000_0000, image)]
    run(kernel(ALLOCATE + OUTPUT + body + DEALLOCATE, 2, SHARED), memory, block=THREADS, seed=3)
    found = out.data.reshape(THREADS, 1024)[:, : 16 * cells]
    for lane in range(THREADS):
        expected = elements[source(lane)].reshape(-1)[: 16 * cells]
        np.testing.assert_array_equal(found[lane], expected)


@pytest.mark.parametrize(("source", "bits"), [("b4x16_p64", 4), ("b6x16_p32", 6)], ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_decompression(source: str, bits: int, seed: int) -> None:
    codes = np.random.default_rng(8).integers(0, 1 << bits, (128, 16))
    image = np.full((128, 16), 0xEE, np.uint8)
    for row in range(128):
        word = sum(int(code) << bits * i for i, code in enumerate(codes[row]))
        image[row, : 2 * bits] = np.frombuffer(word.to_bytes(2 * bits, "little"), np.uint8)
    body = copy_body(f"128x128b.b8x16.{source}", encode_descriptor(0, 128, 128, 0), 4, 2048)
    body = body.replace("32x32b.x8.b32", "32x32b.x4.b32").replace(names(100, 8), names(100, 4))
    out = Region("out", 0x5000_0000, np.zeros(THREADS * 1024, np.uint8))
    memory = [out, Region("image", 0x6000_0000, image)]
    run(kernel(ALLOCATE + OUTPUT + body + DEALLOCATE, 2, SHARED), memory, block=THREADS, seed=seed)
    found = out.data.reshape(THREADS, 1024)[:, :16]
    np.testing.assert_array_equal(found, codes << 2 if bits == 4 else codes)


STORE_HALF = """
    tcgen05.st.sync.aligned.16x64b.x1.b32 [%r21], %r0;
    tcgen05.wait::st.sync.aligned;
"""


@pytest.mark.parametrize("strict", [False, True], ids=["default", "strict"])
def test_what_is_unwritten_may_be_loaded_but_not_stored(strict: bool) -> None:
    load = "    tcgen05.ld.sync.aligned.32x32b.x1.b32 %r100, [%r21];\n"
    load += "    tcgen05.wait::ld.sync.aligned;\n    add.u32 %r100, %r100, 1;\n"
    choose = "    and.b32 %r40, %r0, 16;\n    setp.eq.u32 %p4, %r40, 0;\n"
    store = store_registers(1)
    out = Region("out", 0x5000_0000, np.zeros(THREADS * 1024, np.uint8))
    start, stop = ALLOCATE + OUTPUT + STORE_HALF + load + choose, DEALLOCATE
    with pytest.raises(errors.UnwrittenRead, match=r"out: what is stored .*last loaded by tcgen05"):
        run(kernel(start + store + stop, 1, SHARED), [out], block=THREADS, strict=strict)
    store = store.replace("st.global", "@%p4 st.global")
    report = run(kernel(start + store + stop, 1, SHARED), [out], block=THREADS, strict=strict)
    found = out.data.view(np.uint32).reshape(THREADS, -1)[:, 0]
    written = np.arange(THREADS) % 32 < 16
    assert (found[written] > 0).all()
    assert not found[~written].any()
    assert not report.notes


LOAD = "    tcgen05.ld.sync.aligned.32x32b.x1.b32 %r100, [%r21];\n"
FAULTS = {
    "another-warp's-lanes": (
        LOAD.replace("%r21", "%r20"),
        errors.TensorMemoryMisuse,
        r"warp \d can",
    ),
    "half-a-quarter": (
        "    add.u32 %r23, %r21, 1048576;\n" + LOAD.replace("%r21", "%r23"),
        errors.TensorMemoryMisuse,
        "in steps of 32",
    ),
    "disagreeing-lanes": (
        "    add.u32 %r23, %r21, %r0;\n" + LOAD.replace("%r21", "%r23"),
        errors.TensorMemoryMisuse,
        "disagree",
    ),
    "unwritten": (
        "    add.u32 %r23, %r21, 8;\n"
        + LOAD.replace("%r21", "%r23")
        + "    setp.eq.u32 %p4, %r100, 0;\n"
        "    @%p4 bra L9;\nL9:\n",
        errors.UnwrittenRead,
        "%p4 is used, which depends on what nothing has written",
    ),
    "beyond-the-last-column": (
        "    add.u32 %r23, %r21, 511;\n"
        + LOAD.replace("%r21", "%r23").replace("x1", "x2").replace("%r100", "{%r100, %r101}"),
        errors.TensorMemoryMisuse,
        "column 512 is not allocated",
    ),
    "store-not-waited-for": (
        "    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r21], %r0;\n" + LOAD,
        errors.InFlightRead,
        "tcgen05.ld reads",
    ),
    "load-not-waited-for": (
        LOAD + "    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r21], %r0;\n",
        errors.InFlightWrite,
        "tcgen05.st writes",
    ),
    "dealloc-with-a-load-in-flight": (LOAD, errors.InFlightWrite, "tcgen05.dealloc"),
    "one-lane": (
        "    @%p0 bra skip;\n    bra skip;\nskip:\n    @%p0" + LOAD,
        errors.DivergentExecution,
        "guard differs between lanes",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str) -> None:
    body, error, message = FAULTS[name]
    with pytest.raises(error, match=message):
        output(fill(8) + body)


REFUSED = {
    "red": "tcgen05.ld.red.sync.aligned.32x32b.x2.min.f32 {%r100, %r101}, %r102, [%r21];",
    "too-many": "tcgen05.ld.sync.aligned.16x256b.x64.b32 {%r100, %r101}, [%r21];",
    "registers": "tcgen05.ld.sync.aligned.16x256b.x1.b32 {%r100, %r101}, [%r21];",
    "no-split": "tcgen05.ld.sync.aligned.16x32bx2.x1.b32 %r100, [%r21];",
    "split": "tcgen05.ld.sync.aligned.32x32b.x1.b32 %r100, [%r21], 16;",
    "4x256b": "tcgen05.cp.cta_group::1.4x256b [%r20], %rd10;",
    "no-multicast": "tcgen05.cp.cta_group::1.32x128b [%r20], %rd10;",
    "wrong-multicast": "tcgen05.cp.cta_group::1.64x128b.warpx4 [%r20], %rd10;",
    "two-ctas": "tcgen05.cp.cta_group::2.128x128b [%r20], %rd10;",
    "shift": "tcgen05.shift.cta_group::1.down [%r20];",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_implemented_is_named(name: str) -> None:
    with pytest.raises(errors.UnsupportedInstruction, match=REFUSED[name].split(" ")[0]):
        output("    " + REFUSED[name] + "\n")
