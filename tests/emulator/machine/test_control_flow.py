"""Branches, loops, calls and exits, whichever lanes run first."""

from __future__ import annotations

import numpy as np
import pytest

from emulator.errors import Deadlock, DivergentExecution, Trapped, UnsupportedInstruction
from emulator.programs.lane_programs import run_lanes

from .scheduler import POLICIES

SEEDS = range(len(POLICIES))
LANES = np.arange(64, dtype=np.uint32)


@pytest.mark.parametrize("seed", SEEDS)
def test_diverged_loops_and_nested_branches(seed: int) -> None:
    """The steps that a Collatz sequence takes; every lane leaves the loop at its own time."""
    body = """
        .reg .pred %p, %q; .reg .b32 %x, %n, %odd;
        add.u32 %x, %a0, 1; mov.u32 %n, 0;
    LOOP:
        setp.eq.u32 %p, %x, 1;
        @%p bra DONE;
        and.b32 %odd, %x, 1;
        setp.ne.u32 %q, %odd, 0;
        @%q bra ODD;
        shr.u32 %x, %x, 1;
        bra NEXT;
    ODD:
        mad.lo.u32 %x, %x, 3, 1;
    NEXT:
        add.u32 %n, %n, 1;
        bra.uni LOOP;
    DONE:
        mov.u32 %d0, %n;
    """
    (got,) = run_lanes(body, [LANES], [np.uint32], block=64, seed=seed)

    def steps(value: int) -> int:
        count = 0
        while value != 1:
            value = value // 2 if value % 2 == 0 else 3 * value + 1
            count += 1
        return count

    assert got.tolist() == [steps(value + 1) for value in range(64)]


@pytest.mark.parametrize("seed", SEEDS)
def test_jump_tables(seed: int) -> None:
    body = """
        .reg .b32 %i; and.b32 %i, %a0, 3;
    TABLE: .branchtargets A, B, C, D;
        brx.idx %i, TABLE;
    A: mov.u32 %d0, 10; bra E;
    B: mov.u32 %d0, 11; bra E;
    C: mov.u32 %d0, 12; bra E;
    D: mov.u32 %d0, 13;
    E:
    """
    (got,) = run_lanes(body, [LANES], [np.uint32], block=64, seed=seed)
    assert np.array_equal(got, 10 + LANES % 4)


