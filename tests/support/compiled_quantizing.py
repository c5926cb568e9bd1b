"""The quantizing Triton kernels, compiled for GPUs that are not here."""

from __future__ import annotations

from typing import Any

_ROWS = ("i64", "i64", "u8")  # what a half of a call points to, besides values
_WEIGHTS = ("fp16", "fp32", "fp32")


def compile_quantizing(dtype: str, capability: int, rows: int, warps: int) -> Any:
    """What Triton makes of the rule amax/6 for values of `dtype`, a program of `rows`, `warps`."""
    from sdsa_kernels.triton.quantize import quantize_write_kernel

    constants = {"ROWS": rows, "OVERLAPS": capability >= 90}
    return _compile(quantize_write_kernel, dtype, capability, warps, constants)


def compile_rule(rule: str, dtype: str, capability: int) -> Any:
    """What Triton makes of another rule, as `sdsa_kernels.triton.write` launches it."""
    from sdsa_kernels.triton import write
    from sdsa_kernels.triton.block_rules import write_block_rule_kernel
    from sdsa_kernels.triton.covariance import write_covariance_kernel

    constants: dict[str, Any] = {"OVERLAPS": capability >= 90}
    if rule == "covariance":
        constants["KEYS"] = write._KEYS_PER_PROGRAM
        kernel, warps = write_covariance_kernel, write._COVARIANCE_WARPS
    else:
        constants |= {"SEARCH": rule == "search", "ROWS": write._BLOCK_RULE_ROWS}
        kernel, warps = write_block_rule_kernel, write._BLOCK_RULE_WARPS
    return _compile(kernel, dtype, capability, warps, constants)


def _compile(
    kernel: Any, dtype: str, capability: int, warps: int, constants: dict[str, Any]
) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sdsa_kernels.triton.launch import COMPILE_OPTIONS

    weighted = "key_factor_ptr" in kernel.arg_names
    half = ["*" + each for each in (dtype, *_ROWS, *(_WEIGHTS if weighted else ()))]
    types = half * 2 + ["fp32"] * 2 * weighted + ["i32"] * 2 + ["i64"] * 6
    signature = dict(zip(kernel.arg_names, types, strict=False))
    names = kernel.arg_names
    aligned = ["key_ptr", "query_ptr"]
    aligned += [name for name in names if name.endswith(("factor_ptr", "within_ptr", "pivots_ptr"))]
    return triton.compile(
        ASTSource(
            kernel,
            signature | dict.fromkeys(constants, "constexpr"),
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        ),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, **COMPILE_OPTIONS},
    )
