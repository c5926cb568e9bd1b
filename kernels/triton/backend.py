"""Backend `triton`: NVFP4 and BF16 scores on every NVIDIA GPU from SM80, in CUDA graphs.

The host side. Two kernels do the work, both with a grid that the device fixes, made smaller only
where `scores` is too narrow for that many pages, sharing out the pages that the lengths define
(`shares`):

- `score_gluon`, where Triton has Gluon (3.6 and later);
- `score_portable`, with older Tritons and under the interpreter (``TRITON_INTERPRET=1``), which
  takes CPU tensors.

A device compiles one variant per pair of formats, three in all: nothing else is a compile-time
constant, and no argument is specialized on. The first call of a variant compiles it, which a stream
capture forbids, so a first call inside a capture is refused before it has done anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sdsa_kernels.device import (
    device_index,
    multiprocessors,
    refuse_capture_before_warmup,
)
from sdsa_kernels.plans import Plan, addresses_of
from sdsa_kernels.problem import TILED_SCALES_REASON, ScoreProblem
from sdsa_kernels.switches import interpreting
from sdsa_quant.layout import BF16, NVFP4, PAGE

from .launch import (
    COMPILE_OPTIONS,
    direct_launch,
    has_gluon,
    overlaps_launches,
    reason_unsupported_on,
)

_KEY_VECTOR_BYTES = 16
_SCALE_VECTOR_BYTES = 8
_PORTABLE_PROGRAMS = 4  # a multiprocessor
_INTERPRETED_PROGRAMS = 3  # enough to split a group, few enough for an interpreter

Formats = tuple[str, str]  # of query rows, of keys


@dataclass(frozen=True, slots=True)
class _Tuning:
    """Launch shape of the Gluon kernel.

    `programs` a multiprocessor are resident at once with `registers` a thread. H200, Triton 3.6,
    2026-11, (32 groups, 1 row, 65,536 keys), calls in a graph: NVFP4 takes 47 us with 2 warps and
    12 programs, 53 with 4 warps, 49 to 53 with 2 to 4 times the programs. BF16, whose ring of 48 KB
    lets 4 programs be resident, takes 130 us with 2 warps or 4, and (1, 1, 131,072) takes 11 us,
    3 more with 3 times the programs.
    """

    warps: int
    programs: int
    registers: int


_TUNING = {
    NVFP4: _Tuning(warps=2, programs=12, registers=80),
    BF16: _Tuning(warps=2, programs=4, registers=168),
}

# What is compiled, as functions of programs, a stream and the kernel's arguments; None stands for
# the portable kernel, which Triton's JIT launches.
_compiled: dict[tuple[int, Formats], Callable[..., None] | None] = {}


def reason_unsupported(problem: ScoreProblem) -> str | None:
    """None where this backend can serve `problem`, else why not."""
    if problem.tiled_scales:
        return TILED_SCALES_REASON
    return reason_unsupported_on(problem.device)


def launch(problem: ScoreProblem) -> None:
    """Compute the scores of a validated problem on the current stream of its device.

    Raises
    ------
    RuntimeError
        The kernel is not compiled yet and the stream is being captured.
    """
    if problem.rows == 0 or problem.max_context == 0:
        return
    if interpreting():
        _launch_portable(problem, _INTERPRETED_PROGRAMS)
        return
    index = device_index(problem.device)
    variant = (index, (problem.query_format, problem.key_format))
    if variant not in _compiled:
        refuse_capture_before_warmup(index, "indexer_scores")
        with torch.cuda.device(index):
            _compiled[variant] = _compile_gluon(index, *variant[1]) if has_gluon() else None
    plan = make_plan(problem)
    if plan is None:
        with torch.cuda.device(index):
            _launch_portable(problem, _PORTABLE_PROGRAMS * multiprocessors(index))
        return
    plan(*addresses_of(problem))


def make_plan(problem: ScoreProblem) -> Plan | None:
    """How to launch `problem` again at other addresses; None for the portable kernel."""
    if problem.device.type != "cuda":
        return None
    index = device_index(problem.device)
    run = _compiled.get((index, (problem.query_format, problem.key_format)))
    if run is None or problem.rows == 0 or problem.max_context == 0:
        return None
    query, query_scales = problem.query, problem.query_scales
    key_cache, key_scales = problem.key_cache, problem.key_scales
    sizes = (
        problem.groups,
        problem.max_context,
        problem.rows_per_group,
        query.stride(0) * query.element_size() // _KEY_VECTOR_BYTES,
        0 if query_scales is None else query_scales.stride(0) // _SCALE_VECTOR_BYTES,
        key_cache.stride(0) * key_cache.element_size() // _KEY_VECTOR_BYTES,
        0 if key_scales is None else key_scales.stride(0) // _SCALE_VECTOR_BYTES,
        problem.block_table.stride(0),
        problem.scores.stride(0),
        *_constants(index, problem.query_format, problem.key_format),
    )
    # No more than there can be pages, where `scores` is narrow enough to say so.
    most_pages = problem.groups * -(-problem.max_context // PAGE)
    programs = min(_TUNING[problem.key_format].programs * multiprocessors(index), most_pages)
    current_device = torch.cuda.current_device
    current_stream = _stream_lookup()

    def plan(*addresses: int) -> None:
        if current_device() == index:
            run(programs, current_stream(index), *addresses, *sizes)
        else:
            with torch.cuda.device(index):
                run(programs, current_stream(index), *addresses, *sizes)

    return plan


def compiled_variants() -> list[tuple[int, Formats]]:
    """What this process has compiled: a device's index and a pair of formats for each variant."""
    return list(_compiled)


