"""What the `cute` backend serves, and what it says where it cannot; no GPU needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sdsa_kernels import backends
from sdsa_kernels.checks import check_scores_call
from sdsa_kernels.cute import backend as cute_scores
from sdsa_kernels.cute.variants import (
    ARCHITECTURES,
    SHORT,
    loaded_together,
    tensor_core_variant,
    variants_of,
    warp_variant,
)
from sdsa_kernels.problem import ScoreCall, ScoreProblem
from sdsa_kernels.testing.problems import with_tiled_scales
from sdsa_quant.errors import UnsupportedError
from support.problems import KINDS, make_problem


def _checked(kind: str, rows_per_group: int, generator: torch.Generator) -> ScoreProblem:
    problem = make_problem([70], generator=generator, kind=kind, rows_per_group=rows_per_group)
    return check_scores_call(ScoreCall(**vars(problem)))


class _OnCuda:
    """A checked problem that claims to be on a CUDA device, for questions that touch no data."""

    def __init__(self, problem: ScoreProblem, index: int) -> None:
        self._problem = problem
        self.device = SimpleNamespace(type="cuda", index=index)

    def __getattr__(self, name: str) -> object:
        return getattr(self._problem, name)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices 0 to 4: an A100, an H100, a B200, a B300 and something newer."""
    capabilities = [(8, 0), (9, 0), (10, 0), (10, 3), (13, 0)]
    monkeypatch.setattr(cute_scores, "capability", lambda index: capabilities[index])
    monkeypatch.setattr(cute_scores, "package_version", lambda name: "4.8.1")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows_per_group", range(1, 9))
@pytest.mark.parametrize("architecture", ARCHITECTURES.values())
def test_every_call_has_a_compiled_variant(
    generator: torch.Generator, kind: str, rows_per_group: int, architecture: str
) -> None:
    problem = _checked(kind, rows_per_group, generator)
    for groups in (1, 1_000_000):
        variant = warp_variant(replace(problem, groups=groups), architecture, 132)
        assert variant in variants_of(architecture)
    found = tensor_core_variant(problem, architecture)
    if architecture in ("sm_100a", "sm_103a") and kind != "mixed":
        assert found == f"tcgen05_{kind}"
        assert found in variants_of(architecture)
    else:
        assert found is None


@pytest.mark.parametrize(
    "change",
    [
        lambda p: {"key_cache": p.key_cache[:0]},
        lambda p: {"key_cache": p.key_cache[:1].expand(5, -1, -1)},
        lambda p: {"key_cache": p.key_cache.view(-1).as_strided((2, 64, 128), (64, 128, 1))},
        lambda p: {"query": p.query[:1].expand(3, -1)},
    ],
    ids=["no-pages", "one-page-repeated", "overlapping-pages", "one-row-repeated"],
)
def test_what_no_tensor_map_describes_stays_at_warp_level(
    generator: torch.Generator, change: Callable[[ScoreProblem], dict[str, torch.Tensor]]
) -> None:
    problem = _checked("bf16", 3, generator)
    assert tensor_core_variant(problem, "sm_100a") == "tcgen05_bf16"
    assert tensor_core_variant(replace(problem, **change(problem)), "sm_100a") is None


def test_the_stride_of_a_single_page_does_not_matter(generator: torch.Generator) -> None:
    problem = _checked("bf16", 3, generator)
    single = problem.key_cache[:1].as_strided((1, 64, 128), (1, 128, 1))
    assert tensor_core_variant(replace(problem, key_cache=single), "sm_100a") == "tcgen05_bf16"


