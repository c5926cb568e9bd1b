"""Kernels that follow the PTX ISA to the letter, or miss one thing that an emulator must notice.

Each is small and hand-written; `EXAMPLES` says for each what it must give, by default and `strict`.
"""

from __future__ import annotations

from dataclasses import dataclass

from emulator.errors import (
    DataRace,
    Faults,
    InFlightRead,
    InFlightWrite,
    MissingProxyFence,
    PhaseError,
)
from emulator.tcgen05.tensor_order import TensorOrderError

# 160 threads: warps 0 to 3 read D, lane 0 of warp 4 issues. %p0: that lane; %p1: warp 4.
HEAD = """.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .b64 out)
{
    .reg .pred %p<20>; .reg .b16 %h<20>; .reg .b32 %r<200>; .reg .b64 %rd<40>; .reg .f32 %f<20>;
    .shared .align 1024 .b8 smem[16384];
    .shared .align 8 .b64 done; .shared .align 8 .b64 free; .shared .align 8 .b64 more;
    .shared .align 4 .b32 slot;
    ld.param.b64 %rd0, [out];
    mov.u32 %r0, %tid.x;
    shr.u32 %r1, %r0, 5;
    setp.eq.u32 %p0, %r0, 128;
    setp.eq.u32 %p1, %r1, 4;
    @%p0 mbarrier.init.shared::cta.b64 [done], 1;
    @%p0 mbarrier.init.shared::cta.b64 [free], 128;
    @%p0 mbarrier.init.shared::cta.b64 [more], 1;
    @%p0 fence.mbarrier_init.release.cluster;
    @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 128;
    @%p1 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    mov.u32 %r2, 0;
    shl.b32 %r3, %r0, 2;
"""
CLEAR = """
    mov.u32 %r4, smem;
    add.u32 %r4, %r4, %r3;
    mov.u32 %r6, %ntid.x;
    shl.b32 %r6, %r6, 2;
CLEAR:
    st.shared.b32 [%r4], 0;
    add.u32 %r4, %r4, %r6;
    add.u32 %r2, %r2, %r6;
    sub.u32 %r5, 16384, %r3;
    setp.lt.u32 %p2, %r2, %r5;
    @%p2 bra CLEAR;
    fence.proxy.async.shared::cta;
"""
READY = """
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    ld.shared.b32 %r10, [slot];
    shl.b32 %r11, %r1, 21;
    add.u32 %r11, %r11, %r10;         // where the warp's lanes begin
    // K-major, no swizzle: LBO 128, SBO 256 bytes
    mov.u32 %r12, smem;
    shr.u32 %r12, %r12, 4;
    or.b32 %r12, %r12, 524288;         // LBO = 8 << 16
    mov.b64 %rd1, {%r12, 16400};       // SBO = 16, bits 46-48 = 1
    add.s64 %rd2, %rd1, 512;           // B: 8192 bytes on
    mov.u32 %r13, 134349968;           // M = 128, N = 8, D is FP32, A and B are FP16
    setp.ne.u32 %p3, %r13, %r13;
"""
TAIL = """
    bar.sync 0;
    @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 128;
    ret;
}
"""
MMA = "    @%p0 tcgen05.mma.cta_group::1.kind::f16 [%r10], %rd1, %rd2, %r13, %p3;\n"
COMMIT = "    @%p0 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [done];\n"
LOAD = """
    tcgen05.ld.sync.aligned.32x32b.x8.b32 {%r20, %r21, %r22, %r23, %r24, %r25, %r26, %r27}, [%r11];
"""
WAIT_LD = "    tcgen05.wait::ld.sync.aligned;\n"
STORE = """
    shl.b32 %r30, %r0, 2;
    cvt.u64.u32 %rd3, %r30;
    add.s64 %rd3, %rd3, %rd0;
    st.global.b32 [%rd3], %r20;
"""


def wait(barrier: str, parity: int, label: str, semantics: str = "") -> str:
    return f"""
{label}:
    mbarrier.try_wait.parity{semantics}.shared::cta.b64 %p9, [{barrier}], {parity};
    @!%p9 bra {label};
"""


RELAXED = ".relaxed.cluster"
BEFORE = "    tcgen05.fence::before_thread_sync;\n"
AFTER = "    tcgen05.fence::after_thread_sync;\n"
# Commit, wait, and store D's first column.
STORE_D = f"""{COMMIT}{wait("done", 0, "L1")}{AFTER}
    @%p1 bra END;
{LOAD}{WAIT_LD}{BEFORE}{STORE}
END:
{TAIL}"""


