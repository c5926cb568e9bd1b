"""What a study ranks: the scores of keys or of blocks of keys, made a chunk of keys at a time.

    rows       q . k                             ranked by each query row
    relu-sum   sum over h of w_h max(0, q_h . k)  ranked by each query row
    block-max  q_h . k                           ranked by each head of a query row

With blocks the scores are the maxima over the keys of a block that a row sees. What ranks, a query
row or a head of one, is called a row in everything that is measured: row r of a study by block-max
is head ``r % heads`` of query row ``r // heads``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sdsa_quant.selection.scores import block_max_scores, block_maxima, relu_sum_scores

from .inputs import BLOCK_MAX, RELU_SUM, ROWS


@dataclass(frozen=True, slots=True)
class Ranking:
    """By what the keys of one layer are ranked."""

    score: str = ROWS  # one of `SCORES`
    heads: int | None = None  # of a query row; None for rows without heads
    block: int = 1  # keys of a block
    local: int = 0  # of the last blocks that a row sees, those that are selected in any case

    @property
    def rows_each(self) -> int:
        """Rankings that a query row makes."""
        return self.heads or 1 if self.score == BLOCK_MAX else 1

    def choices(self, length: int) -> int:
        """What a row of this many keys chooses among: keys, or blocks."""
        return -(-length // self.block)

    def workspace_bytes(self, keys: int) -> int:
        """Bytes that `add_chunk` takes for each query row and a chunk of keys."""
        if self.heads is None and self.block == 1:
            return 0  # the products are the scores
        return 2 * 8 * keys

    def add_chunk(
        self,
        scores: torch.Tensor,
        start: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        lengths: torch.Tensor,
        *,
        weights: torch.Tensor | None = None,
        shifts: torch.Tensor | None = None,
    ) -> None:
        """Write the scores of a chunk of keys, computed in float64 and rounded once.

        Parameters
        ----------
        scores : torch.Tensor
            Output, float32 ``[rows * rows_each, choices]``: what this chunk decides is written.
        start : int
            The first key of the chunk, a multiple of `block`.
        query : torch.Tensor
            Input, floating point ``[rows, 128]``, or ``[rows, heads, 128]``.
        keys : torch.Tensor
            Input, floating point ``[n, 128]``, whole blocks except at the end of a request.
        lengths : torch.Tensor
            Input, int64 ``[rows]``: keys of the request that each query row sees.
        weights, shifts : torch.Tensor, optional
            Inputs, ``[rows, heads]``, and the shape of `query` without its last dimension: weights
            of the heads, and what is added to every product. Neither by default.
        """
        inside = lengths - start
        if self.score == BLOCK_MAX:
            found = block_max_scores(query, keys, inside, block=self.block)
            if shifts is not None:
                found += shifts[..., None]
            found = found.flatten(0, 1)
        else:
            if self.score == RELU_SUM:
                found = relu_sum_scores(query, keys, weights, shifts=shifts)
            else:
                found = query.double() @ keys.double().T
                if shifts is not None:
                    found += shifts[:, None]
            if self.block > 1:
                found = block_maxima(found, inside, self.block)
        first = start // self.block
        scores[:, first : first + found.shape[1]] = found
