"""Scores of indexers with heads, against the formulas written out in loops of exact fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from sdsa_quant.errors import InputError
from sdsa_quant.selection.scores import block_max_scores, relu_sum_scores, select_blocks


def _dot(first: torch.Tensor, second: torch.Tensor) -> Fraction:
    pairs = zip(first.tolist(), second.tolist(), strict=True)
    return sum((Fraction(a) * Fraction(b) for a, b in pairs), Fraction(0))


@pytest.fixture
def query(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(3, 4, 128, generator=generator).bfloat16()


@pytest.fixture
def keys(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(9, 128, generator=generator).bfloat16()


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weights"])
@pytest.mark.parametrize("shifted", [False, True], ids=["unshifted", "shifts"])
def test_relu_sum(
    query: torch.Tensor,
    keys: torch.Tensor,
    generator: torch.Generator,
    weighted: bool,
    shifted: bool,
) -> None:
    weights = torch.randn(3, 4, generator=generator) if weighted else None
    shifts = torch.randn(3, 4, generator=generator).double() if shifted else None
    scores = relu_sum_scores(query, keys, weights, shifts=shifts)
    for row in range(3):
        for key in range(9):
            exact = Fraction(0)
            for head in range(4):
                product = _dot(query[row, head], keys[key])
                product += 0 if shifts is None else Fraction(float(shifts[row, head]))
                weight = 1 if weights is None else Fraction(float(weights[row, head]))
                exact += weight * max(Fraction(0), product)
            assert float(scores[row, key]) == pytest.approx(float(exact), rel=1e-13, abs=1e-12)


def test_relu_sum_in_chunks_is_the_same(query: torch.Tensor, keys: torch.Tensor) -> None:
    whole = relu_sum_scores(query, keys)
    parts = [relu_sum_scores(query, part) for part in (keys[:5], keys[5:])]
    assert torch.equal(whole, torch.cat(parts, dim=1))


def test_block_max_sees_only_a_rows_keys(query: torch.Tensor, keys: torch.Tensor) -> None:
    lengths = torch.tensor([0, 5, 9])  # nothing, a part of block 1, the short last block
    scores = block_max_scores(query, keys, lengths, block=4)
    assert scores.shape == (3, 4, 3)
    for row, length in enumerate(lengths.tolist()):
        for head in range(4):
            for block in range(3):
                seen = range(4 * block, min(4 * block + 4, length))
                products = [float(_dot(query[row, head], keys[key])) for key in seen]
                assert float(scores[row, head, block]) == max(products, default=-torch.inf)


def test_select_blocks_forces_the_local_ones() -> None:
    scores = torch.tensor([[[5.0, 4.0, 3.0, 2.0]], [[1.0, 1.0, 1.0, -torch.inf]]])
    lengths = torch.tensor([16, 10])
    free = select_blocks(scores, 2, lengths, block=4)
    assert free.tolist() == [[[0, 1]], [[0, 1]]]  # equal scores by lower index
    forced = select_blocks(scores, 2, lengths, block=4, local=1)
    assert forced.tolist() == [[[0, 3]], [[0, 2]]]
    everything = select_blocks(scores, 4, lengths, block=4)
    assert everything.tolist() == [[[0, 1, 2, 3]], [[0, 1, 2, -1]]]


def test_wrong_shapes_are_refused(query: torch.Tensor, keys: torch.Tensor) -> None:
    with pytest.raises(InputError, match=r"query must be \[rows, heads, dim\]"):
        relu_sum_scores(query[0], keys)
    with pytest.raises(InputError, match=r"weights must be \[3, 4\]"):
        relu_sum_scores(query, keys, torch.ones(3))
    with pytest.raises(InputError, match=r"lengths must be \[3\]"):
        block_max_scores(query, keys, torch.ones(2), block=4)
    with pytest.raises(InputError, match="block must be at least 1"):
        block_max_scores(query, keys, torch.ones(3), block=0)
    scores = block_max_scores(query, keys, torch.full((3,), 9), block=4)
    with pytest.raises(InputError, match="local must be 0 to 2, got 3"):
        select_blocks(scores, 2, torch.full((3,), 9), block=4, local=3)
    with pytest.raises(InputError, match=r"scores must be \[rows, heads, blocks\]"):
        select_blocks(scores[0], 2, torch.full((3,), 9), block=4)
    with pytest.raises(InputError, match="block must be at least 1"):
        select_blocks(scores, 2, torch.full((3,), 9), block=0)
