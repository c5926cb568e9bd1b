"""Probes of asynchronous copies of linear memory: cp.async and cp.async.bulk."""

from __future__ import annotations

import numpy as np

from .probe import Probe, module, raw_bytes
from .values import operand

_LANES = 32
_CHUNK = 16  # bytes of shared memory for each lane

# Every lane fills its chunk of shared memory with ones; ``slot`` and ``source`` are its own.
_FRAME = f"""
    .reg .b32 slot, ones, size, w0, w1, w2, w3, base, bar; .reg .b64 source, target;
    .reg .pred p, done;
    mov.u32 base, shared;
    add.u32 bar, base, {_LANES * _CHUNK};
    mad.lo.u32 slot, tid, {_CHUNK}, base;
    mov.b32 ones, 0xFFFFFFFF;
    st.shared.v4.b32 [slot], {{ones, ones, ones, ones}};
    mul.wide.u32 source, tid, {_CHUNK};
    add.u64 source, source, in0;
    setp.eq.u32 p, tid, 0;
"""
_END = f"""
    ld.shared.v4.b32 {{w0, w1, w2, w3}}, [slot];
    mul.wide.u32 target, tid, {_CHUNK};
    add.u64 target, target, out;
    st.global.v4.b32 [target], {{w0, w1, w2, w3}};
"""


def _source(name: str, size: int = _LANES * _CHUNK) -> np.ndarray:
    return raw_bytes(f"source of {name}", size)


def _lane_probe(name: str, body: str) -> Probe:
    ptx = module(1, f"{_FRAME}\n{body}\n{_END}")
    return Probe(name, ptx, (_source(name),), _LANES * _CHUNK, shared_bytes=1024)


def _small_copies() -> list[Probe]:
    probes = []
    for copy in ("ca 4", "ca 8", "ca 16", "cg 16"):
        cache, size = copy.split()
        target = f"cp.async.{cache}.shared.global [slot], [source], {size}"
        probes.append(
            _lane_probe(
                f"cp.async.{copy}", f"{target};\ncp.async.commit_group;\ncp.async.wait_group 0;"
            )
        )
        probes.append(
            _lane_probe(
                f"cp.async.{copy} of fewer source bytes",
                f"rem.u32 size, tid, {int(size) + 1};\n{target}, size;\ncp.async.wait_all;",
            )
        )
    probes.append(
        _lane_probe(
            "cp.async with ignore-src",
            """
            .reg .pred skip;
            and.b32 size, tid, 1;
            setp.eq.u32 skip, size, 1;
            cp.async.cg.shared.global [slot], [source], 16, skip;
            cp.async.wait_all;
            """,
        )
    )
    probes.append(
        _lane_probe(
            "cp.async in two groups",
            """
            cp.async.ca.shared.global [slot], [source], 8;
            cp.async.commit_group;
            cp.async.ca.shared.global [slot + 8], [source + 8], 8;
            cp.async.commit_group;
            cp.async.commit_group;
            cp.async.wait_group 2;
            ld.shared.v2.b32 {w0, w1}, [slot];
            cp.async.wait_group 0;
            st.shared.v2.b32 [slot + 8], {w0, w1};
            """,
        )
    )
    for suffix, arrivals in ((".noinc", _LANES), ("", 1)):
        # Without .noinc the count goes up by one before it goes down: only thread 0 is waited for.
        extra = "" if suffix else "@p mbarrier.arrive.shared.b64 _, [bar];"
        probes.append(
            _lane_probe(
                f"cp.async.mbarrier.arrive{suffix}",
                f"""
                @p mbarrier.init.shared.b64 [bar], {arrivals};
                barrier.sync 0;
                cp.async.ca.shared.global [slot], [source], 16;
                cp.async.mbarrier.arrive{suffix}.shared.b64 [bar];
                barrier.sync 0;
                {extra}
                WAIT:
                mbarrier.try_wait.parity.shared.b64 done, [bar], 0;
                @!done bra WAIT;
                """,
            )
        )
    return probes


def _bulk_loads() -> list[Probe]:
    probes = []
    for size, shift in ((16, 0), (48, 16), (512, 0), (256, 112)):
        probes.append(
            _lane_probe(
                f"cp.async.bulk of {size} bytes from global memory, {shift} bytes in",
                f"""
                fence.proxy.async;
                @p mbarrier.init.shared.b64 [bar], 1;
                fence.mbarrier_init.release.cluster;
                barrier.sync 0;
                @!p bra WAIT;
                add.u64 source, in0, {shift};
                mbarrier.arrive.expect_tx.shared.b64 _, [bar], {size};
                cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
                    [base], [source], {size}, [bar];
                WAIT:
                mbarrier.try_wait.parity.shared.b64 done, [bar], 0;
                @!done bra WAIT;
                """,
            )
        )
    return probes


