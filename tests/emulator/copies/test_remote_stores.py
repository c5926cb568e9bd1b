"""`st.async` and `red.async` reach the own CTA, complete on an mbarrier, and must be waited for."""

from __future__ import annotations

import numpy as np
import pytest

from emulator import errors
from emulator.machine.memory import Region
from emulator.programs.ptx_kernels import SEEDS, expect, initialize, kernel, run, wait

STORE = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
REDUCE = "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes"
WAIT = wait("full", 0, "stored")
# Each lane stores a vector of words; then lane 31 - i reads what lane i stored.
BODY = (
    initialize("full")
    + expect("full", 32 * 16)
    + f"""
    shl.b32 %r10, %r0, 4; mov.u32 %r11, smem; mapa.shared::cluster.u32 %r12, %r11, 0;
    add.u32 %r10, %r10, %r12; mapa.shared::cluster.u32 %r13, full, 0; mul.lo.u32 %r14, %r0, 5;
    {STORE}.v4.b32 [%r10], {{%r0, %r14, %r0, %r14}}, [%r13];
    {WAIT}
    sub.u32 %r15, 31, %r0; shl.b32 %r15, %r15, 4; add.u32 %r15, %r15, %r11;
    ld.shared.v4.b32 {{%r16, %r17, %r18, %r19}}, [%r15];
    shl.b32 %r20, %r0, 4; cvt.u64.u32 %rd5, %r20; add.u64 %rd5, %rd5, %rd0;
    st.global.v4.b32 [%rd5], {{%r16, %r17, %r18, %r19}};
"""
).replace("mapa.shared::cluster.u32 %r13, full, 0", "mov.u32 %r13, full")


def stored(body: str, seed: int) -> np.ndarray:
    out = Region("out", 0x1000_0000, 512)
    run(kernel(body, 1), [out], seed=seed)
    return out.data.view(np.uint32).reshape(32, 4)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_lanes_store_arrives(seed: int) -> None:
    lane = np.arange(32, dtype=np.uint32)[::-1]
    expected = np.stack([lane, 5 * lane, lane, 5 * lane], 1)
    np.testing.assert_array_equal(stored(BODY, seed), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_store_must_be_waited_for(seed: int) -> None:
    with pytest.raises((errors.DataRace, errors.InFlightRead, errors.UnwrittenRead)):
        stored(BODY.replace(WAIT, ""), seed)


SUMS = {"add.u32": 700 + sum(range(32)), "max.s32": 700, "min.u32": 0, "xor.b32": 700}


@pytest.mark.parametrize("name", SUMS)
def test_reductions(name: str) -> None:
    body = (
        "    st.shared.b32 [smem], 700;\n"
        + initialize("full")
        + expect("full", 32 * 4)
        + f"    mov.u32 %r13, full; {REDUCE}.{name} [smem], %r0, [%r13];\n"
        + WAIT
        + "    ld.shared.b32 %r16, [smem]; st.global.b32 [%rd0], %r16;\n"
    )
    assert stored(body, 3)[0, 0] == SUMS[name]


def test_bulk_zeros() -> None:
    body = """
    st.shared.b64 [smem], -1; st.shared.b64 [smem+8], -1; bar.sync 0;
    @%p0 st.bulk.weak.shared::cta [smem], 8, 0; bar.sync 0;
    ld.shared.v4.b32 {%r16, %r17, %r18, %r19}, [smem];
    st.global.v4.b32 [%rd0], {%r16, %r17, %r18, %r19};
"""
    assert stored(body, 0)[0].tolist() == [0, 0, 0xFFFFFFFF, 0xFFFFFFFF]