def _stream_lookup() -> Callable[[int], int]:
    """What gives the handle of a device's current stream, as Triton's own launches do."""
    from triton.runtime import driver

    return driver.active.get_current_stream


def _constants(index: int, query_format: str, key_format: str) -> tuple[bool, bool, int, bool]:
    warps = _TUNING[key_format].warps
    return query_format == NVFP4, key_format == NVFP4, warps, overlaps_launches(index)


def _compile_gluon(index: int, query_format: str, key_format: str) -> Callable[..., None]:
    from .score_gluon import score_kernel

    tuning = _TUNING[key_format]
    compiled = score_kernel.warmup(
        torch.int32 if query_format == NVFP4 else torch.bfloat16,
        torch.uint16,
        torch.int32 if key_format == NVFP4 else torch.bfloat16,
        torch.uint16,
        torch.int32,
        torch.int32,
        torch.int32,
        torch.float32,
        *(0,) * 9,  # sizes and strides, none of which is specialized on
        *_constants(index, query_format, key_format),
        grid=(1,),
        num_warps=tuning.warps,
        maxnreg=tuning.registers,
        launch_pdl=overlaps_launches(index),
        **COMPILE_OPTIONS,
    )
    return direct_launch(compiled)


def _launch_portable(problem: ScoreProblem, programs: int) -> None:
    from .score_portable import score_kernel

    query_scales, key_scales = problem.query_scales, problem.key_scales
    score_kernel[(programs,)](
        problem.query,
        problem.query if query_scales is None else query_scales,
        problem.key_cache,
        problem.key_cache if key_scales is None else key_scales,
        problem.block_table,
        problem.context_lengths,
        problem.requests,
        problem.scores,
        problem.groups,
        problem.max_context,
        problem.rows_per_group,
        problem.query.stride(0),
        0 if query_scales is None else query_scales.stride(0),
        problem.key_cache.stride(0),
        0 if key_scales is None else key_scales.stride(0),
        problem.block_table.stride(0),
        problem.scores.stride(0),
        QUERY_NVFP4=problem.query_format == NVFP4,
        KEY_NVFP4=problem.key_format == NVFP4,
        UPCAST=interpreting(),
        **COMPILE_OPTIONS,
    )
