"""`cp.async`: sizes, groups, arrivals at mbarriers, and planted bugs in how it is waited for."""

from __future__ import annotations

import numpy as np
import pytest

from emulator.errors import (
    DataRace,
    EmulationError,
    Faults,
    InFlightRead,
    InFlightWrite,
    Misaligned,
    OutOfBounds,
    PhaseError,
    UnfinishedAsync,
    UnwrittenRead,
)
from emulator.machine.scheduler import POLICIES, Policy
from emulator.programs.lane_programs import run_lanes

SEEDS = range(len(POLICIES))
LATE = Policy("late", "random", 40, True, 0.0, 1)
IMPATIENT = Policy("late", "random", 40, True, 0.9, 1)  # try_wait mostly fails early
WORDS = np.arange(256, dtype=np.uint64) * 0x0001_0001_0001_0001
# Every thread copies 16 bytes of the first array, 8 bytes an element, to its row of `box`.
START = """
    .shared .align 16 .b8 box[2048]; .shared .align 8 .b64 bar;
    .reg .b32 %row, %x, %y; .reg .b64 %g; .reg .pred %p, %first;
    setp.eq.u32 %first, %t, 0;
    mov.u32 %row, box; mad.lo.u32 %row, %t, 16, %row;
    ld.param.b64 %g, [p0]; mad.wide.u32 %g, %t, 8, %g;
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_sizes_and_zero_fill(seed: int) -> None:
    body = (
        START
        + """
        .reg .b64 %z; and.b32 %x, %t, 15;
        ld.param.b64 %g, [p0]; mad.wide.u32 %g, %t, 16, %g;
        cp.async.cg.shared.global [%row], [%g], 16, %x;
        setp.eq.u32 %p, %x, 3;
        cp.async.ca.shared::cta.global.L2::128B [%row + 1024], [%g], 4, %p;
        cp.async.ca.shared.global [%row + 1032], [%g + 8], 8;
        cp.async.wait_all;
        ld.shared.v2.b64 {%d0, %d1}, [%row]; ld.shared.b32 %d2, [%row + 1024];
        ld.shared.b64 %d3, [%row + 1032];
    """
    )
    kinds = [np.uint64, np.uint64, np.uint32, np.uint64]
    low, high, word, pair = run_lanes(body, [WORDS[:64]], kinds, block=32, seed=seed)[:4]
    data = WORDS[:64].view(np.uint8).reshape(32, 16)
    expected = np.where(np.arange(16) < (np.arange(32) & 15)[:, None], data, 0).astype(np.uint8)
    assert np.array_equal(low, expected[:, :8].copy().view(np.uint64)[:, 0])
    assert np.array_equal(high, expected[:, 8:].copy().view(np.uint64)[:, 0])
    first_words = data[:, :4].copy().view(np.uint32)[:, 0]
    assert np.array_equal(word, np.where((np.arange(32) & 15) == 3, 0, first_words))
    assert np.array_equal(pair, WORDS[1:64:2])


PIPELINE = (
    START
    + """
    .reg .b64 %sum, %v; mov.b64 %sum, 0; mov.u32 %x, 0; ld.param.b64 %g, [p0];
    mad.wide.u32 %g, %t, 8, %g;
    cp.async.ca.shared.global [%row], [%g], 8; cp.async.commit_group;
    cp.async.ca.shared.global [%row + 1024], [%g + 512], 8; cp.async.commit_group;
LOOP:
    cp.async.wait_group 1;
    bar.sync 0;
    and.b32 %y, %x, 1; shl.b32 %y, %y, 10; add.u32 %y, %y, %row; xor.b32 %y, %y, 16;
    ld.shared.b64 %v, [%y]; add.u64 %sum, %sum, %v;
    bar.sync 0;
    add.u32 %x, %x, 1;
    setp.ge.u32 %p, %x, 3; @%p bra SKIP;
    xor.b32 %y, %y, 16;
    mad.wide.u32 %g, %x, 512, %g; cp.async.ca.shared.global [%y], [%g + 512], 8;
SKIP:
    cp.async.commit_group;
    setp.lt.u32 %p, %x, 3; @%p bra LOOP;
    cp.async.wait_all;
    mov.b64 %d0, %sum;
