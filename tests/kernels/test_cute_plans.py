"""The tensor maps of a plan: what the driver is asked to encode, and when; no GPU needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sdsa_kernels.cute import plans as cute_plans
from sdsa_kernels.cute import tensor_maps as cute_tensor_maps
from sdsa_kernels.cute.compiled import LaunchConfig
from sdsa_kernels.cute.variants import TENSOR_CORE_VARIANTS
from sdsa_kernels.problem import ScoreProblem
from sdsa_kernels.testing.problems import exact_problem, with_tiled_scales
from sdsa_quant.errors import InputError

QUERY, SCALES, KEYS = 2**40, 2**41, 2**42
Encoded = list[tuple[object, ...]]


# Bytes of a row in shared memory and MMA columns, by format (docs/explanation/tcgen05.md).
BOXES = {"nvfp4": (64, 8), "bf16": (128, 16)}


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Encoded:
    """The arguments of every map that was encoded; a map is its address."""
    calls: Encoded = []

    def encode(address: int, *sizes: object) -> bytes:
        calls.append((address, *sizes))
        return address.to_bytes(8, "little")

    monkeypatch.setattr(cute_tensor_maps, "encode_tensor_map", encode)
    return calls


def tensor_maps(problem: ScoreProblem) -> object:
    """The maps of a kernel whose boxes are those of the problem's formats."""
    box_bytes, columns = BOXES[problem.key_format]
    config = LaunchConfig(192, 4096, 1, 1, 64, 0, box_bytes=box_bytes, columns=columns)
    return cute_plans._tensor_maps(problem, config)


def call(maps: object, query: int = QUERY, keys: int = KEYS, key_scales: int = SCALES) -> bytes:
    return maps(query, 0, keys, key_scales, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("values", "row_bytes", "box", "columns", "record"),
    [("nvfp4", 64, 64, 8, 4608), ("bf16", 256, 128, 16, 16_384)],
)
def test_maps_describe_rows_and_pages(
    encoded: Encoded, values: str, row_bytes: int, box: int, columns: int, record: int
) -> None:
    problem = exact_problem(values, torch.device("cpu"), (70, 5), rows_per_group=3, pages=7)
    call(tensor_maps(problem))
    assert encoded == [
        (QUERY, (row_bytes, 6), (row_bytes,), (box, columns)),
        (KEYS, (row_bytes, 64, 7), (row_bytes, record), (box, 64, 1)),
    ]


def test_a_single_page_is_as_far_from_the_next_as_it_is_long(encoded: Encoded) -> None:
    problem = exact_problem("bf16", torch.device("cpu"), (70,), rows_per_group=1, pages=1)
    keys = problem.key_cache.as_strided((1, 64, 128), (1, 128, 1))  # no stride that a map takes
    call(tensor_maps(replace(problem, key_cache=keys)))
    assert encoded[1][2] == (256, 16_384)


def test_boxes_are_what_the_kernels_copy() -> None:
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    from sdsa_kernels.cute.compile import tensor_core_config

    for variant in TENSOR_CORE_VARIANTS:
        config = tensor_core_config(variant)
        wanted = BOXES["bf16" if "bf16" in variant else "nvfp4"]
        assert (config.box_bytes, config.columns) == wanted


def test_maps_are_encoded_once_for_each_pair_of_addresses(encoded: Encoded) -> None:
    problem = exact_problem("nvfp4", torch.device("cpu"), (70,), rows_per_group=1)
    maps = tensor_maps(problem)
    for _ in range(2):
        assert call(maps) == QUERY.to_bytes(8, "little") + KEYS.to_bytes(8, "little")
    assert len(encoded) == 2
    assert call(maps, keys=KEYS + 16)[8:] == (KEYS + 16).to_bytes(8, "little")
    assert len(encoded) == 4


def test_a_plan_refuses_tiled_scales_that_bulk_copies_do_not_take(encoded: Encoded) -> None:
    # Plans let any multiple of 8 bytes pass, which linear scales may start at.
    linear = exact_problem("nvfp4", torch.device("cpu"), (70,), rows_per_group=1)
    call(tensor_maps(linear), key_scales=SCALES + 8)
    maps = tensor_maps(with_tiled_scales(linear))
    call(maps, key_scales=SCALES + 16)
    with pytest.raises(InputError, match="multiple of 16 bytes, got an address that is 8 bytes"):
        call(maps, key_scales=SCALES + 8)


def test_an_installed_kernel_serves_its_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute_plans, "_kernels", {})
    kernel: Any = object()
    cute_plans.install(3, "bf16", kernel)
    assert cute_plans.loaded_kernel(3, "bf16") is kernel
    assert cute_plans.loaded() == [(3, "bf16")]
