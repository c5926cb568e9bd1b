"""What Triton makes of other people's kernels, for several architectures, on some schedules."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")

pytestmark = [
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing"),
    pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset"),
]
SEEDS = (0, 3, 5)


@pytest.fixture(scope="module")
def kernels() -> Any:
    from . import triton_kernels

    return triton_kernels


# Form of values as Triton names it, their type, values to a byte, to a scale, and types of scales.
FORMS = {
    "nvfp4": ("e2m1", ml_dtypes.float4_e2m1fn, 2, 16, ml_dtypes.float8_e4m3fn),
    "mxfp4": ("e2m1", ml_dtypes.float4_e2m1fn, 2, 32, ml_dtypes.float8_e8m0fnu),
    "mxfp8": ("e4m3", ml_dtypes.float8_e4m3fn, 1, 32, ml_dtypes.float8_e8m0fnu),
}


@pytest.mark.parametrize("capability", [100, pytest.param(120, marks=pytest.mark.large)])
@pytest.mark.parametrize("name", FORMS)
def test_a_block_scaled_gemm(kernels: Any, name: str, capability: int) -> None:
    form, dtype, per_byte, block, scale_type = FORMS[name]
    random, depth = np.random.default_rng(4), 256
    given: dict[str, np.ndarray] = {}
    values = []
    for matrix in "ab":
        codes = random.integers(-2, 3, (128, depth)).astype(dtype).view(np.uint8)
        powers = 2.0 ** random.integers(-2, 3, (128, depth // block))
        scales = powers.astype(scale_type)
        values.append(codes.view(dtype).astype(np.float64) * np.repeat(powers, block, 1))
        packed = codes[:, ::2] | codes[:, 1::2] << 4 if per_byte == 2 else codes.view(dtype)
        is_e4m3 = scale_type is ml_dtypes.float8_e4m3fn
        given |= {matrix: packed, f"{matrix}_scales": scales if is_e4m3 else scales.view(np.uint8)}
    given["d"] = np.zeros((128, 128), np.float32)
    constants = {"depth": depth, "block": block, "form": form, "per_byte": per_byte}
    constants["step"] = 128
    compiled = kernels.compile_kernel(kernels.scaled_gemm, capability, given, constants)
    for seed in SEEDS:
        compiled.run((1,), given, seed)
        np.testing.assert_array_equal(given["d"], values[0] @ values[1].T)


@pytest.mark.parametrize(("capability", "specialized"), [(80, False), (100, False), (100, True)])
def test_attention(kernels: Any, capability: int, specialized: bool) -> None:
    random, length, depth = np.random.default_rng(5), 256, 64
    given: dict[str, Any] = {
        name: random.standard_normal((length, depth)).astype(np.float16)
        for name in ("query", "key", "value", "output")
    }
    scores = given["query"].astype(float) @ given["key"].T.astype(float) / 8
    shares = np.where(np.tril(np.ones_like(scores)) > 0, np.exp(scores), 0)
    expected = shares / shares.sum(1, keepdims=True) @ given["value"].astype(float)
    rows = 128 if specialized else 64
    constants = {"depth": depth, "rows": rows, "columns": 64, "specialized": specialized}
    given |= {"length": length, "scale": 0.125}
    compiled = kernels.compile_kernel(kernels.attention, capability, given, constants)
    for seed in SEEDS[:2]:
        given["output"][...] = 0
        compiled.run((length // rows,), given, seed)
        assert kernels.relative_error(given["output"], expected) < 2e-3


def test_tensor_maps_of_the_host(kernels: Any) -> None:
    random, (m, n, k) = np.random.default_rng(3), (256, 128, 256)
    a, b = (random.integers(-3, 4, (rows, k)).astype(np.float16) for rows in (m, n))
    d = np.zeros((m, n), np.float16)
    given = {"a_map": (a, (128, 64)), "b_map": (b, (64, 64)), "d_map": (d, (128, 64)), "depth": k}
    constants = {"rows": 128, "columns": 64, "step": 64}
    compiled = kernels.compile_kernel(kernels.gemm_of_maps, 100, given, constants)
    for seed in range(8):
        d[...] = 0
        report = compiled.run((m // 128, n // 64), given, seed)
        np.testing.assert_array_equal(d, a.astype(float) @ b.T.astype(float))
        # Customary, and not promised by the ISA.
        assert report.notes["copy over what the generic proxy wrote, without a proxy fence"] > 0


@pytest.mark.parametrize(
    ("capability", "specialized"),
    [
        pytest.param(100, False, marks=pytest.mark.large),
        (100, True),
        pytest.param(120, False, marks=pytest.mark.large),
    ],
)
def test_tensor_maps_that_a_kernel_makes(kernels: Any, capability: int, specialized: bool) -> None:
    random, (m, n, k) = np.random.default_rng(6), (256, 128, 128)
    a, b = (random.integers(-3, 4, (rows, k)).astype(np.float16) for rows in (m, n))
    given: dict[str, Any] = {"a": a, "b": b, "d": np.zeros((m, n), np.float16)}
    given |= {"m": m, "n": n, "k": k}
    constants = {"rows": 128, "columns": 64, "step": 64, "specialized": specialized}
    compiled = kernels.compile_kernel(kernels.gemm_of_descriptors, capability, given, constants)
    for seed in SEEDS:
        given["d"][...] = 0
        compiled.run((m // 128, n // 64), given, seed)
        np.testing.assert_array_equal(given["d"], a.astype(float) @ b.T.astype(float))


def test_rows_by_their_indices(kernels: Any) -> None:
    random = np.random.default_rng(7)
    source = random.integers(-9, 9, (64, 128)).astype(np.float16)
    chosen = random.permutation(64)[:32].astype(np.int32)
    given: dict[str, Any] = {
        "source": source,
        "indices": chosen,
        "target": np.zeros((64, 128), np.float16),
    }
    given |= {"rows": 64, "columns": 128}
    constants = {"width": 64, "count": 32}
    compiled = kernels.compile_kernel(kernels.add_one_to_rows, 100, given, constants)
    for seed in SEEDS:
        given["target"][...] = 0
        compiled.run((1,), given, seed)
        expected = np.zeros_like(source)
        expected[chosen, 64:] = source[chosen, 64:] + 1
        np.testing.assert_array_equal(given["target"], expected)


@pytest.mark.parametrize("capability", [80, 90])
def test_sorting(kernels: Any, capability: int) -> None:
    values = np.random.default_rng(8).standard_normal(256).astype(np.float32)
    given = {"values": values, "ordered": np.zeros(256, np.float32)}
    given["highest"] = np.zeros(32, np.float32)
    constants = {"count": 256, "top": 32}
    compiled = kernels.compile_kernel(kernels.sort_and_print, capability, given, constants)
    for seed in SEEDS:
        compiled.run((1,), given, seed)
        np.testing.assert_array_equal(given["ordered"], np.sort(values)[::-1])
        np.testing.assert_array_equal(given["highest"], given["ordered"][:32])
