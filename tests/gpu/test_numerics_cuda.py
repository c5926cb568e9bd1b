"""The numerics and the `torch` backend on CUDA tensors: the same bits as on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sdsa_quant.errors import InputError, UnsupportedError
from sdsa_quant.formats import e2m1
from sdsa_quant.formats.nvfp4 import dequantize_nvfp4, e4m3_scales, quantize_nvfp4
from sdsa_quant.formats.scale_order import linear_from_128x4, linear_to_128x4
from support.problems import KINDS, UNTOUCHED, assert_scores, gaussian_values, make_problem

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_golden_vectors(fixtures: Path, dtype: torch.dtype) -> None:
    golden = load_file(fixtures / "nvfp4-golden.safetensors")
    codes, scales = quantize_nvfp4(golden["inputs"].to("cuda", dtype), nonfinite="saturate")
    assert torch.equal(codes.cpu(), golden["codes"])
    assert torch.equal(scales.view(torch.uint8).cpu(), golden["scales"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_same_bits_as_the_cpu(generator: torch.Generator, dtype: torch.dtype) -> None:
    values = gaussian_values((4099, 128), generator).to(dtype)
    expected = quantize_nvfp4(values)
    codes, scales = quantize_nvfp4(values.cuda())
    assert torch.equal(codes.cpu(), expected[0])
    assert torch.equal(scales.view(torch.uint8).cpu(), expected[1].view(torch.uint8))
    assert torch.equal(dequantize_nvfp4(codes, scales).cpu(), dequantize_nvfp4(*expected))


def test_every_bfloat16_as_a_blocks_maximum() -> None:
    # Division by 6 and the E4M3 cast are where devices have differed.
    amax = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    expected = e4m3_scales(amax).view(torch.uint8)
    assert torch.equal(e4m3_scales(amax.cuda()).view(torch.uint8).cpu(), expected)


def test_ties_and_signed_zeros() -> None:
    values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 9.0, -0.0, -0.1])
    assert e2m1.encode(values.cuda()).tolist() == e2m1.encode(values).tolist()


def test_nonfinite_values_are_refused() -> None:
    values = torch.zeros(4, 32, device="cuda")
    values[1, 3] = float("inf")
    with pytest.raises(InputError, match="values must be finite"):
        quantize_nvfp4(values)


def test_scale_orders(generator: torch.Generator) -> None:
    scales = torch.randint(0, 256, (300, 8), generator=generator).to(torch.uint8)
    tiled = linear_to_128x4(scales.cuda())
    assert torch.equal(tiled.cpu(), linear_to_128x4(scales))
    assert torch.equal(linear_from_128x4(tiled, 300, 8).cpu(), scales)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("integers", [True, False], ids=["integers", "gaussian"])
def test_torch_backend(generator: torch.Generator, kind: str, integers: bool) -> None:
    problem = make_problem(
        [0, 1, 63, 64, 65, 700],
        generator=generator,
        kind=kind,
        rows_per_group=3,
        integers=integers,
    ).to("cuda")
    problem.run("torch")
    assert_scores(problem, exact=integers)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_torch_backend_refuses_a_capture(generator: torch.Generator) -> None:
    problem = make_problem([100], generator=generator).to("cuda")
    problem.run("torch")
    problem.scores.fill_(UNTOUCHED)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(UnsupportedError, match="a graph capture forbids"), torch.cuda.graph(graph):
        problem.run("torch")
    problem.run("torch")  # the stream is still usable
    assert_scores(problem, exact=False)
