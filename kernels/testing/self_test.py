"""Whether every backend of a machine computes right scores: a small problem against float64."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from sdsa_kernels.backends import BACKENDS, Backend
from sdsa_kernels.problem import ScoreProblem
from sdsa_quant.errors import DeviceLostError, SdsaError
from sdsa_quant.formats.scale_order import LINEAR, TILED
from sdsa_quant.layout import BF16, FORMAT_PAIRS

from .compare import UNTOUCHED, compare_scores
from .problems import Shape, exact_problem, synthetic_problems, with_tiled_scales

# Every way in which a group can end, among more groups than a warp has lanes.
_SHAPE = Shape(
    lengths=(1, 0, 63, 64, 65, 127, 128, 129, 700, *[30] * 25), rows_per_group=3, max_context=701
)
_SEED = 20261130
_PAGES = 8  # few enough that groups read them all, and with them scales of every byte

# Format pairs, with tiled scales or not.
CASES = (*((format_pair, False) for format_pair in FORMAT_PAIRS), ("nvfp4", True))
_ALL = "all"  # instead of a backend's name, where none could be asked


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What one backend made of one pair of formats."""

    device: str
    query_format: str
    key_format: str
    scale_order: str | None  # of key_scales, None where there are none
    backend: str
    largest_difference: float | None  # from float64, None where no score was right
    failure: str | None  # None where all is well
    device_lost: bool = False  # whether a kernel hangs there, for which later work would wait


def self_tests(device: str) -> Iterator[SelfTest]:
    """Run every backend that can run on a device over every pair of formats, and 128x4 scales.

    Whatever goes wrong is a failure in what is yielded. A kernel that hangs is the last one that
    runs: later work on its device would wait for it.
    """
    for format_pair, tiled in CASES:
        query_format, key_format = FORMAT_PAIRS[format_pair]
        scale_order = None if key_format == BF16 else TILED if tiled else LINEAR
        result = functools.partial(SelfTest, device, query_format, key_format, scale_order)
        try:
            problem = _problem(format_pair, device, tiled)
            backends = [each for each in BACKENDS if _is_asked(each, problem)]
        except DeviceLostError as error:
            yield result(_ALL, None, str(error), device_lost=True)
            return
        except Exception as error:  # such as of a driver: what a report has to show
            yield result(_ALL, None, f"{type(error).__name__}: {error}")
            continue
        for backend in backends:
            try:
                largest, failure = _run(problem, backend)
            except DeviceLostError as error:
                yield result(backend.name, None, str(error), device_lost=True)
                return
            yield result(backend.name, largest, failure)


def _problem(format_pair: str, device: str, tiled: bool) -> ScoreProblem:
    where = torch.device(device)
    if FORMAT_PAIRS[format_pair][1] == BF16:
        problem, *_ = synthetic_problems(_SHAPE, format_pair, where, rotations=1, seed=_SEED)
        return problem
    problem = exact_problem(
        format_pair, where, _SHAPE.lengths, rows_per_group=_SHAPE.rows_per_group, pages=_PAGES
    )
    if problem.query_format == BF16:  # whose values need not be whole: the comparison has bounds
        generator = torch.Generator(where).manual_seed(_SEED)
        problem.query.normal_(generator=generator)
    return with_tiled_scales(problem) if tiled else problem


def _is_asked(backend: Backend, problem: ScoreProblem) -> bool:
    """Whether a backend can run, or could if its kernel had passed its self-check."""
    runs = backend.reason_unsupported(problem) is None
    return runs or backend.reason_for_fallback(problem) is not None


def _run(problem: ScoreProblem, backend: Backend) -> tuple[float | None, str | None]:
    """The largest difference and the failure of one backend.

    Raises
    ------
    DeviceLostError
        A kernel hangs.
    """
    problem = replace(problem, scores=torch.full_like(problem.scores, UNTOUCHED))
    largest = None
    try:
        if backend.reason_unsupported(problem) is None:
            backend.launch(problem)
            largest = compare_scores(problem)
        return largest, backend.reason_for_fallback(problem)
    except DeviceLostError:
        raise
    except SdsaError as error:
        return largest, str(error)
    except Exception as error:  # such as of a compiler that is missing
        return largest, f"{type(error).__name__}: {error}"
