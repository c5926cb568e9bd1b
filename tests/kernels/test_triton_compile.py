"""The Triton kernels compile for other GPUs than are here, to instructions that those have."""

from __future__ import annotations

import re
import sys

import pytest

from support.compiled_quantizing import compile_quantizing

triton = pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")

from sdsa_kernels.switches import interpreting  # noqa: E402
from sdsa_kernels.triton.backend import _TUNING  # noqa: E402
from sdsa_kernels.triton.launch import COMPILE_OPTIONS, has_gluon  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not has_gluon(), reason="Triton before 3.6"),
    pytest.mark.skipif(interpreting(), reason="the interpreter compiles nothing"),
    pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux"),
]

SIZES = ("groups", "max_context", "rows_per_group")
STRIDES = (
    "query_stride", "query_scale_stride", "page_stride", "scale_page_stride", "table_stride",
    "scores_stride",
)  # fmt: skip


def compile_scores(kind: str, capability: int) -> dict[str, str]:
    """Intermediate codes of the Gluon kernel for one pair of formats."""
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from sdsa_kernels.triton.score_gluon import score_kernel

    query, keys = {
        "nvfp4": ("*i32", "*i32"),
        "mixed": ("*bf16", "*i32"),
        "bf16": ("*bf16", "*bf16"),
    }[kind]
    tuning = _TUNING["bf16" if kind == "bf16" else "nvfp4"]
    signature = {
        "query_ptr": query,
        "query_scales_ptr": "*u16",
        "keys_ptr": keys,
        "key_scales_ptr": "*u16",
        "table_ptr": "*i32",
        "lengths_ptr": "*i32",
        "requests_ptr": "*i32",
        "scores_ptr": "*fp32",
        **dict.fromkeys(SIZES, "i32"),
        **dict.fromkeys(STRIDES, "i64"),
    }
    constants = {
        "QUERY_NVFP4": query == "*i32",
        "KEY_NVFP4": keys == "*i32",
        "WARPS": tuning.warps,
        "SM90": capability >= 90,
    }
    names = [*signature, *constants]
    compiled = triton.compile(
        GluonASTSource(
            score_kernel,
            {**signature, **dict.fromkeys(constants, "constexpr")},
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={
                (names.index(name),): [["tt.divisibility", 16]]
                for name in ("query_ptr", "keys_ptr")
            },
        ),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": tuning.warps, "maxnreg": tuning.registers, **COMPILE_OPTIONS},
    )
    return {stage: compiled.asm[stage] for stage in ("ttgir", "ptx")}


@pytest.mark.parametrize("capability", [80, 86, 90])
@pytest.mark.parametrize("kind", ["nvfp4", "mixed", "bf16"])
def test_scores_compile(kind: str, capability: int) -> None:
    code = compile_scores(kind, capability)
    assert "f8E4M3" not in code["ttgir"], "SM80 and SM86 have no such type"
    assert f".target sm_{capability}" in code["ptx"]
    inputs = "f16.f16" if kind == "nvfp4" else "bf16.bf16"
    assert f"mma.sync.aligned.m16n8k16.row.col.f32.{inputs}.f32" in code["ptx"]
    assert code["ptx"].count("griddepcontrol.wait") == (capability >= 90)
    assert code["ptx"].count("griddepcontrol.launch_dependents") == (capability >= 90)
    assert ("prefetch.L2" in code["ptx"]) == (capability >= 90 and kind != "bf16")
    if kind == "bf16":
        assert "cp.async.cg" in code["ptx"]
    else:
        # Keys are loaded 16 bytes at a time, and no operand goes through shared memory.
        assert re.search(r"ld\.global\S*\.v4\.b32", code["ptx"])
        assert "ldmatrix" not in code["ptx"]


@pytest.mark.parametrize("capability", [80, 86, 90])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_quantizing_compiles(dtype: str, capability: int) -> None:
    from sdsa_kernels.triton.write import _ROWS_PER_PROGRAM, _WARPS

    compiled = compile_quantizing(dtype, capability, _ROWS_PER_PROGRAM, _WARPS)
    ptx = compiled.asm["ptx"]
    # 16 bytes at a time, and every block to the thread that quantizes it.
    assert re.search(r"ld\.global\S*\.v4\.b32", ptx)
    assert not re.search(r"st\.shared|shfl|bar\.sync", ptx)
    assert ptx.count("griddepcontrol.wait") == (capability >= 90)
