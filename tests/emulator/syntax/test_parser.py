"""PTX text becomes the right data, scope by scope; what is not PTX is refused with its line."""

from __future__ import annotations

import struct

import pytest

from emulator.errors import PtxSyntaxError, UnsupportedInstruction
from emulator.programs.lane_programs import HEADER

from .module import (
    Address,
    Function,
    Group,
    Immediate,
    Instruction,
    Name,
    Not,
    Pair,
    Register,
    Sink,
    SpecialRegister,
    Symbol,
    Vector,
)
from .parser import parse_module


def kernel(body: str, before: str = "", parameters: str = ".param .u64 p") -> Function:
    module = parse_module(f"{HEADER}{before}.visible .entry k({parameters}) {{ {body} }}")
    return module.functions["k"]


def one(
    text: str, declarations: str = ".reg .b32 %r<5>; .reg .b64 %rd<5>; .reg .pred %p<3>;"
) -> Instruction:
    return kernel(f"{declarations} {text}").instructions[-1]


def test_header_and_directives() -> None:
    module = parse_module(
        """// comment
        .version 8.7
        .target sm_100a, debug
        .address_size 64
        .file 1 "a.cu"
        .extern .shared .align 1024 .b8 dynamic[];
        .visible .entry k ( .param .u64 .ptr .global .align 16 p , .param .align 64 .b8 map[128] )
        .reqntid 128, 1, 1
        .minnctapersm 2
        .maxnreg 168
        { .loc 1 2 3
          .pragma "nounroll";
          /* a
             comment */ ret; }
        .section .debug_str { .b8 1 }
        """
    )
    function = module.functions["k"]
    assert (module.version, module.target) == ("8.7", "sm_100a")
    assert module.variables["dynamic"].align == 1024
    assert function.directives == {"reqntid": (128, 1, 1), "minnctapersm": (2,), "maxnreg": (168,)}
    assert [(p.name, p.offset, p.size) for p in function.parameters] == [
        ("p", 0, 8),
        ("map", 64, 128),
    ]
    assert function.instructions[0].line == 14


def test_operands() -> None:
    parsed = one("@!%p1 foo.a::b.v2.16x64b {%r1, _}, [%rd2 + -16], !%p0, -5, 0f3F800000, %tid.y;")
    assert parsed.opcode == "foo.a::b.v2.16x64b"
    assert parsed.guard == Not(Register("%p1", "pred"))
    assert parsed.operands == (
        Vector((Register("%r1", "b32"), Sink())),
        Address(Register("%rd2", "b64"), -16),
        Not(Register("%p0", "pred")),
        Immediate(-5),
        Immediate(0x3F800000, 32),
        SpecialRegister("%tid.y"),
    )
    tensor = one("foo [%r1], [p, {%r2, %r3}], [%r4], {%r1}, %r1|%p2, (%r1, p), LABEL;")
    coordinates = Vector((Register("%r2", "b32"), Register("%r3", "b32")))
    assert isinstance(tensor.operands[1], Address)
    assert tensor.operands[1].extra == (coordinates,)
    assert isinstance(tensor.operands[1].base, Symbol)
    assert isinstance(tensor.operands[4], Pair)
    assert isinstance(tensor.operands[5], Group)
    assert isinstance(tensor.operands[6], Name)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0x1F", 31),
        ("0b101", 5),
        ("017", 15),
        ("42U", 42),
        ("-7", -7),
        ("~0", -1),
        ("WARP_SZ", 32),
    ],
)
def test_integers(text: str, value: int) -> None:
    assert one(f"foo {text};").operands == (Immediate(value),)


@pytest.mark.parametrize(
    ("text", "bits", "value"),
    [
        ("0fC0000000", 32, -2.0),
        ("-0f40000000", 32, -2.0),
        ("0d3FF8000000000000", 64, 1.5),
        ("2.5", 64, 2.5),
        ("-1.5e-3", 64, -1.5e-3),
    ],
)
def test_floats(text: str, bits: int, value: float) -> None:
    (operand,) = one(f"foo {text};").operands
    code, width = ("<f", 4) if bits == 32 else ("<d", 8)
    assert operand == Immediate(
        int.from_bytes(struct.pack(code, value).ljust(width, b"\0"), "little"), bits
    )


def test_scopes_hide_registers_variables_and_labels() -> None:
    function = kernel(
        """
        .reg .b32 x; .shared .b32 box;
    L:  foo x, box;
        { .reg .b64 x; .shared .b64 box[2];
    L:    foo x, box; bra L; }
        { .reg .b16 x; foo x; }
        foo x, box; bra L;
        """
    )
    foo = [i for i in function.instructions if i.opcode == "foo"]
    types = [i.operands[0].type for i in foo if isinstance(i.operands[0], Register)]
    names = [i.operands[0].name for i in foo if isinstance(i.operands[0], Register)]
    assert types == ["b32", "b64", "b16", "b32"]
    assert names[0] == names[3]
    assert len(set(names)) == 3
    sizes = [i.operands[1].variable.size for i in foo[:2] if isinstance(i.operands[1], Symbol)]
    assert sizes == [4, 16]
    branches = [i.operands[0] for i in function.instructions if i.opcode == "bra"]
    found = [function.find(name) for name in branches if isinstance(name, Name)]
    assert found == [1, 0]


def test_variables_with_initialisers() -> None:
    module = parse_module(
        f"""{HEADER}
        .const .align 4 .u16 table[4] = {{1, 0x203, 5}};
        .global .f32 one = 0f3F800000;
        .global .align 16 .b8 zeros[32];
        .global .v2 .u32 pair = {{7, 8}};
        """
    )
    assert module.variables["table"].initial == bytes([1, 0, 3, 2, 5, 0, 0, 0])
    assert module.variables["one"].initial == struct.pack("<f", 1.0)
    assert module.variables["zeros"].initial == bytes(32)
    assert module.variables["pair"].initial == struct.pack("<II", 7, 8)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("foo %r1", PtxSyntaxError, "line 4"),
        ("foo `;", PtxSyntaxError, "cannot read"),
        ("L: foo; L: foo;", PtxSyntaxError, "twice"),
        (".reg .b99 x;", UnsupportedInstruction, "b99"),
        ("P: .callprototype _ (.param .b32 _)", PtxSyntaxError, "';' is needed"),
        (".tex .u32 x;", UnsupportedInstruction, r"\.tex"),
    ],
)
def test_what_is_refused(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kernel(text)
