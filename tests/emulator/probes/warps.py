"""Probes of instructions in which the lanes of a warp, or the warps of a CTA, act together."""

from __future__ import annotations

from .probe import Probe, module
from .values import operand

_FRAME = """
    .reg .b64 at; .reg .b32 a, b, c, d, e; .reg .pred p, q, s;
    mul.wide.u32 at, tid, 4;
    add.u64 at, at, in0;
    ld.global.b32 a, [at];
    mul.wide.u32 at, tid, 4;
    add.u64 at, at, in1;
    ld.global.b32 b, [at];
    mov.b32 d, 0;
    mov.b32 e, 0;
"""
_THREADS = 128


def _probe(name: str, body: str, kinds: tuple[str, str] = ("u32", "u32"), pools: str = "") -> Probe:
    """Every thread has ``a`` and ``b`` and leaves ``d`` and ``e``."""
    end = """
        mul.wide.u32 at, tid, 8;
        add.u64 at, at, out;
        st.global.v2.b32 [at], {d, e};
    """
    inputs = tuple(operand(kind, f"warp {index}{pools}") for index, kind in enumerate(kinds))
    return Probe(name, module(2, f"{_FRAME}\n{body}\n{end}"), inputs, 8 * _THREADS, _THREADS)


def _shuffles() -> list[Probe]:
    probes = []
    for mode in ("up", "down", "bfly", "idx"):
        for name, limit in (("32", 31), ("16", 16 << 8 | 15), ("8", 24 << 8 | 7)):
            limit = limit if mode != "up" else limit & 0x1F00
            probes.append(
                _probe(
                    f"shfl.sync.{mode}.b32 in segments of {name}",
                    f"""
                    and.b32 b, b, 31;
                    shfl.sync.{mode}.b32 d|p, a, b, {limit}, 0xFFFFFFFF;
                    selp.u32 e, 1, 0, p;
                    """,
                )
            )
    probes.append(
        _probe(
            "shfl.sync with half of the lanes",
            """
            and.b32 c, tid, 1;
            setp.eq.u32 q, c, 0;
            @!q bra ODD;
            shfl.sync.bfly.b32 d|p, a, 2, 31, 0x55555555;
            bra JOIN;
            ODD:
            shfl.sync.idx.b32 d|p, a, 31, 31, 0xAAAAAAAA;
            JOIN:
            selp.u32 e, 1, 0, p;
            """,
        )
    )
    return probes


def _votes() -> list[Probe]:
    votes = """
        and.b32 c, b, 3;
        setp.eq.u32 p, c, 0;
    """
    probes = [
        _probe(
            f"vote.sync.{mode}.pred",
            f"""
            {votes}
            shr.u32 c, tid, 5;
            setp.lt.or.u32 s, c, 2, p;
            setp.lt.and.u32 p, c, 3, s;
            vote.sync.{mode}.pred q, p, 0xFFFFFFFF;
            selp.u32 d, 1, 0, q;
            vote.sync.{mode}.pred q, !p, 0xFFFFFFFF;
            selp.u32 e, 1, 0, q;
            """,
        )
        for mode in ("all", "any", "uni")
    ]
    probes.append(
        _probe(
            "vote.sync.ballot.b32",
            f"""
            {votes}
            vote.sync.ballot.b32 d, p, 0xFFFFFFFF;
            vote.sync.ballot.b32 e, !p, 0xFFFFFFFF;
            """,
        )
    )
    probes.append(
        _probe(
            "activemask and elect.sync under divergence",
            """
            and.b32 c, tid, 7;
            setp.lt.u32 q, c, 3;
            @!q bra REST;
            bar.warp.sync 0x07070707;
            elect.sync d|p, 0x07070707;
            selp.u32 e, 1, 0, p;
            vote.sync.ballot.b32 c, p, 0x07070707;
            xor.b32 d, d, c;
            bra JOIN;
            REST:
            elect.sync d|p, 0xF8F8F8F8;
            selp.u32 e, 1, 0, p;
            JOIN:
            bar.warp.sync 0xFFFFFFFF;
            activemask.b32 c;
            xor.b32 e, e, c;
            """,
        )
    )
    return probes


