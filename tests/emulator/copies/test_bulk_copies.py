"""Bulk copies without tensor maps: data, completion, and what a kernel must not do."""

from __future__ import annotations

import numpy as np
import pytest

from emulator import errors
from emulator.machine.memory import Region
from emulator.programs.ptx_kernels import SEEDS, expect, initialize, kernel, run, wait

SIZE = 4096
LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.global.shared::cta.bulk_group"
ROUND_TRIP = (
    initialize("full")
    + expect("full", SIZE)
    + f"    @%p0 {LOAD} [smem], [%rd0], {SIZE}, [full];\n"
    + wait("full", 0, "loaded")
    + f"""
    @%p0 {STORE} [%rd1], [smem], {SIZE};
    @%p0 cp.async.bulk.commit_group;
    @%p0 cp.async.bulk.wait_group 0;
"""
)


def regions(seed: int = 1) -> tuple[Region, Region]:
    """A source of random bytes and a destination."""
    data = np.random.default_rng(seed).integers(0, 256, SIZE, dtype=np.uint8)
    return Region("source", 0x1000_0000, data), Region("target", 0x2000_0000, SIZE)


@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_go_there_and_back(seed: int) -> None:
    source, target = regions()
    run(kernel(ROUND_TRIP, 2), [source, target], seed=seed)
    assert target.written.all()
    np.testing.assert_array_equal(target.data, source.data)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cache_hint_and_the_cta_window_change_nothing(seed: int) -> None:
    source, target = regions()
    body = ROUND_TRIP.replace(f"{LOAD} ", f"{LOAD.replace('cluster', 'cta', 1)}.L2::cache_hint ")
    body = body.replace("[full];\nloaded", "[full]").replace(", [full];", ", [full], %rd9;")
    body = "    mov.b64 %rd9, 0;\n" + body
    run(kernel(body, 2), [source, target], seed=seed)
    np.testing.assert_array_equal(target.data, source.data)


@pytest.mark.parametrize("ranks", [1, 3], ids=["own", "other"])
def test_multicast_reaches_the_only_cta(ranks: int) -> None:
    source, target = regions()
    body = ROUND_TRIP.replace(f"{LOAD} ", f"{LOAD}.multicast::cluster ")
    body = f"    mov.b16 %h0, {ranks};\n" + body.replace(
        "[full];\n\nloaded", "[full], %h0;\n\nloaded"
    )
    assert "%h0;" in body
    if ranks == 1:
        run(kernel(body, 2), [source, target])
        np.testing.assert_array_equal(target.data, source.data)
        return
    with pytest.raises(errors.OutOfBounds, match="CTA mask of 0x0003"):
        run(kernel(body, 2), [source, target])


