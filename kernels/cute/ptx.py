"""The PTX instructions of the CuTe DSL kernels, one function each, on registers of the DSL.

Addresses are byte addresses: ``Int64`` for global memory, ``Int32`` for shared memory. Registers
that hold packed values (four int8, two FP16, two BF16) are ``Uint32``.
"""

import functools
import operator
from collections.abc import Sequence

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint16, Uint32
from cutlass.cute.arch import inline_ptx

BARRIER_BYTES = 8  # of a barrier in shared memory
CACHE_LINE = 128  # bytes that a prefetch brings into the L2 cache

Registers = tuple[Uint32, ...]


def _operands(kind: str, first: int, count: int) -> str:
    return "{" + ", ".join(f"{{${kind}{first + i}}}" for i in range(count)) + "}"


# ---- Memory -----------------------------------------------------------------------------------


def load_global_words(address: Int64, words: int) -> Registers:
    """One load of 1, 2 or 4 words."""
    if words == 1:
        return (
            inline_ptx(
                "ld.global.b32 {$w0}, [{$r0}];",
                write_only_types=[Uint32],
                read_only_args=[address],
            ),
        )
    return inline_ptx(
        f"ld.global.v{words}.b32 {_operands('w', 0, words)}, [{{$r0}}];",
        write_only_types=[Uint32] * words,
        read_only_args=[address],
    )


def load_global_int(address: Int64) -> Int32:
    """One 32-bit integer."""
    return inline_ptx(
        "ld.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address]
    )


def load_global_ints(address: Int64, count: int) -> tuple[Int32, ...]:
    """2 or 4 consecutive 32-bit integers."""
    return inline_ptx(
        f"ld.global.v{count}.b32 {_operands('w', 0, count)}, [{{$r0}}];",
        write_only_types=[Int32] * count,
        read_only_args=[address],
    )


def load_global_pair(address: Int64) -> Uint16:
    """Two bytes."""
    return inline_ptx(
        "ld.global.b16 {$w0}, [{$r0}];", write_only_types=[Uint16], read_only_args=[address]
    )


def prefetch_to_l2(address: Int64) -> None:
    """Start to bring the cache line of an address into the L2 cache."""
    inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])


def load_shared_words(address: Int32) -> Registers:
    """16 bytes of shared memory."""
    return inline_ptx(
        f"ld.shared.v4.b32 {_operands('w', 0, 4)}, [{{$r0}}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


def load_shared_pair(address: Int32) -> Uint16:
    """2 bytes of shared memory."""
    return inline_ptx(
        "ld.shared.b16 {$w0}, [{$r0}];", write_only_types=[Uint16], read_only_args=[address]
    )


def load_shared_int(address: Int32) -> Int32:
    """One 32-bit integer of shared memory."""
    return inline_ptx(
        "ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address]
    )


def store_shared_int(address: Int32, value: Int32, predicate: Boolean | None = None) -> None:
    """One 32-bit integer to shared memory, where `predicate` holds, or everywhere."""
    inline_ptx(
        "st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, value], predicate=predicate
    )


def store_global_ints(
    address: Int64, values: Sequence[Int32], predicate: Boolean | None = None
) -> None:
    """One store of 1 or 2 consecutive integers, where `predicate` holds, or everywhere."""
    if len(values) == 1:
        target = "st.global.b32 [{$r0}], {$r1};"
    else:
        target = f"st.global.v{len(values)}.b32 [{{$r0}}], {_operands('r', 1, len(values))};"
    inline_ptx(target, read_only_args=[address, *values], predicate=predicate)


def load_shared_ints(address: Int32, count: int) -> tuple[Int32, ...]:
    """2 or 4 consecutive integers of shared memory."""
    return inline_ptx(
        f"ld.shared.v{count}.b32 {_operands('w', 0, count)}, [{{$r0}}];",
        write_only_types=[Int32] * count,
        read_only_args=[address],
    )


def store_shared_ints(address: Int32, values: Sequence[Int32]) -> None:
    """2 or 4 consecutive integers to shared memory."""
    inline_ptx(
        f"st.shared.v{len(values)}.b32 [{{$r0}}], {_operands('r', 1, len(values))};",
        read_only_args=[address, *values],
    )


def store_global_floats(address: Int64, values: Sequence[Float32], predicate: Boolean) -> None:
    """One store of 1, 2 or 4 consecutive floats, where `predicate` holds."""
    if len(values) == 1:
        target = "st.global.f32 [{$r0}], {$r1};"
    else:
        target = f"st.global.v{len(values)}.f32 [{{$r0}}], {_operands('r', 1, len(values))};"
    inline_ptx(target, read_only_args=[address, *values], predicate=predicate)


def eviction_policy(kind: str) -> Int64:
    """An L2 cache policy for `copy_bulk_to_shared`, such as ``"evict_first"``."""
    return inline_ptx(
        f"createpolicy.fractional.L2::{kind}.b64 {{$w0}}, 1.0;", write_only_types=[Int64]
    )


def copy_bulk_to_shared(
    target: Int32, source: Int64, size: Int32, barrier: Int32, policy: Int64
) -> None:
    """Asynchronous copy by the copy engine; addresses and `size` are multiples of 16 bytes."""
    inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}], {$r4};",
        read_only_args=[target, source, size, barrier, policy],
    )


