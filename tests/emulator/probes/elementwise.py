"""Probes of scalar instructions: each lane applies one to operands of its own.

An instruction is written ``mnemonic kind kind ... -> kind``: the kinds of its operands (see
`values.operand`; an integer is an immediate) and of its result.
"""

from __future__ import annotations

from .probe import Probe, module
from .values import LANES, operand

_BITS = {"u64": 64, "f64": 64, "u16": 16, "f16": 16, "bf16": 16}  # 32 for every other kind
_LETTERS = "abcf"  # registers of the operands; d takes the result, e is for sequences

INTEGER = """
add.s32 u32 u32 -> u32
sub.s32 u32 u32 -> u32
mul.lo.s32 u32 u32 -> u32
mul.hi.s32 u32 u32 -> u32
mul.hi.u32 u32 u32 -> u32
mul.wide.s32 u32 u32 -> u64
mul.wide.u32 u32 u32 -> u64
mul.wide.s16 u16 u16 -> u32
mul.wide.u16 u16 u16 -> u32
mul.lo.s16 u16 u16 -> u16
mul.hi.u16 u16 u16 -> u16
mul24.lo.s32 u32 u32 -> u32
mul24.hi.u32 u32 u32 -> u32
mad.lo.s32 u32 u32 u32 -> u32
mad.hi.s32 u32 u32 u32 -> u32
mad.hi.sat.s32 u32 u32 u32 -> u32
mad.hi.u32 u32 u32 u32 -> u32
mad.wide.s32 u32 u32 u64 -> u64
mad.wide.u32 u32 u32 u64 -> u64
mad.lo.s16 u16 u16 u16 -> u16
mad.lo.u64 u64 u64 u64 -> u64
add.sat.s32 u32 u32 -> u32
sub.sat.s32 u32 u32 -> u32
add.u16x2 u32 u32 -> u32
add.u64 u64 u64 -> u64
sub.s64 u64 u64 -> u64
mul.lo.u64 u64 u64 -> u64
mul.hi.u64 u64 u64 -> u64
mul.hi.s64 u64 u64 -> u64
div.s32 u32 nonzero -> u32
div.u32 u32 nonzero -> u32
rem.s32 u32 nonzero -> u32
rem.u32 u32 nonzero -> u32
div.u64 u64 7 -> u64
rem.s64 u64 1000 -> u64
abs.s32 u32 -> u32
abs.s16 u16 -> u16
abs.s64 u64 -> u64
neg.s32 u32 -> u32
neg.s64 u64 -> u64
min.s32 u32 u32 -> u32
max.s32 u32 u32 -> u32
min.u32 u32 u32 -> u32
max.u32 u32 u32 -> u32
min.relu.s32 u32 u32 -> u32
max.relu.s32 u32 u32 -> u32
min.s16x2 u32 u32 -> u32
max.u16x2 u32 u32 -> u32
max.relu.s16x2 u32 u32 -> u32
min.s64 u64 u64 -> u64
max.u64 u64 u64 -> u64
min.s16 u16 u16 -> u16
max.u16 u16 u16 -> u16
sad.s32 u32 u32 u32 -> u32
sad.u32 u32 u32 u32 -> u32
popc.b32 u32 -> u32
popc.b64 u64 -> u32
clz.b32 u32 -> u32
clz.b64 u64 -> u32
bfind.s32 u32 -> u32
bfind.u32 u32 -> u32
bfind.shiftamt.u32 u32 -> u32
bfind.shiftamt.s32 u32 -> u32
bfind.u64 u64 -> u32
brev.b32 u32 -> u32
brev.b64 u64 -> u64
fns.b32 u32 field small -> u32
bmsk.clamp.b32 shift field -> u32
bmsk.wrap.b32 shift field -> u32
szext.clamp.s32 u32 field -> u32
szext.wrap.u32 u32 field -> u32
bfe.s32 u32 field field -> u32
bfe.u32 u32 field field -> u32
bfe.s64 u64 shift field -> u64
bfe.u64 u64 shift field -> u64
bfi.b32 u32 u32 field field -> u32
bfi.b64 u64 u64 shift field -> u64
dp4a.s32.s32 u32 u32 u32 -> u32
dp4a.u32.u32 u32 u32 u32 -> u32
dp4a.s32.u32 u32 u32 u32 -> u32
dp4a.u32.s32 u32 u32 u32 -> u32
dp2a.lo.s32.s32 u32 u32 u32 -> u32
dp2a.hi.u32.s32 u32 u32 u32 -> u32
and.b32 u32 u32 -> u32
or.b64 u64 u64 -> u64
xor.b16 u16 u16 -> u16
not.b32 u32 -> u32
cnot.b32 u32 -> u32
lop3.b32 u32 u32 u32 0x96 -> u32
lop3.b32 u32 u32 u32 0xCA -> u32
lop3.b32 u32 u32 u32 0x1D -> u32
lop3.b32 u32 u32 u32 0x80 -> u32
shl.b32 u32 shift -> u32
shl.b64 u64 shift -> u64
shl.b16 u16 shift -> u16
shr.u32 u32 shift -> u32
shr.s32 u32 shift -> u32
shr.u64 u64 shift -> u64
shr.s64 u64 shift -> u64
shr.s16 u16 shift -> u16
shf.l.wrap.b32 u32 u32 shift -> u32
shf.l.clamp.b32 u32 u32 shift -> u32
shf.r.wrap.b32 u32 u32 shift -> u32
shf.r.clamp.b32 u32 u32 shift -> u32
prmt.b32 u32 u32 selector -> u32
prmt.b32.f4e u32 u32 selector -> u32
prmt.b32.b4e u32 u32 selector -> u32
prmt.b32.rc8 u32 u32 selector -> u32
prmt.b32.ecl u32 u32 selector -> u32
prmt.b32.ecr u32 u32 selector -> u32
prmt.b32.rc16 u32 u32 selector -> u32
slct.u32.s32 u32 u32 u32 -> u32
slct.f32.f32 f32 f32 f32 -> f32
set.lt.u32.s32 u32 u32 -> u32
set.hs.s32.u32 u32 u32 -> u32
"""