"""
)


def _pipeline(body: str, **how: object) -> np.ndarray:
    inputs = [np.resize(WORDS, 512)]
    (got,) = run_lanes(body, [inputs[0]], [np.uint64], block=64, **how)
    return got


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pipeline_of_two_stages(seed: int) -> None:
    data = np.resize(WORDS, 512).reshape(8, 64)
    # Stages 0 and 1, then what iteration 1 and 2 asked for: 512 and 1536 bytes on, plus 512.
    expected = data[0] + data[1] + data[2]
    assert np.array_equal(_pipeline(PIPELINE, seed=seed), expected[np.arange(64) ^ 1])


BUGS: dict[str, tuple[str, str, Faults]] = {
    "no wait": ("cp.async.wait_group 1;", "", InFlightRead),
    "waits for too little": ("cp.async.wait_group 1;", "cp.async.wait_group 2;", InFlightRead),
    "no commit": (
        "%y], [%g + 512], 8;\nSKIP:\n    cp.async.commit_group;",
        "%y], [%g + 512], 8;\nSKIP:",
        (InFlightRead, DataRace),
    ),
    "no barrier before reading": (
        "cp.async.wait_group 1;\n    bar.sync 0;",
        "cp.async.wait_group 1;",
        EmulationError,
    ),
    "no barrier before writing": ("%v;\n    bar.sync 0;", "%v;", DataRace),
    "misaligned source": ("[%g + 512], 8; cp", "[%g + 516], 8; cp", Misaligned),
    "misaligned target": ("[%row + 1024]", "[%row + 1028]", Misaligned),
    "beyond the source": ("[%g + 512], 8; cp", "[%g + 8192], 8; cp", OutOfBounds),
    "beyond shared memory": ("[%row + 1024]", "[%row + 10240]", OutOfBounds),
    "reads what was never copied": (
        "xor.b32 %y, %y, 16;\n    ld",
        "xor.b32 %y, %y, 8;\n    ld",
        UnwrittenRead,
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs(bug: str) -> None:
    right, wrong, error = BUGS[bug]
    assert right in PIPELINE
    with pytest.raises(error):
        _pipeline(PIPELINE.replace(right, wrong), policy=LATE)


def test_lanes_may_copy_the_same_bytes_to_the_same_place() -> None:
    body = """
        .shared .align 16 .b8 box[64]; .reg .b32 %row; .reg .b64 %g;
        and.b32 %row, %t, 3; ld.param.b64 %g, [p0]; mad.wide.u32 %g, %row, 4, %g;
        mov.u32 %d0, box; mad.lo.u32 %row, %row, 4, %d0;
        cp.async.ca.shared.global [%row], [%g], 4; cp.async.wait_all; bar.sync 0;
        ld.shared.b32 %d0, [%row];
    """
    words = np.arange(32, dtype=np.uint32) + 7
    (got,) = run_lanes(body, [words], [np.uint32])
    assert np.array_equal(got, words[np.arange(32) % 4])
    with pytest.raises(InFlightWrite):  # other bytes to the same place
        run_lanes(body.replace("%row, 4, %g;", "%t, 4, %g;"), [words], [np.uint32])


def test_nobody_waits_for_the_last_copy() -> None:
    body = START + "cp.async.ca.shared.global [%row], [%g], 8; mov.b64 %d0, 0;"
    with pytest.raises(UnfinishedAsync, match=r"cp\.async\.ca"):
        run_lanes(body, [WORDS[:32]], [np.uint64], policy=LATE)


def test_a_store_under_a_copy() -> None:
    body = (
        START
        + """
        cp.async.ca.shared.global [%row], [%g], 8;
        st.shared.b32 [%row], %t; cp.async.wait_all; mov.b64 %d0, 0;
    """
    )
    with pytest.raises(InFlightWrite):
        run_lanes(body, [WORDS[:32]], [np.uint64], policy=LATE)


ARRIVAL = (
    START
    + """
    @%first mbarrier.init.shared.b64 [bar], 64;
    bar.sync 0;
    cp.async.ca.shared.global [%row], [%g], 8;
    cp.async.mbarrier.arrive.noinc.shared.b64 [bar];
W:  mbarrier.try_wait.parity.shared::cta.b64 %p, [bar], 0;
    @!%p bra W;
    xor.b32 %y, %row, 528; ld.shared.b64 %d0, [%y];
"""
)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("counted", [True, False])
def test_copies_arrive_at_an_mbarrier(seed: int, counted: bool) -> None:
    body = ARRIVAL
    if not counted:
        body = body.replace(
            "arrive.noinc.shared.b64 [bar];",
            "arrive.shared.b64 [bar]; mbarrier.arrive.shared.b64 _, [bar];",
        )
    (got,) = run_lanes(body, [WORDS[:64]], [np.uint64], block=64, seed=seed)
    assert np.array_equal(got, WORDS[np.arange(64) ^ 33])


ARRIVAL_BUGS: dict[str, tuple[str, str, Faults]] = {
    "wrong parity": (
        "[bar], 0;\n    @",
        "[bar], 1;\n    @",
        (InFlightRead, UnwrittenRead, DataRace),
    ),
    "no wait": (
        "mbarrier.try_wait.parity.shared::cta.b64 %p, [bar], 0;\n    @!%p bra W;",
        "",
        (InFlightRead, UnwrittenRead, DataRace),
    ),
    "no second try": ("@!%p bra W;", "", (InFlightRead, UnwrittenRead, DataRace)),
    "count too high": ("[bar], 64;", "[bar], 65;", EmulationError),
    "count too low": ("[bar], 64;", "[bar], 63;", PhaseError),
    "arrival without the copy": (".noinc", "", EmulationError),
    "plain arrival": (
        "cp.async.mbarrier.arrive.noinc.shared.b64 [bar];",
        "mbarrier.arrive.shared.b64 _, [bar];",
        InFlightRead,
    ),
}


@pytest.mark.parametrize("bug", ARRIVAL_BUGS)
def test_planted_bugs_of_arrivals(bug: str) -> None:
    right, wrong, error = ARRIVAL_BUGS[bug]
    assert right in ARRIVAL
    with pytest.raises(error):
        run_lanes(
            ARRIVAL.replace(right, wrong), [WORDS[:64]], [np.uint64], block=64, policy=IMPATIENT
        )