@pytest.mark.usefixtures("devices")
def test_tiled_scales_need_tensor_cores_that_can_be_trusted(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = with_tiled_scales(_checked("nvfp4", 2, generator))
    monkeypatch.setattr(cute_scores, "is_trusted", lambda device, variant: device == 2)
    assert "only the tensor cores of SM10x" in cute_scores.reason_unsupported(_OnCuda(problem, 1))
    assert cute_scores.reason_unsupported(_OnCuda(problem, 2)) is None
    assert "failed its check" in cute_scores.reason_unsupported(_OnCuda(problem, 3))
    mixed = with_tiled_scales(_checked("mixed", 2, generator))
    assert "with NVFP4 query rows" in cute_scores.reason_unsupported(_OnCuda(mixed, 2))


def test_lists_of_two_pages_for_every_team_are_short(generator: torch.Generator) -> None:
    problem = replace(_checked("nvfp4", 1, generator), groups=32)
    for width, variant in ((4224, "blocks1_short"), (4225, "blocks1"), (65_536, "blocks1")):
        assert warp_variant(replace(problem, max_context=width), "sm_90a", 132) == variant


@pytest.mark.parametrize("architecture", ARCHITECTURES.values())
def test_the_first_call_loads_the_kernels_for_every_size(architecture: str) -> None:
    for variant in variants_of(architecture):
        together = loaded_together(variant, architecture)
        assert variant in together
        base = variant.removesuffix(SHORT)
        assert set(together) == {base, base + SHORT} & set(variants_of(architecture))


def test_variants_are_few() -> None:
    # What one process can ever compile on a device, whatever the shapes, strides and lengths.
    assert {name: len(variants_of(name)) for name in ARCHITECTURES.values()} == {
        "sm_90a": 9,
        "sm_100a": 8,
        "sm_103a": 8,
        "sm_120a": 5,
    }


def test_cpu_tensors_are_refused(generator: torch.Generator) -> None:
    problem = make_problem([70], generator=generator)
    with pytest.raises(UnsupportedError, match=r"backend cute cannot run here.*not on cpu"):
        problem.run("cute")


@pytest.mark.usefixtures("devices")
def test_the_device_of_the_tensors_decides(generator: torch.Generator) -> None:
    problem = _checked("nvfp4", 1, generator)
    reasons = [cute_scores.reason_unsupported(_OnCuda(problem, index)) for index in range(5)]
    assert [reason is None for reason in reasons] == [False, True, True, True, False]
    assert "this is an SM80" in reasons[0]
    assert "SM90, SM100, SM103, SM120" in reasons[4]


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    ("installed", "said"),
    [
        (None, "needs nvidia-cutlass-dsl 4.8 or later, which is not installed"),
        ("4.4.0", "needs nvidia-cutlass-dsl 4.8 or later, installed is 4.4.0"),
        ("3.99.1", "installed is 3.99.1"),
        ("4.8.0", None),
        ("4.10.0.dev1", None),
        ("5.0", None),
    ],
)
def test_missing_or_old_cute_dsl_is_named(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, installed: str, said: str
) -> None:
    monkeypatch.setattr(cute_scores, "package_version", lambda name: installed)
    reason = cute_scores.reason_unsupported(_OnCuda(_checked("nvfp4", 1, generator), 1))
    if said is None:
        assert reason is None
    else:
        assert said in reason


@pytest.mark.usefixtures("devices")
def test_more_pages_than_the_kernel_counts_are_refused(generator: torch.Generator) -> None:
    problem = replace(_checked("bf16", 1, generator), groups=140_000, max_context=1_048_576)
    reason = cute_scores.reason_unsupported(_OnCuda(problem, 1))
    assert "140000 groups of up to 1048576 keys" in reason


@pytest.mark.parametrize(
    ("index", "kind", "rows", "order"),
    [
        (1, "bf16", 2, ["cute", "triton", "torch"]),
        (1, "bf16", 3, ["triton", "cute", "torch"]),
        (1, "nvfp4", 8, ["cute", "triton", "torch"]),
        (1, "mixed", 8, ["cute", "triton", "torch"]),
        (2, "bf16", 8, ["cute", "triton", "torch"]),
        (3, "nvfp4", 1, ["cute", "triton", "torch"]),
    ],
)
def test_auto_tries_the_measured_winner_first(
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    index: int,
    kind: str,
    rows: int,
    order: list[str],
) -> None:
    # By the problem's own device: 1 is an H100 here, whatever device is current.
    capabilities = [(8, 0), (9, 0), (10, 0), (10, 3)]
    monkeypatch.setattr(backends, "capability", lambda device: capabilities[device])
    problem = _OnCuda(_checked(kind, rows, generator), index)
    assert [backend.name for backend in backends.auto_order(problem)] == order
