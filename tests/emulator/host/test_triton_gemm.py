"""Triton's code for SM100, and its tensor maps as kernel parameters, under every policy."""

from __future__ import annotations

import struct
import sys

import numpy as np
import pytest

from emulator import Region, run_kernel
from emulator.copies.tensor_map import DataType, TensorMap
from emulator.copies.tensor_map_form import pack
from emulator.programs.ptx_kernels import SEEDS

triton = pytest.importorskip("triton", reason="triton is not installed")

pytestmark = [
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing"),
    pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset"),
]
M, N, K = 256, 128, 256
SWIZZLE_128B = 3


@pytest.fixture(scope="module")
def compiled() -> tuple[str, int]:
    from .triton_gemm import compile_gemm

    return compile_gemm()


def map_of(address: int, matrix: np.ndarray, rows: int, columns: int) -> bytes:
    """What a Triton kernel takes for a tensor map: the map, then sizes and strides."""
    height, width = matrix.shape
    form = TensorMap(
        DataType.FLOAT16,
        address,
        (width, height),
        (2 * width,),
        (columns, rows),
        (1, 1),
        0,
        SWIZZLE_128B,
        2,
        0,
    )
    return pack(form) + struct.pack("<IIQQ", height, width, width, 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_gemm_of_triton(compiled: tuple[str, int], seed: int) -> None:
    ptx, shared_bytes = compiled
    random = np.random.default_rng(3)
    a, b = (random.integers(-3, 4, (rows, K)).astype(np.float16) for rows in (M, N))
    d = np.zeros((M, N), np.float16)
    regions, parameters = [], b""
    for index, (matrix, box) in enumerate([(a, (128, 64)), (b, (64, 64)), (d, (128, 64))]):
        regions.append(Region("abd"[index], 0x7F00_0000_0000 + (index << 20), matrix))
        parameters = parameters.ljust(-(-len(parameters) // 64) * 64, b"\0")
        parameters += map_of(regions[index].base, matrix, *box)
    parameters += struct.pack("<I", K)
    # Two scratch pointers that it does not use.
    parameters = parameters.ljust(-(-len(parameters) // 8) * 8, b"\0") + bytes(16)
    report = run_kernel(
        ptx, "gemm", (M // 128, N // 64), 128, parameters, regions, shared_bytes, seed
    )
    product = (a.astype(np.float64) @ b.T.astype(np.float64)).astype(np.float16)
    np.testing.assert_array_equal(regions[2].data.view(np.float16).reshape(M, N), product)
    # Customary, and not promised by the ISA.
    assert report.notes["copy over what the generic proxy wrote, without a proxy fence"] > 0
