"""GEMMs whose layouts, descriptors and synchronization are NVIDIA's and not ours.

What these kernels compute in the emulator must be the product that NumPy computes: CuTe's idea of
every descriptor and layout then agrees with the emulator's.
"""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
import torch

from emulator.machine.launch import Report
from emulator.programs.ptx_kernels import SEEDS

from .emulated_launch import emulate_launch, memory_of
from .launch_recorder import LaunchRecorder
from .recorded_launch import Device, Launch
from .standin import reason_unavailable

pytestmark = [
    pytest.mark.skipif(reason_unavailable() is not None, reason=str(reason_unavailable())),
    # CuTe DSL says so where the recorder has it keep PTX.
    pytest.mark.filterwarnings("ignore:Cache is disabled"),
]
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

RANDOM = np.random.default_rng(21)


@pytest.fixture(scope="module")
def recorder() -> Iterator[LaunchRecorder]:
    with LaunchRecorder(Device(capability=(10, 0), multiprocessors=148)) as recorder:
        yield recorder


def emulate(launch: Launch, result: str, seed: int = 2) -> tuple[np.ndarray, Report]:
    """Bytes of a region after a recorded launch."""
    memory = memory_of(launch)
    report = emulate_launch(launch, memory, seed)
    return memory[result].data, report


# Types of values and scales as CuTe DSL, torch and ml_dtypes call them; elements to a scale factor.
SCALED = {
    "nvfp4": ("Float4E2M1FN", ml_dtypes.float4_e2m1fn, "Float8E4M3FN", 16),
    "nvfp4-e8m0": ("Float4E2M1FN", ml_dtypes.float4_e2m1fn, "Float8E8M0FNU", 16),
    "mxfp4": ("Float4E2M1FN", ml_dtypes.float4_e2m1fn, "Float8E8M0FNU", 32),
    "mxfp8": ("Float8E4M3FN", ml_dtypes.float8_e4m3fn, "Float8E8M0FNU", 32),
    "mxfp8-e5m2": ("Float8E5M2", ml_dtypes.float8_e5m2, "Float8E8M0FNU", 32),
}


