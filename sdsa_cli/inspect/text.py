"""Numbers as `sdsa inspect` shows them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

_LISTED_LENGTHS = 8
_BETWEEN = " \u00b7 "  # numbers of a list, whose thousands have commas


def describe_lengths(lengths: Sequence[int]) -> str:
    """Context lengths in a few words: all of a few, otherwise their range and sum."""
    if not lengths:
        return "none"
    if len(lengths) == 1:
        return f"{lengths[0]:,}"
    total = f"sum {sum(lengths):,}"
    if min(lengths) == max(lengths):
        return f"{lengths[0]:,} each ({total})"
    if len(lengths) <= _LISTED_LENGTHS:
        return f"{_BETWEEN.join(f'{length:,}' for length in lengths)} ({total})"
    middle = statistics.median(lengths)
    return f"{min(lengths):,} to {max(lengths):,} (median {middle:,.0f}, {total})"
