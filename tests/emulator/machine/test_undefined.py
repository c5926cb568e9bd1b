"""What nothing has written may be loaded, moved and computed with, but not used."""

from __future__ import annotations

import numpy as np
import pytest

from emulator.errors import UnwrittenRead
from emulator.programs.lane_programs import run_lanes

# %u is undefined in every lane, %h in odd lanes only; %w is the lane's own word of `box`.
START = """
    .shared .align 16 .b8 box[256], other[256]; .local .align 16 .b8 frame[16];
    .reg .b32 %u, %h, %w, %o, %x, %y; .reg .b16 %s, %v; .reg .b64 %q; .reg .pred %p, %odd;
    mov.u32 %w, box; mad.lo.u32 %w, %t, 4, %w; mov.u32 %o, other; mad.lo.u32 %o, %t, 4, %o;
    and.b32 %x, %t, 1; setp.eq.u32 %odd, %x, 1;
    ld.shared.b32 %u, [%w + 128];
    @!%odd st.shared.b32 [%w], %a0; bar.warp.sync -1; ld.shared.b32 %h, [%w];
"""
USED = {
    "stored": "mov.b32 %d0, %u;",
    "computed with": "add.u32 %x, %u, 1; mul.lo.u32 %d0, %x, 0;",
    "branched on": "mov.u32 %d0, 0; setp.eq.u32 %p, %u, 0; @%p bra L; L:",
    "an address": "ld.shared.b32 %d0, [%u];",
    "a vote": "setp.eq.u32 %p, %u, 0; vote.sync.any.pred %p, %p, -1; selp.u32 %d0, 1, 2, %p;",
    "of another lane": "shfl.sync.bfly.b32 %d0, %h, 1, 31, -1;",
    "through shared memory": "st.shared.b32 [%o], %u; ld.shared.b32 %d0, [%o];",
    "through local memory": "st.local.b32 [frame], %u; ld.local.b32 %d0, [frame];",
    "one bit of it": "and.b32 %x, %u, 1; or.b32 %d0, %x, 6;",
    "half of a register": "mov.b32 {%s, %v}, %a0; cvt.u16.u32 %v, %u; mov.b32 %d0, {%s, %v};",
    "compared, and the other is true": (
        "setp.eq.u32 %odd, %t, %t; setp.lt.and.u32 %p, %u, 3, %odd; selp.u32 %d0, 1, 2, %p;"
    ),
    "in a table": "lop3.b32 %d0, %u, %a0, 0, 0x3C;",
    "a byte of it": "prmt.b32 %d0, %u, %a0, 0x7650;",
    "atomically": "mov.u32 %d0, 0; st.shared.b32 [%o], 0; atom.shared.add.u32 %x, [%o], %u;",
}
THREES = 3 * np.arange(32, dtype=np.uint32)  # %a0
ODD = np.arange(32) % 2 == 1
UNUSED = {
    "overwritten": ("mov.b32 %u, %a0; mov.b32 %d0, %u;", THREES),
    "not chosen": (
        "selp.b32 %x, %u, %a0, %odd; selp.b32 %d0, 7, %x, %odd;",
        np.where(ODD, 7, THREES),
    ),
    "masked": ("and.b32 %x, %u, 0; or.b32 %d0, %x, %a0;", THREES),
    "shifted away": ("shr.u32 %x, %u, 31; shr.u32 %x, %x, 1; add.u32 %d0, %x, %a0;", THREES),
    "other half": (
        "cvt.u16.u32 %v, %u; mov.b32 {%s, _}, %a0; mov.b32 %x, {%s, %v}; mov.b32 {%s, _}, %x;"
        "cvt.u32.u16 %d0, %s;",
        THREES,
    ),
    "a false operand decides": (
        "setp.ne.or.u32 %p, %t, %t, %odd; setp.eq.and.u32 %p, %u, 3, !%p; setp.eq.u32 %odd, %t, 77;"
        "setp.lt.and.u32 %p, %u, 3, %odd; selp.u32 %d0, 1, 2, %p;",
        np.full(32, 2),
    ),
    "a true operand decides": (
        "setp.eq.u32 %odd, %t, %t; setp.lt.or.u32 %p, %u, 3, %odd; selp.u32 %d0, 1, 2, %p;",
        np.full(32, 1),
    ),
    "a comparison decides": (
        "setp.ne.u32 %odd, %u, 0; setp.ne.and.u32 %p, %t, %t, %odd; selp.u32 %d0, 1, 2, %p;",
        np.full(32, 2),
    ),
    "the table leaves it out": ("lop3.b32 %d0, %u, %a0, 0, 0xCC;", THREES),
    "other bytes": ("prmt.b32 %d0, %u, %a0, 0x7654;", THREES),
    "shifted out of two": (
        "shf.l.wrap.b32 %x, %u, %a0, 0; shf.r.clamp.b32 %d0, %a0, %u, 0; add.u32 %d0, %d0, %x;"
        "sub.u32 %d0, %d0, %x; shf.r.clamp.b32 %d0, %a0, %u, 0;",
        THREES,
    ),
    "bits beside it": ("bfi.b32 %x, %u, %a0, 16, 8; bfe.u32 %d0, %x, 0, 16;", THREES),
    "converted away": (
        "cvt.u16.u32 %v, %u; mov.b32 {%s, _}, %a0; mov.b32 %x, {%s, %v}; cvt.u16.u32 %s, %x;"
        "cvt.u32.u16 %d0, %s;",
        THREES,
    ),
    "of a defined lane": ("shfl.sync.idx.b32 %d0, %h, 4, 31, -1;", np.full(32, 12)),
    "of no lane that takes it": (
        "mov.u32 %d0, 5; @!%odd mov.b32 %d0, %h;",
        np.where(ODD, 5, THREES),
    ),
}


