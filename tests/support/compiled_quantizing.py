"""The quantizing Triton kernel, compiled for GPUs that are not here."""

from __future__ import annotations

from typing import Any


def compile_quantizing(dtype: str, capability: int, rows: int, warps: int) -> Any:
    """What Triton makes of it for values of `dtype`, with `rows` and `warps` of a program."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sdsa_kernels.triton.launch import COMPILE_OPTIONS
    from sdsa_kernels.triton.quantize import quantize_write_kernel

    types = ["*" + dtype, "*i64", "*i64", "*u8"] * 2 + ["i32"] * 2 + ["i64"] * 6
    constants = {"ROWS": rows, "OVERLAPS": capability >= 90}
    signature = dict(zip(quantize_write_kernel.arg_names, types, strict=False))
    names = [*signature, *constants]
    return triton.compile(
        ASTSource(
            quantize_write_kernel,
            signature | dict.fromkeys(constants, "constexpr"),
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={
                (names.index(name),): [["tt.divisibility", 16]] for name in ("key_ptr", "query_ptr")
            },
        ),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, **COMPILE_OPTIONS},
    )