def _store_frame(instruction: str) -> str:
    """Shared memory takes the source, then one thread copies 256 bytes of it out."""
    return f"""
        .reg .b32 slot, base, w0, w1, w2, w3; .reg .b64 source; .reg .pred p;
        mov.u32 base, shared;
        mad.lo.u32 slot, tid, 16, base;
        mul.wide.u32 source, tid, 16;
        add.u64 source, source, in0;
        ld.global.v4.b32 {{w0, w1, w2, w3}}, [source];
        st.shared.v4.b32 [slot], {{w0, w1, w2, w3}};
        mul.wide.u32 source, tid, 16;
        add.u64 source, source, in1;
        ld.global.v4.b32 {{w0, w1, w2, w3}}, [source];
        mul.wide.u32 source, tid, 16;
        add.u64 source, source, out;
        st.global.v4.b32 [source], {{w0, w1, w2, w3}};
        fence.proxy.async;
        barrier.sync 0;
        setp.ne.u32 p, tid, 0;
        @p bra END;
        {instruction}
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
        END:
    """


_REDUCTIONS = {
    "u32": ["add", "min", "max", "inc", "dec"],
    "s32": ["add", "min", "max"],
    "u64": ["add", "min", "max"],
    "s64": ["min", "max"],
    "b32": ["and", "or", "xor"],
    "b64": ["and"],
    "f16": ["add.noftz", "min", "max"],
    "bf16": ["add.noftz", "min", "max"],
    "f32": ["add"],
    "f64": ["add"],
}
_KINDS = {"s32": "u32", "b32": "u32", "s64": "u64", "b64": "u64", "f16": "f16x2", "bf16": "bf16x2"}


def _bulk_stores() -> list[Probe]:
    copy = "cp.async.bulk.global.shared::cta.bulk_group [out], [base], 256;"
    name = "cp.async.bulk from shared to global memory"
    blank = np.zeros(512, dtype=np.uint8)
    probes = [
        Probe(name, module(2, _store_frame(copy)), (_source(name), blank), 512, shared_bytes=512)
    ]
    for kind, operations in _REDUCTIONS.items():
        pool = _KINDS.get(kind, kind)
        given = tuple(
            operand(pool, f"bulk {side}").view(np.uint8)[:512] for side in ("source", "target")
        )
        for operation in operations:
            instruction = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}.{kind}"
            ptx = module(2, _store_frame(f"{instruction} [out], [base], 256;"))
            probes.append(Probe(instruction, ptx, given, 512, shared_bytes=512))
    return probes


def _vectors() -> list[Probe]:
    """Loads and stores of every width, through global, shared and local memory."""
    probes = []
    for count, bits in (
        (1, 8),
        (1, 16),
        (2, 8),
        (4, 8),
        (2, 16),
        (4, 16),
        (2, 32),
        (4, 32),
        (2, 64),
    ):
        size = count * bits // 8
        register_bits = max(bits, 16)
        names = [f"r{index}" for index in range(count)]
        listed = f"{{{', '.join(names)}}}" if count > 1 else names[0]
        vector = f".v{count}" if count > 1 else ""
        body = f"""
            .reg .b64 at, place; .reg .b{register_bits} {", ".join(names)};
            .local .align 16 .b8 scratch[64];
            mul.wide.u32 at, tid, {size};
            add.u64 at, at, in0;
            ld.global.nc{vector}.b{bits} {listed}, [at];
            mov.u64 place, scratch;
            st.local{vector}.b{bits} [place + 16], {listed};
            ld.local{vector}.b{bits} {listed}, [place + 16];
            mov.u64 place, shared;
            mul.wide.u32 at, tid, {size};
            add.u64 place, place, at;
            st.shared{vector}.b{bits} [place], {listed};
            cvta.shared.u64 place, place;
            ld{vector}.b{bits} {listed}, [place];
            add.u64 at, at, out;
            st.global{vector}.b{bits} [at], {listed};
        """
        name = f"ld and st {vector}.b{bits}".replace(" .", " ")
        source = _source(name)
        probes.append(Probe(name, module(1, body), (source,), _LANES * size, shared_bytes=512))
    body = """
        .reg .b64 at; .reg .s32 a, b; .reg .u32 c, d;
        cvt.u64.u32 at, tid;
        add.u64 at, at, in0;
        ld.global.s8 a, [at];
        ld.global.u8 c, [at];
        mul.wide.u32 at, tid, 2;
        add.u64 at, at, in0;
        ld.global.s16 b, [at];
        ld.global.u16 d, [at];
        mul.wide.u32 at, tid, 16;
        add.u64 at, at, out;
        st.global.v4.b32 [at], {a, b, c, d};
    """
    name = "ld of signed and unsigned parts"
    probes.append(Probe(name, module(1, body), (_source(name),), _LANES * 16))
    return probes


def copy_probes() -> list[Probe]:
    """Every probe of this module."""
    return [*_small_copies(), *_bulk_loads(), *_bulk_stores(), *_vectors()]
