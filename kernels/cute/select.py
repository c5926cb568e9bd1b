"""Host side of `select_top_k` in CuTe DSL: two launches, and their workspace.

The workspace is one allocation of the call: outside a capture it belongs to the current stream,
inside one to the graph, so that neither replays nor streams ever share it. It is never cleared: a
kernel reads only what the one before it wrote.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch

from sdsa_kernels.device import capability, device_index, multiprocessors, package_version
from sdsa_kernels.selection.problem import SelectProblem

from .backend import DISTRIBUTION, reason_against_dsl
from .plans import loaded_kernel
from .selection.arguments import SelectAddresses, SelectSizes
from .variants import ARCHITECTURES, FINISH_VARIANT, MARK_VARIANT

# As in `selection.rows` and `selection.finish`, which import CuTe DSL.
DIRECT = 8192  # scores of a row that needs no threshold
TILE = 4096
MOST_PROGRAMS = 511  # one less than the segments of a row that the finishing kernel looks at
_SPARE = 2048  # candidates of a segment beyond twice k
SHARED_BYTES = 80_000  # that the finishing kernel needs: `selection.finish`
_PROGRAMS = 2  # of the marking kernel, a multiprocessor
_MOST_SHAPES = 256


def reason_unsupported(problem: SelectProblem) -> str | None:
    """None where this backend can serve `problem`, else why not."""
    if problem.device.type != "cuda":
        return f"tensors must be on a CUDA device, not on {problem.device}"
    found = capability(device_index(problem.device))
    if found not in ARCHITECTURES:
        names = ", ".join(f"SM{major}{minor}" for major, minor in ARCHITECTURES)
        return f"it has kernels for {names}, and this is an SM{found[0]}{found[1]}"
    return reason_against_dsl(package_version(DISTRIBUTION))


def launch(problem: SelectProblem) -> None:
    """Select on the current stream of the problem's device.

    Raises
    ------
    UnsupportedError
        The kernels are not loaded yet and the stream is being captured, or they cannot be compiled
        or loaded.
    """
    if problem.rows:
        launch_with(problem, new_workspace(problem))


def new_workspace(problem: SelectProblem) -> torch.Tensor:
    """An int32 tensor that holds what the kernels tell each other."""
    words = _plan_of(problem).workspace_words
    return torch.empty(words, dtype=torch.int32, device=problem.device)


def launch_with(problem: SelectProblem, workspace: torch.Tensor) -> None:
    """`launch` with a tensor from `new_workspace`, which no other launch may use meanwhile."""
    plan = _plan_of(problem)
    values, table, requests = problem.top_scores, problem.block_table, problem.requests
    address = workspace.data_ptr()
    addresses = (
        problem.scores.data_ptr(),
        problem.context_lengths.data_ptr(),
        problem.top_keys.data_ptr(),
        0 if values is None else values.data_ptr(),
        0 if table is None else table.data_ptr(),
        0 if requests is None else requests.data_ptr(),
        *(address + at for at in plan.offsets),
    )
    if plan.mark is not None:
        plan.mark(*addresses)
    plan.finish(*addresses)


class _Plan(NamedTuple):
    mark: Callable[..., None] | None  # None where no row can be long
    finish: Callable[..., None]
    offsets: tuple[int, ...]  # in the workspace: planes of bits, counts, candidates
    workspace_words: int


def _plan_of(problem: SelectProblem) -> _Plan:
    values, table = problem.top_scores, problem.block_table
    return _plan(
        device_index(problem.device),
        problem.rows,
        problem.rows_per_group,
        problem.max_context,
        problem.top_k,
        4 * problem.scores.stride(0),
        4 * problem.top_keys.stride(0),
        0 if values is None else 4 * values.stride(0),
        0 if table is None else 4 * table.stride(0),
    )


@functools.lru_cache(maxsize=_MOST_SHAPES)
def _plan(
    index: int,
    rows: int,
    rows_per_group: int,
    max_context: int,
    top_k: int,
    score_stride: int,
    top_keys_stride: int,
    top_scores_stride: int,
    table_stride: int,
) -> _Plan:
    """How to launch a call of these sizes."""
    sms = multiprocessors(index)
    tiles = rows * -(-max_context // TILE)
    long = max_context > DIRECT
    programs = min(_PROGRAMS * sms, MOST_PROGRAMS, tiles) if long else 1
    segments = programs + rows if long else 0
    capacity = min(2 * top_k + _SPARE, -(-tiles // programs) * TILE)
    words = -(-max_context // 32) if long else 0
    sizes = SelectSizes(
        score_stride,
        top_keys_stride,
        top_scores_stride,
        table_stride,
        rows,
        rows_per_group,
        max_context,
        top_k,
        words,
        capacity,
        programs,
    )
    plane = -(-4 * words * rows // 8) * 8
    sizes_of_parts = (plane, plane, 8 * segments, 8 * segments * capacity)
    *offsets, workspace = itertools.accumulate(sizes_of_parts, initial=0)
    mark = loaded_kernel(index, MARK_VARIANT) if long else None
    finish = loaded_kernel(index, FINISH_VARIANT)
    # Rows of which each can have a multiprocessor are not to share one while others are idle.
    shared_bytes = None if rows <= sms else SHARED_BYTES
    return _Plan(
        mark=None if mark is None else mark.make_launch(programs, SelectAddresses, sizes),
        finish=finish.make_launch(rows, SelectAddresses, sizes, shared_bytes=shared_bytes),
        offsets=tuple(offsets),
        workspace_words=workspace // 4,
    )