FUNCTIONS = """
.func (.param .b32 result) twice(.param .b32 value, .param .align 8 .b8 pair[8])
{
    .reg .b32 %r<4>; .reg .pred %p;
    ld.param.b32 %r1, [value];
    ld.param.b32 %r2, [pair + 4];
    setp.gt.u32 %p, %r1, 20;
    @%p bra BIG;
    add.u32 %r1, %r1, %r1;
    st.param.b32 [result], %r1;
    ret;
BIG:
    add.u32 %r1, %r1, %r2;
    st.param.b32 [result], %r1;
    ret;
}
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_calls_pass_bytes_and_return_to_their_callers(seed: int) -> None:
    body = """
        .reg .b32 %x; .reg .pred %p; .param .b32 given; .param .align 8 .b8 two[8];
        .param .b32 taken;
        st.param.b32 [given], %a0; st.param.v2.b32 [two], {%t, 1000};
        call.uni (taken), twice, (given, two);
        ld.param.b32 %x, [taken];
        setp.lt.u32 %p, %t, 5;
        @%p st.param.b32 [given], %x;
        @%p call (taken), twice, (given, two);
        @%p ld.param.b32 %x, [taken];
        mov.u32 %d0, %x;
    """
    (got,) = run_lanes(body, [LANES], [np.uint32], block=64, seed=seed, module=FUNCTIONS)

    def twice(value: int) -> int:
        return value + 1000 if value > 20 else 2 * value

    assert got.tolist() == [twice(twice(v)) if v < 5 else twice(v) for v in range(64)]


def test_recursion_and_unknown_functions_are_refused() -> None:
    module = ".func f() { call.uni f; ret; }"
    with pytest.raises(UnsupportedInstruction, match="recursion"):
        run_lanes("call.uni f;", [LANES], [np.uint32], block=64, module=module)
    with pytest.raises(UnsupportedInstruction, match="no body"):
        run_lanes("call.uni f;", [LANES], [np.uint32], block=64, module=".extern .func f();")


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_that_end_are_not_waited_for(seed: int) -> None:
    body = """
        .reg .pred %p, %q; .reg .b32 %m;
        setp.ge.u32 %p, %t, 40;
        @%p exit;
        bar.sync 0;
        activemask.b32 %m;
        mov.u32 %d0, %m;
    """
    (got,) = run_lanes(body, [LANES], [np.uint32], block=64, seed=seed)
    assert got[:40].tolist() == [0xFFFFFFFF] * 32 + [0xFF] * 8
    assert (got[40:] == 0).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_sync_instructions_gather_diverged_lanes(seed: int) -> None:
    """Halves of a warp take different ways to one shuffle, and have shuffles of their own."""
    body = """
        .reg .pred %p; .reg .b32 %x, %half, %mask;
        and.b32 %half, %t, 16;
        setp.eq.u32 %p, %half, 0;
        mov.u32 %mask, 0xFFFF0000;
        @%p mov.u32 %mask, 0x0000FFFF;
        mov.u32 %x, %a0;
        @%p bra LEFT;
        add.u32 %x, %x, 100; add.u32 %x, %x, 100;
    LEFT:
        shfl.sync.bfly.b32 %d0, %x, 1, 0x1f, %mask;
        @%p bra EVEN;
        shfl.sync.idx.b32 %d1, %x, 17, 0x1f, 0xFFFF0000;
        bra JOIN;
    EVEN:
        shfl.sync.idx.b32 %d1, %x, 3, 0x1f, 0x0000FFFF;
    JOIN:
        bar.warp.sync -1;
        shfl.sync.idx.b32 %d2, %x, 31, 0x1f, -1;
    """
    kinds = [np.uint32] * 3
    got = run_lanes(body, [LANES[:32]], kinds, seed=seed)
    values = LANES[:32] + np.where(LANES[:32] < 16, 0, 200)
    assert np.array_equal(got[0], values[LANES[:32] ^ 1])
    assert got[1].tolist() == [3] * 16 + [217] * 16
    assert (got[2] == 231).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_that_end_complete_a_warp_barrier(seed: int) -> None:
    """Once with lanes that end instead of coming, then again with those that are left."""
    body = """
        .reg .pred %p, %q; .shared .b32 box[32]; .reg .b32 %at, %x;
        setp.ge.u32 %p, %t, 24; and.b32 %x, %t, 1; setp.eq.u32 %q, %x, 0;
        mov.u32 %at, box; mad.lo.u32 %at, %t, 4, %at;
        @%p bra END;
        @%q bra A;
        st.shared.b32 [%at], 1; bar.warp.sync 0xffffffff; bra B;
    A:  st.shared.b32 [%at], 2; bar.warp.sync 0xffffffff;
    B:  xor.b32 %at, %at, 4; ld.shared.b32 %x, [%at]; bar.warp.sync 0xffffffff;
        st.shared.b32 [%at], 7;
        mov.u32 %d0, %x; bra DONE;
    END: exit;
    DONE:
    """
    (got,) = run_lanes(body, [LANES[:32]], [np.uint32], seed=seed)
    assert got.tolist() == [1, 2] * 12 + [0] * 8


def test_only_the_kernel_that_calls_indirectly_is_refused() -> None:
    call = """
        .reg .b64 %f; mov.u64 %f, 0;
    P: .callprototype _ ();
        call %f, (), P;
    """
    module = f".visible .entry other() {{ {call} ret; }}"
    (got,) = run_lanes("mov.u32 %d0, %a0;", [LANES], [np.uint32], block=64, module=module)
    assert (got == LANES).all()
    with pytest.raises(UnsupportedInstruction, match=r"call %f.*indirect call"):
        run_lanes(call, [LANES], [np.uint32], block=64)


def test_a_shuffle_without_all_its_members_is_a_deadlock() -> None:
    body = """
        .reg .pred %p; setp.lt.u32 %p, %t, 16;
        @%p bra A;
        shfl.sync.idx.b32 %d0, %a0, 0, 0x1f, -1; bra B;
    A:  shfl.sync.idx.b32 %d0, %a0, 1, 0x1f, -1;
    B:
    """
    with pytest.raises(Deadlock, match="member mask 0xffffffff"):
        run_lanes(body, [LANES[:32]], [np.uint32])


def test_a_lane_must_be_in_its_member_mask() -> None:
    with pytest.raises(DivergentExecution, match="member mask 0xff"):
        run_lanes("bar.warp.sync 0xFF; mov.u32 %d0, 0;", [LANES[:32]], [np.uint32])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_spin_lock_between_lanes_and_warps(seed: int) -> None:
    """Who waits must not keep from running who holds the lock, be it a lane of the same warp."""
    body = """
        .reg .pred %p; .reg .b32 %old, %x; .shared .b32 lock, count;
        setp.ne.u32 %p, %t, 0; @%p bra START;
        st.shared.b32 [lock], 0; st.shared.b32 [count], 0;
    START: bar.sync 0;
    SPIN: atom.shared.cas.b32 %old, [lock], 0, 1;
        setp.ne.u32 %p, %old, 0;
        @%p bra TRY;
        ld.volatile.shared.b32 %x, [count]; add.u32 %x, %x, 1; st.volatile.shared.b32 [count], %x;
        atom.shared.exch.b32 %old, [lock], 0;
        mov.u32 %old, 0;
    TRY: setp.ne.u32 %p, %old, 0; @%p bra SPIN;
        bar.sync 0;
        ld.shared.b32 %d0, [count];
    """
    (got,) = run_lanes(body, [LANES], [np.uint32], block=64, seed=seed)
    assert (got == 64).all()


def test_trap_and_endless_loops() -> None:
    with pytest.raises(Trapped):
        run_lanes("trap;", [LANES], [np.uint32], block=64)
    body = """
        .reg .pred %p; .reg .b32 %x; .shared .b32 flag; st.shared.b32 [flag], 0;
    L:  ld.volatile.shared.b32 %x, [flag]; setp.eq.u32 %p, %x, 0; @%p bra L;
        mov.u32 %d0, %x;
    """
    with pytest.raises(Deadlock, match="polls in vain"):
        run_lanes(body, [LANES[:32]], [np.uint32])


def test_special_registers() -> None:
    body = """
        .reg .b32 %x, %y;
        mov.u32 %d0, %laneid; mov.u32 %d1, %warpid; mov.u32 %d2, %lanemask_lt;
        mov.u32 %d3, %ntid.x; mov.u32 %x, %ctaid.x; mov.u32 %y, %cluster_ctarank;
        add.u32 %d4, %x, %y; mov.u64 %d5, %clock64;
    """
    kinds = [np.uint32] * 5 + [np.uint64]
    lane, warp, below, size, zero, clock = run_lanes(body, [LANES], kinds, block=64)
    assert np.array_equal(lane, LANES % 32)
    assert np.array_equal(warp, LANES // 32)
    assert below.tolist() == [(1 << i % 32) - 1 for i in range(64)]
    assert (size == 64).all()
    assert (zero == 0).all()
    assert (clock > 0).all()


@pytest.mark.parametrize(
    "policy",
    [
        "fractional.L2::evict_first.b64 %d0",
        "fractional.L2::evict_last.L2::evict_unchanged.b64 %d0, 0.5",
        "range.global.L2::evict_last.L2::evict_first.b64 %d0, [%at], 64, %t",
        "cvt.L2.b64 %d0, 0x10",
    ],
)
def test_a_cache_policy_is_a_value(policy: str) -> None:
    (got,) = run_lanes(f"createpolicy.{policy};", [LANES], [np.uint64], block=64)
    assert len(set(got.tolist())) == 1


@pytest.mark.parametrize("policy", ["fractional.L2::evict_never.b64 %d0", "range.L2.b64 %d0"])
def test_an_unknown_cache_policy_is_named(policy: str) -> None:
    with pytest.raises(UnsupportedInstruction, match="createpolicy"):
        run_lanes(f"createpolicy.{policy};", [LANES], [np.uint64], block=64)
