"""The list of pages that a call's lengths define."""

from __future__ import annotations

import torch

from sdsa_kernels.pages import list_pages
from sdsa_kernels.testing.problems import exact_problem


def test_pages_are_listed_group_by_group() -> None:
    problem = exact_problem("nvfp4", torch.device("cpu"), (130, 0, 64, 1), rows_per_group=2)
    listed = list_pages(problem)
    table = problem.block_table.tolist()
    assert listed.pages.tolist() == [*table[0][:3], table[2][0], table[3][0]]
    assert listed.groups.tolist() == [0, 0, 0, 2, 3]
    assert listed.blocks.tolist() == [0, 1, 2, 0, 0]
    assert listed.counts.tolist() == [64, 64, 2, 64, 1]
    part = listed.part(2, 4)
    assert (part.groups.tolist(), part.counts.tolist()) == ([0, 2], [2, 64])
