"""CTAs that take over others' work: every index is worked on once, on every schedule."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from emulator.machine.launch import run_kernel
from emulator.machine.memory import Region
from emulator.programs.ptx_kernels import HEADER, SEEDS, wait

KERNEL = f"""{HEADER}
.visible .entry k(.param .b64 p)
{{
    .reg .pred %p<10>; .reg .b32 %r<30>; .reg .b64 %rd<5>; .reg .b128 %q<2>;
    .shared .align 16 .b8 response[16]; .shared .align 8 .b64 full;
    ld.param.b64 %rd0, [p];
    mov.u32 %r0, %tid.x; setp.eq.u32 %p0, %r0, 0;
    @%p0 mbarrier.init.shared::cta.b64 [full], 1;
    @%p0 fence.mbarrier_init.release.cluster;
    bar.sync 0;
    mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %ctaid.z; mov.u32 %r9, 0;
WORK:
    @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], 16;
    @%p0 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128
        [response], [full];
    mad.lo.u32 %r4, %r3, 2, %r2; mad.lo.u32 %r4, %r4, 3, %r1; shl.b32 %r4, %r4, 2;
    cvt.u64.u32 %rd1, %r4; add.u64 %rd1, %rd1, %rd0;
    @%p0 red.global.add.u32 [%rd1], 1;
    {wait("full", 0, "W").replace(", 0;", ", %r9;")}
    ld.shared.b128 %q0, [response];
    fence.proxy.async.shared::cta; bar.sync 0;
    xor.b32 %r9, %r9, 1;
    mov.b128 %q1, %q0; mov.b128 {{%rd2, %rd3}}, %q1; mov.b128 %q0, {{%rd2, %rd3}};
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p1, %q0;
    clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {{%r1, %r2, %r3, _}}, %q0;
    clusterlaunchcontrol.query_cancel.get_first_ctaid::y.b32.b128 %r5, %q0;
    setp.ne.u32 %p2, %r5, %r2; @%p2 trap;
    @%p1 bra WORK;
    ret;
}}
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_all_work_is_done_once(seed: int) -> None:
    region = Region("counts", 0x1000_0000, np.zeros(12, np.uint32))
    parameters = struct.pack("<Q", region.base)
    report = run_kernel(KERNEL, "k", (3, 2, 2), 64, parameters, [region], seed=seed, strict=True)
    assert region.data.view(np.uint32).tolist() == [1] * 12
    assert len(report.warps) < 12  # some never began