FLOAT = """
add.rn.f32 f32 f32 -> f32
add.rz.f32 f32 f32 -> f32
add.rm.f32 f32 f32 -> f32
add.rp.f32 f32 f32 -> f32
add.rn.ftz.f32 f32 f32 -> f32
add.rn.sat.f32 f32 f32 -> f32
sub.rn.f32 f32 f32 -> f32
sub.rz.ftz.sat.f32 f32 f32 -> f32
mul.rn.f32 f32 f32 -> f32
mul.rz.f32 f32 f32 -> f32
mul.rm.f32 f32 f32 -> f32
mul.rp.f32 f32 f32 -> f32
mul.rn.ftz.f32 f32 f32 -> f32
mul.rn.sat.f32 f32 f32 -> f32
fma.rn.f32 f32 f32 f32 -> f32
fma.rz.f32 f32 f32 f32 -> f32
fma.rm.f32 f32 f32 f32 -> f32
fma.rp.f32 f32 f32 f32 -> f32
fma.rn.ftz.f32 f32 f32 f32 -> f32
fma.rn.sat.f32 f32 f32 f32 -> f32
mad.rn.f32 f32 f32 f32 -> f32
div.rn.f32 f32 f32 -> f32
div.rz.f32 f32 f32 -> f32
div.rm.ftz.f32 f32 f32 -> f32
rcp.rn.f32 f32 -> f32
rcp.rp.f32 f32 -> f32
sqrt.rn.f32 f32 -> f32
sqrt.rz.f32 f32 -> f32
abs.f32 f32 -> f32
abs.ftz.f32 f32 -> f32
neg.f32 f32 -> f32
min.f32 f32 f32 -> f32
max.f32 f32 f32 -> f32
min.NaN.f32 f32 f32 -> f32
max.NaN.f32 f32 f32 -> f32
min.ftz.f32 f32 f32 -> f32
max.xorsign.abs.f32 f32 f32 -> f32
min.NaN.xorsign.abs.f32 f32 f32 -> f32
copysign.f32 f32 f32 -> f32
set.ltu.u32.f32 f32 f32 -> u32
set.ge.f32.f32 f32 f32 -> f32
add.rn.f64 f64 f64 -> f64
mul.rz.f64 f64 f64 -> f64
fma.rn.f64 f64 f64 f64 -> f64
div.rn.f64 f64 f64 -> f64
max.f64 f64 f64 -> f64
add.rn.f16 f16 f16 -> f16
add.rn.ftz.f16 f16 f16 -> f16
add.rn.sat.f16 f16 f16 -> f16
sub.rn.f16 f16 f16 -> f16
mul.rn.f16 f16 f16 -> f16
fma.rn.f16 f16 f16 f16 -> f16
fma.rn.relu.f16 f16 f16 f16 -> f16
fma.rn.ftz.sat.f16 f16 f16 f16 -> f16
add.rn.f16x2 f16x2 f16x2 -> f16x2
sub.rn.ftz.f16x2 f16x2 f16x2 -> f16x2
mul.rn.f16x2 f16x2 f16x2 -> f16x2
mul.rn.sat.f16x2 f16x2 f16x2 -> f16x2
fma.rn.f16x2 f16x2 f16x2 f16x2 -> f16x2
fma.rn.relu.f16x2 f16x2 f16x2 f16x2 -> f16x2
fma.rn.sat.f16x2 f16x2 f16x2 f16x2 -> f16x2
abs.f16 f16 -> f16
neg.f16x2 f16x2 -> f16x2
abs.f16x2 f16x2 -> f16x2
min.f16 f16 f16 -> f16
max.NaN.f16 f16 f16 -> f16
min.f16x2 f16x2 f16x2 -> f16x2
max.f16x2 f16x2 f16x2 -> f16x2
max.NaN.f16x2 f16x2 f16x2 -> f16x2
min.ftz.xorsign.abs.f16x2 f16x2 f16x2 -> f16x2
add.rn.bf16 bf16 bf16 -> bf16
sub.rn.bf16 bf16 bf16 -> bf16
mul.rn.bf16 bf16 bf16 -> bf16
fma.rn.bf16 bf16 bf16 bf16 -> bf16
fma.rn.relu.bf16 bf16 bf16 bf16 -> bf16
add.rn.bf16x2 bf16x2 bf16x2 -> bf16x2
sub.rn.bf16x2 bf16x2 bf16x2 -> bf16x2
mul.rn.bf16x2 bf16x2 bf16x2 -> bf16x2
fma.rn.bf16x2 bf16x2 bf16x2 bf16x2 -> bf16x2
fma.rn.relu.bf16x2 bf16x2 bf16x2 bf16x2 -> bf16x2
abs.bf16x2 bf16x2 -> bf16x2
neg.bf16 bf16 -> bf16
neg.bf16x2 bf16x2 -> bf16x2
min.bf16x2 bf16x2 bf16x2 -> bf16x2
max.bf16 bf16 bf16 -> bf16
max.NaN.bf16x2 bf16x2 bf16x2 -> bf16x2
min.xorsign.abs.bf16x2 bf16x2 bf16x2 -> bf16x2
"""

