"""Calls of `indexer_scores` that were checked before: launch them again without checking again.

Checking eight tensors in Python takes longer than a small call takes on a GPU. What the checks look
at, dtypes, shapes, strides, devices and the alignment of addresses, is the call's *signature*. A
plan is what a backend needs to launch a call of that signature again: everything except the
addresses.
Addresses are never part of a signature, and a call that differs in anything is checked in full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sdsa_quant.layout import KEY_ALIGNMENT_BYTES, SCALE_ALIGNMENT_BYTES

from .problem import CallTensors, ScoreProblem

# Launches a call given the addresses of query, query_scales, key_cache, key_scales, block_table,
# context_lengths, requests and scores; 0 stands for missing scales.
Plan = Callable[[int, int, int, int, int, int, int, int], None]

_MOST_PLANS = 1024
_KEY_MASK = KEY_ALIGNMENT_BYTES - 1
_SCALE_MASK = SCALE_ALIGNMENT_BYTES - 1

_plans: dict[tuple[Any, ...], Plan] = {}
_latest: tuple[tuple[Any, ...], Plan | None] = ((), None)  # found by comparing, without hashing


def signature(call: CallTensors, backend: str | None) -> tuple[Any, ...]:
    """All that the checks of a call look at, except the addresses.

    One flat tuple, written out: every function call here costs what a comparison of shapes does.
    """
    query, key_cache, block_table, lengths, requests, scores, query_scales, key_scales = call
    # fmt: off
    return (
        backend,
        query.dtype, query.shape, query.stride(), query.device,
        key_cache.dtype, key_cache.shape, key_cache.stride(), key_cache.device,
        block_table.dtype, block_table.shape, block_table.stride(), block_table.device,
        lengths.dtype, lengths.shape, lengths.stride(), lengths.device,
        requests.dtype, requests.shape, requests.stride(), requests.device,
        scores.dtype, scores.shape, scores.stride(), scores.device,
        None if query_scales is None else (
            query_scales.dtype, query_scales.shape, query_scales.stride(), query_scales.device
        ),
        None if key_scales is None else (
            key_scales.dtype, key_scales.shape, key_scales.stride(), key_scales.device
        ),
    )
    # fmt: on


def launch_again(call: CallTensors, backend: str | None) -> bool:
    """Launch a call whose signature has a plan; False where it has none, and nothing was done."""
    global _latest
    try:
        key = signature(call, backend)
        latest_key, plan = _latest
        if key != latest_key:
            plan = _plans.get(key)
            _latest = key, plan
    except (AttributeError, RuntimeError, TypeError):
        return False  # no tensors, or not strided: the checks will say which
    if plan is None:
        return False
    query, key_cache, block_table, lengths, requests, scores, query_scales, key_scales = call
    query_address, key_address = query.data_ptr(), key_cache.data_ptr()
    query_scale_address = 0 if query_scales is None else query_scales.data_ptr()
    key_scale_address = 0 if key_scales is None else key_scales.data_ptr()
    if (query_address | key_address) & _KEY_MASK:
        return False
    if (query_scale_address | key_scale_address) & _SCALE_MASK:
        return False
    plan(
        query_address,
        query_scale_address,
        key_address,
        key_scale_address,
        block_table.data_ptr(),
        lengths.data_ptr(),
        requests.data_ptr(),
        scores.data_ptr(),
    )
    return True


def addresses_of(problem: ScoreProblem) -> tuple[int, int, int, int, int, int, int, int]:
    """The addresses that a plan takes, of a checked call."""
    query_scales, key_scales = problem.query_scales, problem.key_scales
    return (
        problem.query.data_ptr(),
        0 if query_scales is None else query_scales.data_ptr(),
        problem.key_cache.data_ptr(),
        0 if key_scales is None else key_scales.data_ptr(),
        problem.block_table.data_ptr(),
        problem.context_lengths.data_ptr(),
        problem.requests.data_ptr(),
        problem.scores.data_ptr(),
    )


def remember(key: tuple[Any, ...], plan: Plan) -> None:
    """Keep a plan under the signature of the call that was checked for it."""
    global _latest
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    _plans[key] = plan
    _latest = key, plan


def forget_all() -> None:
    """Drop every plan, so that each call is checked again."""
    global _latest
    _plans.clear()
    _latest = (), None
