"""Loads, stores and atomics: spaces, vectors, extension, and the faults that the shadow finds."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from emulator.errors import (
    EmulationError,
    Misaligned,
    OutOfBounds,
    UnsupportedInstruction,
    UnwrittenRead,
)
from emulator.programs.lane_programs import FIRST_ADDRESS, HEADER, run_lanes

from .launch import run_kernel
from .memory import Region

WORDS = np.arange(32, dtype=np.uint32) * 0x01010101


def test_vectors_and_extension() -> None:
    body = """
        .shared .align 16 .b8 box[512];
        .reg .b32 %base, %row; .reg .b16 %h<5>; .reg .b32 %w<5>; .reg .s32 %s;
        mov.u32 %base, box;
        mad.lo.u32 %row, %t, 16, %base;
        mov.u32 %w0, %a0; add.u32 %w1, %a0, 1; add.u32 %w2, %a0, 2; add.u32 %w3, %a0, 0x80;
        st.shared.v4.b32 [%row], {%w0, %w1, %w2, %w3};
        bar.warp.sync -1;
        ld.shared.v2.u16 {%h0, %h1}, [%row + 4];
        ld.shared.s8 %d0, [%row + 12];
        ld.shared.u8 %d1, [%row + 12];
        ld.shared.b64 %d2, [%row + 8];
        mov.b32 %d3, {%h0, %h1};
    """
    kinds = [np.uint32, np.uint32, np.uint64, np.uint32]
    extended, plain, double, halves = run_lanes(body, [WORDS], kinds)
    low = (WORDS + 0x80) & 0xFF
    assert np.array_equal(plain, low)
    assert np.array_equal(extended, low.astype(np.uint8).view(np.int8).astype(np.int32).view("u4"))
    assert np.array_equal(halves, WORDS + 1)
    wide = (WORDS + np.uint32(0x80)).astype(np.uint64) << np.uint64(32)
    assert np.array_equal(double, wide | (WORDS + np.uint32(2)))


def test_generic_addresses_reach_every_space() -> None:
    body = """
        .shared .b32 word[32]; .local .align 8 .b8 frame[16];
        .reg .b64 %s, %l, %g, %p; .reg .b32 %o, %x; .reg .pred %q<4>;
        mov.u32 %o, word; mad.lo.u32 %o, %t, 4, %o; cvt.u64.u32 %s, %o; cvta.shared.u64 %s, %s;
        mov.u64 %l, frame; cvta.local.u64 %l, %l; add.u64 %l, %l, 8;
        st.b32 [%s], %a0;
        add.u32 %x, %a0, 5; st.b32 [%l], %x;
        ld.b32 %d0, [%s]; ld.b32 %d1, [%l];
        cvta.to.shared.u64 %p, %s; cvt.u32.u64 %x, %p; ld.shared.b32 %d2, [%x];
        mov.u64 %g, table; ld.b32 %d3, [%g + 4];
        isspacep.shared %q0, %s; isspacep.local %q1, %l; isspacep.global %q2, %g;
        isspacep.shared %q3, %l;
        selp.u32 %x, 1, 0, %q0; @%q1 add.u32 %x, %x, 2; @%q2 add.u32 %x, %x, 4;
        @%q3 add.u32 %x, %x, 8; mov.u32 %d4, %x;
    """
    module = ".global .align 4 .u32 table[3] = {1, 77, 3};"
    got = run_lanes(body, [WORDS], [np.uint32] * 5, module=module)
    assert np.array_equal(got[0], WORDS)
    assert np.array_equal(got[1], WORDS + 5)
    assert np.array_equal(got[2], WORDS)
    assert (got[3] == 77).all()
    assert (got[4] == 7).all()


def test_one_instruction_can_touch_several_spaces_and_regions() -> None:
    body = """
        .shared .b32 word[32];
        .reg .b64 %s, %g; .reg .b32 %o; .reg .pred %q; .reg .b32 %x;
        mov.u32 %o, word; mad.lo.u32 %o, %t, 4, %o; cvt.u64.u32 %s, %o; cvta.shared.u64 %s, %s;
        st.b32 [%s], %a0;
        ld.param.b64 %g, [p1];
        and.b32 %x, %t, 1; setp.eq.u32 %q, %x, 0;
        @%q mov.u64 %s, %g;
        ld.b32 %d0, [%s];
    """
    other = np.full(32, 99, np.uint32)
    (got,) = run_lanes(body, [WORDS, other], [np.uint32])
    assert np.array_equal(got, np.where(np.arange(32) % 2 == 0, 99, WORDS))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("ld.global.b32 %d0, [%at + 128];", OutOfBounds),
        ("ld.global.b32 %d0, [%at - 128];", OutOfBounds),
        ("ld.global.b32 %d0, [%at + 2];", Misaligned),
        ("ld.global.v2.b32 {%d0, _}, [%at + 4];", Misaligned),
        ("st.global.b32 [%at + 0x40000], %t;", OutOfBounds),
        ("ld.shared.b32 %d0, [box + 4];", UnwrittenRead),
        ("ld.shared.b32 %d0, [box + 16];", OutOfBounds),
        ("ld.shared.b32 %d0, [0];", OutOfBounds),
        ("ld.local.b32 %d0, [frame];", UnwrittenRead),
        ("ld.local.b32 %d0, [frame + 64];", OutOfBounds),
        ("st.const.b32 [%at], %t;", UnsupportedInstruction),
    ],
)
def test_faults(text: str, error: type[EmulationError]) -> None:
    body = f"""
        .shared .align 8 .b8 box[16]; .local .b32 frame[2]; .reg .b64 %at;
        ld.param.b64 %at, [p0];
        {text}
    """
    with pytest.raises(error) as caught:
        run_lanes(body, [WORDS], [np.uint32])
    assert text.split(" ")[0] in str(caught.value)


def test_the_message_says_where() -> None:
    body = """
        .reg .b64 %at; .reg .pred %q; ld.param.b64 %at, [p0];
        setp.eq.u32 %q, %t, 37;
        @%q ld.global.b32 %d0, [%at + 4096];
    """
    with pytest.raises(OutOfBounds) as caught:
        run_lanes(body, [np.arange(64, dtype=np.uint32)], [np.uint32], block=64)
    message = str(caught.value)
    for part in ("0x7f1000001000", "array 0", "lanes [5]", "k, line", "warp 1", "CTA (0, 0, 0)"):
        assert part in message


def test_unwritten_global_bytes_are_known() -> None:
    region = Region("half", FIRST_ADDRESS, np.zeros(8, np.uint8), np.arange(8) < 4)
    ptx = f"""{HEADER}.visible .entry k(.param .u64 p)
    {{ .reg .b64 %a; .reg .b32 %x; ld.param.u64 %a, [p];
       ld.global.b32 %x, [%a]; ld.global.b32 %x, [%a + 4]; ret; }}"""
    with pytest.raises(UnwrittenRead, match="at 0x7f1000000004"):
        run_kernel(ptx, "k", 1, 32, struct.pack("<Q", region.base), [region])


ATOMICS = {
    # instruction and what it makes of 7 in turn with 0 to 31
    "atom.global.add.u32 %d0, [%at], %t;": 7 + sum(range(32)),
    "atom.global.max.s32 %d0, [%at], %t;": 31,
    "atom.global.min.u32 %d0, [%at], %t;": 0,
    "atom.global.or.b32 %d0, [%at], %t;": 31,
    "atom.global.xor.b32 %d0, [%at], %t;": 7,
    "atom.global.inc.u32 %d0, [%at], 20;": (7 + 32) % 21,
    "atom.global.dec.u32 %d0, [%at], 20;": (7 - 32) % 21,
    "atom.global.cas.b32 %d0, [%at], 7, 100;": 100,
    "red.release.gpu.global.add.u32 [%at], 2;": 71,
}


@pytest.mark.parametrize("text", ATOMICS)
def test_atomics(text: str) -> None:
    region = Region("word", FIRST_ADDRESS, np.array([7, 0], np.uint32))
    ptx = f"""{HEADER}.visible .entry k(.param .u64 p)
    {{ .reg .b64 %at; .reg .b32 %t, %d0; ld.param.u64 %at, [p]; mov.u32 %t, %tid.x;
       {text} ret; }}"""
    run_kernel(ptx, "k", 1, 32, struct.pack("<Q", region.base), [region], seed=2)
    assert region.data.view(np.uint32)[0] == ATOMICS[text]


def test_atomics_return_what_was_there_before() -> None:
    body = """
        .shared .b32 counter; .reg .pred %q;
        setp.eq.u32 %q, %t, 0; @%q st.shared.b32 [counter], 100; bar.sync 0;
        atom.shared.add.u32 %d0, [counter], 1;
    """
    (got,) = run_lanes(body, [WORDS], [np.uint32])
    assert sorted(got.tolist()) == list(range(100, 132))


def test_float_atomics() -> None:
    region = Region("values", FIRST_ADDRESS, np.array([1.5, 2.0, 0.0, 0.0], np.float32))
    ptx = f"""{HEADER}.visible .entry k(.param .u64 p)
    {{ .reg .b64 %at; .reg .b32 %x, %y; ld.param.u64 %at, [p]; mov.b32 %x, 0f3F000000;
       mov.b32 %y, 0x3C003800;
       red.global.add.v2.f32 [%at], {{%x, %x}};
       red.global.add.noftz.f16x2 [%at + 8], %y;
       red.global.max.f64 [%at], 0d7FF0000000000000;
       ret; }}"""
    with pytest.raises(UnsupportedInstruction, match=r"max\.f64"):
        run_kernel(ptx, "k", 1, 32, struct.pack("<Q", region.base), [region])
    without = ptx.replace("red.global.max.f64 [%at], 0d7FF0000000000000;", "")
    run_kernel(without, "k", 1, 32, struct.pack("<Q", region.base), [region])
    assert region.data.view(np.float32)[:2].tolist() == [17.5, 18.0]
    assert region.data.view(np.float16)[4:6].tolist() == [16.0, 32.0]


def test_a_region_reports_its_own_state() -> None:
    region = Region("bytes", FIRST_ADDRESS + 3, 5)
    assert region.data.shape == (5,)
    assert not region.written.any()
    with pytest.raises(OutOfBounds):
        region.range(FIRST_ADDRESS, 5)
