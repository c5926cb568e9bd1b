"""Whether what was captured selects what the model selected.

The scores are computed anew from the captured tensors, in float64, and a row agrees where no key
that it left out scores higher than one that it chose. Models score in float32, so that scores
nearer to each other than its rounding are equal: such rows agree by a tie, and are counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sdsa_quant.selection.scores import block_max_scores, relu_sum_scores

from .rule import BLOCK_MAX, SelectionRule

_KEYS_AT_A_TIME = 1 << 14
_SCORES_AT_A_TIME = 1 << 23  # float64, of rows and heads by keys or blocks
# Of the largest product of lengths that a score can have: dot products of 128 values summed in
# float32 differ from exact ones by less than sqrt(128) 2^-24 of it, about 2^-20.5.
_ROUNDING = 2.0**-18


@dataclass(frozen=True, slots=True)
class Agreement:
    """How many rows select what the model selected."""

    rows: int
    """Rows that were compared: those that see a key."""
    same: int
    """Rows that select the same, ties aside."""
    tied: int
    """Of those, rows that differ only among scores that float32 cannot tell apart."""
    first_other: int | None = None
    """The first row that selects something else, by its index among those compared."""

    def __add__(self, other: Agreement) -> Agreement:
        first = self.first_other
        if first is None and other.first_other is not None:
            first = self.rows + other.first_other
        return Agreement(
            self.rows + other.rows, self.same + other.same, self.tied + other.tied, first
        )


def compare_selection(
    rule: SelectionRule,
    query: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor | None,
    selected: torch.Tensor,
    lengths: torch.Tensor,
) -> Agreement:
    """Compare the selection of a request's rows with the scores of its keys.

    Parameters
    ----------
    rule : SelectionRule
        How the model selects.
    query : torch.Tensor
        Input, floating point ``[rows, heads, 128]`` on the CPU or a GPU.
    keys : torch.Tensor
        Input, floating point ``[keys, 128]`` on the same device.
    weights : torch.Tensor or None
        Input, floating point ``[rows, heads]``; every weight is 1 without them.
    selected : torch.Tensor
        Input, integers ``[rows, k]``, or ``[rows, heads, k]`` where heads select blocks. What is
        negative or beyond what a row sees is not a choice.
    lengths : torch.Tensor
        Input, integers ``[rows]``: keys that each row sees.
    """
    rows = query.shape[0]
    per_head = query.shape[1] if rule.score == BLOCK_MAX else 1
    step = max(1, _SCORES_AT_A_TIME // max(1, keys.shape[0] // rule.block * per_head))
    total = Agreement(0, 0, 0)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        total += _compare(
            rule,
            query[part],
            keys,
            None if weights is None else weights[part],
            selected[part],
            lengths[part],
        )
    return total


def selection_scores(
    rule: SelectionRule,
    query: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor | None,
    lengths: torch.Tensor,
) -> torch.Tensor:
    """The scores that a rule selects by, float64 ``[rows, 1 or heads, keys or blocks]``.

    What a row does not see has -inf, a block that it must choose +inf. Arguments as
    `compare_selection`.
    """
    count, parts = keys.shape[0], []
    step = -(-_KEYS_AT_A_TIME // rule.block) * rule.block
    for start in range(0, count, step):
        some = keys[start : start + step]
        if rule.score == BLOCK_MAX:
            inside = (lengths - start).clamp(min=0)
            parts.append(block_max_scores(query, some, inside, block=rule.block))
        else:
            parts.append(relu_sum_scores(query, some, weights)[:, None])
    if not parts:
        return torch.empty(query.shape[0], 1, 0, dtype=torch.float64, device=query.device)
    scores = torch.cat(parts, -1)
    index = torch.arange(scores.shape[-1], device=scores.device, dtype=torch.int64)
    seen = (lengths + rule.block - 1) // rule.block
    scores.masked_fill_((index >= seen[:, None])[:, None], -torch.inf)
    if rule.local:
        forced = (index < seen[:, None]) & (index >= (seen - rule.local)[:, None])
        scores.masked_fill_(forced[:, None], torch.inf)
    return scores


def _compare(
    rule: SelectionRule,
    query: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor | None,
    selected: torch.Tensor,
    lengths: torch.Tensor,
) -> Agreement:
    scores = selection_scores(rule, query, keys, weights, lengths)
    rows, heads, choices = scores.shape
    seen = (lengths + rule.block - 1) // rule.block
    chosen = selected.reshape(rows, heads, -1).long()
    valid = (chosen >= 0) & (chosen < seen[:, None, None])
    is_chosen = torch.zeros(rows, heads, choices + 1, dtype=torch.bool, device=scores.device)
    is_chosen.scatter_(-1, chosen.where(valid, torch.full_like(chosen, choices)), True)
    is_chosen = is_chosen[..., :choices]
    whole = is_chosen.sum(-1) == seen.clamp(max=rule.k)[:, None]
    worst_in = scores.masked_fill(~is_chosen, torch.inf).amin(-1)
    best_out = scores.masked_fill(is_chosen, -torch.inf).amax(-1)
    longest = max(float(some.double().norm(dim=-1).max()) for some in keys.split(_KEYS_AT_A_TIME))
    reach = query.double().norm(dim=-1) * longest  # [rows, heads]
    if rule.score != BLOCK_MAX:
        if weights is not None:
            reach = reach * weights.double().abs()
        reach = reach.sum(-1, keepdim=True)
    same = whole & ((worst_in >= best_out - _ROUNDING * reach) | (worst_in == best_out))
    tied = same & (worst_in <= best_out)
    compared = lengths > 0
    agrees = same.all(-1)
    other = (compared & ~agrees).nonzero()
    first = int(compared[: int(other[0])].sum()) if len(other) else None
    return Agreement(
        int(compared.sum()),
        int((compared & agrees).sum()),
        int((compared & agrees & tied.any(-1)).sum()),
        first,
    )