CONVERSIONS = """
cvt.s32.s8 u32 -> u32
cvt.u32.u8 u32 -> u32
cvt.s64.s32 u32 -> u64
cvt.u64.u32 u32 -> u64
cvt.u32.u64 u64 -> u32
cvt.u16.u32 u32 -> u16
cvt.s32.s16 u16 -> u32
cvt.s8.s32 u32 -> u32
cvt.sat.s8.s32 u32 -> u32
cvt.sat.u8.s32 u32 -> u32
cvt.sat.u8.u32 u32 -> u32
cvt.sat.s16.s32 u32 -> u32
cvt.sat.u32.s32 u32 -> u32
cvt.sat.s32.u32 u32 -> u32
cvt.sat.s32.s64 u64 -> u32
cvt.sat.u32.s64 u64 -> u32
cvt.rn.f32.s32 u32 -> f32
cvt.rz.f32.s32 u32 -> f32
cvt.rm.f32.u32 u32 -> f32
cvt.rp.f32.u32 u32 -> f32
cvt.rn.f32.u32 u32 -> f32
cvt.rn.f32.s64 u64 -> f32
cvt.rn.f32.u64 u64 -> f32
cvt.rn.f32.u8 u32 -> f32
cvt.rn.f32.s16 u16 -> f32
cvt.rn.f16.s32 u32 -> f16
cvt.rn.f16.u16 u16 -> f16
cvt.rn.bf16.s32 u32 -> bf16
cvt.rn.f64.s32 u32 -> f64
cvt.rn.f64.u64 u64 -> f64
cvt.rni.s32.f32 f32 -> u32
cvt.rzi.s32.f32 f32 -> u32
cvt.rmi.s32.f32 f32 -> u32
cvt.rpi.s32.f32 f32 -> u32
cvt.rzi.ftz.s32.f32 f32 -> u32
cvt.rzi.u32.f32 f32 -> u32
cvt.rni.u32.f32 f32 -> u32
cvt.rzi.s64.f32 f32 -> u64
cvt.rzi.u64.f32 f32 -> u64
cvt.rzi.s16.f32 f32 -> u16
cvt.rni.u16.f32 f32 -> u16
cvt.rni.s8.f32 f32 -> u32
cvt.rni.sat.u8.f32 f32 -> u32
cvt.rzi.s32.f16 f16 -> u32
cvt.rni.u16.f16 f16 -> u16
cvt.rzi.s32.f64 f64 -> u32
cvt.rni.s64.f64 f64 -> u64
cvt.rni.f32.f32 f32 -> f32
cvt.rzi.f32.f32 f32 -> f32
cvt.rmi.f32.f32 f32 -> f32
cvt.rpi.ftz.f32.f32 f32 -> f32
cvt.sat.f32.f32 f32 -> f32
cvt.ftz.f32.f32 f32 -> f32
cvt.rni.f16.f16 f16 -> f16
cvt.f32.f16 f16 -> f32
cvt.ftz.f32.f16 f16 -> f32
cvt.f32.bf16 bf16 -> f32
cvt.f64.f32 f32 -> f64
cvt.f64.f16 f16 -> f64
cvt.rn.f32.f64 f64 -> f32
cvt.rz.f32.f64 f64 -> f32
cvt.rp.ftz.f32.f64 f64 -> f32
cvt.rn.f16.f64 f64 -> f16
cvt.rn.f16.f32 f32 -> f16
cvt.rz.f16.f32 f32 -> f16
cvt.rm.f16.f32 f32 -> f16
cvt.rp.f16.f32 f32 -> f16
cvt.rn.ftz.f16.f32 f32 -> f16
cvt.rn.sat.f16.f32 f32 -> f16
cvt.rn.relu.f16.f32 f32 -> f16
cvt.rz.relu.f16.f32 f32 -> f16
cvt.rn.bf16.f32 f32 -> bf16
cvt.rz.bf16.f32 f32 -> bf16
cvt.rn.relu.bf16.f32 f32 -> bf16
cvt.rz.relu.bf16.f32 f32 -> bf16
cvt.rn.bf16.f16 f16 -> bf16
cvt.rn.f16.bf16 bf16 -> f16
cvt.rn.f16x2.f32 f32 f32 -> f16x2
cvt.rz.f16x2.f32 f32 f32 -> f16x2
cvt.rn.relu.f16x2.f32 f32 f32 -> f16x2
cvt.rn.bf16x2.f32 f32 f32 -> bf16x2
cvt.rz.bf16x2.f32 f32 f32 -> bf16x2
cvt.rn.relu.bf16x2.f32 f32 f32 -> bf16x2
cvt.rna.tf32.f32 f32 -> f32
cvt.rn.tf32.f32 f32 -> f32
cvt.rz.tf32.f32 f32 -> f32
cvt.rn.relu.tf32.f32 f32 -> f32
cvt.rna.satfinite.tf32.f32 f32 -> f32
cvt.rn.satfinite.e4m3x2.f32 f32 f32 -> u16
cvt.rn.satfinite.relu.e4m3x2.f32 f32 f32 -> u16
cvt.rn.satfinite.e5m2x2.f32 f32 f32 -> u16
cvt.rn.satfinite.relu.e5m2x2.f32 f32 f32 -> u16
cvt.rn.satfinite.e4m3x2.f16x2 f16x2 -> u16
cvt.rn.satfinite.relu.e4m3x2.f16x2 f16x2 -> u16
cvt.rn.satfinite.e5m2x2.f16x2 f16x2 -> u16
cvt.rn.f16x2.e4m3x2 u16 -> f16x2
cvt.rn.relu.f16x2.e4m3x2 u16 -> f16x2
cvt.rn.f16x2.e5m2x2 u16 -> f16x2
cvt.rn.relu.f16x2.e5m2x2 u16 -> f16x2
cvt.pack.sat.s16.s32 u32 u32 -> u32
cvt.pack.sat.u16.s32 u32 u32 -> u32
cvt.pack.sat.s8.s32.b32 u32 u32 u32 -> u32
cvt.pack.sat.u8.s32.b32 u32 u32 u32 -> u32
cvt.pack.sat.s4.s32.b32 u32 u32 u32 -> u32
cvt.pack.sat.u2.s32.b32 u32 u32 u32 -> u32
"""

