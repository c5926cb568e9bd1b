"""Barriers of a CTA and a cluster, mbarrier objects, and what misusing them does."""

from __future__ import annotations

import numpy as np
import pytest

from emulator.errors import (
    Deadlock,
    DivergentExecution,
    EmulationError,
    PhaseError,
    UnsupportedInstruction,
)
from emulator.machine.scheduler import POLICIES, Policy
from emulator.programs.lane_programs import run_lanes

SEEDS = range(len(POLICIES))
LANES = np.arange(128, dtype=np.uint32)
NEVER_EARLY = Policy("late", "random", 20, True, 0.0, 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_everybody_waits_for_everybody(seed: int) -> None:
    """Threads read what others wrote, over and over, in one buffer."""
    body = """
        .shared .b32 box[128]; .reg .b32 %own, %other, %x, %i; .reg .pred %p;
        mov.u32 %own, box; mad.lo.u32 %own, %t, 4, %own;
        sub.u32 %other, 127, %t; mov.u32 %x, box; mad.lo.u32 %other, %other, 4, %x;
        mov.u32 %x, %a0; mov.u32 %i, 0;
    LOOP:
        st.shared.b32 [%own], %x;
        bar.sync 0;
        ld.shared.b32 %x, [%other]; add.u32 %x, %x, 1;
        barrier.sync.aligned 3, 128;
        add.u32 %i, %i, 1; setp.lt.u32 %p, %i, 5; @%p bra LOOP;
        mov.u32 %d0, %x;
    """
    (got,) = run_lanes(body, [LANES], [np.uint32], block=128, seed=seed)
    assert np.array_equal(got, LANES[::-1] + 5)


@pytest.mark.parametrize("seed", SEEDS)
def test_producers_arrive_and_consumers_wait(seed: int) -> None:
    """The producer and consumer of the ISA's example: two named barriers, warps 0 and 1."""
    body = """
        .shared .b32 box[32]; .reg .b32 %at, %i, %x, %sum, %lane; .reg .pred %consumer, %p;
        and.b32 %lane, %t, 31; mov.u32 %at, box; mad.lo.u32 %at, %lane, 4, %at;
        setp.ge.u32 %consumer, %t, 32; mov.u32 %i, 0; mov.u32 %sum, 0;
        @%consumer bra CONSUME;
    PRODUCE:
        mad.lo.u32 %x, %i, 10, %lane;
        st.shared.b32 [%at], %x;
        bar.arrive 1, 64;
        bar.sync 2, 64;
        add.u32 %i, %i, 1; setp.lt.u32 %p, %i, 4; @%p bra PRODUCE;
        bra DONE;
    CONSUME:
        bar.sync 1, 64;
        ld.shared.b32 %x, [%at]; add.u32 %sum, %sum, %x;
        bar.arrive 2, 64;
        add.u32 %i, %i, 1; setp.lt.u32 %p, %i, 4; @%p bra CONSUME;
    DONE:
        mov.u32 %d0, %sum;
    """
    (got,) = run_lanes(body, [LANES[:64]], [np.uint32], block=64, seed=seed)
    assert got.tolist() == [0] * 32 + [4 * lane + 60 for lane in range(32)]


@pytest.mark.parametrize("seed", SEEDS)
def test_reductions_over_a_barrier(seed: int) -> None:
    body = """
        .reg .pred %p, %all, %any; setp.lt.u32 %p, %t, 70;
        bar.red.popc.u32 %d0, 0, %p;
        bar.red.and.pred %all, 0, %p; selp.u32 %d1, 1, 0, %all;
        barrier.red.or.aligned.pred %any, 1, 128, !%p; selp.u32 %d2, 1, 0, %any;
    """
    count, every, some = run_lanes(body, [LANES], [np.uint32] * 3, block=128, seed=seed)
    assert (set(count), set(every), set(some)) == ({70}, {0}, {1})


@pytest.mark.parametrize("seed", SEEDS)
def test_diverged_lanes_of_a_warp_arrive_apart(seed: int) -> None:
    body = """
        .reg .pred %p; .reg .b32 %x; and.b32 %x, %t, 1; setp.eq.u32 %p, %x, 0;
        @%p bra EVEN;
        barrier.sync 4; mov.u32 %d0, 1; bra DONE;
    EVEN:
        barrier.sync 4; mov.u32 %d0, 2;
    DONE:
    """
    (got,) = run_lanes(body, [LANES[:64]], [np.uint32], block=64, seed=seed)
    assert got.tolist() == [2, 1] * 32


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("bar.sync 16;", PhaseError, "barrier 16 of 16"),
        ("bar.sync 0, 100;", PhaseError, "not a multiple of 32"),
        ("bar.sync 0, 64;", Deadlock, "waits at a barrier"),
        ("@%low bar.sync 0; @!%low bar.sync 1;", Deadlock, "waits at a barrier"),
        ("@%odd bar.sync 0;", DivergentExecution, "guard differs"),
        ("bar.arrive 0, 96; bar.sync 0, 64;", PhaseError, "threads, where others"),
        ("bar.arrive 0, 0;", PhaseError, "0 threads"),
        ("barrier.cluster.wait;", PhaseError, "no arrival"),
        ("barrier.cluster.arrive; barrier.cluster.arrive;", PhaseError, "twice"),
    ],
)
def test_misuse_of_barriers(text: str, error: type[EmulationError], message: str) -> None:
    body = f"""
        .reg .pred %low, %odd; .reg .b32 %x; setp.lt.u32 %low, %t, 32;
        and.b32 %x, %t, 1; setp.eq.u32 %odd, %x, 1;
        {text}
    """
    with pytest.raises(error, match=message):
        run_lanes(body, [LANES[:96]], [np.uint32], block=96)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_barrier_of_a_cluster_of_one(seed: int) -> None:
    body = """
        .shared .b32 box[128]; .reg .b32 %at, %x;
        mov.u32 %at, box; mad.lo.u32 %at, %t, 4, %at; st.shared.b32 [%at], %a0;
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
        xor.b32 %x, %t, 96; mov.u32 %at, box; mad.lo.u32 %at, %x, 4, %at;
        mapa.shared::cluster.u32 %at, %at, 0;
        ld.shared::cluster.b32 %d0, [%at];
    """
    (got,) = run_lanes(body, [LANES], [np.uint32], block=128, seed=seed)
    assert np.array_equal(got, LANES ^ 96)


