"""Kernels that another compiler made: Triton's PTX of the quantizing kernel, bit for bit."""

from __future__ import annotations

import struct
import sys

import numpy as np
import pytest
import torch

from emulator.machine.launch import run_kernel
from emulator.machine.memory import Region
from sdsa_quant.formats.nvfp4 import quantize_nvfp4
from support.compiled_quantizing import compile_quantizing

pytest.importorskip("triton", reason="triton is not installed")

from sdsa_kernels.switches import interpreting

pytestmark = [
    pytest.mark.skipif(interpreting(), reason="the interpreter compiles nothing"),
    pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux"),
]

ROWS, WARPS, KEYS, PAGES = 16, 2, 37, 2
SPACING = 1 << 20


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_tritons_quantization(dtype: str, capability: int) -> None:
    generator = torch.Generator().manual_seed(capability)
    exponents = torch.randint(-20, 21, (KEYS, 8), generator=generator).float()
    values = torch.randn(KEYS, 128, generator=generator)
    values *= torch.exp2(exponents).repeat_interleave(16, 1)
    values[3, :16] = 0.0
    values[4, :32:3] = -0.0
    values = values.bfloat16() if dtype == "bf16" else values
    slots = torch.randperm(64 * PAGES, generator=generator)[:KEYS]
    slots[7] = -1  # is skipped
    untouched = torch.full((64 * PAGES, 64), 0xEE, dtype=torch.uint8)
    arrays = [bytes_of(values), bytes_of(slots), bytes_of(untouched), bytes_of(untouched[:, :8])]
    regions = [
        Region(name, 0x7F40_0000_0000 + SPACING * index, array)
        for index, (name, array) in enumerate(
            zip(("values", "slots", "codes", "scales"), arrays, strict=True)
        )
    ]
    compiled = compile_quantizing(dtype, capability, ROWS, WARPS)
    ptx, shared = compiled.asm["ptx"], compiled.metadata.shared
    bases = [region.base for region in regions]
    vectors = 128 * values.element_size() // 16
    # Without query rows the keys' arguments stand in for theirs; then two scratch pointers.
    parameters = struct.pack(
        "<8Q2i6q2Q", *bases, *bases, KEYS, 0, vectors, vectors, 64 * 64 // 16, 4, 64 * 8, 8, 0, 0
    )
    programs = -(-KEYS // ROWS)
    run_kernel(
        ptx, "quantize_write_kernel", programs, 32 * WARPS, parameters, regions, shared, seed=5
    )
    codes, scales = quantize_nvfp4(values)
    expected_codes, expected_scales = untouched.clone(), untouched[:, :8].clone()
    kept = slots >= 0
    expected_codes[slots[kept]] = codes[kept]
    expected_scales[slots[kept]] = scales.view(torch.uint8)[kept]
    assert np.array_equal(regions[2].data, bytes_of(expected_codes))
    assert np.array_equal(regions[3].data, bytes_of(expected_scales))