def interleaved(codes: np.ndarray) -> np.ndarray:
    """Scale codes `[rows, columns]` in the 128x4 order, written out scale by scale."""
    rows, columns = codes.shape
    result = np.zeros(-(-rows // 128) * 128 * columns, np.uint8)
    for row, column in np.ndindex(rows, columns):
        place = (row // 128 * (columns // 4) + column // 4) * 512
        result[place + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = codes[row, column]
    return result


def scaled_operand(name: str, rows: int, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Stored codes, scale codes, and the values that they stand for together."""
    _, value_type, scale_type, block = SCALED[name]
    if value_type is ml_dtypes.float4_e2m1fn:
        codes = RANDOM.integers(0, 16, (rows, k), dtype=np.uint8)
        stored = codes[:, ::2] | codes[:, 1::2] << 4
    else:
        small = RANDOM.integers(-4, 5, (rows, k)).astype(np.float32)
        codes = stored = small.astype(value_type).view(np.uint8)
    if scale_type == "Float8E4M3FN":
        scales = RANDOM.choice(np.array([0x30, 0x38, 0x40, 0x44], np.uint8), (rows, k // block))
        factors = scales.view(ml_dtypes.float8_e4m3fn)
    else:
        scales = RANDOM.integers(125, 130, (rows, k // block), dtype=np.uint8)
        factors = scales.view(ml_dtypes.float8_e8m0fnu)
    values = codes.view(value_type).astype(np.float64)
    return stored, scales, values * np.repeat(factors.astype(np.float64), block, axis=1)


def record_scaled(
    recorder: LaunchRecorder,
    name: str,
    shape: tuple[int, int, int],
    tile_columns: int = 128,
    *,
    mn_major: bool = False,
) -> tuple[Launch, np.ndarray]:
    """A launch of NVIDIA's kernel and the product in FP32."""
    from .recorded_gemms import BlockScaledProblem, blockscaled_gemm

    m, n, k = shape
    a, a_scales, a_values = scaled_operand(name, m, k)
    b, b_scales, b_values = scaled_operand(name, n, k)
    if mn_major:
        a, b = np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
    tensors = [torch.from_numpy(x) for x in (a, b, interleaved(a_scales), interleaved(b_scales))]
    values, _, scales, block = SCALED[name]
    problem = BlockScaledProblem(values, scales, block, *tensors, shape, tile_columns, mn_major)
    (launch,) = recorder.record(blockscaled_gemm, problem)
    return launch, (a_values @ b_values.T).astype(np.float32)


@pytest.mark.parametrize("name", SCALED)
def test_block_scaled_types(recorder: LaunchRecorder, name: str) -> None:
    launch, expected = record_scaled(recorder, name, (128, 128, 256))
    result, _ = emulate(launch, "c")
    np.testing.assert_array_equal(result.view(np.float32).reshape(expected.shape), expected)


def test_block_scaled_mn_major_operands(recorder: LaunchRecorder) -> None:
    launch, expected = record_scaled(recorder, "mxfp8", (128, 128, 128), mn_major=True)
    result, _ = emulate(launch, "c")
    np.testing.assert_array_equal(result.view(np.float32).reshape(expected.shape), expected)


@pytest.mark.parametrize("tile_columns", [64, 192])
def test_block_scaled_tiles(recorder: LaunchRecorder, tile_columns: int) -> None:
    """Several tiles to a CTA, several CTAs; K is no multiple of the stages."""
    launch, expected = record_scaled(recorder, "nvfp4", (256, 384, 320), tile_columns)
    assert launch.grid != (1, 1, 1)
    result, _ = emulate(launch, "c")
    np.testing.assert_array_equal(result.view(np.float32).reshape(expected.shape), expected)


def test_block_scaled_under_every_policy(recorder: LaunchRecorder) -> None:
    launch, expected = record_scaled(recorder, "nvfp4", (256, 128, 1024))
    for seed in SEEDS:
        result, report = emulate(launch, "c", seed)
        np.testing.assert_array_equal(result.view(np.float32).reshape(expected.shape), expected)
        # What NVIDIA's kernel relies on beyond the ISA.
        assert {note.partition(" without")[0] for note in report.notes} <= {
            "mma -> ld of another thread",
            "ld -> mma of another thread",
            "ld -> mma",
            "ld -> dealloc",
            "mma -> cp",
            "cp -> cp",
        }


# Type, type of accumulator, NumPy type of D.
DENSE = {
    "bf16": ("BFloat16", torch.bfloat16, "Float32", torch.float32),
    "f16": ("Float16", torch.float16, "Float32", torch.float32),
    "f16-to-f16": ("Float16", torch.float16, "Float16", torch.float16),
    "tf32": ("TFloat32", torch.float32, "Float32", torch.float32),
    "e4m3": ("Float8E4M3FN", torch.float8_e4m3fn, "Float32", torch.float32),
    "e5m2": ("Float8E5M2", torch.float8_e5m2, "Float32", torch.float32),
    "s8": ("Int8", torch.int8, "Int32", torch.int32),
    "u8": ("Uint8", torch.uint8, "Int32", torch.int32),
}


def check_dense(
    recorder: LaunchRecorder,
    name: str,
    tile: tuple[int, int],
    k: int,
    *,
    majors: str = "kk",
    depth: int = 0,
) -> None:
    """Emulate one tile and compare."""
    from .recorded_dense_gemm import DenseProblem, dense_gemm

    values, value_type, accumulator, result_type = DENSE[name]
    low = 0 if name == "u8" else -3
    a, b = (RANDOM.integers(low, 4, (rows, k)) for rows in tile)
    tensors = []
    for matrix, major in zip((a, b), majors, strict=True):
        tensor = torch.from_numpy(matrix).to(value_type)
        tensors.append(tensor if major == "k" else tensor.t().contiguous().t())
    d = torch.zeros(tile, dtype=result_type)
    problem = DenseProblem(values, accumulator, *tensors, d, depth or k)
    (launch,) = recorder.record(dense_gemm, problem)
    result, _ = emulate(launch, "d")
    found = torch.frombuffer(bytearray(result.tobytes()), dtype=result_type).reshape(tile)
    np.testing.assert_array_equal(found.double().numpy(), a @ b.T)


@pytest.mark.parametrize("majors", ["kk", "mk", "km", "mm"])
@pytest.mark.parametrize("name", ["bf16", "tf32", "e4m3"])
def test_dense_majors(recorder: LaunchRecorder, name: str, majors: str) -> None:
    check_dense(recorder, name, (128, 64), 64, majors=majors)


@pytest.mark.parametrize("name", ["f16", "f16-to-f16", "e5m2", "s8", "u8"])
def test_dense_types(recorder: LaunchRecorder, name: str) -> None:
    check_dense(recorder, name, (128, 32), 128, depth=64)


@pytest.mark.parametrize("tile", [(64, 8), (64, 256), (128, 16), (128, 256)], ids=str)
def test_dense_tiles(recorder: LaunchRecorder, tile: tuple[int, int]) -> None:
    check_dense(recorder, "bf16", tile, 64)


def test_dense_operand_without_swizzle(recorder: LaunchRecorder) -> None:
    """Rows of 16 bytes along N."""
    check_dense(recorder, "bf16", (64, 8), 64, majors="km")


@pytest.mark.parametrize("depth", [16, 32, 64], ids=["32B", "64B", "128B"])
@pytest.mark.parametrize("majors", ["kk", "mm"])
def test_dense_swizzles(recorder: LaunchRecorder, depth: int, majors: str) -> None:
    """CuTe takes the widest swizzle that the tile's rows fill."""
    rows = depth if majors == "mm" else 64
    check_dense(recorder, "f16", (128, rows), 64, majors=majors, depth=depth)