INITIALIZED = """
    .shared .align 8 .b64 full, empty; .shared .b32 box[128]; .reg .pred %first, %p, %q;
    .reg .b32 %at, %x, %i; .reg .b64 %state;
    setp.eq.u32 %first, %t, 0;
    @%first mbarrier.init.shared::cta.b64 [full], COUNT;
    @%first mbarrier.init.shared.b64 [empty], COUNT;
    bar.sync 0;
    mov.u32 %at, box; mad.lo.u32 %at, %t, 4, %at;
"""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("wait", ["test_wait", "try_wait"])
def test_an_mbarrier_orders_phases(wait: str, seed: int) -> None:
    body = (
        INITIALIZED.replace("COUNT", "128")
        + f"""
        mov.u32 %i, 0; mov.u32 %x, %a0;
    LOOP:
        st.shared.b32 [%at], %x;
        mbarrier.arrive.shared.b64 %state, [full];
    WAIT1:
        mbarrier.{wait}.shared.b64 %p, [full], %state;
        @!%p bra WAIT1;
        sub.u32 %x, 127, %t; shl.b32 %x, %x, 2; add.u32 %x, %x, box; ld.shared.b32 %x, [%x];
        mbarrier.arrive.release.cta.shared::cta.b64 _, [empty], 1;
        and.b32 %d0, %i, 1;
    WAIT2:
        mbarrier.{wait}.parity.acquire.cta.shared::cta.b64 %p, [empty], %d0;
        @!%p bra WAIT2;
        add.u32 %i, %i, 1; setp.lt.u32 %p, %i, 3; @%p bra LOOP;
        mov.u32 %d0, %x;
    """
    )
    body = body.replace(
        "add.u32 %x, %x, box;", ".reg .b32 %b; mov.u32 %b, box; add.u32 %x, %x, %b;"
    )
    (got,) = run_lanes(body, [LANES], [np.uint32], block=128, seed=seed)
    assert np.array_equal(got, LANES[::-1])


def test_counts_of_an_mbarrier() -> None:
    body = (
        INITIALIZED.replace("COUNT", "4")
        + """
        mov.u32 %d0, 9; mov.u32 %d1, 9; mov.u32 %d2, 9; mov.u32 %d3, 9;
        @!%first bra END;
        mbarrier.arrive.noComplete.shared.b64 %state, [full], 2;
        mbarrier.pending_count.b64 %d0, %state;
        mbarrier.arrive_drop.shared.b64 %state, [full];
        mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [full], 16;
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], 8;
        mbarrier.test_wait.shared.b64 %p, [full], %state; selp.u32 %d1, 1, 0, %p;
        mbarrier.complete_tx.shared::cta.b64 [full], 24;
        mbarrier.test_wait.shared.b64 %p, [full], %state; selp.u32 %d2, 1, 0, %p;
        mbarrier.arrive.noComplete.shared.b64 %state, [full], 1;
        mbarrier.pending_count.b64 %d3, %state;
        mbarrier.inval.shared.b64 [full];
        st.shared.b32 [full], 1;
        mbarrier.inval.shared.b64 [empty];
        mbarrier.init.shared.b64 [empty], 1;
    END:
    """
    )
    got = run_lanes(body, [LANES[:32]], [np.uint32] * 4)
    assert [column[0] for column in got] == [4, 0, 1, 3]


