"""Two roofs that every GPU timing stands beside, measured in the same process.

- **read roof**: bytes per second of a kernel that reads one large buffer in order.
- **page-gather roof**: the time of a kernel that only reads the same bytes of the same pages in the
  same order as a scoring call, and writes as many score bytes to the same places.

Both kernels keep several 16-byte loads a thread in flight and fold what they read into one word a
thread, so that no load can be left out. Each roof is the best of a few launch shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sdsa_quant.layout import (
    BF16_RECORD_BYTES,
    CODE_PAGE_BYTES,
    PAGE,
    SCALE_PAGE_BYTES,
)

from .checks import NVFP4, ScoreProblem
from .graph_timing import time_graph
from .timing import Timing
from .triton_launch import device_index, multiprocessors

_READ_BYTES = 1 << 30
_READ_WORDS_PER_STEP = 8192
_PROGRAMS_PER_SM = (4, 8)
_PAGES_PER_STEP = (2, 4)
_WORD_BYTES = 4


@triton.jit
def _read_kernel(buffer_ptr, sink_ptr, words, STEP: tl.constexpr):
    program = tl.program_id(0)
    offsets = tl.arange(0, STEP)
    folded = tl.zeros([STEP], tl.int32)
    for first in range(program * STEP, words, tl.num_programs(0) * STEP):
        folded ^= tl.load(buffer_ptr + first + offsets)
    tl.store(sink_ptr + program, tl.xor_sum(folded, 0))


@triton.jit
def _gather_kernel(
    keys_ptr,
    key_scales_ptr,
    pages_ptr,  # int32 [pages]: page numbers in the order of the call
    score_offsets_ptr,  # int64 [pages]: where a page's scores of its group's first row begin
    counts_ptr,  # int32 [pages]: keys of the page that are scored
    scores_ptr,
    sink_ptr,
    pages,
    rows_per_group,
    page_stride,  # words
    scale_page_stride,  # words
    scores_stride,
    KEY_WORDS: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    STEP: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    share = pages // programs
    extra = pages - share * programs
    start = program * share + tl.minimum(program, extra)
    stop = start + share + (program < extra).to(tl.int32)
    slot = tl.arange(0, STEP)
    key = tl.arange(0, 64)
    word = tl.arange(0, KEY_WORDS)
    folded = tl.zeros([STEP, KEY_WORDS], tl.int32)
    if SCALE_WORDS:
        scale_word = tl.arange(0, SCALE_WORDS)
        folded_scales = tl.zeros([STEP, SCALE_WORDS], tl.int32)
    for first in range(start, stop, STEP):
        live = first + slot < stop
        page = tl.load(pages_ptr + first + slot, mask=live, other=0).to(tl.int64)
        offset = tl.load(score_offsets_ptr + first + slot, mask=live, other=0)
        count = tl.load(counts_ptr + first + slot, mask=live, other=0)
        key_base = tl.multiple_of(page * page_stride, 4)
        keys = keys_ptr + key_base[:, None] + word[None, :]
        folded ^= tl.load(keys, mask=live[:, None], other=0)
        if SCALE_WORDS:
            scale_base = page * scale_page_stride
            scales = key_scales_ptr + scale_base[:, None] + scale_word[None, :]
            folded_scales ^= tl.load(scales, mask=live[:, None], other=0)
        scores = scores_ptr + offset[:, None] + key[None, :]
        for row in range(rows_per_group):
            zeros = tl.zeros([STEP, 64], tl.float32)
            tl.store(scores + row * scores_stride, zeros, mask=key[None, :] < count[:, None])
    result = tl.xor_sum(tl.xor_sum(folded, 1), 0)
    if SCALE_WORDS:
        result ^= tl.xor_sum(tl.xor_sum(folded_scales, 1), 0)
    tl.store(sink_ptr + program, result)


@functools.cache
def read_roof_bytes_per_second(index: int) -> float:
    """Read bandwidth of a device, measured once a process by reading 1 GiB in order."""
    with torch.cuda.device(index):
        buffer = torch.zeros(_READ_BYTES // _WORD_BYTES, dtype=torch.int32, device="cuda")
        best_us = min(
            _time_read(buffer, multiprocessors(device_index) * programs)
            for programs in _PROGRAMS_PER_SM
        )
    return _READ_BYTES / best_us * 1e6


def _time_read(buffer: torch.Tensor, programs: int) -> float:
    sink = torch.empty(programs, dtype=torch.int32, device=buffer.device)

    def read() -> None:
        _read_kernel[(programs,)](buffer, sink, buffer.numel(), STEP=_READ_WORDS_PER_STEP)

    return time_graph([read], 20).median_us


@dataclass(frozen=True, slots=True)
class _PageList:
    """The pages of one call in the order of its groups, on the device."""

    pages: torch.Tensor  # int32 [n]
    score_offsets: torch.Tensor  # int64 [n], in elements of scores
    counts: torch.Tensor  # int32 [n]


def _list_pages(problem: ScoreProblem) -> _PageList:
    lengths = problem.context_lengths.long().clamp(0, problem.max_context)
    blocks_of_group = (lengths + PAGE - 1) // PAGE
    groups = torch.repeat_interleave(blocks_of_group)
    first = blocks_of_group.cumsum(0) - blocks_of_group
    blocks = torch.arange(groups.shape[0], device=groups.device) - first[groups]
    row_step = problem.rows_per_group * problem.scores.stride(0)
    return _PageList(
        pages=problem.block_table[problem.requests[groups].long(), blocks],
        score_offsets=groups * row_step + blocks * PAGE,
        counts=(lengths[groups] - blocks * PAGE).clamp(max=PAGE).int(),
    )


def time_page_gather(problems: Sequence[ScoreProblem], repeats: int) -> Timing:
    """Graph replay timing of the page-gather roof for a rotation of calls, the best launch shape.

    Overwrites the scores of every problem with zeros below each length.
    """
    lists = [_list_pages(problem) for problem in problems]
    timings = [
        time_graph(
            [
                _gather_call(problem, pages, programs, step)
                for problem, pages in zip(problems, lists, strict=True)
            ],
            repeats,
        )
        for programs in _PROGRAMS_PER_SM
        for step in _PAGES_PER_STEP
    ]
    return min(timings, key=lambda timing: timing.median_us)


def _gather_call(
    problem: ScoreProblem, pages: _PageList, programs_per_sm: int, step: int
) -> Callable[[], None]:
    programs = multiprocessors(device_index(problem.device)) * programs_per_sm
    sink = torch.empty(programs, dtype=torch.int32, device=problem.device)
    nvfp4 = problem.key_format == NVFP4
    page_bytes = CODE_PAGE_BYTES if nvfp4 else BF16_RECORD_BYTES
    keys = _as_words(problem.key_cache)
    key_scales = keys if problem.key_scales is None else _as_words(problem.key_scales)

    def gather() -> None:
        _gather_kernel[(programs,)](
            keys,
            key_scales,
            pages.pages,
            pages.score_offsets,
            pages.counts,
            problem.scores,
            sink,
            pages.pages.shape[0],
            problem.rows_per_group,
            keys.stride(0),
            key_scales.stride(0),
            problem.scores.stride(0),
            KEY_WORDS=page_bytes // _WORD_BYTES,
            SCALE_WORDS=SCALE_PAGE_BYTES // _WORD_BYTES if nvfp4 else 0,
            STEP=step if nvfp4 else step // 2,
        )

    return gather


def _as_words(pages: torch.Tensor) -> torch.Tensor:
    """The same bytes as int32, so that one load moves 16 bytes."""
    return pages.view(torch.int32)