def copy_8_bytes_to_shared(target: Int32, source: Int64) -> None:
    """Asynchronous copy of 8 bytes by this thread."""
    inline_ptx("cp.async.ca.shared.global [{$r0}], [{$r1}], 8;", read_only_args=[target, source])


def copy_to_shared(target: Int32, source: Int64, size: Int32) -> None:
    """Asynchronous copy of up to 16 bytes by this thread, from and to multiples of 16 bytes.

    What `size` leaves of them is filled with zeros.
    """
    inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[target, source, size],
    )


def copy_int_to_shared(target: Int32, source: Int64) -> None:
    """Asynchronous copy of 4 bytes by this thread."""
    inline_ptx("cp.async.ca.shared.global [{$r0}], [{$r1}], 4;", read_only_args=[target, source])


def end_of_copies() -> None:
    """Make a group of this thread's copies so far that are in none."""
    inline_ptx("cp.async.commit_group;")


def wait_for_copies(groups: int) -> None:
    """Wait until this thread's groups of copies have landed, except the last `groups`."""
    inline_ptx(f"cp.async.wait_group {groups};")


def add_one_to_shared(address: Int32, predicate: Boolean) -> None:
    """Add 1 to an integer of shared memory, where `predicate` holds."""
    inline_ptx("red.shared.add.u32 [{$r0}], 1;", read_only_args=[address], predicate=predicate)


# ---- Neighbours in the stream ------------------------------------------------------------------


def launch_dependents() -> None:
    """Let the next kernel of the stream start, if it may, once every CTA has come here."""
    inline_ptx("griddepcontrol.launch_dependents;")


def wait_for_prerequisites() -> None:
    """Wait until what the stream has before this kernel is complete and its writes are visible."""
    inline_ptx("griddepcontrol.wait;")


# ---- Barriers ---------------------------------------------------------------------------------


def barrier_init(barrier: Int32, arrivals: Int32) -> None:
    inline_ptx("mbarrier.init.shared::cta.b64 [{$r0}], {$r1};", read_only_args=[barrier, arrivals])


def barrier_expect(barrier: Int32, size: Int32) -> None:
    """Arrive once and announce `size` bytes of bulk copies."""
    inline_ptx(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{$r0}], {$r1};",
        read_only_args=[barrier, size],
    )


def barrier_arrive_after_copies(barrier: Int32) -> None:
    """Arrive once as soon as this thread's earlier 8-byte copies have landed."""
    inline_ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{$r0}];", read_only_args=[barrier])


def barrier_wait(barrier: Int32, parity: Int32) -> None:
    """Wait until the phase of this parity is complete."""
    inline_ptx(
        "{\n"
        ".reg .pred done;\n"
        "AGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [{$r0}], {$r1};\n"
        "@!done bra AGAIN;\n"
        "}",
        read_only_args=[barrier, parity],
    )


def all_arrived(words: Sequence[Uint32], zero: Uint32) -> Boolean:
    """Wait until loads of every lane of the warp have delivered these words; always true.

    Loads are asynchronous, and nothing else makes a bulk copy wait for loads from the memory that
    it overwrites. So whatever starts the copy must depend on what was loaded. `zero` is an
    `opaque_zero`.
    """
    mixed = functools.reduce(operator.xor, words)
    return cute.arch.vote_all_sync((mixed & zero) == 0)


# ---- Warps -------------------------------------------------------------------------------------


def sum_of_warp(value: Int32) -> Int32:
    """The sum over all lanes, in every lane."""
    return inline_ptx(
        "redux.sync.add.s32 {$w0}, {$r0}, 0xffffffff;",
        write_only_types=[Int32],
        read_only_args=[value],
    )


def most_of_warp(value: Int32) -> Int32:
    """The largest over all lanes, in every lane."""
    return inline_ptx(
        "redux.sync.max.s32 {$w0}, {$r0}, 0xffffffff;",
        write_only_types=[Int32],
        read_only_args=[value],
    )


def least_of_warp(value: Int32) -> Int32:
    """The smallest over all lanes, in every lane."""
    return inline_ptx(
        "redux.sync.min.s32 {$w0}, {$r0}, 0xffffffff;",
        write_only_types=[Int32],
        read_only_args=[value],
    )


# ---- Arithmetic on packed registers -----------------------------------------------------------