FAULTS = {
    "no-wait-for-load": (wait("full", 0, "loaded"), "", errors.InFlightRead),
    "no-wait-for-store": ("    @%p0 cp.async.bulk.wait_group 0;\n", "", errors.UnfinishedAsync),
    "no-barrier-fence": (
        "    @%p0 fence.mbarrier_init.release.cluster;\n",
        "",
        errors.MissingProxyFence,
    ),
    "odd-size": (f"{SIZE}, [full]", f"{SIZE - 8}, [full]", errors.Misaligned),
    "odd-address": ("[smem], [%rd0]", "[smem+8], [%rd0]", errors.Misaligned),
    "too-long": ("[smem], [%rd0]", "[smem], [%rd0+16]", errors.OutOfBounds),
    "too-few-bytes-expected": (
        f"[full], {SIZE};",
        f"[full], {SIZE + 16};",
        errors.Deadlock,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_reported_when_copies_are_late(name: str) -> None:
    old, new, error = FAULTS[name]
    assert old in ROUND_TRIP
    with pytest.raises(error):
        run(kernel(ROUND_TRIP.replace(old, new, 1), 2), list(regions()), seed=0)


STORE_FROM_REGISTERS = f"""
    shl.b32 %r2, %r0, 4;
    mov.u32 %r3, smem;
    add.u32 %r3, %r3, %r2;
    st.shared.v4.b32 [%r3], {{%r0, %r0, %r0, %r0}};
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%p0 {STORE} [%rd0], [smem], 512;
    @%p0 cp.async.bulk.commit_group;
    @%p0 cp.async.bulk.wait_group.read 0;
    bar.sync 0;
    st.shared.b32 [%r3], %r2;
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_after_wait_group_read_the_source_may_be_overwritten(seed: int) -> None:
    target = Region("target", 0x2000_0000, 512)
    run(kernel(STORE_FROM_REGISTERS, 1), [target], seed=seed)
    np.testing.assert_array_equal(target.data.view(np.uint32), np.repeat(np.arange(32), 4))


STORE_FAULTS = {
    "no-proxy-fence": ("    fence.proxy.async.shared::cta;\n", errors.MissingProxyFence),
    "no-read-wait": ("    @%p0 cp.async.bulk.wait_group.read 0;\n", errors.InFlightWrite),
    "no-commit": ("    @%p0 cp.async.bulk.commit_group;\n", errors.InFlightWrite),
}


@pytest.mark.parametrize("name", STORE_FAULTS)
def test_faults_of_stores(name: str) -> None:
    missing, error = STORE_FAULTS[name]
    target = Region("target", 0x2000_0000, 512)
    with pytest.raises(error):
        run(kernel(STORE_FROM_REGISTERS.replace(missing, "", 1), 1), [target], seed=0)


@pytest.mark.parametrize("recent", [0, 1, 2], ids=str)
def test_wait_group_leaves_the_most_recent_groups_alone(recent: int) -> None:
    """Three groups of one store each; overwriting the source of group `i` after waiting."""
    stores = "".join(
        f"    @%p0 {STORE} [%rd0+{512 * i}], [smem+{512 * i}], 512;\n"
        "    @%p0 cp.async.bulk.commit_group;\n"
        for i in range(3)
    )
    prepare = "".join(
        f"    st.shared.v4.b32 [%r3+{512 * i}], {{%r0, %r0, %r0, %r0}};\n" for i in range(3)
    )
    first, rest = STORE_FROM_REGISTERS.split("    st.shared.v4.b32", 1)
    rest = rest[rest.index("    fence") : rest.index(f"    @%p0 {STORE}")]
    waits = f"    @%p0 cp.async.bulk.wait_group {recent};\n    bar.sync 0;\n"

    def body(touched: int) -> str:
        return first + prepare + rest + stores + waits + f"    st.shared.b32 [%r3+{touched}], 0;\n"

    complete = 3 - recent
    if complete:
        touched = body(512 * (complete - 1)) + "    @%p0 cp.async.bulk.wait_group 0;\n"
        target = Region("target", 0x2000_0000, 1536)
        run(kernel(touched, 1), [target], seed=0)
        expected = np.tile(np.repeat(np.arange(32), 4), 3)
        np.testing.assert_array_equal(target.data.view(np.uint32), expected)
    if recent:
        with pytest.raises(errors.InFlightWrite):
            run(kernel(body(512 * complete), 1), [Region("target", 0x2000_0000, 1536)], seed=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_reductions_add_to_global_memory(seed: int) -> None:
    reduce = STORE.replace("cp.async", "cp.reduce.async") + ".add.u32"
    twice = f"    @%p0 {reduce} [%rd0], [smem], 512;\n"
    body = STORE_FROM_REGISTERS.replace(f"    @%p0 {STORE} [%rd0], [smem], 512;\n", twice * 2)
    target = Region("target", 0x2000_0000, np.full(128, 7, np.uint32))
    run(kernel(body, 1), [target], seed=seed)
    np.testing.assert_array_equal(target.data.view(np.uint32), 7 + 2 * np.repeat(np.arange(32), 4))


def test_a_reduction_needs_something_to_reduce() -> None:
    reduce = STORE.replace("cp.async", "cp.reduce.async") + ".min.s32"
    body = STORE_FROM_REGISTERS.replace(STORE, reduce)
    with pytest.raises(errors.UnwrittenRead, match="reduction of bytes"):
        run(kernel(body, 1), [Region("target", 0x2000_0000, 512)], seed=0)


REFUSED = {
    "mask": f"{STORE}.cp_mask [%rd0], [smem], 16, %h0;",
    "remote": LOAD.replace("global", "shared::cta") + " [smem], [smem+64], 16, [full];",
    "reduce-type": STORE.replace("cp.async", "cp.reduce.async") + ".inc.s32 [%rd0], [smem], 16;",
    "reduce-noftz": STORE.replace("cp.async", "cp.reduce.async") + ".add.f16 [%rd0], [smem], 16;",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_implemented_is_named(name: str) -> None:
    with pytest.raises(errors.UnsupportedInstruction) as caught:
        run(kernel(f"    {REFUSED[name]}\n", 1), [Region("target", 0x2000_0000, 512)])
    assert REFUSED[name].split()[0] in str(caught.value)


def test_a_prefetch_is_only_checked() -> None:
    prefetch = "    cp.async.bulk.prefetch.L2.global [%rd0], 512;\n"
    target = Region("target", 0x2000_0000, 512)
    run(kernel(prefetch, 1), [target])
    with pytest.raises(errors.OutOfBounds):
        run(kernel(prefetch.replace("512", "528"), 1), [target])