def _matches_and_reductions() -> list[Probe]:
    probes = [
        _probe(
            "match.any.sync.b32",
            """
            and.b32 c, a, 3;
            match.any.sync.b32 d, c, 0xFFFFFFFF;
            and.b32 c, b, 31;
            match.any.sync.b32 e, c, 0xFFFFFFFF;
            """,
        ),
        _probe(
            "match.any.sync.b64",
            """
            .reg .b64 w;
            and.b32 c, a, 3;
            mov.b64 w, {c, c};
            match.any.sync.b64 d, w, 0xFFFFFFFF;
            """,
        ),
        _probe(
            "match.all.sync.b32",
            """
            shr.u32 c, tid, 5;
            shr.u32 b, tid, 6;
            setp.eq.u32 s, tid, 70;
            selp.u32 b, 9, b, s;
            match.all.sync.b32 d|p, b, 0xFFFFFFFF;
            selp.u32 c, 256, 0, p;
            or.b32 e, e, c;
            """,
        ),
    ]
    for operation in ("add", "min", "max"):
        probes += [
            _probe(
                f"redux.sync.{operation}.{kind}",
                f"redux.sync.{operation}.{kind} d, a, 0xFFFFFFFF;",
            )
            for kind in ("u32", "s32")
        ]
    probes += [
        _probe(f"redux.sync.{operation}.b32", f"redux.sync.{operation}.b32 d, a, 0xFFFFFFFF;")
        for operation in ("and", "or", "xor")
    ]
    return probes


def _control_flow() -> list[Probe]:
    return [
        _probe(
            "loops of different lengths",
            """
            and.b32 b, b, 15;
            LOOP:
            setp.eq.u32 p, b, 0;
            @p bra DONE;
            mad.lo.u32 d, d, 3, a;
            sub.u32 b, b, 1;
            bra LOOP;
            DONE:
            bar.warp.sync 0xFFFFFFFF;
            shfl.sync.bfly.b32 e, d, 1, 31, 0xFFFFFFFF;
            """,
        ),
        _probe(
            "brx.idx",
            """
            and.b32 b, b, 3;
            TARGETS: .branchtargets ZERO, ONE, TWO, ONE;
            brx.idx b, TARGETS;
            ZERO:
            mov.b32 d, 10;
            bra JOIN;
            ONE:
            mov.b32 d, 11;
            bra JOIN;
            TWO:
            mov.b32 d, 12;
            JOIN:
            """,
        ),
        _probe(
            "lanes that leave early",
            """
            and.b32 c, tid, 31;
            setp.gt.u32 p, c, 20;
            @p exit;
            activemask.b32 d;
            redux.sync.add.u32 e, c, 0x1FFFFF;
            """,
        ),
        _probe(
            "special registers",
            """
            mov.u32 d, %laneid;
            mov.u32 c, %lanemask_lt;
            mad.lo.u32 d, c, 3, d;
            mov.u32 c, %lanemask_ge;
            mad.lo.u32 d, c, 5, d;
            mov.u32 c, %lanemask_le;
            mad.lo.u32 d, c, 7, d;
            mov.u32 c, %lanemask_gt;
            mad.lo.u32 d, c, 11, d;
            mov.u32 c, %lanemask_eq;
            mad.lo.u32 d, c, 13, d;
            mov.u32 e, %ntid.x;
            mov.u32 c, %nctaid.x;
            mad.lo.u32 e, c, 1000, e;
            mov.u32 c, %ctaid.x;
            mad.lo.u32 e, c, 10000, e;
            mov.u32 c, %tid.y;
            add.u32 e, e, c;
            mov.u32 c, %ntid.y;
            add.u32 e, e, c;
            mov.u32 c, %cluster_nctarank;
            mad.lo.u32 e, c, 100000, e;
            mov.u32 c, %cluster_ctarank;
            add.u32 e, e, c;
            mov.u32 c, %cluster_nctaid.x;
            mad.lo.u32 e, c, 1000000, e;
            """,
        ),
    ]


