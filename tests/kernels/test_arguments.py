"""Arguments of other types than a public call of the kernels states: refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sdsa_kernels
from sdsa_quant.errors import SdsaError
from support.problems import make_problem

WRONG: tuple[Any, ...] = (None, "", "?", b"x", 5, -1, True, 1.5, object(), {"a": 1}, [1.5], [])
Call = tuple[Callable[..., Any], dict[str, Any]]


def calls() -> dict[str, Call]:
    """Every public call with arguments that are right; what may be left out is there too."""
    problem = make_problem([70, 3], generator=torch.Generator().manual_seed(0))
    tensors = {**vars(problem)}
    scores = tensors.pop("scores")
    top_keys = torch.empty(2, 4, dtype=torch.int32)
    selection = {"top_keys": top_keys, "top_scores": torch.empty(2, 4), "slots": True}
    where = {name: tensors[name] for name in ("block_table", "requests")}
    counters, ends = torch.zeros(2, 2, dtype=torch.int32), torch.tensor([70, 3], dtype=torch.int32)
    candidates, tiles = torch.zeros(2, 8, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    ranges, thresholds = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2)
    cache = {name: tensors[name] for name in ("key_cache", "key_scales")}
    offsets = torch.zeros(128, dtype=torch.uint8)
    sample = {
        "sample_keys": torch.zeros(2, 128, 64, dtype=torch.uint8),
        "sample_scales": torch.zeros(2, 128, 8, dtype=torch.uint8),
        "samples_per_run": 64,
        "pages_per_run": 1,
    }
    prefill = {
        **cache,
        "query": tensors["query"],
        "query_scales": tensors["query_scales"],
        "row_ends": ends,
        "tile_requests": tiles,
        "block_table": tensors["block_table"],
        "thresholds": thresholds,
        "counters": counters,
        "candidates": candidates,
        "max_context": 70,
        "top_k": 4,
        "arrivals": tiles,
        "ranges": ranges,
    }
    found = {
        "key": torch.ones(2, 128),
        "slots": torch.arange(2),
        "query": torch.ones(2, 128),
        "query_rows": torch.arange(2),
        "key_cache": torch.zeros(1, 64, 64, dtype=torch.uint8),
        "key_scales": torch.zeros(1, 64, 8, dtype=torch.uint8),
        "packed_query": torch.zeros(2, 64, dtype=torch.uint8),
        "query_scales": torch.zeros(2, 8, dtype=torch.uint8),
    }
    right = {
        "indexer_scores": {**tensors, "scores": scores},
        "indexer_top_k": {**tensors, **selection},
        "select_top_k": {"scores": scores, "context_lengths": ends, **selection, **where},
        "rescore_top_k": {
            "query": torch.ones(2, 128, dtype=torch.bfloat16),
            "key_cache": torch.ones(3, 64, 128, dtype=torch.bfloat16),
            "block_table": torch.tensor([[0, 1], [2, -1]], dtype=torch.int32),
            "candidates": torch.tensor([[0, 65], [3, -1]], dtype=torch.int32),
            "requests": tensors["requests"],
            **selection,
        },
        "quantize_write_nvfp4": found,
        "quantize_write_index_qk_nvfp4": found,
        "indexer_threshold_select": prefill,
        "top_k_from_candidates": {
            "candidates": candidates,
            "ranges": ranges,
            "top_keys": top_keys,
        },
        "gather_key_sample": {
            **cache,
            "block_table": tensors["block_table"],
            "offsets": offsets,
            "sample_ends": ends,
            **sample,
        },
        "thresholds_from_sample": {
            "sample_scores": torch.zeros(2, 8),
            "sample_top": torch.zeros(2, 2, dtype=torch.int32),
            "thresholds": thresholds,
            "counters": counters,
        },
    }
    return {name: (getattr(sdsa_kernels, name), each) for name, each in right.items()}


CALLS = calls()


def test_the_table_has_everything_public() -> None:
    assert {*sdsa_kernels.__all__} - {"backend_names"} == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_the_calls_are_right(name: str) -> None:
    function, right = calls()[name]
    function(**right)


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        (name, argument)
        for name, (function, _) in CALLS.items()
        for argument in inspect.signature(function).parameters
    ],
)
def test_values_of_other_types_are_refused_by_name(name: str, argument: str) -> None:
    function, right = calls()[name]
    annotation = inspect.signature(function).parameters[argument].annotation
    for value in WRONG:
        if value is None and "None" in annotation:
            continue
        if annotation in ("int", "bool") and type(value).__name__ == annotation:
            continue
        with pytest.raises(SdsaError, match=argument):
            function(**{**right, argument: value})
