"""Rescoring: the answer is BF16's own top-k wherever that is among the candidates."""

from __future__ import annotations

import pytest
import torch

from sdsa_kernels import indexer_scores, indexer_top_k, rescore_top_k, select_top_k
from sdsa_kernels.testing.selection import reference_top_k
from sdsa_quant import quantize_nvfp4
from sdsa_quant.errors import DtypeError, InputError

PAGES, LENGTHS, ROWS = 12, (300, 0, 130), 2


@pytest.fixture
def caches(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """BF16 pages and the same keys in NVFP4, of three requests with two rows each."""
    keys = torch.randn(PAGES, 64, 128, generator=generator).bfloat16()
    codes, scales = quantize_nvfp4(keys.view(-1, 128))
    query = torch.randn(len(LENGTHS) * ROWS, 128, generator=generator).bfloat16()
    table = torch.randperm(PAGES, generator=generator).int()[:10].view(2, 5)
    return {
        "keys": keys,
        "codes": codes.view(PAGES, 64, 64),
        "scales": scales.view(PAGES, 64, 8),
        "query": query,
        "table": table,
        "lengths": torch.tensor(LENGTHS, dtype=torch.int32),
        "requests": torch.tensor([1, 99, 0], dtype=torch.int32),  # 99: a group without keys
    }


def first_pass(caches: dict[str, torch.Tensor], number: int) -> torch.Tensor:
    candidates = torch.empty(len(LENGTHS) * ROWS, number, dtype=torch.int32)
    indexer_top_k(
        caches["query"], caches["codes"], caches["table"], caches["lengths"],
        requests=caches["requests"], top_keys=candidates, key_scales=caches["scales"],
    )  # fmt: skip
    return candidates


def scores_of_bf16(caches: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of each row by itself: a CPU's matrix product may sum a group of rows in another order."""
    scores = torch.zeros(len(LENGTHS) * ROWS, 320)
    indexer_scores(
        caches["query"], caches["keys"], caches["table"],
        caches["lengths"].repeat_interleave(ROWS),
        requests=caches["requests"].repeat_interleave(ROWS), scores=scores,
    )  # fmt: skip
    return scores


@pytest.mark.parametrize(("number", "k"), [(64, 16), (40, 40), (1, 1), (130, 65), (200, 199)])
@pytest.mark.parametrize("slots", [False, True])
def test_the_best_candidates_by_their_bf16_scores(
    caches: dict[str, torch.Tensor], number: int, k: int, slots: bool
) -> None:
    candidates = first_pass(caches, number)
    whole = torch.full((6, k + 2), -9, dtype=torch.int32)
    values = torch.zeros(6, k)
    rescore_top_k(
        caches["query"], caches["keys"], caches["table"], candidates,
        requests=caches["requests"], top_keys=whole[:, :k], top_scores=values, slots=slots,
    )  # fmt: skip
    scores = scores_of_bf16(caches)
    expected = torch.full((6, k), -1, dtype=torch.int32)
    for row, chosen in enumerate(candidates.tolist()):
        there = [key for key in chosen if key >= 0]
        best = sorted(sorted(there, key=lambda key: (-scores[row, key].item(), key))[:k])
        assert torch.equal(values[row, : len(best)], scores[row, best])
        assert (values[row, len(best) :] == -torch.inf).all()
        if slots:
            pages = caches["table"][int(caches["requests"][row // ROWS])] if best else None
            best = [int(pages[key // 64]) * 64 + key % 64 for key in best]  # type: ignore[index]
        expected[row, : len(best)] = torch.tensor(best, dtype=torch.int32)
    assert torch.equal(whole[:, :k], expected)
    assert (whole[:, k:] == -9).all()


def test_all_candidates_give_bf16s_own_top_k(caches: dict[str, torch.Tensor]) -> None:
    keys = torch.empty(6, 32, dtype=torch.int32)
    rescore_top_k(
        caches["query"], caches["keys"], caches["table"], first_pass(caches, 300),
        requests=caches["requests"], top_keys=keys,
    )  # fmt: skip
    scores = scores_of_bf16(caches)
    assert torch.equal(keys, reference_top_k(scores, LENGTHS, 32, rows_per_group=ROWS))
    direct = torch.empty_like(keys)
    select_top_k(scores, caches["lengths"], top_keys=direct)
    assert torch.equal(keys, direct)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("query", torch.zeros(6, 64, dtype=torch.uint8), DtypeError, "query must be bfloat16"),
        ("keys", torch.zeros(PAGES, 64, 64, dtype=torch.uint8), DtypeError, "key_cache must"),
        ("requests", torch.zeros(4, dtype=torch.int32), InputError, "each of the 4 groups"),
        ("candidates", torch.zeros(6, 4), DtypeError, "candidates must be int32"),
        ("candidates", torch.zeros(5, 4, dtype=torch.int32), InputError, r"int32 \[6, n\]"),
    ],
)
def test_wrong_arguments_are_named(
    caches: dict[str, torch.Tensor],
    name: str,
    value: torch.Tensor,
    error: type[Exception],
    message: str,
) -> None:
    given = {**caches, "candidates": first_pass(caches, 8), name: value}
    with pytest.raises(error, match=message):
        rescore_top_k(
            given["query"], given["keys"], given["table"], given["candidates"],
            requests=given["requests"], top_keys=torch.empty(6, 4, dtype=torch.int32),
        )  # fmt: skip