def opaque_zero() -> Uint32:
    """Zero, but the compiler does not know: a lane's number less the number of lanes below it."""
    below = Int32(cute.arch.popc(cute.arch.lanemask_lt()))
    return Uint32(cute.arch.lane_idx() - below)


def multiply_high(a: Uint32, b: Uint32) -> Uint32:
    """Upper half of the 64-bit product."""
    return inline_ptx(
        "mul.hi.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b]
    )


def leading_zeros(value: Int32) -> Int32:
    """Zero bits above the highest one, 32 of 0."""
    return inline_ptx("clz.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def permute_bytes(low: Uint32, high: Uint32, selector: Uint32) -> Uint32:
    """Byte i of the result is the byte of ``high:low`` that nibble i of `selector` names.

    A set top bit in a nibble asks for eight copies of that byte's sign bit instead.
    """
    return inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Uint32],
        read_only_args=[low, high, selector],
    )


def _multiply(kind: str, a: Uint32, b: Uint32) -> Uint32:
    # The instruction takes no immediate, which a constant `b` would become.
    return inline_ptx(
        "{\n"
        ".reg .b32 factor;\n"
        "mov.b32 factor, {$r1};\n"
        f"mul.rn.{kind} {{$w0}}, {{$r0}}, factor;\n"
        "}",
        write_only_types=[Uint32],
        read_only_args=[a, b],
    )


def multiply_f16x2(a: Uint32, b: Uint32) -> Uint32:
    return _multiply("f16x2", a, b)


def multiply_bf16x2(a: Uint32, b: Uint32) -> Uint32:
    return _multiply("bf16x2", a, b)


def e4m3x2_to_f16x2(pair: Uint16) -> Uint32:
    return inline_ptx(
        "cvt.rn.f16x2.e4m3x2 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[pair]
    )


def e2m1x8_to_f16x2(codes: Uint32) -> Registers:
    """Eight codes to four FP16 pairs, in order (SM10x and later)."""
    return inline_ptx(
        "{\n"
        ".reg .b8 byte0, byte1, byte2, byte3;\n"
        "mov.b32 {byte0, byte1, byte2, byte3}, {$r0};\n"
        "cvt.rn.f16x2.e2m1x2 {$w0}, byte0;\n"
        "cvt.rn.f16x2.e2m1x2 {$w1}, byte1;\n"
        "cvt.rn.f16x2.e2m1x2 {$w2}, byte2;\n"
        "cvt.rn.f16x2.e2m1x2 {$w3}, byte3;\n"
        "}",
        write_only_types=[Uint32] * 4,
        read_only_args=[codes],
    )


def f16x2_to_floats(pair: Uint32) -> tuple[Float32, Float32]:
    return inline_ptx(
        "{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, {$r0};\n"
        "cvt.f32.f16 {$w0}, low;\n"
        "cvt.f32.f16 {$w1}, high;\n"
        "}",
        write_only_types=[Float32, Float32],
        read_only_args=[pair],
    )


def floats_to_bf16x2(low: Float32, high: Float32) -> Uint32:
    return inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint32],
        read_only_args=[high, low],
    )


def fused_multiply_add(a: Float32, b: Float32, c: Float32) -> Float32:
    return inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[a, b, c],
    )


def square_root(value: Float32) -> Float32:
    return inline_ptx(
        "sqrt.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[value]
    )


def canonical_zero(value: Float32) -> Float32:
    """The same number, with +0 for -0."""
    return inline_ptx(
        "add.rn.f32 {$w0}, {$r0}, 0f00000000;", write_only_types=[Float32], read_only_args=[value]
    )


def not_a_number(value: Float32) -> Boolean:
    return inline_ptx(
        "setp.nan.f32 {$w0}, {$r0}, {$r0};", write_only_types=[Boolean], read_only_args=[value]
    )


def as_int(value: Float32) -> Int32:
    """The bits of a float."""
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def as_float(bits: Uint32) -> Float32:
    """The float that has these bits."""
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


# ---- Warp-level MMA: D[16, 8] = A[16, k] . B[k, 8] + C ------------------------------------------


def mma_s8(a: Registers, b: Registers, c: Registers) -> Registers:
    """k = 32, int8 operands, exact int32 sums."""
    return inline_ptx(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        f"{_operands('w', 0, 4)}, {_operands('r', 0, 4)}, {_operands('r', 4, 2)}, "
        f"{_operands('r', 6, 4)};",
        write_only_types=[Uint32] * 4,
        read_only_args=[*a, *b, *c],
    )


def mma_16bit(kind: str, a: Registers, b: Registers, c: tuple[Float32, ...]) -> tuple[Float32, ...]:
    """k = 16, FP16 (`kind` ``"f16"``) or BF16 (``"bf16"``) operands, FP32 sums."""
    return inline_ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        f"{_operands('w', 0, 4)}, {_operands('r', 0, 4)}, {_operands('r', 4, 2)}, "
        f"{_operands('r', 6, 4)};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *c],
    )
