"""Races for shared memory are found on every schedule, and nothing else is called one."""

from __future__ import annotations

import numpy as np
import pytest

from emulator.errors import DataRace, Faults, InFlightWrite, MissingProxyFence
from emulator.programs.lane_programs import run_lanes

from .scheduler import POLICIES

SEEDS = range(len(POLICIES))
LANES = np.arange(64, dtype=np.uint32)
START = """
    .shared .align 16 .b8 box[512]; .shared .align 8 .b64 bar, two; .reg .pred %p, %first, %low;
    .reg .b32 %at, %x, %base; .reg .b64 %g, %state;
    setp.eq.u32 %first, %t, 0; setp.lt.u32 %low, %t, 32;
    mov.u32 %base, box; mad.lo.u32 %at, %t, 4, %base;
    @%first mbarrier.init.shared.b64 [bar], 1; @%first mbarrier.init.shared.b64 [two], 2;
    @%first fence.mbarrier_init.release.cluster;
    st.shared.b32 [%at], %a0; bar.sync 0;
"""

RACES = {
    "another warp reads": "st.shared.b32 [%at], 1; xor.b32 %x, %at, 128; ld.shared.b32 %d0, [%x];",
    "another warp writes": "ld.shared.b32 %d0, [%at]; xor.b32 %x, %at, 128; st.shared.b32 [%x], 1;",
    "two warps write": "and.b32 %x, %at, 0xffffff7f; st.shared.b32 [%x], %a0; mov.u32 %d0, 0;",
    "another lane reads": "st.shared.b32 [%at], 1; xor.b32 %x, %at, 4; ld.shared.b32 %d0, [%x];",
    "another lane writes": "ld.shared.b32 %d0, [%at]; xor.b32 %x, %at, 4; st.shared.b32 [%x], 1;",
    "a byte of a word": """
        st.shared.b8 [%at + 1], %t; xor.b32 %x, %at, 128; ld.shared.b32 %d0, [%x];
    """,
    "a relaxed arrival": """
        st.shared.b32 [%at], 1;
        @%first mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [bar];
    W:  mbarrier.try_wait.parity.shared::cta.b64 %p, [bar], 0; @!%p bra W;
        ld.shared.b32 %d0, [%base];
    """,
    "a lane arrives for others that wrote": """
        st.shared.b32 [%at], 1;
        @%first mbarrier.arrive.shared::cta.b64 _, [bar];
        @%low bra DONE;
    W:  mbarrier.try_wait.parity.shared::cta.b64 %p, [bar], 0; @!%p bra W;
        ld.shared.b32 %d0, [%at - 128];
    DONE:
    """,
    "a lane arrives for others that read": """
        @%low ld.shared.b32 %x, [%at];
        @%first mbarrier.arrive.shared::cta.b64 _, [bar];
        @%low bra DONE;
    W:  mbarrier.try_wait.parity.shared::cta.b64 %p, [bar], 0; @!%p bra W;
        st.shared.b32 [%at - 128], 1;
    DONE:
    """,
    "a vote is no barrier": """
        @%low ld.shared.b32 %x, [%at];
        vote.sync.all.pred %p, %p, -1;
        @%first mbarrier.arrive.shared::cta.b64 _, [bar];
        @%low bra DONE;
    W:  mbarrier.try_wait.parity.shared::cta.b64 %p, [bar], 0; @!%p bra W;
        st.shared.b32 [%at - 128], 1;
    DONE:
    """,
    "half a warp meets before a lane arrives": """
        @%low ld.shared.b32 %x, [%at];
        and.b32 %x, %t, 16; setp.eq.u32 %p, %x, 0;
        @%p bar.warp.sync 0xffff;
        @%first mbarrier.arrive.shared::cta.b64 _, [bar];
        @%low bra DONE;
    W:  mbarrier.try_wait.parity.shared::cta.b64 %p, [bar], 0; @!%p bra W;
        st.shared.b32 [%at - 128], 1;
    DONE:
    """,
    "a lane waits for others that read": """
        .reg .pred %second; setp.eq.u32 %second, %t, 32;
        @%low st.shared.b32 [%at], 1;
        @%low bar.warp.sync -1;
        @%first mbarrier.arrive.shared::cta.b64 _, [bar];
        @%low bra DONE;
        @!%second bra READ;
    W:  mbarrier.try_wait.parity.shared::cta.b64 %p, [bar], 0; @!%p bra W;
    READ:
        shfl.sync.idx.b32 %x, %t, 0, 31, -1;
        ld.shared.b32 %d0, [%at - 128];
    DONE:
    """,
    "a later read of the lane that arrives": """
        @%low ld.shared.b32 %x, [%base];
        @%first mbarrier.arrive.noComplete.shared::cta.b64 %state, [two], 1;
        @%first ld.shared.b32 %x, [%base];
        @%first mbarrier.arrive.shared::cta.b64 _, [bar];
        @%low bra DONE;
    W:  mbarrier.try_wait.parity.shared::cta.b64 %p, [bar], 0; @!%p bra W;
        setp.eq.u32 %p, %t, 32; @%p st.shared.b32 [%base], 1;
    DONE:
    """,
    "an mbarrier of which only one lane knows": """
        .shared .align 8 .b64 late;
        @%first mbarrier.init.shared.b64 [late], 1;
        @%low mbarrier.test_wait.parity.shared::cta.b64 %p, [late], 1;
    """,
    "the wrong warp arrives": """
        st.shared.b32 [%at], 1; setp.eq.u32 %p, %t, 32;
        @%p mbarrier.arrive.shared::cta.b64 _, [bar];
    W:  mbarrier.try_wait.parity.shared::cta.b64 %p, [bar], 0; @!%p bra W;
        ld.shared.b32 %d0, [%base];
    """,
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("race", RACES)
def test_races(race: str, seed: int) -> None:
    with pytest.raises(DataRace):
        run_lanes(START + RACES[race], [LANES], [np.uint32], block=64, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_store_that_changes_nothing_is_only_a_note(seed: int) -> None:
    """Warps that hold copies of the same values all store them in Triton's kernels."""
    body = START + "and.b32 %x, %at, 0xffffff7f; st.shared.b32 [%x], 7; bar.sync 0;"
    body += "ld.shared.b32 %d0, [%x];"
    (got,) = run_lanes(body, [LANES], [np.uint32], block=64, seed=seed)
    assert (got == 7).all()


ORDERED = {
    "barrier": "st.shared.b32 [%at], 1; bar.sync 0; xor.b32 %x, %at, 128; ld.shared.b32 %d0, [%x];",
    "warp barrier": """
        st.shared.b32 [%at], 1; bar.warp.sync -1; xor.b32 %x, %at, 4; ld.shared.b32 %d0, [%x];
    """,
    "both read": "xor.b32 %x, %at, 128; ld.shared.b32 %d0, [%x]; ld.shared.b32 %d0, [%at];",
    "bytes of one word": """
        shr.u32 %x, %t, 5; and.b32 %at, %at, 124; add.u32 %x, %x, %at; add.u32 %x, %x, %base;
        and.b32 %at, %base, 124; sub.u32 %x, %x, %at;
        st.shared.b8 [%x], %t; mov.u32 %d0, 1;
    """,
    "mbarrier": """
        st.shared.b32 [%at], 1; bar.warp.sync -1;
        @%first mbarrier.arrive.shared::cta.b64 _, [bar];
        @%low bra READ;
    W:  mbarrier.try_wait.parity.shared::cta.b64 %p, [bar], 0; @!%p bra W;
    READ:
        and.b32 %x, %at, 0xffffff7f; ld.shared.b32 %d0, [%x];
    """.replace("and.b32 %x, %at, 0xffffff7f", "and.b32 %x, %t, 31; mad.lo.u32 %x, %x, 4, %base"),
    "every lane arrives": """
        .shared .align 8 .b64 all; @%first mbarrier.init.shared.b64 [all], 32; bar.sync 0;
        @%low ld.shared.b32 %x, [%base];
        setp.gt.u32 %p, %t, 7; @%p bra LATER;
        mbarrier.arrive.shared::cta.b64 _, [all]; bra DONE;
    LATER:
        @%low ld.shared.b32 %x, [%base];
        @%low mbarrier.arrive.shared::cta.b64 _, [all];
        @%low bra DONE;
    W:  mbarrier.try_wait.parity.shared::cta.b64 %p, [all], 0; @!%p bra W;
        setp.eq.u32 %p, %t, 32; @%p st.shared.b32 [%base], 1;
    DONE:
        mov.u32 %d0, 1;
    """,
    "a lane waits, then the warp meets": """
        @%low st.shared.b32 [%at], 1;
        @%low bar.warp.sync -1;
        @%first mbarrier.arrive.shared::cta.b64 _, [bar];
        @%low bra DONE;
        setp.ne.u32 %p, %t, 32; @%p bra READ;
    W:  mbarrier.try_wait.parity.shared::cta.b64 %p, [bar], 0; @!%p bra W;
    READ:
        bar.warp.sync -1;
        ld.shared.b32 %d0, [%at - 128];
    DONE:
        mov.u32 %d0, 1;
    """,
    "an mbarrier of which a warp knows": """
        .shared .align 8 .b64 late;
        @%first mbarrier.init.shared.b64 [late], 1;
        bar.warp.sync -1;
        @%low mbarrier.test_wait.parity.shared::cta.b64 %p, [late], 1;
        mov.u32 %d0, 1;
    """,
    "a lane by itself": """
        @%first ld.shared.b32 %x, [%at]; @%first st.shared.b32 [%at], 1;
        @%first ld.shared.b32 %x, [%at];
        @%first mbarrier.arrive.shared::cta.b64 _, [bar];
        @%low bra DONE;
    W:  mbarrier.try_wait.parity.shared::cta.b64 %p, [bar], 0; @!%p bra W;
        setp.eq.u32 %p, %t, 32; @%p st.shared.b32 [%base], 1;
    DONE:
        mov.u32 %d0, 1;
    """,
    "atomics": "atom.shared.add.u32 %d0, [%base], 1;",
    "a flag": """
        .shared .b32 flag; st.volatile.shared.b32 [flag], 0; bar.sync 0;
        @%low st.shared.b32 [%at], 7; @%low bar.warp.sync -1;
        @%first st.release.cta.shared.b32 [flag], 1; @%low bra DONE;
    W:  ld.acquire.cta.shared.b32 %x, [flag]; setp.eq.u32 %p, %x, 0; @%p bra W;
        ld.shared.b32 %d0, [%at - 128];
    DONE:
        mov.u32 %d0, 1;
    """,
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("order", ORDERED)
def test_what_is_ordered_is_no_race(order: str, seed: int) -> None:
    run_lanes(START + ORDERED[order], [LANES], [np.uint32], block=64, seed=seed)


BULK = (
    START
    + """
    ld.param.b64 %g, [p0];
    st.shared.b32 [%at], 5;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%first cp.async.bulk.global.shared::cta.bulk_group [%g], [%base], 256;
    @%first cp.async.bulk.commit_group;
    @%first cp.async.bulk.wait_group.read 0;
    bar.sync 0;
    st.shared.b32 [%at], 6;
    mov.u32 %d0, 5;
"""
)
# What is replaced, by what, and the faults that it may show as, whatever the schedule.
BULK_BUGS: dict[str, tuple[str, str, Faults]] = {
    "no proxy fence": ("fence.proxy.async.shared::cta;", "", MissingProxyFence),
    "a fence of one warp before the barrier": (
        "fence.proxy.async.shared::cta;",
        "@%low fence.proxy.async.shared::cta;",
        MissingProxyFence,
    ),
    "no barrier before": ("cta;\n    bar.sync 0;", "cta;", (DataRace, MissingProxyFence)),
    "no barrier after": (
        "read 0;\n    bar.sync 0;",
        "read 0;",
        (DataRace, InFlightWrite, MissingProxyFence),
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("bug", BULK_BUGS)
def test_planted_bugs_of_a_bulk_store(bug: str, seed: int) -> None:
    right, wrong, error = BULK_BUGS[bug]
    assert right in BULK
    with pytest.raises(error):
        run_lanes(BULK.replace(right, wrong), [LANES], [np.uint32], block=64, seed=seed)


def test_a_bulk_store_that_is_not_waited_for() -> None:
    text = BULK.replace("@%first cp.async.bulk.wait_group.read 0;", "")
    with pytest.raises(InFlightWrite):
        run_lanes(text, [LANES], [np.uint32], block=64, seed=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bulk_store_of_what_was_written(seed: int) -> None:
    (got,) = run_lanes(BULK, [LANES], [np.uint32], block=64, seed=seed)
    assert (got == 5).all()
