"""The measurements of `sdsa bench`: every shape with every pair of formats on every backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sdsa_cli.output import Output

from .document import BenchOptions, BenchResult
from .shapes import BenchShape

if TYPE_CHECKING:
    import torch

    from sdsa_kernels.problem import ScoreProblem


def run_bench(options: BenchOptions, sink: Output) -> list[BenchResult]:
    """Measure every shape with all format pairs and backends."""
    total = len(options.shapes) * len(options.values) * len(options.backends)
    results = []
    with sink.progress("measuring", total) as advance:
        for shape in options.shapes:
            for format_pair in options.values:
                results += _measure_shape(options, shape, format_pair)
                advance(len(options.backends))
    return results


def _measure_shape(options: BenchOptions, shape: BenchShape, format_pair: str) -> list[BenchResult]:
    import torch

    from sdsa_kernels.backends import choose_backend
    from sdsa_kernels.measure.measurement import measure_problems
    from sdsa_kernels.measure.traffic import shape_traffic
    from sdsa_kernels.testing.problems import Shape, synthetic_problems

    device = torch.device(options.device)
    sizes = Shape(shape.lengths, shape.rows_per_group, shape.max_context)
    traffic = shape_traffic(sizes, format_pair)
    problems = synthetic_problems(
        sizes,
        format_pair,
        device,
        rotations=_rotations(options, traffic.key_bytes, device),
        seed=options.seed,
    )
    results = []
    for backend in options.backends:
        measurement = measure_problems(
            problems,
            traffic,
            options.repeats,
            backend=backend,
            calls_per_replay=options.calls_per_replay,
        )
        if options.check:  # after the measurement, whose first call is to be the first
            _check(problems[0], backend)
        results.append(
            BenchResult(
                shape=shape,
                format_pair=format_pair,
                backend=choose_backend(problems[0], backend).name,
                measurement=measurement,
                checked=options.check,
                flashinfer_us=None,
                gather_bmm_us=None,
            )
        )
    if device.type == "cuda":
        if options.compare:
            results = _add_others(results, problems, options)
        del problems
        torch.cuda.empty_cache()
    return results


def _add_others(
    results: Sequence[BenchResult], problems: Sequence[ScoreProblem], options: BenchOptions
) -> list[BenchResult]:
    """The results beside the times of other ways to the same scores."""
    from sdsa_kernels.measure.peers import flashinfer_call, gather_bmm_call

    flashinfer_us, gather_bmm_us = (
        _time_other([make(problem) for problem in problems], options)
        for make in (flashinfer_call, gather_bmm_call)
    )
    return [
        dataclasses.replace(result, flashinfer_us=flashinfer_us, gather_bmm_us=gather_bmm_us)
        for result in results
    ]


def _rotations(options: BenchOptions, key_bytes: int, device: torch.device) -> int:
    if options.hot or device.type != "cuda":
        return 1
    from sdsa_kernels.measure.timing import rotations_for

    return rotations_for(key_bytes, device)


def _time_other(
    calls: Sequence[Callable[[], object] | None], options: BenchOptions
) -> float | None:
    from sdsa_kernels.measure.timing import time_graph

    known = [call for call in calls if call is not None]
    if len(known) < len(calls):
        return None
    timing = time_graph(known, options.repeats, calls_per_replay=options.calls_per_replay)
    return timing.median_us


def _check(problem: ScoreProblem, backend: str) -> None:
    from sdsa_kernels.measure.measurement import scoring_call
    from sdsa_kernels.testing.compare import UNTOUCHED, compare_scores

    problem.scores.fill_(UNTOUCHED)
    scoring_call(problem, backend)()
    compare_scores(problem)
