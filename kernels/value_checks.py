"""The opt-in checked mode (``SDSA_CHECK=1``): read lengths, requests and tables, and validate them.

It synchronizes with the device, so it is for debugging an engine and never for a graph.
"""

from __future__ import annotations

import torch

from sdsa_quant.errors import InputError
from sdsa_quant.layout import PAGE

from .problem import ScoreProblem


def _first(mask: torch.Tensor) -> int:
    return int(mask.nonzero()[0])


def check_device_values(problem: ScoreProblem) -> None:
    """Check every length, request and page number that a backend would read.

    Raises
    ------
    ValueError
        A length is negative or needs more pages than the block table has columns, a request is not
        a row of the block table, or a page number below a group's length is not in the cache.
    """
    lengths = problem.context_lengths.long().cpu()
    requests = problem.requests.long().cpu()
    table = problem.block_table.cpu()
    negative = lengths < 0
    if negative.any():
        group = _first(negative)
        raise InputError(
            f"context_lengths must not be negative, got {int(lengths[group])} for group {group}"
        )
    lengths = lengths.clamp(max=problem.max_context)
    used = lengths > 0
    bad_request = used & ((requests < 0) | (requests >= table.shape[0]))
    if bad_request.any():
        group = _first(bad_request)
        raise InputError(
            f"requests must be rows of block_table, 0 to {table.shape[0] - 1}, got "
            f"{int(requests[group])} for group {group} of length {int(lengths[group])}"
        )
    pages = (lengths + PAGE - 1) // PAGE
    too_long = pages > table.shape[1]
    if too_long.any():
        group = _first(too_long)
        raise InputError(
            f"block_table must have {int(pages[group])} columns for length {int(lengths[group])} "
            f"of group {group}, got {table.shape[1]}"
        )
    # One pass per request: the longest group of a request reads the most of its table row.
    needed = torch.zeros(table.shape[0], dtype=torch.long)
    needed.scatter_reduce_(0, requests[used], pages[used], reduce="amax")
    columns = torch.arange(table.shape[1])
    read = columns[None, :] < needed[:, None]
    bad_page = read & ((table < 0) | (table >= problem.key_cache.shape[0]))
    if bad_page.any():
        request, column = (int(i) for i in bad_page.nonzero()[0])
        raise InputError(
            f"block_table must hold pages 0 to {problem.key_cache.shape[0] - 1} below a group's "
            f"length, got {int(table[request, column])} at request {request}, block {column}"
        )