FAULTS = {
    "arrivals beyond the count": "mbarrier.arrive.shared.b64 _, [full], 3;",
    "initialized twice": "mbarrier.init.shared.b64 [full], 1;",
    "a count of 0": "mbarrier.inval.shared.b64 [full]; mbarrier.init.shared.b64 [full], 0;",
    "not initialized": "mbarrier.arrive.shared.b64 _, [box];",
    "invalidated": "mbarrier.inval.shared.b64 [full]; mbarrier.arrive.shared.b64 _, [full];",
    "plain load": "ld.shared.b64 %state, [full];",
    "plain store": "st.shared.b64 [full], %state;",
    "completes in spite of noComplete": "mbarrier.arrive.noComplete.shared.b64 _, [full], 2;",
    "parity 2": "mbarrier.test_wait.parity.shared.b64 %p, [full], 2;",
    "too many transactions": "mbarrier.expect_tx.shared.b64 [full], 0x100000;",
    "a phase of which nobody saw the last one complete": """
        mbarrier.arrive.shared.b64 _, [full], 2; mbarrier.arrive.shared.b64 _, [full], 2;
    """,
    "a state of long ago": """
        mbarrier.arrive.shared.b64 %state, [full], 2;
        mbarrier.test_wait.shared.b64 %p, [full], %state;
        mbarrier.arrive.shared.b64 _, [full], 2;
        mbarrier.test_wait.parity.shared.b64 %p, [full], 1;
        mbarrier.test_wait.shared.b64 %p, [full], %state;
    """,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_misuse_of_an_mbarrier(fault: str) -> None:
    body = (
        INITIALIZED.replace("COUNT", "2")
        + f"@!%first bra END; {FAULTS[fault]} END: mov.u32 %d0, 0;"
    )
    with pytest.raises(PhaseError):
        run_lanes(body, [LANES[:32]], [np.uint32], policy=NEVER_EARLY)


@pytest.mark.parametrize(
    "text",
    [
        "mbarrier.try_wait.parity.shared::cta.b64 %p, [full], 0;",
        "mbarrier.test_wait.parity.shared::cta.b64 %p, [full], 0;",
    ],
)
def test_a_phase_that_never_completes_is_a_deadlock(text: str) -> None:
    body = (
        INITIALIZED.replace("COUNT", "2")
        + f"""
        @%first mbarrier.arrive.shared.b64 _, [full];
    L: {text}
        @!%p bra L;
        mov.u32 %d0, 0;
    """
    )
    with pytest.raises(Deadlock, match=r"polls in vain|waits for phase 0"):
        run_lanes(body, [LANES[:64]], [np.uint32], block=64)


@pytest.mark.parametrize("seed", SEEDS)
def test_try_wait_may_fail_early_and_is_then_tried_again(seed: int) -> None:
    """Whether the loop runs once or more often is the schedule's choice, the result is not."""
    body = (
        INITIALIZED.replace("COUNT", "64")
        + """
        st.shared.b32 [%at], %a0;
        mbarrier.arrive.shared.b64 _, [full]; mov.u32 %d0, 0;
    L:  add.u32 %d0, %d0, 1;
        mbarrier.try_wait.parity.shared::cta.b64 %p, [full], 0, 1000;
        @!%p bra L;
        xor.b32 %x, %t, 33; mov.u32 %at, box; mad.lo.u32 %at, %x, 4, %at;
        ld.shared.b32 %d1, [%at];
    """
    )
    tries, values = run_lanes(body, [LANES[:64]], [np.uint32] * 2, block=64, seed=seed)
    assert (tries >= 1).all()
    assert np.array_equal(values, LANES[:64] ^ 33)


def test_fences_are_decoded_strictly() -> None:
    body = """
        fence.acq_rel.gpu; fence.sc.cta; membar.gl; fence.acquire.cluster; fence.proxy.alias;
        fence.proxy.async; fence.proxy.async.global; fence.proxy.async.shared::cta;
        fence.mbarrier_init.release.cluster; mov.u32 %d0, 1;
    """
    (got,) = run_lanes(body, [LANES[:32]], [np.uint32])
    assert (got == 1).all()
    with pytest.raises(UnsupportedInstruction, match=r"fence\.proxy\.texture"):
        run_lanes("fence.proxy.texture;", [LANES[:32]], [np.uint32])
