"""The tensor-core kernels on the hardware that they are for; see tests/emulator for all others."""

from __future__ import annotations

import pytest
import torch

from sdsa_kernels import plans
from sdsa_kernels.cute import trust as cute_self_check
from sdsa_kernels.cute.trust import is_trusted, known_reason_against
from sdsa_kernels.cute.variants import ARCHITECTURES, TENSOR_CORE, TENSOR_CORE_VARIANTS
from sdsa_kernels.device import capability
from sdsa_kernels.switches import TCGEN05
from sdsa_quant.formats.scale_order import linear_to_128x4
from support.problems import UNTOUCHED, assert_scores, make_problem

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip where there are no such tensor cores; ask for every verdict anew."""
    found = capability(torch.cuda.current_device())
    if ARCHITECTURES.get(found) not in TENSOR_CORE:
        pytest.skip(f"needs an SM100 or SM103, and this is an SM{found[0]}{found[1]}")
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    monkeypatch.setattr(cute_self_check, "_verdicts", {})
    monkeypatch.delenv(TCGEN05, raising=False)
    plans.forget_all()


@pytest.mark.parametrize("variant", TENSOR_CORE_VARIANTS)
def test_every_kernel_passes_its_check(variant: str) -> None:
    device = torch.cuda.current_device()
    assert is_trusted(device, variant), known_reason_against(device, variant)


@pytest.mark.parametrize("kind", ["bf16", "nvfp4"])
@pytest.mark.parametrize("rows_per_group", [1, 2, 8])
@pytest.mark.parametrize("integers", [True, False], ids=["integers", "gaussian"])
def test_scores(generator: torch.Generator, kind: str, rows_per_group: int, integers: bool) -> None:
    lengths = [0, 1, 63, 64, 65, 127, 128, 129, 100_001, *range(3000, 3040)]
    problem = make_problem(
        lengths, generator=generator, kind=kind, rows_per_group=rows_per_group, integers=integers
    ).to("cuda")
    for _ in range(10):
        problem.scores.fill_(UNTOUCHED)
        problem.run("cute")
    assert_scores(problem, exact=integers)


def test_scales_in_the_128x4_order(generator: torch.Generator) -> None:
    problem = make_problem([5000, 64, 129], generator=generator, rows_per_group=2).to("cuda")
    linear = problem.run("cute").clone()
    tiled = linear_to_128x4(problem.key_scales.reshape(-1, 8))
    problem.scores.fill_(UNTOUCHED)
    assert torch.equal(problem.replace(key_scales=tiled).run("cute"), linear)


@pytest.mark.parametrize("kind", ["bf16", "nvfp4"])
def test_the_switch_changes_no_bit_of_exact_scores(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    problem = make_problem([5000, 64], generator=generator, kind=kind, integers=True).to("cuda")
    scores = problem.run("cute").clone()
    monkeypatch.setenv(TCGEN05, "0")
    plans.forget_all()
    problem.scores.fill_(UNTOUCHED)
    assert torch.equal(problem.run("cute"), scores)