def _cta_barriers() -> list[Probe]:
    spread = "selp.u32 d, 1, 0, q;"
    reductions = (("popc.u32", "d", ""), ("and.pred", "q", spread), ("or.pred", "q", spread))
    probes = [
        _probe(
            f"barrier.red.{operation}",
            f"""
            and.b32 c, b, 7;
            setp.eq.u32 p, c, 0;
            barrier.sync 0;
            barrier.red.{operation} {target}, 1, p;
            {after}
            """,
        )
        for operation, target, after in reductions
    ]
    probes.append(
        _probe(
            "barrier.arrive and barrier.sync between two halves",
            """
            .reg .b32 slot;
            mov.u32 slot, shared;
            mad.lo.u32 c, tid, 4, slot;
            setp.lt.u32 p, tid, 64;
            @p bra PRODUCER;
            barrier.sync 3, 128;
            xor.b32 c, tid, 64;
            mad.lo.u32 c, c, 4, slot;
            ld.shared.b32 d, [c];
            bra JOIN;
            PRODUCER:
            st.shared.b32 [c], a;
            barrier.arrive 3, 128;
            JOIN:
            bar.sync 4;
            """,
        )
    )
    return [
        Probe(each.name, each.ptx, each.inputs, each.output_bytes, each.block, shared_bytes=1024)
        for each in probes
    ]


def warp_probes() -> list[Probe]:
    """Every probe of this module."""
    families = (_shuffles, _votes, _matches_and_reductions, _control_flow, _cta_barriers, _atomics)
    return [probe for family in families for probe in family()]


_ATOMICS = {
    "u32": ["add", "min", "max", "exch", "inc", "dec"],
    "s32": ["min", "max", "add"],
    "b32": ["and", "or", "xor", "exch"],
    "f32": ["add"],
}


def _atomics() -> list[Probe]:
    """Each thread on an address of its own, which holds ``b``."""
    probes = []
    for space in ("global", "shared"):
        window = (
            "mov.u32 c, shared;\ncvt.u64.u32 place, c;"
            if space == "shared"
            else f"add.u64 place, out, {8 * _THREADS};"
        )
        for kind, operations in _ATOMICS.items():
            for operation in operations:
                if kind == "u32" and operation == "exch":
                    continue
                operands = ("f32", "f32") if kind == "f32" else ("u32", "u32")
                probes.append(
                    _probe(
                        f"atom.{space}.{operation}.{kind}",
                        f"""
                        .reg .b64 place, offset;
                        {window}
                        mul.wide.u32 offset, tid, 4;
                        add.u64 place, place, offset;
                        st.{space}.b32 [place], b;
                        atom.{space}.{operation}.{kind} d, [place], a;
                        ld.{space}.b32 e, [place];
                        """,
                        operands,
                    )
                )
        probes.append(
            _probe(
                f"atom.{space}.cas.b32",
                f"""
                .reg .b64 place, offset;
                {window}
                mul.wide.u32 offset, tid, 4;
                add.u64 place, place, offset;
                st.{space}.b32 [place], b;
                and.b32 c, tid, 1;
                setp.eq.u32 p, c, 1;
                selp.b32 c, a, b, p;
                atom.{space}.cas.b32 d, [place], c, 77;
                ld.{space}.b32 e, [place];
                """,
            )
        )
        probes.append(
            _probe(
                f"red.{space}.add.u32 of all threads",
                f"""
                .reg .b64 place;
                {window}
                setp.eq.u32 p, tid, 0;
                @p st.{space}.b32 [place], 5;
                barrier.sync 0;
                red.{space}.add.u32 [place], a;
                barrier.sync 0;
                ld.{space}.b32 d, [place];
                """,
            )
        )
    packed = [("f16x2", ".noftz"), ("bf16x2", ".noftz")]
    probes += [
        _probe(
            f"atom.global.add{modifier}.{kind}",
            f"""
            .reg .b64 place, offset;
            add.u64 place, out, {8 * _THREADS};
            mul.wide.u32 offset, tid, 4;
            add.u64 place, place, offset;
            st.global.b32 [place], b;
            atom.global.add{modifier}.{kind} d, [place], a;
            ld.global.b32 e, [place];
            """,
            (kind, kind),
        )
        for kind, modifier in packed
    ]
    # The global ones work behind the output proper.
    return [
        Probe(each.name, each.ptx, each.inputs, 12 * _THREADS, each.block, shared_bytes=1024)
        for each in probes
    ]
