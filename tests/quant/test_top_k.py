"""The deterministic top-k against a plain Python sort, and its promises one by one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdsa_quant.accuracy import top_k
from sdsa_quant.accuracy.top_k import top_k_indices
from sdsa_quant.errors import DtypeError, InputError

SCORES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan]),
    st.floats(width=32),
)


def sorted_top_k(scores: list[float], k: int) -> list[int]:
    """Sort every index by score, then by index; -1 fills up to k."""
    usable = [index for index, score in enumerate(scores) if not math.isnan(score)]
    best = sorted(usable, key=lambda index: (-scores[index], index))[:k]
    return best + [-1] * (k - len(best))


@given(
    rows=st.integers(0, 40).flatmap(
        lambda keys: st.lists(st.lists(SCORES, min_size=keys, max_size=keys), max_size=4)
    ),
    k=st.integers(1, 45),
)
def test_agrees_with_a_plain_sort(rows: list[list[float]], k: int) -> None:
    keys = len(rows[0]) if rows else 0
    scores = torch.tensor(rows, dtype=torch.float32).view(len(rows), keys)
    assert top_k_indices(scores, k).tolist() == [sorted_top_k(row, k) for row in scores.tolist()]


@given(
    row=st.lists(SCORES, min_size=1, max_size=30),
    k=st.integers(1, 10),
    data=st.data(),
)
def test_looks_at_nothing_past_a_length(row: list[float], k: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, len(row)), min_size=1, max_size=3))
    scores = torch.tensor([row] * len(lengths), dtype=torch.float32)
    expected = [sorted_top_k(scores[0].tolist()[:length], k) for length in lengths]
    assert top_k_indices(scores, k, torch.tensor(lengths)).tolist() == expected


@pytest.mark.parametrize("k", [1, 64, 299, 300, 301], ids=lambda k: f"k{k}")
def test_equal_scores_are_taken_by_lower_index_every_time(k: int) -> None:
    scores = torch.full((1, 300), 7.25)
    expected = list(range(min(k, 300))) + [-1] * max(0, k - 300)
    for _ in range(100):
        assert top_k_indices(scores, k)[0].tolist() == expected


def test_distinct_scores_that_are_close_match_a_full_sort(generator: torch.Generator) -> None:
    # All 10,000 lie in [1, 1.001], where float32 has 8,389 values: some are equal, most differ by
    # one unit in the last place, which a top-k over rounded keys (float16 or TF32) would confuse.
    steps = torch.randperm(10_000, generator=generator)
    scores = (1.0 + steps.double() * 1e-7).float()[None]
    order = sorted_top_k(scores[0].tolist(), 2048)
    assert top_k_indices(scores, 2048)[0].tolist() == order


def test_negative_zero_equals_zero() -> None:
    scores = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -1.0]])
    assert top_k_indices(scores, 4)[0].tolist() == [0, 1, 2, 3]


def test_nan_is_never_chosen_and_minus_infinity_is() -> None:
    scores = torch.tensor([[math.nan, -math.inf, 1.0, math.nan]])
    assert top_k_indices(scores, 4)[0].tolist() == [2, 1, -1, -1]


def test_rows_beyond_one_block_are_chosen_alike(
    monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    scores = torch.randint(-3, 4, (17, 50), generator=generator).float()
    lengths = torch.randint(0, 51, (17,), generator=generator)
    whole = top_k_indices(scores, 9, lengths)
    monkeypatch.setattr(top_k, "_BLOCK_SCORES", 150)  # three rows at a time
    assert torch.equal(top_k_indices(scores, 9, lengths), whole)


def test_input_is_left_as_it_was() -> None:
    scores = torch.tensor([[-0.0, math.nan, 2.0]])
    before = scores.view(torch.int32).clone()
    top_k_indices(scores, 2)
    assert torch.equal(scores.view(torch.int32), before)


@pytest.mark.parametrize(
    ("scores", "k", "error", "message"),
    [
        (torch.zeros(3), 1, InputError, r"scores must be \[rows, keys\], got \[3\]"),
        (torch.zeros(1, 3), 0, InputError, "k must be at least 1, got 0"),
        (torch.zeros(1, 3, dtype=torch.int32), 1, DtypeError, "floating point, got torch.int32"),
    ],
    ids=["one-dimensional", "k0", "integers"],
)
def test_refuses(scores: torch.Tensor, k: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        top_k_indices(scores, k)
