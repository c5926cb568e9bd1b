"""Bugs planted into the tensor-core kernel: each must be caught, by a fault or by wrong scores.

A bug replaces a function that the kernel is traced with; the broken kernel then runs with the
parameters and tensor maps of the right one's launch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from emulator.errors import EmulationError
from emulator.host.launch_recorder import LaunchRecorder
from emulator.host.standin import reason_unavailable
from emulator.machine.scheduler import POLICIES
from sdsa_kernels.cute.compile import trace_variant
from sdsa_kernels.cute.tcgen05 import copies, kernel, tiles
from sdsa_kernels.cute.tcgen05.rings import Slot
from support.problems import assert_scores, make_problem

from .tcgen05_calls import RecordedCall, record_call

pytestmark = pytest.mark.skipif(
    reason_unavailable() is not None, reason=f"the stand-in {reason_unavailable()}"
)

Plant = Callable[[pytest.MonkeyPatch], None]
VARIANT = "tcgen05_nvfp4"
STAGES = tiles.FORMATS[VARIANT].stages

# The kernel's waits in the order in which they are traced.
QUERY_FULL, TILE_FULL, SCORED = range(3)
QUERY_EMPTY, TILE_EMPTY = range(2)
STORED = 2 + STAGES + tiles.QUERY_BUFFERS
LAST = range(2, STORED)  # for every stage and query buffer once more


def _replace(patch: pytest.MonkeyPatch, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function wherever the kernel's modules have it by what `make` makes of it."""
    modules = [module for module in (copies, kernel, tiles) if hasattr(module, name)]
    broken = make(getattr(modules[0], name))
    for module in modules:
        patch.setattr(module, name, broken)


def _instead(name: str, broken: Callable[..., Any]) -> Plant:
    """Replace a function; `broken` gets the right one first."""
    return lambda patch: _replace(patch, name, lambda right: partial(broken, right))


def _without(name: str, *calls: int) -> Plant:
    """Leave some calls of a function out, or all."""

    def make(right: Callable[..., None]) -> Callable[..., None]:
        made = count()

        def sometimes(*arguments: Any) -> None:
            if calls and next(made) not in calls:
                right(*arguments)

        return sometimes

    return lambda patch: _replace(patch, name, make)


def _without_warp_barriers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kernel.cute.arch, "sync_warp", lambda *_: None)


def _wrong_phase(right: Callable[..., None], barriers: Any, slot: Slot) -> None:
    right(barriers, slot._replace(parity=slot.parity ^ 1))


def _swapped_words(right: Callable[..., None], target: Any, offset: int, *rest: Any) -> None:
    right(target, offset ^ 4, *rest)


def _next_entry(right: Callable[..., Any], address: Any) -> Any:
    return right(address + 4)


def _fewer_bytes(right: Callable[..., None], barrier: Any, size: Any) -> None:
    right(barrier, size - 64)


def _more_bytes(right: Callable[..., None], barrier: Any, size: Any) -> None:
    right(barrier, size + 64)


def _longer_stride(right: Callable[..., Any], address: Any, group_bytes: int, swizzle: int) -> Any:
    return right(address, group_bytes + 16 * bool(swizzle), swizzle)


def _another_swizzle(
    right: Callable[..., Any], address: Any, group_bytes: int, swizzle: int
) -> Any:
    return right(address, group_bytes, 6 if swizzle else 0)


def _everywhere(right: Callable[..., None], address: Any, values: Any, predicate: Any) -> None:
    right(address, values, predicate | (address > 0))


def _one_column_on(right: Callable[..., Any], address: Any, columns: int) -> Any:
    return right(address + 1, columns)


def _always_accumulating(right: Callable[..., None], *arguments: Any) -> None:
    right(*arguments[:-1], True)


def _never_accumulating(right: Callable[..., None], *arguments: Any) -> None:
    right(*arguments[:-1], False)


def _scales_of_the_query(right: Callable[..., None], *arguments: Any) -> None:
    *others, _, b_scales, accumulate = arguments
    right(*others, b_scales, b_scales, accumulate)


