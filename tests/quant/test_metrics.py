"""Every measure by hand on a small example, against slow plain Python, and at its edges."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdsa_quant.accuracy.metrics import RowAccuracy, TopKAccuracy, average_ranks, row_accuracy
from sdsa_quant.errors import InputError


def measure(
    scores: Sequence[float],
    baseline: Sequence[float],
    top_k: Sequence[int] = (),
    softmax_scale: float = 1.0,
) -> RowAccuracy:
    return row_accuracy(
        0,
        0,
        torch.tensor(scores, dtype=torch.float32),
        torch.tensor(baseline, dtype=torch.float32),
        top_k=top_k,
        softmax_scale=softmax_scale,
    )


def one_top_k(
    scores: Sequence[float], baseline: Sequence[float], k: int, softmax_scale: float = 1.0
) -> TopKAccuracy:
    return measure(scores, baseline, (k,), softmax_scale).top_k[0]


# By hand: s = (4, 2, 2, -1), b = (3, 4, 0, 0), s - b = (1, -2, 2, -1).
HAND_SCORES, HAND_BASELINE = (4.0, 2.0, 2.0, -1.0), (3.0, 4.0, 0.0, 0.0)


def test_relative_l2_by_hand() -> None:
    # |s - b| = sqrt(1 + 4 + 4 + 1), |b| = sqrt(9 + 16) = 5
    assert measure(HAND_SCORES, HAND_BASELINE).relative_l2 == pytest.approx(math.sqrt(10) / 5)


def test_max_abs_by_hand() -> None:
    assert measure(HAND_SCORES, HAND_BASELINE).max_abs == 2.0


def test_cosine_by_hand() -> None:
    # s . b = 12 + 8 = 20, |s| = sqrt(16 + 4 + 4 + 1) = 5, |b| = 5
    assert measure(HAND_SCORES, HAND_BASELINE).cosine == pytest.approx(0.8)


def test_spearman_by_hand() -> None:
    # Ranks of s: 4, 2.5, 2.5, 1; of b: 3, 4, 1.5, 1.5. Less their mean 2.5: (1.5, 0, 0, -1.5) and
    # (0.5, 1.5, -1, -1). Product 0.75 + 1.5 = 2.25, squares 4.5 and 0.25 + 2.25 + 1 + 1 = 4.5.
    assert measure(HAND_SCORES, HAND_BASELINE).spearman == pytest.approx(0.5)


def test_average_ranks_by_hand() -> None:
    ranks = average_ranks(torch.tensor([7.0, -1.0, 7.0, 0.0, -0.0, 7.0]))
    assert ranks.tolist() == [5.0, 1.0, 5.0, 2.5, 2.5, 5.0]


def test_recall_and_mass_by_hand() -> None:
    # top-2(s) = {0, 1}, ties by lower index; top-2(b) = {1, 0}: the same set.
    same = one_top_k(HAND_SCORES, HAND_BASELINE, 2)
    assert (same.recall, same.mass, same.same_set, same.same_scores) == (1.0, 1.0, True, True)
    # top-1(s) = {0}, top-1(b) = {1}: no hit, and exp(3) is kept of exp(4).
    other = one_top_k(HAND_SCORES, HAND_BASELINE, 1)
    assert other == TopKAccuracy(
        k=1,
        kept=1,
        recall=0.0,
        mass=pytest.approx(math.exp(-1)),
        chance=0.25,
        same_scores=False,
        same_set=False,
        ties_left_out=0,
    )


def test_softmax_scale_scales_the_scores_before_the_softmax() -> None:
    assert one_top_k(HAND_SCORES, HAND_BASELINE, 1, 0.5).mass == pytest.approx(math.exp(-0.5))


def test_mass_of_scores_whose_powers_overflow() -> None:
    # exp(1000) is not a float64; the ratio exp(999 - 1000) is.
    kept = one_top_k([0.0, 1.0, -1.0], [1000.0, 999.0, -1000.0], 1)
    assert kept.mass == pytest.approx(math.exp(-1))


def test_equal_scores_cost_no_recall() -> None:
    # CASES 54: 300 equal scores, k = 64. Any 64 will do; 236 keys are as good as the chosen.
    tied = one_top_k([2.0] * 300, [2.0] * 300, 64)
    assert (tied.recall, tied.mass, tied.same_scores, tied.same_set) == (1.0, 1.0, True, True)
    assert tied.ties_left_out == 236
    # Scores that prefer the last keys choose another set of the same scores.
    reverse = one_top_k(range(300), [2.0] * 300, 64)
    assert (reverse.recall, reverse.mass, reverse.same_scores) == (1.0, 1.0, True)
    assert not reverse.same_set


def test_a_tie_at_the_boundary_is_a_hit_but_not_the_same_scores() -> None:
    # top-2(s) = {1, 2}, both reaching the baseline's second largest, 3; but the 5 was missed.
    kept = one_top_k([0.0, 2.0, 2.0], [5.0, 3.0, 3.0], 2)
    assert kept.recall == 1.0
    assert not kept.same_scores
    assert kept.mass == pytest.approx(2 * math.exp(-2) / (1 + math.exp(-2)))


def test_swapped_ranks_cost_one_hit_and_no_cosine(generator: torch.Generator) -> None:
    # CASES 57: noise that swaps only ranks k and k + 1.
    k = 64
    baseline = torch.linspace(10, 20, 4096)[torch.randperm(4096, generator=generator)]
    order = baseline.argsort(descending=True)
    scores = baseline.clone()
    scores[order[k - 1]], scores[order[k]] = baseline[order[k]], baseline[order[k - 1]]
    accuracy = row_accuracy(0, 0, scores, baseline, top_k=(k,), softmax_scale=1.0)
    assert accuracy.cosine is not None
    assert accuracy.cosine > 0.99999
    assert accuracy.top_k[0].recall == (k - 1) / k


def test_k_larger_than_the_length_keeps_every_key() -> None:
    # CASES 20: lengths 249 and 1 with k = 2048.
    for length in (249, 1):
        kept = one_top_k(range(length), range(length), 2048)
        assert (kept.k, kept.kept, kept.recall, kept.chance) == (2048, length, 1.0, 1.0)


def test_identical_scores_measure_exactly_one(generator: torch.Generator) -> None:
    scores = torch.randn(4097, generator=generator).tolist()
    accuracy = measure(scores, scores, (1, 64, 5000), 0.1)
    assert (accuracy.relative_l2, accuracy.max_abs) == (0.0, 0.0)
    assert (accuracy.cosine, accuracy.spearman) == (1.0, 1.0)
    assert [(each.recall, each.mass) for each in accuracy.top_k] == [(1.0, 1.0)] * 3


def test_zero_scores_leave_their_ratios_undefined() -> None:
    # CASES 25: every score 0.0.
    accuracy = measure([0.0] * 130, [-0.0] * 130, (64,))
    assert (accuracy.relative_l2, accuracy.cosine, accuracy.spearman) == (None, None, None)
    assert (accuracy.max_abs, accuracy.top_k[0].recall, accuracy.top_k[0].mass) == (0.0, 1.0, 1.0)
    assert accuracy.valid


def test_one_key_has_no_rank_correlation() -> None:
    accuracy = measure([1.0], [2.0], (1,))
    assert (accuracy.spearman, accuracy.cosine, accuracy.relative_l2) == (None, None, None)
    assert accuracy.max_abs == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("where", ["scores", "baseline"])
def test_a_non_finite_score_makes_the_row_invalid(bad: float, where: str) -> None:
    values = {"scores": [1.0, 2.0, 3.0], "baseline": [1.0, 2.0, 3.0]}
    values[where] = [1.0, bad, 3.0]
    accuracy = measure(values["scores"], values["baseline"], (1,))
    assert not accuracy.valid
    assert accuracy.nonfinite_scores == (where == "scores")
    assert accuracy.nonfinite_baseline == (where == "baseline")
    assert accuracy.top_k == ()
    assert accuracy.cosine is None


def test_a_row_of_length_0_is_valid_and_has_no_measures() -> None:
    accuracy = measure([], [], (64,))
    assert accuracy.valid
    assert (accuracy.length, accuracy.relative_l2, accuracy.top_k) == (0, None, ())


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_refuses_a_softmax_scale(scale: float) -> None:
    with pytest.raises(InputError, match="softmax_scale must be positive and finite"):
        measure([1.0], [1.0], (1,), scale)


def test_refuses_scores_of_another_shape() -> None:
    with pytest.raises(InputError, match=r"must both be \[length\], got \[2\] and \[3\]"):
        measure([1.0, 2.0], [1.0, 2.0, 3.0])


# The same measures once more, in plain Python over exact sums.

FINITE = st.floats(-1e4, 1e4, width=32).map(lambda value: value if abs(value) > 1e-3 else 0.0)
PAIRS = st.lists(
    st.tuples(st.one_of(FINITE, st.sampled_from([-1.0, 0.0, 2.0])), FINITE), min_size=1, max_size=30
)


def plain_cosine(first: Sequence[float], second: Sequence[float]) -> float | None:
    product = math.fsum(a * b for a, b in zip(first, second, strict=True))
    squares = math.fsum(a * a for a in first) * math.fsum(b * b for b in second)
    return product / math.sqrt(squares) if squares else None


def plain_ranks(values: Sequence[float]) -> list[float]:
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2
        for value in values
    ]


def plain_choice(values: Sequence[float], k: int) -> list[int]:
    return sorted(range(len(values)), key=lambda index: (-values[index], index))[:k]


@given(pairs=PAIRS)
def test_errors_agree_with_plain_python(pairs: list[tuple[float, float]]) -> None:
    scores, baseline = zip(*pairs, strict=True)
    accuracy = measure(scores, baseline)
    norm = math.sqrt(math.fsum(b * b for b in baseline))
    error = math.sqrt(math.fsum((s - b) ** 2 for s, b in pairs))
    assert accuracy.relative_l2 == (
        pytest.approx(error / norm) if norm and len(pairs) > 1 else None
    )
    assert accuracy.max_abs == max(abs(s - b) for s, b in pairs)
    expected = plain_cosine(scores, baseline) if len(pairs) > 1 else None
    assert accuracy.cosine == pytest.approx(expected, abs=1e-12)
    middle = (len(pairs) + 1) / 2
    ranks = [[rank - middle for rank in plain_ranks(values)] for values in (scores, baseline)]
    assert accuracy.spearman == pytest.approx(plain_cosine(*ranks), abs=1e-12)


@given(pairs=PAIRS, k=st.integers(1, 32), scale=st.floats(1e-4, 2.0))
def test_top_k_agrees_with_plain_python(
    pairs: list[tuple[float, float]], k: int, scale: float
) -> None:
    scores, baseline = zip(*pairs, strict=True)
    kept = one_top_k(scores, baseline, k, scale)
    chosen, best = plain_choice(scores, k), plain_choice(baseline, k)
    reach = baseline[best[-1]]
    assert kept.kept == len(best) == min(k, len(pairs))
    assert kept.recall == sum(baseline[index] >= reach for index in chosen) / len(best)
    top = max(baseline)
    mass = [
        math.fsum(math.exp((baseline[i] - top) * scale) for i in some) for some in (chosen, best)
    ]
    assert kept.mass == pytest.approx(mass[0] / mass[1])
    assert kept.mass <= 1.0
    assert kept.same_set == (set(chosen) == set(best))
    assert kept.same_scores == (
        sorted(baseline[i] for i in chosen) == sorted(baseline[i] for i in best)
    )
    assert kept.ties_left_out == sum(value >= reach for value in baseline) - len(best)
    assert kept.chance == len(best) / len(pairs)
