"""The measurements of `sdsa bench`: every shape with every pair of formats on every backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sdsa_cli.output import Output

from .document import BenchOptions, BenchResult
from .shapes import BenchShape

if TYPE_CHECKING:
    import torch

    from sdsa_kernels.problem import ScoreProblem


def run_bench(options: BenchOptions, sink: Output) -> list[BenchResult]:
    """Measure every shape with all format pairs and backends."""
    total = len(options.shapes) * len(options.format_pairs) * len(options.backends)
    results = []
    with sink.progress("measuring", total, calm=True) as advance:
        for shape in options.shapes:
            for format_pair in options.format_pairs:
                results += _measure_shape(options, shape, format_pair)
                advance(len(options.backends))
    return results


def _measure_shape(options: BenchOptions, shape: BenchShape, format_pair: str) -> list[BenchResult]:
    import torch

    from sdsa_kernels.backends import choose_backend
    from sdsa_kernels.measure.measurement import measure_problems
    from sdsa_kernels.measure.traffic import shape_traffic
    from sdsa_kernels.testing.compare import compare_scores
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
            check=compare_scores if options.check else None,
        )
        results.append(
            BenchResult(
                shape=shape,
                format_pair=format_pair,
                backend=choose_backend(problems[0], backend).name,
                measurement=measurement,
                checked=options.check,
                flashinfer=_left_out(options),
                gather_bmm=_left_out(options),
            )
        )
    if device.type == "cuda":
        if options.compare:
            results = _add_others(results, problems, options)
        del problems
        torch.cuda.empty_cache()
    return results


def _left_out(options: BenchOptions) -> str:
    """Why other ways to the same scores are not timed."""
    return "only timed on a GPU" if options.compare else "left out by --no-compare"


def _add_others(
    results: Sequence[BenchResult], problems: Sequence[ScoreProblem], options: BenchOptions
) -> list[BenchResult]:
    """The results beside the times of other ways to the same scores."""
    from sdsa_kernels.measure.peers import time_flashinfer, time_gather_bmm

    flashinfer, gather_bmm = (
        time_peer(problems, options.repeats, calls_per_replay=options.calls_per_replay)
        for time_peer in (time_flashinfer, time_gather_bmm)
    )
    return [
        dataclasses.replace(result, flashinfer=flashinfer, gather_bmm=gather_bmm)
        for result in results
    ]


def _rotations(options: BenchOptions, key_bytes: int, device: torch.device) -> int:
    if options.hot or device.type != "cuda":
        return 1
    from sdsa_kernels.measure.timing import rotations_for

    return rotations_for(key_bytes, device)
