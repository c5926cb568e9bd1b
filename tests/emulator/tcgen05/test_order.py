"""Allocation, commits and fences of tcgen05: what is ordered, and planted bugs that are caught."""

from __future__ import annotations

import numpy as np
import pytest

from emulator import errors
from emulator.programs.ptx_kernels import SEEDS, kernel, run, wait
from emulator.programs.tcgen05_kernels import (
    AFTER,
    COMMIT,
    SCALE_A_COLUMN,
    SCALE_B_COLUMN,
    SCALES_AT,
    MmaCase,
    descriptor_register,
)

from .canonical_layouts import encode_descriptor
from .tensor_order import TensorOrderError
from .test_mma import f16_case
from .test_scaled_mma import nvfp4_case

ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], {};\n"
DEALLOC = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 {}, {};\n"
RELINQUISH = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n"
READ_SLOT = "ld.shared.b32 %r20, [slot];\n"
ALLOCATIONS = {
    "sound": (ALLOC.format(64) + READ_SLOT + DEALLOC.format("%r20", 64) + RELINQUISH, None),
    "leak": (ALLOC.format(64), errors.TensorMemoryLeak),
    "not-a-power": (ALLOC.format(48), errors.TensorMemoryMisuse),
    "too-many": (ALLOC.format(1024), errors.TensorMemoryMisuse),
    "after-relinquish": (RELINQUISH + ALLOC.format(64), errors.TensorMemoryMisuse),
    "growing": (ALLOC.format(64) + ALLOC.format(128), errors.TensorMemoryMisuse),
    "wrong-size": (
        ALLOC.format(64) + READ_SLOT + DEALLOC.format("%r20", 32),
        errors.TensorMemoryMisuse,
    ),
    "wrong-address": (
        ALLOC.format(64) + READ_SLOT + "add.u32 %r20, %r20, 32;\n" + DEALLOC.format("%r20", 64),
        errors.TensorMemoryMisuse,
    ),
    "twice": (
        ALLOC.format(64) + READ_SLOT + 2 * DEALLOC.format("%r20", 64),
        errors.TensorMemoryMisuse,
    ),
    "full-for-ever": (ALLOC.format(512) + ALLOC.format(32), errors.Deadlock),
    "disagreeing": (
        "add.u32 %r2, %r0, 32;\n" + ALLOC.format("%r2"),
        errors.TensorMemoryMisuse,
    ),
}


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_allocation(name: str) -> None:
    body, error = ALLOCATIONS[name]
    if error is None:
        run(kernel(body, 0), [])
        return
    with pytest.raises(error):
        run(kernel(body, 0), [])