@pytest.mark.parametrize("name", USED)
def test_using_what_is_undefined_is_a_fault(name: str) -> None:
    with pytest.raises(UnwrittenRead, match=r"nothing has written \(last loaded by ld\."):
        run_lanes(START + USED[name], [THREES], [np.uint32])


@pytest.mark.parametrize("name", UNUSED)
def test_what_does_not_depend_on_it_may_be_stored(name: str) -> None:
    body, expected = UNUSED[name]
    (stored,) = run_lanes(START + body, [THREES], [np.uint32])
    np.testing.assert_array_equal(stored, expected)


@pytest.mark.parametrize(("row", "faults"), [(0, False), (1, True)], ids=["defined", "undefined"])
def test_a_row_of_a_matrix_makes_a_row_of_the_product(row: int, faults: bool) -> None:
    """Rows 0 to 7 of A are written, 8 to 15 are not; each lane stores of one of both."""
    body = f"""
    .shared .align 16 .b8 rows[512]; .reg .b32 %at, %a<4>, %b<2>, %c<4>; .reg .pred %low;
    mov.u32 %at, rows; mad.lo.u32 %at, %t, 16, %at; setp.lt.u32 %low, %t, 8;
    @%low st.shared.v4.b32 [%at], {{0, 0, 0, 0}}; bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x2.shared.b16 {{%a0, %a1}}, [%at];
    mov.b32 %b0, 0; mov.b32 %c0, 0;
    mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32
        {{%c0, %c1, %c2, %c3}}, {{%a0, %a1}}, {{%b0}}, {{%c0, %c0, %c0, %c0}};
    mov.b32 %d0, %c{2 * row};
"""
    body = body.replace("%a0", "%m0").replace("%a1", "%m1").replace("%a<4>", "%m<4>")
    if faults:
        with pytest.raises(UnwrittenRead, match="last loaded by ldmatrix"):
            run_lanes(body, [THREES], [np.uint32])
        return
    (stored,) = run_lanes(body, [THREES], [np.uint32])
    assert not stored.any()
