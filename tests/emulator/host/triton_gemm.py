"""A GEMM in Triton for SM100 with host tensor maps, compiled without a GPU."""

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TILE = {"rows": 128, "columns": 64, "step": 64}


@triton.jit
def gemm(  # type: ignore[no-untyped-def]  # Triton reads the annotations
    a_map, b_map, d_map, depth, rows: tl.constexpr, columns: tl.constexpr, step: tl.constexpr
):
    """One tile of D = A B^T, FP16 with FP32 sums."""
    row, column = tl.program_id(0) * rows, tl.program_id(1) * columns
    total = tl.zeros((rows, columns), tl.float32)
    for start in tl.range(0, depth, step):
        total = tl.dot(a_map.load([row, start]), b_map.load([column, start]).T, total)
    d_map.store([row, column], total.to(tl.float16))


def compile_gemm() -> tuple[str, int]:
    """Its PTX, and the bytes of shared memory that it needs."""
    boxes = {
        "a_map": ("rows", "step"),
        "b_map": ("columns", "step"),
        "d_map": ("rows", "columns"),
    }
    signature = {
        name: f"tensordesc<fp16[{TILE[first]},{TILE[second]}]>"
        for name, (first, second) in boxes.items()
    }
    signature |= {"depth": "i32", **dict.fromkeys(TILE, "constexpr")}
    source = ASTSource(gemm, signature, constexprs=TILE)
    compiled = triton.compile(source, target=GPUTarget("cuda", 100, 32))
    return compiled.asm["ptx"], compiled.metadata.shared