COMPARISONS = {
    "f32": [
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "equ",
        "neu",
        "ltu",
        "leu",
        "gtu",
        "geu",
        "num",
        "nan",
    ],
    "f16": ["eq", "neu", "lt", "geu", "num", "nan"],
    "bf16": ["ne", "leu", "gt", "equ", "num"],
    "f64": ["lt", "neu", "nan"],
    "s32": ["eq", "ne", "lt", "le", "gt", "ge"],
    "u32": ["eq", "ne", "lo", "ls", "hi", "hs"],
    "s64": ["lt", "ge"],
    "u64": ["lt", "hs"],
    "s16": ["le"],
    "u16": ["gt"],
    "b32": ["eq", "ne"],
}
_KIND_OF_TYPE = {"s32": "u32", "b32": "u32", "s64": "u64", "s16": "u16"}
CLASSES = ["finite", "infinite", "number", "notanumber", "normal", "subnormal"]


def _load(register: str, kind: str, region: int) -> str:
    bits = _BITS.get(kind, 32)
    return f"""
        mul.wide.u32 at, tid, {bits // 8};
        add.u64 at, at, in{region};
        ld.global.b{bits} {register}, [at];
    """


def _store(register: str, bits: int) -> str:
    return f"""
        mul.wide.u32 at, tid, {bits // 8};
        add.u64 at, at, out;
        st.global.b{bits} [at], {register};
    """


