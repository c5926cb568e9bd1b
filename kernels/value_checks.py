"""The opt-in checked mode (``SDSA_CHECK=1``): read what a call's indices say, and validate it.

Lengths, requests and page numbers of a scoring call or a selection; slots and rows of a write.

It synchronizes with the device, so it is for debugging an engine and never for a graph.
"""

from __future__ import annotations

import torch

from sdsa_quant.errors import InputError
from sdsa_quant.layout import INT32_MAX, PAGE

from .problem import ScoreProblem, WriteProblem
from .selection.problem import SelectProblem


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
    lengths = _checked_lengths(problem.context_lengths, problem.max_context)
    _check_pages(lengths, problem.requests, problem.block_table, problem.key_cache.shape[0])


def check_selection_values(problem: SelectProblem) -> None:
    """Check every length and, where slots are wanted, every request and page number.

    Raises
    ------
    ValueError
        A length is negative; or it needs more pages than the block table has columns, a request is
        not a row of the block table, or a page number below a length is negative.
    """
    lengths = _checked_lengths(problem.context_lengths, problem.max_context)
    if problem.requests is not None and problem.block_table is not None:
        _check_pages(lengths, problem.requests, problem.block_table, None)


def _checked_lengths(context_lengths: torch.Tensor, max_context: int) -> torch.Tensor:
    """int64 lengths on the CPU, none negative, clamped."""
    lengths = context_lengths.long().cpu()
    negative = lengths < 0
    if negative.any():
        group = _first(negative)
        raise InputError(
            f"context_lengths must not be negative, got {int(lengths[group])} for group {group}"
        )
    return lengths.clamp(max=max_context)


def _check_pages(
    lengths: torch.Tensor, requests: torch.Tensor, table: torch.Tensor, pages_there: int | None
) -> None:
    """Check what `lengths` make a kernel read of requests and table."""
    requests, table = requests.long().cpu(), table.cpu()
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
    needed = torch.zeros(table.shape[0], dtype=torch.long, device="cpu")
    needed.scatter_reduce_(0, requests[used], pages[used], reduce="amax")
    columns = torch.arange(table.shape[1], dtype=torch.int64, device="cpu")
    read = columns[None, :] < needed[:, None]
    most = INT32_MAX if pages_there is None else pages_there - 1
    bad_page = read & ((table < 0) | (table > most))
    if bad_page.any():
        request, column = (int(i) for i in bad_page.nonzero()[0])
        wanted = "pages" if pages_there is None else f"pages 0 to {most}"
        raise InputError(
            f"block_table must hold {wanted} below a group's "
            f"length, got {int(table[request, column])} at request {request}, block {column}"
        )


def check_slots(rows: WriteProblem, name: str) -> None:
    """Check that every index of a write lies in its output.

    Parameters
    ----------
    rows : WriteProblem
        The keys or the query rows of a call.
    name : str
        The argument that holds the indices: ``slots`` or ``query_rows``.

    Raises
    ------
    ValueError
        An index is past the last slot or row of its output.
    """
    room = _room(rows)
    past = rows.index >= room
    if bool(past.any()):
        row = _first(past)
        raise InputError(
            f"{name} must be below {room}, the {_what(rows)}, or negative to be skipped, "
            f"got {int(rows.index[row])} at index {row}"
        )


def check_written_once(rows: WriteProblem, name: str) -> None:
    """Check that no slot or row is written twice, since which write stays is not defined.

    Parameters
    ----------
    rows : WriteProblem
        The keys or the query rows of a call.
    name : str
        The argument that holds the indices: ``slots`` or ``query_rows``.

    Raises
    ------
    ValueError
        An index that is not negative occurs twice.
    """
    index = rows.index.cpu()
    ordered, order = index.sort(stable=True)
    twice = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
    if bool(twice.any()):
        at = _first(twice)
        raise InputError(
            f"{name} must not repeat, got {int(ordered[at])} at index {int(order[at])} and at "
            f"index {int(order[at + 1])}"
        )


def _room(rows: WriteProblem) -> int:
    """Slots of a cache, or rows of packed query rows."""
    return rows.codes.shape[0] * (PAGE if rows.codes.dim() == 3 else 1)


def _what(rows: WriteProblem) -> str:
    pages = rows.codes.shape[0]
    return f"slots of {pages} pages" if rows.codes.dim() == 3 else "rows of packed_query"