def handover(semantics: str, between: str = BEFORE, wait_ld: str = WAIT_LD) -> str:
    """ISA 9.7.16.6.4.4, both examples: mma -> ld of others, ld of others -> mma."""
    return f"""{HEAD}{CLEAR}{READY}
    @%p1 bra ISSUER;
{wait("done", 0, "L1", semantics)}{AFTER}{LOAD}{wait_ld}{between}
    mbarrier.arrive{semantics}.shared::cta.b64 _, [free];
{STORE}
    bra.uni END;
ISSUER:
{MMA}{COMMIT}{wait("free", 0, "L2", semantics)}{AFTER}
{MMA}{COMMIT.replace("[done]", "[more]")}{wait("more", 0, "L3", semantics)}
END:
{TAIL}"""


# cp by warp 4's lane 0, mma by lane 1 of it: "Pipelined instructions, different thread".
SCALED = """
    mov.u32 %r12, smem;
    shr.u32 %r12, %r12, 4;
    or.b32 %r14, %r12, 65536;          // LBO = 1 << 16 (16 bytes), SBO = 128 bytes
    add.u32 %r14, %r14, 512;           // scales: 8192 bytes on
    mov.b64 %rd4, {%r14, 16392};
    add.u32 %r15, %r10, 64;
    add.u32 %r16, %r10, 68;
    mov.u32 %r13, 134349952;           // M = 128, N = 8, E2M1, UE4M3
"""
CP = """    @%p0 tcgen05.cp.cta_group::1.32x128b.warpx4 [%r15], %rd4;
    @%p0 tcgen05.cp.cta_group::1.32x128b.warpx4 [%r16], %rd4;
"""
SCALED_MMA = (
    "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [%r10], %rd1, %rd1, %r13, "
    "[%r15], [%r16], %p3;\n"
)


def pipelined(semantics: str) -> str:
    return f"""{HEAD}{CLEAR}{READY}{SCALED}
    setp.eq.u32 %p4, %r0, 160;
{CP}
    @%p0 tcgen05.fence::before_thread_sync;
    @%p0 mbarrier.arrive{semantics}.shared::cta.b64 _, [more];
    @!%p4 bra OTHERS;
{wait("more", 0, "L1", semantics)}{AFTER}
{SCALED_MMA}{COMMIT.replace("@%p0 ", "")}
OTHERS:
{wait("done", 0, "L2", semantics)}{AFTER}
    setp.ge.u32 %p5, %r0, 128;
    @%p5 bra END;
{LOAD}{WAIT_LD}{BEFORE}{STORE}
END:
{TAIL}"""


# One row's scales written, the other 127 not; column 0 of D, which alone is stored, has that row's.
PART = """
    setp.eq.u32 %p6, %r0, 0;
    mov.u32 %r4, smem;
    add.u32 %r5, %r4, %r3;
    mov.u32 %r6, 0;
ZERO:                                   // A, B and A's scales, but not B's
    st.shared.b32 [%r5], 0;
    add.u32 %r5, %r5, 640;
    add.u32 %r6, %r6, 640;
    sub.u32 %r7, 8704, %r3;
    setp.lt.u32 %p2, %r6, %r7;
    @%p2 bra ZERO;
    @%p6 st.shared.b32 [%r4+8704], 943208504;   // row 0 of B: four scales of 1
    fence.proxy.async.shared::cta;
"""


def partly_written() -> str:
    copies = CP.replace("[%r16], %rd4", "[%r16], %rd5")
    multiply = f"    add.s64 %rd5, %rd4, 32;\n{copies}    @%p0 {SCALED_MMA}"
    return HEAD + PART + READY + SCALED + multiply + STORE_D


def never_waited() -> str:
    """The next MMA may overwrite D while tcgen05.ld still reads it; registers are used later."""
    return handover("", between="", wait_ld="")


READ = "    add.u32 %r40, %r20, 0;\n"
INIT_FENCE = "    @%p0 fence.mbarrier_init.release.cluster;\n"

# A module of its own: parameters, then what is special.
SMALL = """.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .b64 out, .param .align 64 .b8 block[64])
{
    .reg .pred %p<20>; .reg .b32 %r<40>; .reg .b64 %rd<20>;
    .shared .align 1024 .b8 smem[16384];
    .shared .align 8 .b64 a; .shared .align 8 .b64 b;
    ld.param.b64 %rd0, [out];
    mov.u32 %r0, %tid.x;
    setp.eq.u32 %p0, %r0, 0;
    shl.b32 %r1, %r0, 2;
    cvt.u64.u32 %rd1, %r1;
    add.s64 %rd2, %rd0, %rd1;
"""
BARRIERS = """
    @%p0 mbarrier.init.shared::cta.b64 [a], 1;
    @%p0 mbarrier.init.shared::cta.b64 [b], 1;
    @%p0 fence.mbarrier_init.release.cluster;
    bar.sync 0;
"""
READ_SHARED = """
    mov.u32 %r2, smem;
    add.u32 %r2, %r2, %r1;
    ld.shared.b32 %r3, [%r2];
    st.global.b32 [%rd2], %r3;
    bar.sync 0;
"""


