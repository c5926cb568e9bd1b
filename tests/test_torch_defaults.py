"""Engines load models under a BF16 default dtype and a CUDA default device: nothing may change."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import sdsa_kernels
import sdsa_quant
from sdsa_kernels.scoring.chunks import ChunkScorer
from sdsa_kernels.scoring.rows import score_rows
from sdsa_kernels.scoring.task import make_task
from sdsa_kernels.testing.problems import exact_problem
from sdsa_kernels.testing.self_test import self_tests
from sdsa_quant.captures.baseline import open_baseline
from sdsa_quant.files.cache_file import count_scales, open_cache, validate_cache
from sdsa_quant.formats.nvfp4 import UNCALIBRATED_RULES
from sdsa_quant.study import run


@contextlib.contextmanager
def bfloat16() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def meta() -> contextlib.AbstractContextManager[object]:
    """Stands for a GPU as the default device: what lies there cannot meet CPU tensors."""
    return torch.device("meta")


DEFAULTS = pytest.mark.parametrize("defaults", [bfloat16, meta])
Defaults = Callable[[], contextlib.AbstractContextManager[object]]


@pytest.fixture
def capture(tmp_path: Path, generator: torch.Generator) -> Path:
    tensors = {
        "keys": torch.randn(300, 128, generator=generator),
        "queries": torch.randn(4, 128, generator=generator),
        "lengths": torch.tensor([200, 100]),
    }
    save_file(tensors, tmp_path / "capture.safetensors")
    return tmp_path / "capture.safetensors"


def score_call() -> dict[str, Any]:
    i32: Any = {"dtype": torch.int32, "device": "cpu"}
    return {
        "query": torch.ones(1, 128, dtype=torch.bfloat16, device="cpu"),
        "key_cache": torch.ones(2, 64, 128, dtype=torch.bfloat16, device="cpu"),
        "block_table": torch.tensor([[0, 1]], **i32),
        "context_lengths": torch.tensor([65], **i32),
        "requests": torch.tensor([0], **i32),
        "scores": torch.zeros(1, 65, dtype=torch.float32, device="cpu"),
    }


def calls(generator: torch.Generator) -> dict[str, Callable[[], Any]]:
    """Public functions on tensors, each giving tensors."""
    cpu: Any = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    values = torch.randn(70, 128, **cpu)
    codes, scales = sdsa_quant.quantize_nvfp4(values)
    scores = torch.randn(3, 50, **cpu)
    heads = torch.randn(2, 4, 128, **cpu)
    linear = scales.view(torch.uint8)
    tiled = sdsa_quant.linear_to_128x4(linear)
    short = torch.tensor([50, 20, 0], dtype=torch.int32, device="cpu")
    slots = torch.arange(70, dtype=torch.int64, device="cpu")
    weights = torch.rand(2, 4, **cpu)

    def select() -> torch.Tensor:
        chosen = torch.zeros(3, 7, dtype=torch.int32, device="cpu")
        sdsa_kernels.select_top_k(scores, short, top_keys=chosen)
        return chosen

    def write() -> tuple[torch.Tensor, ...]:
        pages = torch.zeros(2, 64, 64, dtype=torch.uint8, device="cpu")
        page_scales = torch.zeros(2, 64, 8, dtype=torch.uint8, device="cpu")
        sdsa_kernels.quantize_write_nvfp4(values, slots, key_cache=pages, key_scales=page_scales)
        return pages, page_scales

    return {
        **{
            f"quantize {rule}": functools.partial(sdsa_quant.quantize_nvfp4, values, rule=rule)
            for rule in UNCALIBRATED_RULES
        },
        "dequantize": lambda: sdsa_quant.dequantize_nvfp4(codes, scales),
        "fp8": lambda: sdsa_quant.dequantize_fp8(*sdsa_quant.quantize_fp8(values)),
        "mxfp4": lambda: sdsa_quant.dequantize_mxfp4(*sdsa_quant.quantize_mxfp4(values)),
        "hadamard": lambda: sdsa_quant.hadamard(values),
        "128x4": lambda: sdsa_quant.linear_to_128x4(linear),
        "from 128x4": lambda: sdsa_quant.linear_from_128x4(tiled, 70, 8),
        "top-k": lambda: sdsa_quant.top_k_indices(scores, 7),
        "relu-sum": lambda: sdsa_quant.relu_sum_scores(heads, values, weights),
        "select": select,
        "write": write,
        "exact problem": lambda: exact_problem(
            "nvfp4", torch.device("cpu"), (64, 3), rows_per_group=1
        ).call()[:6],
        "row accuracy": lambda: sdsa_quant.row_accuracy(
            0, 0, scores[0], scores[1], top_k=(5,), softmax_scale=0.1
        ),
    }


NAMES = list(calls(torch.Generator().manual_seed(0)))


@DEFAULTS
@pytest.mark.parametrize("name", NAMES)
def test_functions_give_the_same(generator: torch.Generator, name: str, defaults: Defaults) -> None:
    call = calls(generator)[name]
    expected = call()
    with defaults():
        found = call()
    if not isinstance(expected, tuple):
        expected, found = (expected,), (found,)
    for one, other in zip(expected, found, strict=True):
        if isinstance(one, torch.Tensor):
            assert (one.dtype, one.device) == (other.dtype, other.device)
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        else:
            assert one == other


@DEFAULTS
def test_scores_are_checked_and_given(monkeypatch: pytest.MonkeyPatch, defaults: Defaults) -> None:
    monkeypatch.setenv("SDSA_CHECK", "1")
    call = score_call()
    with defaults():
        sdsa_kernels.indexer_scores(**call)
    assert call["scores"].tolist() == [[128.0] * 65]


@DEFAULTS
def test_the_self_test_passes(defaults: Defaults) -> None:
    with defaults():
        assert [test.failure for test in self_tests("cpu") if test.failure] == []


@DEFAULTS
def test_files_are_the_same(capture: Path, tmp_path: Path, defaults: Defaults) -> None:
    sdsa_quant.build_cache(capture, tmp_path / "here.safetensors", center="channel", gain="auto")
    with defaults():
        (built,) = sdsa_quant.build_cache(
            capture, tmp_path / "there.safetensors", center="channel", gain="auto"
        ).caches
        cache = open_cache(built.path)
        validate_cache(cache)
        count_scales(cache)
        baseline = open_baseline(capture, cache)
        query = torch.ones(2, 128, dtype=torch.bfloat16, device="cpu")
        task = make_task(
            query, cache.paged_keys(), [0, 1], query_format="nvfp4", transform=cache.transform
        )
        rows = score_rows(
            ChunkScorer(task, None), top_k=(5,), softmax_scale=0.1, read_keys=baseline.read_keys
        )
    assert [row.accuracy.valid for row in rows if row.accuracy is not None] == [True, True]
    here, there = ((tmp_path / f"{name}.safetensors").read_bytes() for name in ("here", "there"))
    assert here == there


@DEFAULTS
def test_studies_are_the_same(capture: Path, tmp_path: Path, defaults: Defaults) -> None:
    options: dict[str, Any] = {
        "formats": ("nvfp4", "nvfp4-search", "nvfp4-covariance", "mxfp4", "fp8"),
        "rotate": ("none", "hadamard"),
        "center": ("channel",),
        "gain": ("auto",),
        "top_k": (16,),
    }
    here = run(capture, capture, tmp_path / "here", **options)
    with defaults():
        there = run(capture, capture, tmp_path / "there", **options)
    assert here.results == there.results
    assert here.blocks == there.blocks
