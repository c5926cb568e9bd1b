"""Probes of matrix instructions: ldmatrix, stmatrix, and mma.sync with what shows how it adds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .probe import Probe, module, random_integers, raw_bytes

_LANES = 32
_WARPS = 16  # of an mma probe; each multiplies matrices of its own


def _matrix_moves() -> list[Probe]:
    probes = []
    for count in (1, 2, 4):
        for trans in ("", ".trans"):
            listed = f"{{{', '.join(f'r{index}' for index in range(count))}}}"
            words = "\n".join(
                f"st.global.b32 [target + {4 * index}], r{index};" for index in range(count)
            )
            # Rows in an order of their own: lane i's is row 5 i + 3 of 32.
            load = f"""
                .reg .b32 base, place, row, w0, w1, w2, w3, r0, r1, r2, r3;
                .reg .b64 source, target;
                mov.u32 base, shared;
                mad.lo.u32 place, tid, 16, base;
                mul.wide.u32 source, tid, 16;
                add.u64 source, source, in0;
                ld.global.v4.b32 {{w0, w1, w2, w3}}, [source];
                st.shared.v4.b32 [place], {{w0, w1, w2, w3}};
                barrier.sync 0;
                mad.lo.u32 row, tid, 5, 3;
                and.b32 row, row, 31;
                mad.lo.u32 place, row, 16, base;
                ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {listed}, [place];
                mul.wide.u32 target, tid, {4 * count};
                add.u64 target, target, out;
                {words}
            """
            reads = "\n".join(
                f"ld.global.b32 r{index}, [source + {4 * index}];" for index in range(count)
            )
            store = f"""
                .reg .b32 base, place, row, w0, w1, w2, w3, r0, r1, r2, r3;
                .reg .b64 source, target;
                mov.u32 base, shared;
                mad.lo.u32 place, tid, 16, base;
                mov.b32 w0, 0;
                st.shared.v4.b32 [place], {{w0, w0, w0, w0}};
                barrier.sync 0;
                mul.wide.u32 source, tid, 16;
                add.u64 source, source, in0;
                {reads}
                mad.lo.u32 row, tid, 5, 3;
                and.b32 row, row, 31;
                mad.lo.u32 row, row, 16, base;
                stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [row], {listed};
                barrier.sync 0;
                ld.shared.v4.b32 {{w0, w1, w2, w3}}, [place];
                mul.wide.u32 target, tid, 16;
                add.u64 target, target, out;
                st.global.v4.b32 [target], {{w0, w1, w2, w3}};
            """
            for name, body, size in (("ldmatrix", load, 4 * count), ("stmatrix", store, 16)):
                source = raw_bytes(f"{name} {count} {trans}", 16 * _LANES)
                probes.append(
                    Probe(
                        f"{name}.x{count}{trans}",
                        module(1, body),
                        (source,),
                        size * _LANES,
                        shared_bytes=512,
                    )
                )
    body = """
        .reg .b32 a, d; .reg .b64 at;
        mul.wide.u32 at, tid, 4;
        add.u64 at, at, in0;
        ld.global.b32 a, [at];
        movmatrix.sync.aligned.m8n8.trans.b16 d, a;
        mul.wide.u32 at, tid, 4;
        add.u64 at, at, out;
        st.global.b32 [at], d;
    """
    source = raw_bytes("movmatrix", 4 * _LANES)
    return [*probes, Probe("movmatrix", module(1, body), (source,), 4 * _LANES)]


@dataclass(frozen=True)
class Format:
    """A floating-point operand format: its width and how its bits divide."""

    bits: int
    exponent_bits: int
    mantissa_bits: int

    def encode(self, signs: np.ndarray, exponents: np.ndarray, mantissas: np.ndarray) -> np.ndarray:
        """Bits of ``(-1)^sign 2^exponent (1 + mantissa / 2^mantissa_bits)``."""
        biased = exponents + (1 << (self.exponent_bits - 1)) - 1
        places = signs << (self.exponent_bits + self.mantissa_bits)
        bits = places | (biased << self.mantissa_bits) | mantissas
        return bits << self.spare_bits

    @property
    def spare_bits(self) -> int:
        """Unused bits below: tf32 lies in the upper 19 of 32."""
        return self.bits - 1 - self.exponent_bits - self.mantissa_bits


F16 = Format(16, 5, 10)
BF16 = Format(16, 8, 7)
TF32 = Format(32, 8, 10)
F32 = Format(32, 8, 23)
E4M3 = Format(8, 4, 3)
E5M2 = Format(8, 5, 2)
_FORMATS = {"f16": F16, "bf16": BF16, "tf32": TF32, "e4m3": E4M3, "e5m2": E5M2}


def _packed(values: np.ndarray, bits: int) -> np.ndarray:
    return values.astype({8: "<u1", 16: "<u2", 32: "<u4"}[bits]).view(np.uint8)


def _random_floats(name: str, form: Format, count: int, spread: np.ndarray) -> np.ndarray:
    """Values of random signs and mantissas, exponents within +-`spread` (one for each value)."""
    span = 2 * spread + 1
    exponents = random_integers(f"{name} exponents", count, 0, 1 << 40) % span - spread
    mantissas = random_integers(f"{name} mantissas", count, 0, 1 << form.mantissa_bits)
    signs = random_integers(f"{name} signs", count, 0, 2)
    return _packed(form.encode(signs, exponents, mantissas), form.bits)


def _small_floats(name: str, form: Format, count: int) -> np.ndarray:
    """Powers of two and zeros, whose sums are exact."""
    signs = random_integers(f"{name} signs", count, 0, 2)
    exponents = random_integers(f"{name} exponents", count, -1, 2)
    bits = form.encode(signs, exponents, np.zeros(count, dtype=np.int64))
    return _packed(np.where(random_integers(f"{name} zeros", count, 0, 4) == 0, 0, bits), form.bits)


def _warps_spread(count: int, widest: int) -> np.ndarray:
    """Exponent spreads that grow from warp to warp: 0, 0, 1, 2, ... up to `widest`."""
    per_warp = np.minimum(np.maximum(np.arange(_WARPS) - 1, 0) * widest // (_WARPS - 3), widest)
    return np.repeat(per_warp, count // _WARPS)


def _sprinkled(name: str, values: np.ndarray, form: Format) -> np.ndarray:
    """Values of which one in 64 is made special: infinities, NaN, zeros, the largest, the least."""
    exponent = ((1 << form.exponent_bits) - 1) << form.mantissa_bits
    sign = 1 << (form.exponent_bits + form.mantissa_bits)
    special = [exponent, exponent | sign, exponent + 1, exponent - 1, 1, sign | 1, 0, sign]
    bits = values.view({8: "<u1", 16: "<u2", 32: "<u4"}[form.bits]).copy()
    chosen = random_integers(f"{name} chosen", len(bits), 0, 512)
    replacement = np.array(special, dtype=np.int64)[chosen % 8] << form.spare_bits
    return np.where(chosen < 8, replacement, bits).astype(bits.dtype).view(np.uint8)


def _tiny_floats(name: str, form: Format, count: int) -> np.ndarray:
    """Values whose exponent field is 0 to 2: subnormal ones and the least normal ones."""
    fields = random_integers(f"{name} fields", count, 0, 3)
    mantissas = random_integers(f"{name} mantissas", count, 0, 1 << form.mantissa_bits)
    signs = random_integers(f"{name} signs", count, 0, 2)
    lowest = 1 - (1 << (form.exponent_bits - 1))
    return _packed(form.encode(signs, fields + lowest, mantissas), form.bits)


def _operand(name: str, kind: str, words: int, variant: str) -> np.ndarray:
    """One operand of every lane of every warp, `words` registers each."""
    if kind not in _FORMATS:
        return raw_bytes(name, 4 * words * _LANES * _WARPS)
    if variant == "excess bits":
        tame = _operand(name, kind, words, "random").view("<u4")
        return (tame | raw_bytes(f"{name} excess", tame.nbytes).view("<u4") >> 19).view(np.uint8)
    form = _FORMATS[kind]
    count = words * _LANES * _WARPS * 32 // form.bits
    if variant == "exact":
        return _small_floats(name, form, count)
    if variant == "tiny" and name.endswith("a"):
        return _tiny_floats(name, form, count)
    if variant in ("tiny", "special"):
        tame = _random_floats(name, form, count, np.full(count, 3))
        return tame if variant == "tiny" else _sprinkled(name, tame, form)
    widest = {"f16": 6, "bf16": 14, "tf32": 14, "e4m3": 5, "e5m2": 12}[kind]
    return _random_floats(name, form, count, _warps_spread(count, widest))


def _accumulator(name: str, kind: str, words: int, variant: str) -> np.ndarray:
    count = words * _LANES * _WARPS
    if kind == "s32":
        return raw_bytes(name, 4 * count)
    if kind == "f16":
        spread = np.full(2 * count, 0 if variant == "exact" else 3)
        return _random_floats(name, F16, 2 * count, spread)
    if variant == "exact":
        return random_integers(name, count, -50, 50).astype("<f4").view(np.uint8)
    if variant == "tiny":
        return _tiny_floats(name, F32, count)
    if variant == "special":
        return _sprinkled(name, _random_floats(name, F32, count, np.full(count, 6)), F32)
    values = _random_floats(name, F32, count, _warps_spread(count, 12)).view("<u4")
    # Every fourth warp starts from zero, as kernels do.
    warp = np.repeat(np.arange(_WARPS), count // _WARPS)
    return np.where(warp % 4 == 3, 0, values).astype("<u4").view(np.uint8)


# Shape, kinds of a, b and c, and the registers of a lane for a, b and c.
_PRODUCTS = [
    ("m16n8k8", "f16", "f16", "f32", 2, 1, 4),
    ("m16n8k16", "f16", "f16", "f32", 4, 2, 4),
    ("m16n8k8", "f16", "f16", "f16", 2, 1, 2),
    ("m16n8k16", "f16", "f16", "f16", 4, 2, 2),
    ("m16n8k8", "bf16", "bf16", "f32", 2, 1, 4),
    ("m16n8k16", "bf16", "bf16", "f32", 4, 2, 4),
    ("m16n8k4", "tf32", "tf32", "f32", 2, 1, 4),
    ("m16n8k8", "tf32", "tf32", "f32", 4, 2, 4),
    ("m16n8k32", "e4m3", "e4m3", "f32", 4, 2, 4),
    ("m16n8k32", "e5m2", "e5m2", "f32", 4, 2, 4),
    ("m16n8k32", "e4m3", "e5m2", "f32", 4, 2, 4),
    ("m16n8k16", "s8", "s8", "s32", 2, 1, 4),
    ("m16n8k32", "s8", "s8", "s32", 4, 2, 4),
    ("m16n8k32", "u8", "s8", "s32", 4, 2, 4),
    ("m16n8k32", "u8", "u8", "s32", 4, 2, 4),
    ("m8n8k16", "s8", "u8", "s32", 1, 1, 2),
]


# Where more is tried: subnormal and special numbers, and tf32 with bits that it does not have.
_EDGES = {
    ("m16n8k16", "f16", "f16", "f32"),
    ("m16n8k16", "f16", "f16", "f16"),
    ("m16n8k16", "bf16", "bf16", "f32"),
    ("m16n8k8", "tf32", "tf32", "f32"),
    ("m16n8k32", "e4m3", "e4m3", "f32"),
    ("m16n8k32", "e5m2", "e5m2", "f32"),
}


def _registers(prefix: str, count: int) -> tuple[str, str]:
    names = [f"{prefix}{index}" for index in range(count)]
    return ", ".join(names), f"{{{', '.join(names)}}}"


def _product(
    shape: str, kinds: tuple[str, str, str], words: tuple[int, int, int], variant: str
) -> Probe:
    a, b, c = kinds
    saturates = variant == "satfinite"
    name = f"mma.sync.aligned.{shape}.row.col{'.satfinite' if saturates else ''}.{c}.{a}.{b}.{c}"
    listed = {}
    declared = []
    for prefix, count in zip("abcd", (*words, words[2]), strict=True):
        names, listed[prefix] = _registers(prefix, count)
        declared.append(f".reg .b32 {names};")
    loads = ""
    for region, (prefix, count) in enumerate(zip("abc", words, strict=True)):
        loads += f"mul.wide.u32 at, tid, {4 * count};\nadd.u64 at, at, in{region};\n"
        loads += "".join(
            f"ld.global.b32 {prefix}{index}, [at + {4 * index}];\n" for index in range(count)
        )
    stores = "".join(f"st.global.b32 [at + {4 * i}], d{i};\n" for i in range(words[2]))
    body = f"""
        .reg .b64 at; {" ".join(declared)}
        {loads}
        {name} {listed["d"]}, {listed["a"]}, {listed["b"]}, {listed["c"]};
        mul.wide.u32 at, tid, {4 * words[2]};
        add.u64 at, at, out;
        {stores}
    """
    label = f"{name}, {variant}"
    inputs = (
        _operand(f"{label} a", a, words[0], variant),
        _operand(f"{label} b", b, words[1], variant),
        _accumulator(f"{label} c", c, words[2], variant),
    )
    threads = _LANES * _WARPS
    return Probe(label, module(3, body), inputs, 4 * words[2] * threads, threads)


def _products() -> list[Probe]:
    probes = []
    for shape, a, b, c, *words in _PRODUCTS:
        integer = a not in _FORMATS
        variants = ("random", "satfinite") if integer else ("exact", "random")
        if (shape, a, b, c) in _EDGES:
            variants = (*variants, "tiny", "special")
        if a == "tf32":
            variants = (*variants, "excess bits")
        for variant in variants:
            probes.append(_product(shape, (a, b, c), (words[0], words[1], words[2]), variant))
    return probes


def matrix_probes() -> list[Probe]:
    """Every probe of this module."""
    return [*_matrix_moves(), *_products()]