def copy(target: int, barrier: str) -> str:
    return (
        "    @%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        f"[smem+{target}], [%rd0], 128, [{barrier}];\n"
    )


# A copy that signals `a`.
COPY = "    @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [a], 128;\n" + copy(0, "a")


def other_barrier(copies: int) -> str:
    """Reads what a copy brings that signals `a`, but waits only for `b`, of other copies."""
    others = "".join(copy(1024 + 128 * i, "b") for i in range(copies))
    return f"""{SMALL}{BARRIERS}{COPY}
    @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [b], {128 * copies};
{others}{wait("b", 0, "L1")}{READ_SHARED}{wait("a", 0, "L2")}
    ret;
}}
"""


def one_lane_waits(after: str = "") -> str:
    """Lane 0 alone waits for a copy, the others read what it brings without `bar.warp.sync`."""
    return f"""{SMALL}{BARRIERS}{COPY}
    @!%p0 bra READ;
{wait("a", 0, "L1")}
READ:
{after}{READ_SHARED}
    ret;
}}
"""


# The lanes have met again after lane 0's wait: shuffles order no memory.
SHUFFLE = "    shfl.sync.idx.b32 %r9, %r0, 0, 31, -1;\n"


def store_out(wait_read: str) -> str:
    """A bulk copy reads what other threads overwrite later."""
    return (
        SMALL
        + f"""
    mov.u32 %r2, smem;
    add.u32 %r2, %r2, %r1;
    st.shared.b32 [%r2], %r0;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd0+4096], [smem], 128;
    @%p0 cp.async.bulk.commit_group;
    {wait_read}
    bar.sync 0;
    st.shared.b32 [%r2], 1;
    st.global.b32 [%rd2], 0;
    @%p0 cp.async.bulk.wait_group 0;
    ret;
}}
"""
    )


# Three words written, four loaded: what a compiler makes of three loads of an array of four.
PADDED = (
    SMALL
    + """
    @%p0 st.shared.v2.b32 [smem], {1, 2};
    @%p0 st.shared.b32 [smem+8], 3;
    bar.sync 0;
    ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [smem];
    add.u32 %r4, %r4, %r5;
    add.u32 %r4, %r4, %r6;
    st.global.b32 [%rd2], %r4;
    ret;
}
"""
)
# What LLVM makes of a tensor map's address: parameter space has addresses of 32 bits.
PARAM = (
    SMALL
    + """
    mov.b32 %r4, block;
    cvt.u64.u32 %rd3, %r4;
    cvta.param.u64 %rd4, %rd3;
    ld.b32 %r5, [%rd4];
    st.global.b32 [%rd2], %r5;
    ret;
}
"""
)
# As CUTLASS's FMHA: a whole warp initializes one mbarrier.
WHOLE_WARP_INIT = (
    SMALL + "    mbarrier.init.shared::cta.b64 [a], 1;\n    st.global.b32 [%rd2], 6;\n    ret;\n}\n"
)
# Tensor memory's address is stored where a bulk copy writes later, with a barrier between.
OVER_GENERIC = f"""{SMALL}
    @%p0 st.shared.b32 [smem], 5;
{BARRIERS}{COPY}{wait("a", 0, "L1")}{READ_SHARED}
    ret;
}}
"""
# As CUTLASS's GEMMs for SM120: lanes read, and one of them tells the warp that copies over it.
COPY_OVER_READ = f"""{SMALL}{BARRIERS}
    mov.u32 %r2, smem;
    add.u32 %r2, %r2, %r1;
    setp.lt.u32 %p1, %r0, 32;
    @%p1 st.shared.b32 [%r2], 3;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @!%p1 bra COPY;
    ld.shared.b32 %r4, [%r2];
    @%p0 mbarrier.arrive.shared::cta.b64 _, [b];
    bra END;
COPY:
    setp.eq.u32 %p0, %r0, 32;
    @!%p0 bra END;
{wait("b", 0, "L1")}{COPY}{wait("a", 0, "L2")}
END:
    bar.sync 0;
    st.global.b32 [%rd2], 0;
    ret;
}}
"""
# mma -> mma of another accumulator that overwrites what the first one reads (A in tensor memory).
OTHER_ACCUMULATOR = f"""{HEAD}{CLEAR}{READY}
    add.u32 %r14, %r10, 32;
    add.u32 %r15, %r11, 32;
    mov.u32 %r16, 0;
    @!%p1 tcgen05.st.sync.aligned.32x32b.x8.b32 [%r15],
        {{%r16, %r16, %r16, %r16, %r16, %r16, %r16, %r16}};
    @!%p1 tcgen05.wait::st.sync.aligned;
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    @%p0 tcgen05.mma.cta_group::1.kind::f16 [%r10], [%r14], %rd2, %r13, %p3;
    @%p0 tcgen05.mma.cta_group::1.kind::f16 [%r14], %rd1, %rd2, %r13, %p3;
{STORE_D}"""


