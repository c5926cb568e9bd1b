"""Host side of `select_top_k` on CUDA tensors: three launches, and their workspace.

The workspace is allocated by the call. Outside a capture it belongs to the current stream, inside
one to the graph, so that neither replays nor streams ever share it. It is never cleared: a kernel
reads only what the one before it wrote.
"""

from __future__ import annotations

import torch

from sdsa_kernels.device import (
    device_index,
    multiprocessors,
    refuse_capture_before_warmup,
)
from sdsa_kernels.selection.problem import SelectProblem
from sdsa_kernels.switches import interpreting

from .launch import COMPILE_OPTIONS, overlaps_launches, reason_unsupported_on

_TILE = 4096  # scores that a program looks at in one step
_BLOCK = 4096  # candidates in the registers of a program
_DIRECT = 8192  # scores of a row that are not worth a threshold
_SAMPLE, _WIDE_SAMPLE = 4096, 8192
_WIDE = 1 << 18  # longest row that the smaller sample serves
_THRESHOLD_WARPS, _COLLECT_WARPS, _FINISH_WARPS = 8, 8, 8
_PROGRAMS = 2  # of collect_kernel, a multiprocessor
_MOST_PROGRAMS = 511  # one less than the segments that finish_kernel looks at
_INTERPRETED_PROGRAMS = 3
_SPARE = 2048  # candidates of a segment beyond k above the threshold and k equal to it

_warm: set[tuple[int, bool, bool, int]] = set()


def reason_unsupported(problem: SelectProblem) -> str | None:
    """None where this backend can serve `problem`, else why not."""
    return reason_unsupported_on(problem.device)


def launch(problem: SelectProblem) -> None:
    """Select on the current stream of the problem's device.

    Raises
    ------
    RuntimeError
        The kernels are not compiled yet and the stream is being captured.
    """
    if not problem.rows:
        return
    sample = _SAMPLE if problem.max_context <= _WIDE else _WIDE_SAMPLE
    slots, values = problem.block_table is not None, problem.top_scores is not None
    if interpreting():
        _run(problem, _INTERPRETED_PROGRAMS, sample, overlaps=False)
        return
    index = device_index(problem.device)
    variant = (index, slots, values, sample if problem.max_context > _DIRECT else 0)
    if variant not in _warm:
        refuse_capture_before_warmup(index, "select_top_k")
    with torch.cuda.device(index):
        programs = min(_PROGRAMS * multiprocessors(index), _MOST_PROGRAMS)
        _run(problem, programs, sample, overlaps=overlaps_launches(index))
    _warm.add(variant)


def _run(problem: SelectProblem, programs: int, sample: int, *, overlaps: bool) -> None:
    from .thresholds import threshold_kernel
    from .top_k import collect_kernel, finish_kernel

    scores, k, rows = problem.scores, problem.top_k, problem.rows
    sizes = (rows, problem.rows_per_group, problem.max_context, k)
    options = {"launch_pdl": True} if overlaps else {}
    long = problem.max_context > _DIRECT
    segments = programs + rows if long else 1
    capacity = 2 * k + _SPARE
    counts, ends = scores.new_empty((2, segments), dtype=torch.int32)
    found_keys = scores.new_empty((segments, capacity if long else 1), dtype=torch.int32)
    found_scores = scores.new_empty(found_keys.shape)
    thresholds = scores.new_empty(rows if long else 1, dtype=torch.int32)
    if long:
        threshold_kernel[(rows,)](
            scores,
            problem.context_lengths,
            thresholds,
            *sizes,
            scores.stride(0),
            DIRECT=_DIRECT,
            SAMPLE=sample,
            OVERLAPS=overlaps,
            num_warps=_THRESHOLD_WARPS,
            **options,
            **COMPILE_OPTIONS,
        )
        collect_kernel[(programs,)](
            scores,
            problem.context_lengths,
            thresholds,
            counts,
            found_keys,
            found_scores,
            *sizes,
            capacity,
            scores.stride(0),
            TILE=_TILE,
            DIRECT=_DIRECT,
            OVERLAPS=overlaps,
            num_warps=_COLLECT_WARPS,
            **options,
            **COMPILE_OPTIONS,
        )
    values, table = problem.top_scores, problem.block_table
    finish_kernel[(rows,)](
        scores,
        problem.context_lengths,
        problem.top_keys,
        scores if values is None else values,
        problem.top_keys if table is None else table,
        problem.context_lengths if problem.requests is None else problem.requests,
        thresholds,
        counts,
        ends,
        found_keys,
        found_scores,
        *sizes,
        capacity,
        programs,
        scores.stride(0),
        problem.top_keys.stride(0),
        0 if values is None else values.stride(0),
        0 if table is None else table.stride(0),
        SLOTS=table is not None,
        VALUES=values is not None,
        BLOCK=_BLOCK,
        TILE=_TILE,
        DIRECT=_DIRECT,
        OVERLAPS=overlaps,
        num_warps=_FINISH_WARPS,
        **options,
        **COMPILE_OPTIONS,
    )
