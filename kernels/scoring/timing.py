"""How long scoring a task takes: which way of timing a device has."""

from __future__ import annotations

import dataclasses

import torch

from sdsa_kernels.device import available_bytes
from sdsa_kernels.measure.measurement import Measurement, measure_on_the_cpu, measure_problems
from sdsa_kernels.measure.selected import SelectionMeasurement, measure_selection
from sdsa_kernels.measure.timing import rotations_for
from sdsa_kernels.problem import ScoreProblem
from sdsa_quant.errors import InputError

from .chunks import ChunkScorer


def time_scorer(scorer: ChunkScorer, repeats: int, *, hot: bool = False) -> Measurement:
    """Time `repeats` runs over every group: CUDA graph replays, or on a CPU plain repeats.

    A GPU's replays go through copies of the cache, as many as exceed twice its L2 cache or fit into
    its memory.

    Parameters
    ----------
    scorer : ChunkScorer
        What to time; on a GPU it must score in one chunk.
    repeats : int
        Samples to take.
    hot : bool
        On a GPU, replay on the cache itself, so that a small one is found in the L2 cache.

    Raises
    ------
    ValueError
        `repeats` is less than 1, or a GPU's scorer has several chunks.
    CheckFailedError
        What was timed did not write the scores of a plain call, or its time is impossible.
    """
    traffic = scorer.task.traffic()
    if scorer.task.device.type == "cpu":
        problem = scorer.last_problem()
        return measure_on_the_cpu(
            scorer.run, traffic, repeats, problem=problem, shared=scorer.in_chunks
        )
    if scorer.in_chunks:
        raise InputError(
            "must be left out where a GPU is timed: its graph replays one call over every group",
            argument="chunk",
        )
    problem = scorer.problem()
    problems = [problem] if hot else _rotate(problem, traffic.key_bytes)
    return measure_problems(problems, traffic, repeats, backend=scorer.task.backend)


def time_selection(
    scorer: ChunkScorer, top_k: int, repeats: int, *, hot: bool = False
) -> SelectionMeasurement:
    """Time the selection of every row's top-k, with its scores and alone, as `time_scorer` does.

    Parameters
    ----------
    scorer : ChunkScorer
        What to time; it must score in one chunk.
    top_k : int
        Keys to select in each row, 1 to 65,535.
    repeats : int
        Samples to take of each.
    hot : bool
        On a GPU, replay on the cache itself, so that a small one is found in the L2 cache.

    Raises
    ------
    ValueError
        `top_k` or `repeats` is out of range, or the scorer has several chunks.
    CheckFailedError
        What was timed did not write the keys of the contract.
    """
    if scorer.in_chunks:
        raise InputError(
            "must be left out where a selection is timed: it is one call over every group",
            argument="chunk",
        )
    problem = scorer.problem()
    cold = scorer.task.device.type == "cuda" and not hot
    problems = _rotate(problem, scorer.task.traffic().key_bytes) if cold else [problem]
    return measure_selection(problems, top_k, repeats, backend=scorer.task.backend)


def _rotate(problem: ScoreProblem, key_bytes: int) -> list[ScoreProblem]:
    """The problem and copies of it with cache pages of their own."""
    cache_bytes = problem.key_cache.untyped_storage().nbytes()
    if problem.key_scales is not None:
        cache_bytes += problem.key_scales.untyped_storage().nbytes()
    fitting = 1 + available_bytes(problem.device) // max(cache_bytes, 1)
    count = min(rotations_for(key_bytes, problem.device), fitting)
    return [problem, *(_with_own_pages(problem) for _ in range(count - 1))]


def _with_own_pages(problem: ScoreProblem) -> ScoreProblem:
    """A copy of the cache in the same layout: views of one buffer stay views of one buffer."""
    copies: dict[int, torch.UntypedStorage] = {}

    def moved(pages: torch.Tensor) -> torch.Tensor:
        storage = pages.untyped_storage()
        if storage.data_ptr() not in copies:
            copies[storage.data_ptr()] = storage.clone()
        fresh = torch.empty(0, dtype=pages.dtype, device=pages.device)
        copy = copies[storage.data_ptr()]
        return fresh.set_(copy, pages.storage_offset(), pages.shape, pages.stride())

    return dataclasses.replace(
        problem,
        key_cache=moved(problem.key_cache),
        key_scales=None if problem.key_scales is None else moved(problem.key_scales),
    )