@dataclass(frozen=True)
class Example:
    """A kernel `k`, its threads, and what comes of it.

    Attributes
    ----------
    ptx : str
        Takes the address of its output; `SMALL` ones also a block of 64 bytes.
    threads : int
    fault : exception or tuple of exceptions or None
        What every run raises.
    strict_fault : exception or tuple of exceptions or None
        What every run with `strict` raises; where only this is given, other runs note it.
    """

    ptx: str
    threads: int
    fault: Faults | None = None
    strict_fault: Faults | None = None

    @property
    def has_block(self) -> bool:
        return ".align 64" in self.ptx.split("{")[0]


RACES = (DataRace, InFlightRead)
EXAMPLES = {
    "acquire-release": Example(handover(""), 160),
    "relaxed-handover": Example(handover(RELAXED), 160),  # 9.7.16.6.4.4, both examples
    "relaxed-pipeline": Example(pipelined(RELAXED), 192),  # 9.7.16.6.4.3
    "pipeline": Example(pipelined(""), 192),
    "partly-written-scales": Example(partly_written(), 160),
    "ld-not-waited-for": Example(never_waited(), 160, InFlightWrite, InFlightWrite),
    "ld-read-before-the-release": Example(
        handover("", READ + BEFORE, ""), 160, None, InFlightWrite
    ),
    "ld-read-in-part-before-the-release": Example(
        handover("", READ.replace("%r20", "%r21") + BEFORE, ""),
        160,
        (InFlightRead, InFlightWrite),
        InFlightWrite,
    ),
    "ld-waited-for-after-the-release": Example(
        handover("", wait_ld="").replace(STORE, WAIT_LD + STORE), 160, InFlightWrite, InFlightWrite
    ),
    "ld-read-before-and-waited-for-after": Example(
        handover("", READ + BEFORE, "").replace(STORE, WAIT_LD + STORE), 160, None, InFlightWrite
    ),
    "relaxed-handover-without-fences": Example(
        handover(RELAXED, between="").replace(AFTER, ""), 160, DataRace, DataRace
    ),
    "no-fences-before-dealloc": Example(
        handover("").replace(BEFORE, "").replace(AFTER, ""), 160, None, TensorOrderError
    ),
    "no-fence-after-mbarrier-init": Example(
        one_lane_waits().replace("@!%p0 bra READ;", "").replace(INIT_FENCE, ""),
        32,
        None,
        MissingProxyFence,
    ),
    "padded-vector-load": Example(PADDED, 32),
    "param-address-of-32-bits": Example(PARAM, 32),
    "whole-warp-init": Example(WHOLE_WARP_INIT, 32, None, PhaseError),  # NVIDIA's FMHA
    "bulk-copy-over-generic-write": Example(OVER_GENERIC, 32, None, MissingProxyFence),  # Triton
    "mma-of-another-accumulator": Example(OTHER_ACCUMULATOR, 160, None, InFlightWrite),
    "waits-for-another-barrier": Example(other_barrier(8), 32, RACES, RACES),
    "waits-for-another-barrier-of-100": Example(other_barrier(100), 32, RACES, RACES),
    "copy-over-what-lanes-read": Example(COPY_OVER_READ, 64, None, DataRace),
    "store-not-waited-for": Example(
        store_out(""), 32, (DataRace, InFlightWrite), (DataRace, InFlightWrite)
    ),
    "store-waited-for": Example(store_out("@%p0 cp.async.bulk.wait_group.read 0;"), 32),
    "one-lane-waits": Example(one_lane_waits(), 32, RACES, RACES),
    "one-lane-waits-at-last": Example(one_lane_waits(SHUFFLE), 32, RACES, RACES),
}
