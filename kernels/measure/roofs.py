"""Two roofs that every GPU timing stands beside, measured in the same process.

- **read roof**: bytes per second of a kernel that reads one large buffer in order.
- **page-gather roof**: the time of a kernel that only reads the same bytes of the same pages in the
  same order as a scoring call, and writes as many score bytes to the same addresses.

Both launch a program for every few pages, which the hardware hands to whichever multiprocessor is
free, and which is faster than a grid of resident programs with equal shares
(docs/explanation/triton.md). The page-gather roof overlaps its launches as the scoring kernels do
(`triton.launch`). What is read is folded into one word, so that no load can be left out.
Each roof is the best of a few launch shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from sdsa_kernels.device import device_index, load_bytes_per_second
from sdsa_kernels.pages import PageList, list_pages
from sdsa_kernels.problem import ScoreProblem
from sdsa_kernels.triton.launch import COMPILE_OPTIONS, overlaps_launches
from sdsa_quant.errors import CheckFailedError
from sdsa_quant.layout import BF16_RECORD_BYTES, CODE_PAGE_BYTES, NVFP4, PAGE, SCALE_PAGE_BYTES

from .timing import Timing, time_graph
from .written import require_written, zero_scores

_READ_BYTES = 1 << 30
_LEAST_US = 1e-3  # of a time that is divided by
_READ_WORDS = 4096  # a program of the read roof
_SHAPES = ((1, 2), (1, 4), (2, 4))  # pages a program, warps
_WORD_BYTES = 4
_IMPOSSIBLE = tl.constexpr(0x5DEECE66)  # a fold that is stored; any other is dropped


@triton.jit
def _read_kernel(buffer_ptr, sink_ptr, WORDS: tl.constexpr):
    words = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    folded = tl.xor_sum(tl.load(buffer_ptr + words), 0)
    if folded == _IMPOSSIBLE:
        tl.store(sink_ptr, folded)


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
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.program_id(0) * STEP + tl.arange(0, STEP)
    live = slot < pages
    page = tl.load(pages_ptr + slot, mask=live, other=0).to(tl.int64)
    offset = tl.load(score_offsets_ptr + slot, mask=live, other=0)
    count = tl.load(counts_ptr + slot, mask=live, other=0)
    keys = keys_ptr + tl.multiple_of(page * page_stride, 4)[:, None]
    keys += tl.arange(0, KEY_WORDS)[None, :]
    folded = tl.xor_sum(tl.xor_sum(tl.load(keys, mask=live[:, None], other=0), 1), 0)
    if SCALE_WORDS:
        scales = key_scales_ptr + (page * scale_page_stride)[:, None]
        scales += tl.arange(0, SCALE_WORDS)[None, :]
        folded ^= tl.xor_sum(tl.xor_sum(tl.load(scales, mask=live[:, None], other=0), 1), 0)
    key = tl.arange(0, 64)
    scores = scores_ptr + offset[:, None] + key[None, :]
    for row in range(rows_per_group):
        zeros = tl.zeros([STEP, 64], tl.float32)
        tl.store(scores + row * scores_stride, zeros, mask=key[None, :] < count[:, None])
    if folded == _IMPOSSIBLE:
        tl.store(sink_ptr, folded)


@functools.cache
def read_roof_bytes_per_second(index: int) -> float:
    """Read bandwidth of a device, measured once a process by reading 1 GiB in order.

    Raises
    ------
    CheckFailedError
        It is more than the device can load.
    """
    with torch.cuda.device(index):
        buffer = torch.zeros(_READ_BYTES // _WORD_BYTES, dtype=torch.int32, device="cuda")
        sink = torch.empty(1, dtype=torch.int32, device="cuda")
        programs = buffer.numel() // _READ_WORDS

        def read() -> None:
            _read_kernel[(programs,)](buffer, sink, WORDS=_READ_WORDS, **COMPILE_OPTIONS)

        rate = _READ_BYTES / max(time_graph([read], 20).median_us, _LEAST_US) * 1e6
    if rate > load_bytes_per_second(torch.device("cuda", index)):
        raise CheckFailedError(
            f"the read roof is {rate / 1e9:,.0f} GB/s, more than any cache of the device can "
            f"serve: the clock is wrong, or the work was not done"
        )
    return rate


def time_page_gather(
    problems: Sequence[ScoreProblem], repeats: int, *, calls_per_replay: int = 1
) -> Timing:
    """Graph replay timing of the page-gather roof for a rotation of calls, the best launch shape.

    Overwrites the scores of every problem with zeros below each length.

    Raises
    ------
    CheckFailedError
        What was timed does not.
    """
    expected = [zero_scores(problem) for problem in problems]

    def verify(index: int, replay: Callable[[], None]) -> None:
        require_written(problems[index], replay, expected[index])

    lists = [list_pages(problem) for problem in problems]
    with torch.cuda.device(problems[0].device):
        timings = [
            time_graph(
                [
                    _gather_call(problem, pages, step, warps)
                    for problem, pages in zip(problems, lists, strict=True)
                ],
                repeats,
                calls_per_replay=calls_per_replay,
                verify=verify,
            )
            for step, warps in _SHAPES
        ]
    return min(timings, key=lambda timing: timing.median_us)


def _gather_call(
    problem: ScoreProblem, pages: PageList, step: int, warps: int
) -> Callable[[], None]:
    sink = torch.empty(1, dtype=torch.int32, device=problem.device)
    nvfp4 = problem.key_format == NVFP4
    page_bytes = CODE_PAGE_BYTES if nvfp4 else BF16_RECORD_BYTES
    keys = _as_words(problem.key_cache)
    key_scales = keys if problem.key_scales is None else _as_words(_scale_pages(problem))
    count = pages.pages.shape[0]
    row_step = problem.rows_per_group * problem.scores.stride(0)
    score_offsets = pages.groups * row_step + pages.blocks * PAGE
    counts = pages.counts.int()
    overlaps = overlaps_launches(device_index(problem.device))

    def gather() -> None:
        _gather_kernel[(-(-count // step),)](
            keys,
            key_scales,
            pages.pages,
            score_offsets,
            counts,
            problem.scores,
            sink,
            count,
            problem.rows_per_group,
            keys.stride(0),
            key_scales.stride(0),
            problem.scores.stride(0),
            KEY_WORDS=page_bytes // _WORD_BYTES,
            SCALE_WORDS=SCALE_PAGE_BYTES // _WORD_BYTES if nvfp4 else 0,
            STEP=step,
            OVERLAPS=overlaps,
            num_warps=warps,
            launch_pdl=overlaps,
            **COMPILE_OPTIONS,
        )

    return gather


def _scale_pages(problem: ScoreProblem) -> torch.Tensor:
    """As many bytes for each page as its scales have, in the 128x4 order other pages' too."""
    assert problem.key_scales is not None
    if not problem.tiled_scales:
        return problem.key_scales
    pages = problem.key_cache.shape[0]
    return problem.key_scales[: pages * SCALE_PAGE_BYTES].view(pages, SCALE_PAGE_BYTES)


def _as_words(pages: torch.Tensor) -> torch.Tensor:
    """The same bytes as int32, so that one load moves 16 bytes."""
    return pages.view(torch.int32)
