"""What CuTe DSL takes the layouts of tensor memory to be, as JSON on standard output.

Run as `python -m emulator.host.cute_layouts` with `CUTE_DSL_ARCH=sm_100a`. CuTe evaluates layouts
while it compiles, so this needs no GPU; see `test_cute_layouts`.
"""

import json

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

SHAPES = {
    "32x32b": tcgen05.Ld32x32bOp,
    "16x64b": tcgen05.Ld16x64bOp,
    "16x128b": tcgen05.Ld16x128bOp,
    "16x256b": tcgen05.Ld16x256bOp,
    "16x32bx2": tcgen05.Ld16x32bx2Op,
}
REPEATS = (1, 2, 8)
WARP = 32
MATRICES = {
    "f16": (cutlass.Float16, 16),
    "e4m3": (cutlass.Float8E4M3FN, 32),
    "tf32": (cutlass.TFloat32, 8),
}
ROWS = (128, 64)
COLUMNS = 16

found: dict[str, list[list[int]]] = {}


def _table(layout: cute.Layout, rows: int, columns: int) -> list[list[int]]:
    """Values of a layout of two modes."""
    return [[int(cute.crd2idx((i, j), layout)) for j in range(columns)] for i in range(rows)]


@cute.jit
def _evaluate() -> None:
    """Cells of (thread, register) of loads, and of (row, column) of matrices."""
    for shape, operation in SHAPES.items():
        for repeats in REPEATS:
            load = operation(getattr(tcgen05.Repetition, f"x{repeats}"))
            layout = cute.make_copy_atom(load, cutlass.Float32).layout_dst_tv
            registers = cute.size(layout) // WARP
            found[f"{shape}.x{repeats}"] = _table(layout, WARP, registers)
    for name, (element, depth) in MATRICES.items():
        for rows in ROWS:
            mma = blackwell.make_trivial_tiled_mma(
                element,
                element,
                OperandMajorMode.K,
                OperandMajorMode.K,
                cutlass.Float32,
                tcgen05.CtaGroup.ONE,
                (rows, COLUMNS),
                tcgen05.OperandSource.TMEM,
            )
            a = mma.make_fragment_A(mma.partition_shape_A((rows, depth))).layout
            d = mma.make_fragment_C(mma.partition_shape_C((rows, COLUMNS))).layout
            found[f"A.{name}.{rows}"] = _table(a[0], rows, depth)
            found[f"D.{name}.{rows}"] = _table(d[0], rows, COLUMNS)


if __name__ == "__main__":
    cute.compile(_evaluate)
    print(json.dumps(found))