def _next_half(right: Callable[..., None], target: Any, descriptor: Any) -> None:
    right(target, descriptor + tiles.HALF_SCALE_BYTES // 16)


BUGS: dict[str, Plant] = {
    "no-wait-for-copies": _without("wait_full", TILE_FULL),
    "no-wait-for-the-query": _without("wait_full", QUERY_FULL),
    "no-wait-for-the-mmas": _without("wait_full", SCORED),
    "no-wait-for-a-free-stage": _without("wait_empty", TILE_EMPTY),
    "no-wait-for-a-free-query-buffer": _without("wait_empty", QUERY_EMPTY),
    "no-wait-for-a-free-accumulator": _without("wait_empty", STORED),
    "no-wait-at-the-end": _without("wait_empty", *LAST),
    "wrong-phase": _instead("wait_full", _wrong_phase),
    "no-proxy-fence": _without("fence_async_proxy"),
    "no-fence-before-the-barrier": _without("fence_before_thread_sync"),
    "no-fence-after-the-barrier": _without("fence_after_thread_sync"),
    "no-arrival-after-copies": _without("barrier_arrive_after_copies"),
    "no-commit": _without("commit_to_barrier", 0),
    "no-warp-barrier-before-the-arrival": _without_warp_barriers,
    "no-arrival-of-the-stores": _without("barrier_arrive"),
    "tensor-memory-is-kept": _without("free_tensor_memory"),
    "too-few-bytes-expected": _instead("barrier_expect", _fewer_bytes),
    "too-many-bytes-expected": _instead("barrier_expect", _more_bytes),
    "wrong-descriptor-stride": _instead("_descriptor", _longer_stride),
    "wrong-swizzle": _instead("_descriptor", _another_swizzle),
    "swapped-scale-words": _instead("copy_or_clear", _swapped_words),
    "wrong-half-of-the-scales": _instead("copy_scales_to_tensor_memory", _next_half),
    "scales-of-the-wrong-operand": _instead("mma_nvfp4", _scales_of_the_query),
    "first-mma-accumulates": _instead("mma_nvfp4", _always_accumulating),
    "second-mma-overwrites": _instead("mma_nvfp4", _never_accumulating),
    "page-off-by-one": _instead("load_global_int", _next_entry),
    "column-off-by-one": _instead("load_tensor_columns", _one_column_on),
    "writes-past-a-length": _instead("store_global_floats", _everywhere),
}


@pytest.fixture(scope="module")
def call(recorder: LaunchRecorder) -> RecordedCall:
    """Two CTAs with several tiles and runs each, more tiles than stages, odd runs and lengths."""
    problem = make_problem(
        [1000, 130, 0, 1, 500, 64, 129],
        generator=torch.Generator().manual_seed(1),
        rows_per_group=2,
        integers=True,
    )
    return record_call(recorder, problem, ctas=2)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(
    call: RecordedCall, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    BUGS[bug](monkeypatch)
    broken = trace_variant("sm_100a", VARIANT)[0].__ptx__
    assert broken != call.launch.ptx
    with pytest.raises((EmulationError, AssertionError)):
        for seed in range(len(POLICIES)):
            scored, _ = call.run(seed, ptx=broken)
            assert_scores(scored, exact=True)


# Bugs in the text: what is replaced, everywhere, and by what.
TEXT_BUGS = {
    "no-wait-for-loads": (r"tcgen05\.wait::ld[^;]*;", ""),
    "no-fence-after-initializations": (r"fence\.mbarrier_init[^;]*;", ""),
    "no-fences-between-threads": (r"tcgen05\.fence[^;]*;", ""),
    "waits-for-the-next-barrier": (r"(mbarrier\.try_wait\S* \w+, \[%r\d+)\]", r"\1+8]"),
    "one-lane-waits": (
        r"(mbarrier\.try_wait\S* (\w+),)",
        r".reg .pred first; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0;"
        r" setp.eq.u32 \2, 0, 0; @first \1",
    ),
    "no-warp-barriers": (r"bar\.warp\.sync[^;]*;", ""),
}


@pytest.mark.parametrize("bug", TEXT_BUGS)
def test_a_bug_in_the_text_is_caught_on_every_schedule(call: RecordedCall, bug: str) -> None:
    assert call.launch.ptx is not None
    broken, count = re.subn(*TEXT_BUGS[bug], call.launch.ptx)
    assert count
    for seed in range(len(POLICIES)):
        with pytest.raises((EmulationError, AssertionError)):
            assert_scores(call.run(seed, ptx=broken)[0], exact=True)


def test_without_a_bug_the_same_run_passes(call: RecordedCall) -> None:
    for seed in range(len(POLICIES)):
        scored, _ = call.run(seed, ptx=trace_variant("sm_100a", VARIANT)[0].__ptx__)
        assert_scores(scored, exact=True)
