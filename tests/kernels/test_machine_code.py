"""Reading a disassembler's listing: instructions, branches, loops."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from sdsa_kernels.testing import machine_code
from sdsa_kernels.testing.machine_code import disassemble, innermost_loop, resource_usage

LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x37c] ;          /* 0x0000df00ff017b82 */
                                                                    /* 0x000fe20000000800 */
        /*0010*/               @P0 LDG.E.128 R4, desc[UR4][R2.64] ; /* 0x0000000402040981 */
        /*0020*/                   IADD3 R2, PT, PT, R2, 0x10, RZ ; /* 0x0000001002027810 */
        /*0030*/                   STG.E [R8], R4 ;                 /* 0x0000000408007986 */
        /*0040*/              @!P1 BRA 0x20 ;                       /* 0xfffffffc00f09947 */
        /*0050*/              @UP0 BRA.U 0x10 ;                     /* 0xfffffffc00f09947 */
        /*0060*/                   EXIT ;                           /* 0x000000000000794d */
"""


@pytest.fixture(autouse=True)
def listing(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"-sass": LISTING, "-res-usage": "Function k:\n  REG:38 STACK:0 SHARED:1024 LOCAL:0"}
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: SimpleNamespace(stdout=texts[command[1]])
    )


def test_instructions_are_read_with_predicates_and_targets() -> None:
    code = disassemble("cuobjdump", b"")
    assert [each.opcode for each in code][:2] == ["LDC", "LDG.E.128"]
    assert str(code[1]) == "@P0 LDG.E.128 R4, desc[UR4][R2.64]"
    assert [each.address for each in code] == list(range(0, 0x70, 0x10))
    assert [each.target for each in code] == [None, None, None, None, 0x20, 0x10, None]


def test_the_innermost_loop_is_the_shortest_around_an_instruction() -> None:
    code = disassemble("cuobjdump", b"")
    assert [each.address for each in innermost_loop(code, "STG")] == [0x20, 0x30, 0x40]
    assert [each.address for each in innermost_loop(code, "LDG")] == [0x10, 0x20, 0x30, 0x40, 0x50]
    with pytest.raises(LookupError, match="no loop around EXIT"):
        innermost_loop(code, "EXIT")


def test_resources_are_numbers() -> None:
    usage = resource_usage("cuobjdump", b"")
    assert (usage["REG"], usage["STACK"]) == (38, 0)


def test_a_missing_disassembler_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code.shutil, "which", lambda name: None)
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia", None)
    assert machine_code.find_disassembler() is None