def _probe(name: str, instruction: str, kinds: list[str], result: str, before: str = "") -> Probe:
    """A probe that loads operands ``a``, ``b``, ..., runs instructions and stores ``d``."""
    letters = _LETTERS[: len(kinds)]
    registers = {**dict(zip(letters, kinds, strict=True)), "d": result}
    declared = "".join(f".reg .b{_BITS.get(kind, 32)} {name};" for name, kind in registers.items())
    loads = "".join(
        _load(letter, kind, region)
        for region, (letter, kind) in enumerate(zip(letters, kinds, strict=True))
    )
    bits = _BITS.get(result, 32)
    body = f".reg .b64 at; {declared} {before}\n{loads}\n{instruction}\n{_store('d', bits)}"
    inputs = tuple(operand(kind, f"operand {index}") for index, kind in enumerate(kinds))
    return Probe(name, module(len(kinds), body), inputs, LANES * bits // 8, block=LANES)


def _instruction_probe(line: str) -> Probe:
    signature, _, result = line.partition(" -> ")
    mnemonic, *operands = signature.split()
    kinds = [each for each in operands if not each[0].isdigit()]
    letters = iter(_LETTERS)
    arguments = [each if each[0].isdigit() else next(letters) for each in operands]
    name = " ".join([mnemonic, *(each for each in operands if each[0].isdigit())])
    return _probe(name, f"{mnemonic} d, {', '.join(arguments)};", kinds, result)


def _predicate_probe(mnemonic: str, kinds: list[str]) -> Probe:
    arguments = ", ".join(_LETTERS[: len(kinds)])
    instruction = f"{mnemonic} p, {arguments};\nselp.u32 d, 1, 0, p;"
    return _probe(mnemonic, instruction, kinds, "u32", ".reg .pred p;")


def elementwise_probes() -> list[Probe]:
    """Every probe of this module."""
    lines = "\n".join((INTEGER, FLOAT, CONVERSIONS)).split("\n")
    probes = [_instruction_probe(line) for line in lines if line]
    for kind, comparisons in COMPARISONS.items():
        operands = [_KIND_OF_TYPE.get(kind, kind)] * 2
        probes += [_predicate_probe(f"setp.{each}.{kind}", operands) for each in comparisons]
    probes += [_predicate_probe(f"testp.{each}.f32", ["f32"]) for each in CLASSES]
    probes.append(_predicate_probe("setp.lt.ftz.f32", ["f32", "f32"]))
    return [*probes, *_sequences()]


def _sequences() -> list[Probe]:
    """Instructions that only make sense together."""
    carry = """
        .reg .b32 al, ah, bl, bh, dl, dh, e;
        mov.b64 {al, ah}, a;
        mov.b64 {bl, bh}, b;
    """
    join = "mov.b64 d, {dl, dh};"
    return [
        _probe(
            "add.cc addc.cc addc",
            f"{carry} add.cc.u32 dl, al, bl;\naddc.cc.u32 dh, ah, bh;\naddc.u32 e, 0, 0;\n"
            f"xor.b32 dl, dl, e;\n{join}",
            ["u64", "u64"],
            "u64",
        ),
        _probe(
            "sub.cc subc.cc subc",
            f"{carry} sub.cc.u32 dl, al, bl;\nsubc.cc.u32 dh, ah, bh;\nsubc.u32 e, 0, 0;\n"
            f"xor.b32 dl, dl, e;\n{join}",
            ["u64", "u64"],
            "u64",
        ),
        _probe(
            "mad.lo.cc madc.hi",
            f"{carry} mad.lo.cc.u32 dl, al, bl, ah;\nmadc.hi.u32 dh, al, bl, bh;\n{join}",
            ["u64", "u64"],
            "u64",
        ),
        _probe(
            "setp with two results and a boolean",
            """
            setp.ne.b32 s, c, 0;
            setp.lt.and.s32 p|q, a, b, s;
            selp.u32 d, 1, 0, p;
            selp.u32 e, 2, 0, q;
            or.b32 d, d, e;
            setp.ge.xor.u32 p, a, b, !s;
            selp.u32 e, 4, 0, p;
            or.b32 d, d, e;
            setp.lt.or.f32 p, a, b, s;
            selp.u32 e, 8, 0, p;
            or.b32 d, d, e;
            """,
            ["u32", "u32", "small"],
            "u32",
            ".reg .pred p, q, s; .reg .b32 e;",
        ),
        _probe(
            "mov packs and unpacks",
            """
            mov.b32 {h0, h1}, a;
            mov.b64 w, {a, b};
            mov.b64 {k0, k1, k2, k3}, w;
            mov.b32 e, {k3, h0};
            mov.b32 d, {h1, k2};
            xor.b32 d, d, e;
            """,
            ["u32", "u32"],
            "u32",
            ".reg .b16 h0, h1, k0, k1, k2, k3; .reg .b64 w; .reg .b32 e;",
        ),
    ]
