"""Probes of mbarrier objects: phases, counts, and what their states tell."""

from __future__ import annotations

from .probe import Probe, module

_WORDS = 32  # of output
_FRAME = """
    .reg .b32 bar, count, value, cursor; .reg .b64 state, old, at; .reg .pred p, done;
    mov.u32 bar, shared;
    mov.u64 at, out;
    setp.ne.u32 p, tid, 0;
"""


class _Script:
    """PTX of one thread that notes 32-bit words, one after another."""

    def __init__(self) -> None:
        self.lines: list[str] = ["@p bra END;"]

    def run(self, *lines: str) -> None:
        self.lines += [f"{line};" for line in lines]

    def note(self, register: str) -> None:
        self.run(f"st.global.b32 [at], {register}", "add.u64 at, at, 4")

    def test(self, operand: str, kind: str = "test_wait") -> None:
        """Note whether a wait would be over; `operand` is a state or, with parity, 0 or 1."""
        parity = ".parity" if operand.isdigit() else ""
        self.run(f"mbarrier.{kind}{parity}.shared.b64 done, [bar], {operand}")
        self.run("selp.u32 value, 1, 0, done")
        self.note("value")

    def pending(self) -> None:
        """Note the arrivals that were pending in the phase of ``state``."""
        self.run("mbarrier.pending_count.b64 value, state")
        self.note("value")

    def ptx(self) -> str:
        body = "\n".join([_FRAME, *self.lines, "END:"])
        return module(0, body)


def _probe(name: str, script: _Script) -> Probe:
    return Probe(name, script.ptx(), (), 4 * _WORDS, shared_bytes=64)


def _arrivals() -> Probe:
    script = _Script()
    script.run("mbarrier.init.shared.b64 [bar], 5")
    script.test("0")
    script.test("1")
    script.run("mbarrier.arrive.shared.b64 state, [bar]")
    script.pending()
    script.test("state")
    script.run("mbarrier.arrive.shared.b64 old, [bar], 3")
    script.run("mov.b64 state, old")
    script.pending()
    script.run("mbarrier.arrive.shared.b64 state, [bar]")
    script.pending()
    script.test("state")
    script.test("0")
    script.test("1")
    script.test("0", "try_wait")
    script.run("mbarrier.arrive.shared.b64 state, [bar], 5")
    script.pending()
    script.test("state")
    script.test("1")
    script.test("0")
    return _probe("mbarrier arrivals and phases", script)


def _transactions() -> Probe:
    script = _Script()
    script.run("mbarrier.init.shared.b64 [bar], 2")
    script.run("mbarrier.arrive.expect_tx.shared.b64 state, [bar], 48")
    script.pending()
    script.run("mbarrier.arrive.shared.b64 state, [bar]")
    script.pending()
    script.test("0")
    script.run("mbarrier.complete_tx.shared.b64 [bar], 32")
    script.test("0")
    script.run("mbarrier.complete_tx.shared.b64 [bar], 16")
    script.test("0")
    script.test("state")
    # In the next phase bytes may arrive before they are expected.
    script.run("mbarrier.complete_tx.shared.b64 [bar], 64")
    script.run("mbarrier.arrive.shared.b64 state, [bar]")
    script.pending()
    script.run("mbarrier.expect_tx.relaxed.cta.shared.b64 [bar], 64")
    script.test("1")
    script.run("mbarrier.arrive.shared.b64 state, [bar]")
    script.test("1")
    script.test("state", "try_wait")
    return _probe("mbarrier transaction counts", script)


def _drops() -> Probe:
    script = _Script()
    script.run("mbarrier.init.shared.b64 [bar], 4")
    script.run("mbarrier.arrive_drop.shared.b64 state, [bar]")
    script.pending()
    script.run("mbarrier.arrive.noComplete.shared.b64 state, [bar], 2")
    script.pending()
    script.run("mbarrier.arrive_drop.shared.b64 state, [bar]")
    script.pending()
    script.test("0")
    script.run("mbarrier.arrive.shared.b64 state, [bar]")
    script.pending()
    script.test("1")
    script.run("mbarrier.arrive_drop.expect_tx.shared.b64 state, [bar], 8")
    script.pending()
    script.test("1")
    script.run("mbarrier.complete_tx.shared.b64 [bar], 8")
    script.test("1")
    script.run("mbarrier.arrive.shared.b64 state, [bar]")
    script.pending()
    script.test("0")
    script.run("mbarrier.inval.shared.b64 [bar]", "mbarrier.init.shared.b64 [bar], 1")
    script.test("0")
    script.test("1")
    script.run("mbarrier.arrive.release.cta.shared::cta.b64 state, [bar]")
    script.test("0")
    return _probe("mbarrier drops and a second life", script)


def _limits() -> Probe:
    script = _Script()
    script.run("mbarrier.init.shared.b64 [bar], 1048575")
    script.run("mbarrier.arrive.shared.b64 state, [bar], 1048574")
    script.pending()
    script.run("mbarrier.arrive.expect_tx.shared.b64 state, [bar], 1048575")
    script.pending()
    script.test("0")
    script.run("mbarrier.complete_tx.shared.b64 [bar], 1048575")
    script.test("0")
    return _probe("mbarrier largest counts", script)


def _handshake() -> Probe:
    """Two warps hand values to each other through two barriers, eight times."""
    body = """
        .reg .b32 full, empty, slot, parity, left, value, sum; .reg .b64 at; .reg .pred p, done;
        mov.u32 full, shared;
        add.u32 empty, full, 8;
        add.u32 slot, full, 128;
        setp.eq.u32 p, tid, 0;
        @p mbarrier.init.shared.b64 [full], 32;
        @p mbarrier.init.shared.b64 [empty], 32;
        barrier.sync 0;
        and.b32 value, tid, 31;
        mad.lo.u32 slot, value, 4, slot;
        mov.b32 parity, 0;
        mov.b32 left, 8;
        mov.b32 sum, 0;
        setp.lt.u32 p, tid, 32;
        @p bra PRODUCER;
        CONSUMER:
        mbarrier.try_wait.parity.shared.b64 done, [full], parity;
        @!done bra CONSUMER;
        ld.shared.b32 value, [slot];
        mad.lo.u32 sum, sum, 31, value;
        mbarrier.arrive.shared.b64 _, [empty];
        xor.b32 parity, parity, 1;
        sub.u32 left, left, 1;
        setp.ne.u32 p, left, 0;
        @p bra CONSUMER;
        bra END;
        PRODUCER:
        xor.b32 parity, parity, 1;
        WAIT:
        mbarrier.test_wait.parity.shared.b64 done, [empty], parity;
        @!done bra WAIT;
        mad.lo.u32 value, left, 1000, tid;
        st.shared.b32 [slot], value;
        mbarrier.arrive.shared.b64 _, [full];
        sub.u32 left, left, 1;
        setp.ne.u32 p, left, 0;
        @p bra PRODUCER;
        END:
        mul.wide.u32 at, tid, 4;
        add.u64 at, at, out;
        st.global.b32 [at], sum;
    """
    return Probe("mbarrier handshake of two warps", module(0, body), (), 256, 64, shared_bytes=512)


def barrier_probes() -> list[Probe]:
    """Every probe of this module."""
    return [_arrivals(), _transactions(), _drops(), _limits(), _handshake()]
