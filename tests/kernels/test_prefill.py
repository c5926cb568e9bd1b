"""The prefill calls on a CPU, compared with plain loops over a row's scores."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch

from sdsa_kernels import (
    gather_key_sample,
    indexer_scores,
    indexer_threshold_select,
    quantize_write_index_qk_nvfp4,
    quantize_write_nvfp4,
    thresholds_from_sample,
    top_k_from_candidates,
)
from sdsa_kernels.prefill import select
from sdsa_quant.errors import DtypeError, InputError
from support.problems import KINDS, make_problem

UNTOUCHED = 0x5A5A5A5A


def bits_of(score: float) -> int:
    return int(torch.tensor(score).view(torch.int32))


def is_exact(score: float, limit: float) -> bool:
    """Whether the difference of two finite numbers is a float32."""
    if not (math.isfinite(score) and math.isfinite(limit)):
        return False
    return Fraction(score) - Fraction(limit) == Fraction(float(torch.tensor(score - limit)))


def order(score: float, key: int) -> tuple[bool, float, int]:
    """Sorts the keys of a row as selections do."""
    missing = math.isnan(score)
    return missing, 0.0 if missing else -score, key


def top_keys_of(scores: list[float], k: int) -> list[int]:
    best = sorted(sorted(range(len(scores)), key=lambda key: order(scores[key], key))[:k])
    return best + [-1] * (k - len(best))


def prefill(
    kind: str, ends: list[int], generator: torch.Generator, *, top_k: int, capacity: int
) -> dict[str, Any]:
    """Arguments of a call: a request for every tile of rows, and small integers for values."""
    rows = len(ends)
    tiles = -(-rows // 128)
    room = max(*ends, 1)
    problem = make_problem([room] * max(tiles, 1), generator=generator, kind=kind, integers=True)
    values = make_problem([1] * rows, generator=generator, kind=kind, integers=True)
    return {
        "query": values.query,
        "key_cache": problem.key_cache,
        "row_ends": torch.tensor(ends, dtype=torch.int32),
        "tile_requests": torch.arange(tiles, dtype=torch.int32).flip(0),
        "block_table": problem.block_table[:, : -(-room // 64)],
        "thresholds": torch.zeros(rows),
        "counters": torch.zeros((rows, 2), dtype=torch.int32),
        "candidates": torch.full((rows, top_k + capacity, 2), UNTOUCHED, dtype=torch.int32),
        "max_context": room,
        "top_k": top_k,
        "query_scales": values.query_scales,
        "key_scales": problem.key_scales,
        "arrivals": torch.zeros(tiles, dtype=torch.int32),
        "ranges": torch.full((2, rows), UNTOUCHED, dtype=torch.int32),
    }


def scores_of(call: dict[str, Any]) -> list[list[float]]:
    """Each row's visible scores, one group a row."""
    rows = call["query"].shape[0]
    scores = torch.empty(rows, call["max_context"])
    ends = call["row_ends"].clamp(0, call["max_context"])
    requests = call["tile_requests"].repeat_interleave(128)[:rows]
    indexer_scores(
        call["query"], call["key_cache"], call["block_table"], ends,
        requests=requests, scores=scores,
        query_scales=call["query_scales"], key_scales=call["key_scales"],
    )  # fmt: skip
    return [row[:end].tolist() for row, end in zip(scores, ends.tolist(), strict=True)]