@pytest.mark.parametrize("seed", SEEDS)
def test_reading_an_allocation_s_address_needs_a_barrier(seed: int) -> None:
    allocate = f"    setp.ne.u32 %p1, %r1, 0;\n    @%p1 bra read;\n{ALLOC.format(64)}read:\n"
    free = f"    bar.sync 0;\n    @%p1 bra end;\n{DEALLOC.format('%r20', 64)}end:\n"
    run(kernel(allocate + BARRIER + READ_SLOT + free, 0), [], block=64, seed=seed)
    with pytest.raises((errors.DataRace, errors.UnwrittenRead)):
        run(kernel(allocate + READ_SLOT + free, 0), [], block=64, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_allocation_waits_for_room(seed: int) -> None:
    """Warp 1 wants columns that warp 0 gives back."""
    body = f"""
    setp.eq.u32 %p1, %r1, 0;
    @!%p1 bra other;
    {ALLOC.format(512)}
    {READ_SLOT}
    bar.sync 0;
    {DEALLOC.format("%r20", 512)}
    bra end;
other:
    bar.sync 0;
    {ALLOC.format(512).replace("slot", "empty")}
    ld.shared.b32 %r20, [empty];
    {DEALLOC.format("%r20", 512)}
end:
"""
    run(kernel(body, 0), [], block=64, seed=seed)


def broken(case: MmaCase, old: str, new: str = "", count: int = 1) -> str:
    """The case's kernel with one thing changed."""
    body = case.body()
    assert old in body
    return body.replace(old, new, count)


BARRIER = "    bar.sync 0;\n"
FIRST_MMA = "    @%p0 tcgen05.mma"
WAIT_DONE = wait("empty", 0, "done")
PLANTED = {
    "no-wait-for-commit": (WAIT_DONE, BARRIER, errors.InFlightRead),
    "no-commit": (COMMIT, "", errors.Deadlock),
    "no-wait-for-operands": (wait("full", 0, "loaded"), "", errors.InFlightRead),
    "no-dealloc": ("    @%p1 tcgen05.dealloc", "    // ", errors.TensorMemoryLeak),
    "no-fence-after-the-commit": (AFTER, "", TensorOrderError),
    "dealloc-before-completion": (
        COMMIT + WAIT_DONE + AFTER,
        BARRIER + "    @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 512;\n" + BARRIER,
        errors.InFlightWrite,
    ),
    "no-load-wait": ("    tcgen05.wait::ld.sync.aligned;\n", "", errors.InFlightWrite),
    "operand-overwritten": (
        COMMIT,
        BARRIER + "    st.shared.b32 [smem], %r0;\n" + COMMIT,
        errors.InFlightWrite,
    ),
    "d-overwritten": (
        COMMIT,
        BARRIER + "    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r21], %r0;\n" + COMMIT,
        errors.InFlightWrite,
    ),
    "unallocated-d": (
        FIRST_MMA,
        "    add.u32 %r20, %r20, 508;\n" + FIRST_MMA,
        errors.TensorMemoryMisuse,
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_of_an_mma_are_caught(name: str) -> None:
    old, new, error = PLANTED[name]
    case, _ = f16_case()
    with pytest.raises(error):
        case.result(seed=0, body=broken(case, old, new))


WRONG = {
    "descriptor-stride": ("b_word", 16 << 32),
    "swizzle": ("b_word", 2 << 61),
    "start": ("a_word", 1),
    "instruction-transpose": ("descriptor", 1 << 16),
    "instruction-type": ("descriptor", 1 << 7),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_descriptors_give_wrong_results_or_faults(name: str) -> None:
    attribute, bits = WRONG[name]
    case, expected = f16_case(n=16)
    setattr(case, attribute, getattr(case, attribute) ^ bits)
    try:
        result = case.result().view(np.float32)
    except errors.EmulationError:
        return
    assert not np.array_equal(result, expected)


def test_an_mma_of_another_shape_on_the_same_accumulator_is_a_race() -> None:
    case, _ = f16_case(n=16)
    narrow = (case.descriptor & ~(0x3F << 17)) | 1 << 17
    second = f"    mov.u32 %r31, {narrow};\n    @%p0 tcgen05.mma.cta_group::1.kind::f16 "
    second += "[%r20], %rd12, %rd13, %r31, %p2;\n"
    with pytest.raises(errors.InFlightWrite, match=r"tcgen05\.mma writes"):
        case.result(seed=0, body=broken(case, COMMIT, second + COMMIT))


def mmas_of_two_threads(before: str, after: str) -> tuple[str, MmaCase, np.ndarray]:
    """Thread 0 copies the scale factors and thread 32 multiplies, with fences between, or not."""
    case, expected = nvfp4_case()
    body = case.body()
    start = body.index("    mov.u32 %r30, smem+0;")  # the descriptors of the MMA
    stop = body.index(WAIT_DONE)
    issue = body[start:stop].replace("@%p0", "@%p3")
    handover = f"{before}    bar.sync 0;\n{after}    setp.eq.u32 %p3, %r0, 32;\n"
    return body[:start] + handover + issue + body[stop:], case, expected


BEFORE = "    tcgen05.fence::before_thread_sync;\n"


@pytest.mark.parametrize("seed", SEEDS)
def test_copies_and_mmas_of_two_threads_are_a_pipeline_between_fences(seed: int) -> None:
    body, case, expected = mmas_of_two_threads(BEFORE, AFTER)
    np.testing.assert_array_equal(case.result(seed, body).view(np.float32), expected)


@pytest.mark.parametrize(("before", "after"), [("", AFTER), (BEFORE, "")], ids=["before", "after"])
def test_each_of_the_two_fences_is_needed(before: str, after: str) -> None:
    body, case, _ = mmas_of_two_threads(before, after)
    missing = "after" if before else "before"
    with pytest.raises(TensorOrderError, match=f"without tcgen05.fence::{missing}_thread_sync"):
        case.result(0, body)


def test_replacing_scale_factors_without_waiting_is_only_refused_when_strict() -> None:
    """The next copy into the same cells after an MMA: an order that the ISA does not list."""
    case, _ = nvfp4_case()
    again = descriptor_register("%rd14", SCALES_AT, encode_descriptor(0, 16, 128, 0))
    again += f"    add.u32 %r32, %r20, {SCALE_A_COLUMN};\n"
    again += "    @%p0 tcgen05.cp.cta_group::1.32x128b.warpx4 [%r32], %rd14;\n"
    body = broken(case, COMMIT, again + COMMIT)
    with pytest.raises(TensorOrderError, match="-> cp without waiting"):
        case.result(0, body)
    notes = case.report(body).notes
    assert notes == {"cp -> cp without waiting": 1, "mma -> cp without waiting": 1}


def test_scale_factors_of_b_from_an_odd_column_are_only_refused_when_strict() -> None:
    """CUTLASS aligns them to two columns; elsewhere hardware is said to fault."""
    case, expected = nvfp4_case()
    for column, strict_fault in ((SCALE_B_COLUMN + 1, True), (SCALE_B_COLUMN + 2, False)):
        body = broken(case, f"%r20, {SCALE_B_COLUMN};", f"%r20, {column};", count=2)
        what = "tcgen05.mma with scale factors of B from an odd column"
        assert case.report(body).notes == ({what: 1} if strict_fault else {})
        if strict_fault:
            with pytest.raises(errors.TensorMemoryMisuse, match="of B from an odd column"):
                case.result(0, body)
        else:
            np.testing.assert_array_equal(case.result(0, body).view(np.float32), expected)


USES = {
    "fill-use": (["fill", "use"], None),
    "fill-lastuse": (["fill", "lastuse"], None),
    "use-first": (["use"], errors.TensorMemoryMisuse),
    "after-discard": (["fill", "discard", "use"], errors.TensorMemoryMisuse),
    "after-lastuse": (["fill", "lastuse", "use"], errors.TensorMemoryMisuse),
}


@pytest.mark.parametrize("name", USES)
def test_collector_qualifiers(name: str) -> None:
    uses, error = USES[name]
    case, expected = f16_case()
    line = next(x for x in case.body().splitlines() if "tcgen05.mma" in x)
    lines = [line.replace("kind::f16", f"kind::f16.collector::a::{use}") for use in uses]
    body = broken(case, line, "\n    setp.ne.u32 %p2, %r31, 0;\n".join(lines))
    if error is None:
        result = case.result(body=body).view(np.float32)
        np.testing.assert_array_equal(result, len(uses) * expected)
        return
    with pytest.raises(error, match="was not kept before"):
        case.result(body=body)


REFUSED = {
    "sparse": ".sp.cta_group::1.kind::f16",
    "weight-stationary": ".ws.cta_group::1.kind::f16",
    "ashift": ".cta_group::1.kind::f16.ashift",
    "two-ctas": ".cta_group::2.kind::f16",
    "no-scales": ".cta_group::1.kind::mxf4nvf4",
    "scaled-f16": ".cta_group::1.kind::f16.block_scale",
    "no-vector": ".cta_group::1.kind::mxf4nvf4.block_scale",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_implemented_is_named(name: str) -> None:
    case, _ = f16_case()
    body = broken(case, ".cta_group::1.kind::f16 ", REFUSED[name] + " ")
    with pytest.raises(errors.UnsupportedInstruction, match=r"tcgen05\.mma"):
        case.result(body=body)


@pytest.mark.parametrize("ranks", [1, 2], ids=["own", "other"])
def test_a_multicast_commit_reaches_the_only_cta(ranks: int) -> None:
    case, expected = f16_case()
    multicast = COMMIT.replace(".b64 [empty]", ".multicast::cluster.b64 [empty], %h0")
    body = broken(case, COMMIT, f"    mov.b16 %h0, {ranks};\n" + multicast)
    if ranks == 1:
        np.testing.assert_array_equal(case.result(body=body).view(np.float32), expected)
        return
    with pytest.raises(errors.OutOfBounds, match="CTA mask of 0x0002"):
        case.result(body=body)
