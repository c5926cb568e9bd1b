"""The baseline that accuracy is measured against: exact dot products of unquantized vectors.

A product of two BF16 values has at most 16 significant bits, so float64 adds 128 of them without
any rounding unless they differ by more than 2^30 in size. Rounded to float32 once, at the end, the
baseline therefore does not depend on the order of the sum: it is the same on every machine, and
equal keys have equal scores.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sdsa_quant.layout import DIM

# Keys of one request in a range: (request, start, stop) -> floating point [stop - start, 128].
KeyReader = Callable[[int, int, int], torch.Tensor]

_KEYS_AT_A_TIME = 16384  # bounds the workspace to 16 MiB of float64 keys


def baseline_scores(
    query: torch.Tensor, read_keys: KeyReader, request: int, length: int
) -> torch.Tensor:
    """float32 ``[rows, length]``: ``query[q] . key[k]`` of one request's keys, rounded once.

    Parameters
    ----------
    query : torch.Tensor
        Input, floating point ``[rows, 128]``, any device; the answer is on the same.
    read_keys : callable
        Gives a range of a request's unquantized keys.
    request, length : int
        Which request, and how many of its keys.
    """
    wide_query = query.double()
    scores = torch.empty((query.shape[0], length), dtype=torch.float32, device=query.device)
    for start in range(0, length, _KEYS_AT_A_TIME):
        stop = min(start + _KEYS_AT_A_TIME, length)
        keys = read_keys(request, start, stop).to(query.device).double()
        scores[:, start:stop] = wide_query @ keys.view(-1, DIM).T
    return scores