def assert_pairs(call: dict[str, Any], row: int, scores: list[float]) -> None:
    """The pairs of a row are what its threshold says, each at the slot of its turn."""
    limit, top_k = float(call["thresholds"][row]), call["top_k"]
    capacity = call["candidates"].shape[1] - top_k
    above = [key for key, score in enumerate(scores) if score > limit]
    ties = [key for key, score in enumerate(scores) if score == limit]
    ties += [key for key, score in enumerate(scores) if not (score > limit or score <= limit)]
    assert call["counters"][row].tolist() == [len(above), len(ties)]
    above, ties = above[:capacity], ties[:top_k]
    slots = {top_k + n: key for n, key in enumerate(above)}
    slots |= {top_k - 1 - n: key for n, key in enumerate(ties)}
    stored = [scores[key] for key in slots.values()]
    if all(is_exact(score, limit) for score in stored):
        stored = [score - limit for score in stored]
    bits = dict(zip(slots, map(bits_of, stored), strict=True))
    for slot, pair in enumerate(call["candidates"][row].tolist()):
        if slot in slots:
            assert pair == [slots[slot], bits[slot]]
        else:
            assert pair == [UNTOUCHED, UNTOUCHED]
    if call["ranges"] is not None:
        assert call["ranges"][:, row].tolist() == [top_k - len(ties), top_k + len(above)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_exact_with_repair(kind: str, generator: torch.Generator) -> None:
    ends = [0, 1, 5, 6, 7, 63, 64, 65, 150, 300, -3, 1000] * 12  # two tiles, the last one short
    call = prefill(kind, ends, generator, top_k=6, capacity=12)
    call["row_ends"][11] = 100_000  # clamped
    scores = scores_of(call)
    # Thresholds that are far too high, too low, NaN, and some that fit.
    limits = [1e9, -1e9, math.nan, math.inf, -math.inf, 20.0]
    call["thresholds"] = torch.tensor([limits[row * 7 % 6] for row in range(len(ends))])
    indexer_threshold_select(**call)
    top_keys = torch.full((len(ends), 6), UNTOUCHED, dtype=torch.int32)
    top_k_from_candidates(call["candidates"], call["ranges"], top_keys=top_keys)
    for row, visible in enumerate(scores):
        assert_pairs(call, row, visible)
        assert top_keys[row].tolist() == top_keys_of(visible, 6), f"row {row}"
    assert (call["arrivals"] == 0).all()


def test_without_repair_a_threshold_is_left(generator: torch.Generator) -> None:
    call = prefill("bf16", [200] * 128, generator, top_k=4, capacity=3)
    call["thresholds"] = torch.linspace(-60, 60, 128).round()
    call["arrivals"] = call["ranges"] = None
    before = call["thresholds"].clone()
    indexer_threshold_select(**call)
    assert torch.equal(call["thresholds"], before)
    for row, visible in enumerate(scores_of(call)):
        assert_pairs(call, row, visible)


def test_a_row_that_fits_keeps_its_threshold(generator: torch.Generator) -> None:
    call = prefill("bf16", [200] * 128, generator, top_k=8, capacity=30)
    ordered = [sorted(row, reverse=True) for row in scores_of(call)]
    call["thresholds"] = torch.tensor([row[12] for row in ordered])
    wide = torch.tensor([row[12] < row[40] for row in ordered])
    before = call["thresholds"].clone()
    indexer_threshold_select(**call)
    assert not wide.any()
    assert torch.equal(call["thresholds"], before)


def test_chunks_of_tiles_change_nothing(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = prefill("nvfp4", [77, 130] * 200, generator, top_k=3, capacity=9)
    again = {name: it.clone() if torch.is_tensor(it) else it for name, it in call.items()}
    indexer_threshold_select(**call)
    monkeypatch.setattr(select, "_CPU_SCORES", 1)
    indexer_threshold_select(**again)
    for name in ("thresholds", "counters", "candidates", "ranges"):
        assert torch.equal(call[name], again[name])


NAN = math.nan
HARD = {
    "nan-among-ties": ([5.0, NAN, 1.0, 5.0, NAN, 0.0], 3, 5.0),
    "more-nan-than-slots": ([NAN, NAN, NAN, 2.0, NAN, -math.inf], 3, 7.0),
    "infinities": ([math.inf, -math.inf, math.inf, 0.0, -math.inf], 4, math.inf),
    "zeros-of-both-signs": ([-0.0, 0.0, -1.0, -0.0, 0.0], 3, -0.0),
    "all-equal": ([1.5] * 9, 4, 2.0),
    "one-ulp": ([1.0, 1.0000001, 0.99999994, 1.0000001, 1.0], 3, 1.0),
    "differences-not-exact": ([1.0, 0.5, 3e-30, 1e20, 4e-30, 2e-30], 4, -1e20),
    "all-nan": ([NAN] * 5, 2, 0.0),
    "fewer-than-k": ([3.0, NAN, -math.inf], 7, math.inf),
}


@pytest.mark.parametrize(("scores", "k", "limit"), HARD.values(), ids=HARD.keys())
def test_hard_scores(scores: list[float], k: int, limit: float) -> None:
    ends = torch.tensor([len(scores)])
    for threshold in (limit, NAN, math.inf, -math.inf):
        thresholds = torch.tensor([threshold])
        counters = torch.zeros((1, 2), dtype=torch.int32)
        candidates = torch.zeros((1, 2 * k, 2), dtype=torch.int32)
        ranges = torch.zeros((2, 1), dtype=torch.int32)
        select._select(torch.tensor([scores]), ends, thresholds, counters, candidates, ranges, k)
        top_keys = torch.zeros((1, k), dtype=torch.int32)
        top_k_from_candidates(candidates, ranges, top_keys=top_keys)
        assert top_keys[0].tolist() == top_keys_of(scores, k), f"threshold {threshold}"


def test_a_difference_is_stored_only_where_all_of_a_row_are_exact() -> None:
    stored = torch.tensor([[3.0, 1.0, 2.0], [1.0, 1e20, 1e20], [3.0, math.nan, 7.0]])
    written = torch.tensor([[True] * 3, [True] * 3, [True, True, False]])
    limit = torch.tensor([[1.0], [2**-24], [3.0]])
    found = select._less_the_threshold(stored, limit, written)
    assert found[0].tolist() == [2.0, 0.0, 1.0]
    assert found[1].tolist() == stored[1].tolist()
    assert found[2, 0] == 0.0


@pytest.mark.parametrize("k", [1, 4, 40])
def test_top_k_of_pairs(k: int, generator: torch.Generator) -> None:
    rows, slots = 30, 20
    keys = torch.stack([torch.randperm(1000, generator=generator)[:slots] for _ in range(rows)])
    values = torch.randint(-2, 3, (rows, slots), generator=generator).float()
    values[::5, ::3] = math.nan
    candidates = torch.stack((keys.int(), values.view(torch.int32)), dim=2)
    first = torch.randint(0, slots, (rows,), generator=generator)
    past = torch.minimum(first + torch.arange(rows), torch.tensor(slots))
    top_keys = torch.full((rows, k + 3), UNTOUCHED, dtype=torch.int32)
    top_k_from_candidates(candidates, torch.stack((first, past)).int(), top_keys=top_keys[:, :k])
    for row in range(rows):
        pairs = [(float(values[row, n]), int(keys[row, n])) for n in range(first[row], past[row])]
        best = sorted(key for _, key in sorted(pairs, key=lambda pair: order(*pair))[:k])
        assert top_keys[row, :k].tolist() == best + [-1] * (k - len(best))
    assert (top_keys[:, k:] == UNTOUCHED).all()


@pytest.mark.parametrize("kind", ["bf16", "nvfp4"])
@pytest.mark.parametrize("pages_per_run", [1, 3])
def test_samples_are_the_keys_of_their_runs(
    kind: str, pages_per_run: int, generator: torch.Generator
) -> None:
    problem = make_problem([640, 70, 64], generator=generator, kind=kind)
    offsets = torch.randint(0, 64 * pages_per_run, (128,), generator=generator).to(torch.uint8)
    ends = [9, 0, 1] if pages_per_run == 3 else [20, 2, 2]
    offsets[-(-ends[1] // 2) :][:1] %= 6  # the second request's last page has 6 keys
    shape = (3, 128, problem.key_cache.shape[2])
    sample = torch.full(shape, 7, dtype=problem.key_cache.dtype)
    nvfp4 = problem.key_scales is not None
    scales = torch.full((3, 128, 8), 7, dtype=torch.uint8) if nvfp4 else None
    gather_key_sample(
        problem.key_cache,
        problem.block_table,
        offsets,
        torch.tensor(ends, dtype=torch.int32),
        sample_keys=sample,
        samples_per_run=2 if pages_per_run == 1 else 3,
        pages_per_run=pages_per_run,
        key_scales=problem.key_scales,
        sample_scales=scales,
    )
    per_run = 2 if pages_per_run == 1 else 3
    for request, end in enumerate(ends):
        for slot in range(end):
            key = slot // per_run * pages_per_run * 64 + int(offsets[slot])
            page = int(problem.block_table[request, key // 64])
            assert torch.equal(
                sample[request, slot].view(torch.uint8),
                problem.key_cache[page, key % 64].view(torch.uint8),
            )
            if scales is not None:
                stored = problem.key_scales.view(torch.uint8)[page, key % 64]
                assert torch.equal(scales[request, slot], stored)
        assert (sample[request, end:] == 7).all()


def test_thresholds_are_the_least_of_the_top() -> None:
    scores = torch.tensor([[3.0, 1.0, 2.0, NAN], [3.0, 1.0, 2.0, NAN], [5.0, 6.0, 7.0, 8.0]])
    top = torch.tensor([[0, 2], [0, 3], [1, -1]], dtype=torch.int32)
    thresholds, counters = torch.zeros(3), torch.ones((3, 2), dtype=torch.int32)
    thresholds_from_sample(scores, top, thresholds=thresholds, counters=counters)
    assert thresholds.tolist() == [2.0, -math.inf, -math.inf]
    assert (counters == 0).all()


def test_a_prefill_from_sample_to_keys(generator: torch.Generator) -> None:
    """The way of the docs: sample, score the sample, take thresholds, select, order."""
    rows, keys, k = 128, 4096, 64
    problem = make_problem([keys], generator=generator, kind="nvfp4")
    query = make_problem([1] * rows, generator=generator, kind="nvfp4")
    sample = torch.zeros((1, 256, 64), dtype=torch.uint8)
    sample_scales = torch.zeros((1, 256, 8), dtype=torch.uint8)
    gather_key_sample(
        problem.key_cache, problem.block_table,
        torch.randint(0, 64, (256,), generator=generator).to(torch.uint8),
        torch.tensor([256], dtype=torch.int32),
        sample_keys=sample, samples_per_run=4, pages_per_run=1,
        key_scales=problem.key_scales, sample_scales=sample_scales,
    )  # fmt: skip
    sampled = torch.empty(rows, 256)
    indexer_scores(
        query.query, sample.view(4, 64, 64), torch.arange(4, dtype=torch.int32)[None],
        torch.full((16,), 256, dtype=torch.int32),
        requests=torch.zeros(16, dtype=torch.int32), scores=sampled,
        query_scales=query.query_scales, key_scales=sample_scales.view(4, 64, 8),
    )  # fmt: skip
    top = sampled.topk(12, dim=1).indices.int()  # about 12 / 256 of all keys: 192 of 4,096
    call: dict[str, Any] = {
        "query": query.query,
        "key_cache": problem.key_cache,
        "row_ends": torch.full((rows,), keys, dtype=torch.int32),
        "tile_requests": torch.zeros(1, dtype=torch.int32),
        "block_table": problem.block_table[:, : keys // 64],
        "thresholds": torch.empty(rows),
        "counters": torch.empty((rows, 2), dtype=torch.int32),
        "candidates": torch.empty((rows, k + 512, 2), dtype=torch.int32),
        "max_context": keys,
        "top_k": k,
        "query_scales": query.query_scales,
        "key_scales": problem.key_scales,
        "arrivals": torch.zeros(1, dtype=torch.int32),
        "ranges": torch.empty((2, rows), dtype=torch.int32),
    }
    thresholds_from_sample(sampled, top, thresholds=call["thresholds"], counters=call["counters"])
    before = call["thresholds"].clone()
    indexer_threshold_select(**call)
    assert (before == call["thresholds"]).float().mean() > 0.9, "the sample serves most rows"
    top_keys = torch.empty((rows, k), dtype=torch.int32)
    top_k_from_candidates(call["candidates"], call["ranges"], top_keys=top_keys)
    for row, visible in enumerate(scores_of(call)):
        assert top_keys[row].tolist() == top_keys_of(visible, k)


def test_no_rows_and_no_keys(generator: torch.Generator) -> None:
    call = prefill("bf16", [0] * 3, generator, top_k=2, capacity=1)
    indexer_threshold_select(**call)
    assert call["ranges"].tolist() == [[2] * 3, [2] * 3]
    assert (call["candidates"] == UNTOUCHED).all()
    for name in ("query", "row_ends", "thresholds", "counters", "candidates", "tile_requests"):
        call[name] = call[name][:0]
    call["arrivals"] = call["ranges"] = None
    indexer_threshold_select(**call)


def test_the_names_of_flashinfer() -> None:
    assert quantize_write_index_qk_nvfp4 is quantize_write_nvfp4


WRONG = {
    "rows": ({"row_ends": torch.zeros(5, dtype=torch.int32)}, r"row_ends must be int32 \[128\]"),
    "tiles": (
        {"tile_requests": torch.zeros(2, dtype=torch.int32)},
        r"tile_requests must be int32 \[1\], one entry for every 128 rows",
    ),
    "thresholds": ({"thresholds": torch.zeros(128).double()}, "thresholds must be float32"),
    "counters": ({"counters": torch.zeros(128, dtype=torch.int32)}, "counters must be int32"),
    "top-k": ({"top_k": 0}, "top_k must be 1 to 65535, got 0"),
    "max-context": ({"max_context": 257}, "max_context must be 0 to 256, .*, got 257"),
    "slots": ({"top_k": 11}, "candidates must have at least 11 slots"),
    "half-a-repair": ({"ranges": None}, "arrivals must be given together with ranges"),
    "ranges": ({"ranges": torch.zeros((3, 128), dtype=torch.int32)}, r"ranges must be int32 \[2, "),
    "device": ({"thresholds": torch.zeros(128, device="meta")}, "thresholds must be on cpu"),
    "scales": ({"key_scales": torch.zeros(1)}, "key_scales must be None for BF16 keys"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_arguments_are_named(
    generator: torch.Generator, changes: dict[str, Any], message: str
) -> None:
    call = prefill("bf16", [200] * 128, generator, top_k=4, capacity=6)
    with pytest.raises((InputError, DtypeError), match=message):
        indexer_threshold_select(**{**call, **changes})
    assert (call["candidates"] == UNTOUCHED).all()


WRONG_SAMPLE = {
    "capacity": ({"offsets": torch.zeros(64, dtype=torch.uint8)}, "offsets must be a multiple of"),
    "ends": ({"sample_ends": torch.zeros(2, dtype=torch.int32)}, r"sample_ends must be int32 \[1"),
    "keys": ({"sample_keys": torch.zeros(1, 128, 64)}, "sample_keys must be bfloat16"),
    "run": ({"pages_per_run": 5}, "pages_per_run must be 1 to 4, got 5"),
    "samples": ({"samples_per_run": 0}, "samples_per_run must be 1 to"),
    "scales": ({"sample_scales": torch.zeros(1)}, "sample_scales must be None for BF16 keys"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG_SAMPLE.values(), ids=WRONG_SAMPLE.keys())
def test_wrong_samples_are_named(
    generator: torch.Generator, changes: dict[str, Any], message: str
) -> None:
    problem = make_problem([128], generator=generator, kind="bf16")
    call: dict[str, Any] = {
        "key_cache": problem.key_cache,
        "block_table": problem.block_table,
        "offsets": torch.zeros(128, dtype=torch.uint8),
        "sample_ends": torch.zeros(1, dtype=torch.int32),
        "sample_keys": torch.zeros(1, 128, 128, dtype=torch.bfloat16),
        "samples_per_run": 1,
        "pages_per_run": 1,
    }
    with pytest.raises((InputError, DtypeError), match=message):
        gather_key_sample(**{**call, **changes})
