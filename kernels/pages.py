"""The pages that the lengths of a call define: those of group 0, then of group 1, and so on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sdsa_quant.layout import PAGE

from .problem import ScoreProblem


@dataclass(frozen=True, slots=True)
class PageList:
    """Every page to score, group by group, on the device of the call."""

    pages: torch.Tensor  # int32 [n], page of the cache
    groups: torch.Tensor  # int64 [n]
    blocks: torch.Tensor  # int64 [n], index of the page in its request
    counts: torch.Tensor  # int64 [n], keys of the page that its group sees, 1 to 64

    def part(self, start: int, stop: int) -> PageList:
        """The pages of a range of indices."""
        return PageList(
            self.pages[start:stop],
            self.groups[start:stop],
            self.blocks[start:stop],
            self.counts[start:stop],
        )


def list_pages(problem: ScoreProblem) -> PageList:
    """The pages of a call, in the order of its groups; reads the lengths on the host."""
    lengths = problem.context_lengths.long().clamp(0, problem.max_context)
    blocks_of_group = (lengths + PAGE - 1) // PAGE
    groups = torch.repeat_interleave(blocks_of_group)
    first = blocks_of_group.cumsum(0) - blocks_of_group
    blocks = torch.arange(groups.shape[0], device=groups.device, dtype=torch.int64) - first[groups]
    return PageList(
        pages=problem.block_table[problem.requests[groups].long(), blocks],
        groups=groups,
        blocks=blocks,
        counts=(lengths[groups] - blocks * PAGE).clamp(max=PAGE),
    )
