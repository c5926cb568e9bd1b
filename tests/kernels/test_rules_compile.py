"""The kernels of the rules other than amax/6 compile for GPUs that are not here."""

from __future__ import annotations

import sys

import pytest

from support.compiled_quantizing import compile_rule

pytest.importorskip("triton", reason="triton is not installed")

from sdsa_kernels.switches import interpreting

pytestmark = [
    pytest.mark.skipif(interpreting(), reason="the interpreter compiles nothing"),
    pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux"),
]

SHARED_BYTES = 48 << 10  # so that several programs fit on a multiprocessor


@pytest.mark.parametrize(
    "rule", ["4over6", pytest.param("search", marks=pytest.mark.large),
             pytest.param("covariance", marks=pytest.mark.large)]
)  # fmt: skip
@pytest.mark.parametrize(("dtype", "capability"), [("bf16", 80), ("fp32", 100)])
def test_compiles(rule: str, dtype: str, capability: int) -> None:
    compiled = compile_rule(rule, dtype, capability)
    assert compiled.metadata.shared <= SHARED_BYTES
    assert ".local" not in compiled.asm["ptx"]
    assert "fma.rn" in compiled.asm["ptx"]
