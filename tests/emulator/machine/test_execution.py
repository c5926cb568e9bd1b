"""The emulator runs a kernel: parameters, registers, memory, branches."""

from __future__ import annotations

import struct

import numpy as np

from .launch import run_kernel
from .memory import Region

HEADER = ".version 8.8\n.target sm_90a\n.address_size 64\n"


def test_each_thread_stores_its_sum() -> None:
    ptx = (
        HEADER
        + """
    .visible .entry k(.param .u64 out, .param .u32 bias)
    {
        .reg .b32 %r<4>; .reg .b64 %rd<3>;
        ld.param.b64 %rd1, [out];
        ld.param.b32 %r1, [bias];
        mov.u32 %r2, %tid.x;
        add.s32 %r3, %r1, %r2;
        mov.b64 %rd2, {%r2, 0};
        add.s64 %rd2, %rd2, %rd2;
        add.s64 %rd2, %rd2, %rd2;
        add.s64 %rd1, %rd1, %rd2;
        st.global.b32 [%rd1], %r3;
        ret;
    }
    """
    )
    out = Region("out", 0x7F0000001000, 64 * 4)
    report = run_kernel(ptx, "k", 1, 64, struct.pack("<QI", out.base, 7), [out])
    assert report.instructions["add.s64"] == 2 * 3
    assert report.warps == {(0, 0, 0): [report.total // 2] * 2}
    assert out.data.view(np.uint32).tolist() == list(range(7, 71))
    assert out.written.all()
