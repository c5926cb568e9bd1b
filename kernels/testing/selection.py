"""What a selection must be: Python's own sort of float64 scores, and hard rows to select from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from sdsa_quant.layout import PAGE


def reference_top_k(
    scores: torch.Tensor,
    lengths: Sequence[int],
    k: int,
    *,
    rows_per_group: int = 1,
    tables: torch.Tensor | None = None,
) -> torch.Tensor:
    """int32 ``[rows, k]`` on the CPU: keys by score, then index, NaN last, in ascending index.

    `tables` are rows of a block table, one a group, for slots.
    """
    chosen = torch.full((scores.shape[0], k), -1, dtype=torch.int32, device="cpu")
    for row, values in enumerate(scores.double().cpu().tolist()):
        group = row // rows_per_group
        length = max(0, min(lengths[group], len(values)))

        def place(key: int, values: list[float] = values) -> tuple[bool, float, int]:
            missing = math.isnan(values[key])
            return missing, 0.0 if missing else -values[key], key

        best = sorted(sorted(range(length), key=place)[:k])
        if tables is not None:
            pages = tables[group].tolist()
            best = [pages[key // PAGE] * PAGE + key % PAGE for key in best]
        chosen[row, : len(best)] = torch.tensor(best, dtype=torch.int32, device="cpu")
    return chosen


def hard_rows(length: int, k: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Rows of `length` float32 scores that mislead a selection, by name."""
    normal = torch.randn(length, generator=generator, dtype=torch.float32, device="cpu")
    index = torch.arange(length, dtype=torch.int64, device="cpu")
    one = torch.tensor(1.0, dtype=torch.float32, device="cpu")
    above, below = torch.nextafter(one, 2 * one), torch.nextafter(one, 0 * one)
    near = torch.stack([below, one, above])
    few_high = torch.zeros(length, dtype=torch.float32, device="cpu")
    few_high[
        torch.randperm(length, generator=generator, dtype=torch.int64, device="cpu")[
            : max(1, min(k, length) // 2)
        ]
    ] = 1.0
    signed_zeros = torch.where(index % 3 == 0, -0.0, 0.0).float()
    special = normal.clone()
    special[::3], special[1::7], special[2::11] = torch.nan, torch.inf, -torch.inf
    clustered = normal.clone()
    clustered[length // 2 : length // 2 + k] += 100.0
    huge = normal.clone()
    if length:
        huge[length // 3] = 3e38
    return {
        "normal": normal,
        "all-equal": torch.full((length,), -2.5, dtype=torch.float32, device="cpu"),
        "zeros-of-both-signs": signed_zeros,
        "two-values": few_high,
        "one-ulp": near[
            torch.randint(0, 3, (length,), generator=generator, dtype=torch.int64, device="cpu")
        ],
        "ascending": index.float(),
        "descending": -index.float(),
        "one-huge": huge,
        "clustered": clustered,
        "nan-and-inf": special,
        "all-nan": torch.full((length,), torch.nan, dtype=torch.float32, device="cpu"),
        "subnormal": normal * 2.0**-140,
        # High exactly where no multiple of 16 looks, and the other way round.
        "hidden": torch.where(index % 16 == 0, -1.0, 1.0).float() * normal.abs(),
        "shown": torch.where(index % 16 == 0, 1.0, -1.0).float() * normal.abs(),
    }
