"""`top_k_from_candidates`: the top-k among the pairs that `indexer_threshold_select` stored."""

from __future__ import annotations

import torch

from sdsa_kernels.selection.torch_select import order_keys

from .checks import check_candidates

_INDEX_BITS = 32
_LOWER_BITS = 2**31 - 1
_LAST = torch.iinfo(torch.int64).min


def top_k_from_candidates(
    candidates: torch.Tensor, ranges: torch.Tensor, *, top_keys: torch.Tensor
) -> None:
    """The keys of each row's `top_k` largest stored scores, in ascending key index.

    The arguments are those of ``flashinfer.sdsa.top_k_from_candidates``; the order is that of every
    selection here: equal scores by the lower key, NaN below -inf. A row of at most `top_k` pairs
    gets all its keys, then -1. Nothing reads device values on the host.

    Parameters
    ----------
    candidates : torch.Tensor
        Input, int32 ``[rows, slots, 2]``: pairs of a key and the bits of a float32.
    ranges : torch.Tensor
        Input, int32 ``[2, rows]``: first and past-last slot of each row's pairs.
    top_keys : torch.Tensor
        Output, int32 ``[rows, top_k]``, row stride free, `top_k` from 1 to 65,535.

    Raises
    ------
    TypeError
        An argument is not a tensor or has the wrong dtype.
    ValueError
        A shape, stride or device is wrong.
    """
    check_candidates(candidates, ranges, top_keys)
    with torch.inference_mode():
        keys, bits = candidates[:, :, 0], candidates[:, :, 1]
        slot = torch.arange(candidates.shape[1], device=candidates.device, dtype=torch.int64)
        inside = (slot >= ranges[0][:, None]) & (slot < ranges[1][:, None])
        # One int64 a pair: the score's order above, the key counted down below. No two are equal.
        order = (order_keys(bits.contiguous().view(torch.float32)).long() << _INDEX_BITS) + (
            _LOWER_BITS - keys.long()
        )
        order = order.masked_fill(~inside, _LAST)
        count = min(top_keys.shape[1], candidates.shape[1])
        best = order.topk(count, dim=1, sorted=False)
        chosen = keys.gather(1, best.indices)
        missing = _LOWER_BITS  # sorts after every key
        chosen = chosen.masked_fill(best.values == _LAST, missing).sort(dim=1).values
        top_keys[:, :count] = chosen.masked_fill(chosen == missing, -1)
        top_keys[:, count:] = -1
