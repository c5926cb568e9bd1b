"""The registered operators: schemas, fake tensors, `torch.compile`, and the functions' results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import sdsa_kernels.operators  # noqa: F401  registers them
from sdsa_kernels import indexer_scores, indexer_top_k, quantize_write_nvfp4
from support.problems import Problem, make_problem


@pytest.fixture
def problem(generator: torch.Generator) -> Problem:
    return make_problem([130, 70], generator=generator, rows_per_group=2, integers=True)


def call_tensors(problem: Problem) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """What both calls take, by position and by name."""
    assert problem.query_scales is not None
    assert problem.key_scales is not None
    positional = problem.query, problem.key_cache, problem.block_table, problem.context_lengths
    return positional, {"query_scales": problem.query_scales, "key_scales": problem.key_scales}


def samples(problem: Problem) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of every operator; scales as bytes, since torch's check multiplies no FP8."""
    positional, named = call_tensors(problem)
    scales = {name: each.view(torch.uint8) for name, each in named.items()}
    keys = torch.zeros(4, 16, dtype=torch.int32)
    bf16 = torch.randn(4, 64, 128).bfloat16()
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    return {
        "indexer_scores": ((*positional, problem.requests, problem.scores.clone()), {**scales}),
        "indexer_top_k": ((*positional, problem.requests, keys.clone()), {**scales}),
        "select_top_k": (
            (torch.randn(4, 100), torch.tensor([100, 3], dtype=torch.int32), keys.clone()),
            {"top_scores": torch.zeros(4, 16)},
        ),
        "rescore_top_k": (
            (
                torch.randn(4, 128).bfloat16(),
                bf16,
                table,
                torch.arange(20, dtype=torch.int32).repeat(4, 1),
                torch.tensor([1, 0], dtype=torch.int32),
                keys.clone(),
            ),
            {},
        ),
        "quantize_write_nvfp4": (
            (
                torch.randn(3, 128),
                torch.tensor([5, -1, 64]),
                None,
                None,
                torch.zeros(2, 64, 64, dtype=torch.uint8),
                torch.zeros(2, 64, 8, dtype=torch.uint8),
            ),
            {},
        ),
    }


NAMES = ("indexer_scores", "indexer_top_k", "select_top_k", "rescore_top_k", "quantize_write_nvfp4")


@pytest.mark.parametrize("name", NAMES)
def test_schemas_and_fakes_are_right(problem: Problem, name: str) -> None:
    arguments, named = samples(problem)[name]
    operator = getattr(torch.ops.sdsa, name).default
    torch.library.opcheck(operator, arguments, named, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", NAMES)
def test_fake_tensors_need_no_memory(problem: Problem, name: str) -> None:
    arguments, named = samples(problem)[name]
    with FakeTensorMode() as mode:
        fake = [each if each is None else mode.from_tensor(each) for each in arguments]
        fake_named = {
            key: mode.from_tensor(each) if isinstance(each, torch.Tensor) else each
            for key, each in named.items()
        }
        assert getattr(torch.ops.sdsa, name)(*fake, **fake_named) is None


def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def test_a_compiled_step_is_one_graph_and_right(problem: Problem) -> None:
    positional, scales = call_tensors(problem)
    key = torch.randn(3, 128)
    slots = torch.tensor([0, 1, 64])

    def step(key: torch.Tensor, cache: torch.Tensor, cache_scales: torch.Tensor) -> torch.Tensor:
        torch.ops.sdsa.quantize_write_nvfp4(key * 2, slots, None, None, cache, cache_scales)
        top_keys = torch.full((4, 8), -7, dtype=torch.int32)
        scores = torch.zeros(4, 192)
        query, _, table, lengths = positional
        operands = query, cache, table, lengths, problem.requests
        both = {"query_scales": scales["query_scales"], "key_scales": cache_scales}
        torch.ops.sdsa.indexer_scores(*operands, scores, **both)
        torch.ops.sdsa.indexer_top_k(*operands, top_keys, **both)
        return torch.cat((scores, top_keys.float()), 1)

    caches = [problem.key_cache.clone() for _ in "ab"], [scales["key_scales"].clone() for _ in "ab"]
    found = compiled(step)(key, caches[0][0], caches[1][0])
    quantize_write_nvfp4(key * 2, slots, key_cache=caches[0][1], key_scales=caches[1][1])
    assert torch.equal(caches[0][0], caches[0][1])
    assert torch.equal(caches[1][0].view(torch.uint8), caches[1][1].view(torch.uint8))
    scores, top_keys = torch.zeros(4, 192), torch.full((4, 8), -7, dtype=torch.int32)
    query, _, table, lengths = positional
    both = {"query_scales": scales["query_scales"], "key_scales": caches[1][1]}
    operands = query, caches[0][1], table, lengths
    indexer_scores(*operands, requests=problem.requests, scores=scores, **both)
    indexer_top_k(*operands, requests=problem.requests, top_keys=top_keys, **both)
    assert torch.equal(found[:, :192], scores)
    assert torch.equal(found[:, 192:], top_keys.float())
