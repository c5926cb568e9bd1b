"""Scores of an indexer with several heads, in float64, one head at a time.

With query heads ``q_h`` of one row, weights ``w_h`` and a key ``k``:

    relu-sum  = sum over h of w_h max(0, q_h . k)       one score for each key
    block-max = max of q_h . k over the keys of a block  one score for each head and block

Where keys are pooled, `k` is the mean of n consecutive keys.

Relu-sum is the score of DeepSeek-V3.2's indexer (equation 1 of its technical report; weights carry
every positive factor), block-max that of MiniMax-M3's. Heads are added in ascending order, so that
the same input gives the same bits whatever the size of a chunk of keys.
"""

from __future__ import annotations

import torch

from sdsa_quant.accuracy.top_k import top_k_indices
from sdsa_quant.arguments import checked_arguments
from sdsa_quant.errors import InputError


@checked_arguments
def relu_sum_scores(
    query: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    shifts: torch.Tensor | None = None,
) -> torch.Tensor:
    """``sum_h w_h max(0, q_h . k)`` as float64 ``[rows, keys]``.

    Parameters
    ----------
    query : torch.Tensor
        Input, floating point ``[rows, heads, dim]``, any device.
    keys : torch.Tensor
        Input, floating point ``[keys, dim]`` on the same device.
    weights : torch.Tensor, optional
        Input, floating point ``[rows, heads]`` on the same device, any sign; 1 by default.
    shifts : torch.Tensor, optional
        Input, floating point ``[rows, heads]`` on the same device: added to every product before
        the ReLU, for keys whose mean was taken off. None are added by default.

    Raises
    ------
    ValueError
        The shapes do not belong together.
    """
    _require_shapes(query, keys)
    for name, given in (("weights", weights), ("shifts", shifts)):
        if given is not None and given.shape != query.shape[:2]:
            raise InputError(
                f"must be {list(query.shape[:2])} for query {list(query.shape)}, "
                f"got {list(given.shape)}",
                argument=name,
            )
    wide_keys = keys.double().T
    total = torch.zeros((query.shape[0], keys.shape[0]), dtype=torch.float64, device=query.device)
    for head in range(query.shape[1]):
        products = query[:, head].double() @ wide_keys
        if shifts is not None:
            products += shifts[:, head, None]
        products.clamp_(min=0)
        if weights is not None:
            products *= weights[:, head, None].double()
        total += products
    return total


@checked_arguments
def block_max_scores(
    query: torch.Tensor, keys: torch.Tensor, lengths: torch.Tensor, *, block: int
) -> torch.Tensor:
    """The maximum of ``q_h . k`` over each block of keys, float64 ``[rows, heads, blocks]``.

    Parameters
    ----------
    query : torch.Tensor
        Input, floating point ``[rows, heads, dim]``, any device.
    keys : torch.Tensor
        Input, floating point ``[keys, dim]`` on the same device; the last block may be shorter.
    lengths : torch.Tensor
        Input, integers ``[rows]`` on the same device: a row sees its first ``lengths[row]`` keys.
        A block of which it sees none has -inf.
    block : int
        Keys of a block, at least 1.

    Raises
    ------
    ValueError
        The shapes do not belong together, or `block` is less than 1.
    """
    _require_shapes(query, keys)
    if lengths.shape != query.shape[:1]:
        raise InputError(
            f"must be {list(query.shape[:1])}, got {list(lengths.shape)}", argument="lengths"
        )
    if block < 1:
        raise InputError(f"must be at least 1, got {block}", argument="block")
    rows, heads, _ = query.shape
    blocks = -(-keys.shape[0] // block)
    wide_keys = keys.double().T
    scores = torch.empty((rows, heads, blocks), dtype=torch.float64, device=query.device)
    for head in range(heads):
        scores[:, head] = block_maxima(query[:, head].double() @ wide_keys, lengths, block)
    return scores


def block_maxima(scores: torch.Tensor, lengths: torch.Tensor, block: int) -> torch.Tensor:
    """The maximum of each block of the scores that a row sees, ``[rows, blocks]``.

    Parameters
    ----------
    scores : torch.Tensor
        Input, floating point ``[rows, keys]``, overwritten with -inf where a row does not see.
    lengths : torch.Tensor
        Input, integers ``[rows]`` on the same device: scores that each row sees.
    block : int
        Scores of a block, at least 1; the last one may be shorter.
    """
    rows, keys = scores.shape
    whole = keys // block * block
    if bool((lengths < keys).any()):
        hidden = torch.arange(keys, device=scores.device, dtype=torch.int64) >= lengths[:, None]
        scores.masked_fill_(hidden, -torch.inf)
    maxima = scores[:, :whole].view(rows, -1, block).amax(-1)
    if whole == keys:
        return maxima
    return torch.cat([maxima, scores[:, whole:].amax(-1, keepdim=True)], -1)


@checked_arguments
def mean_pooled_keys(keys: torch.Tensor, pool: int) -> torch.Tensor:
    """The mean of every `pool` consecutive keys, ``[keys // pool, dim]``, in the dtype of `keys`.

    Added in float64 and rounded once; keys past the last whole pool are left out.

    Parameters
    ----------
    keys : torch.Tensor
        Input, floating point ``[keys, dim]``, any device.
    pool : int
        Keys of a pool, at least 1.

    Raises
    ------
    ValueError
        `keys` does not have two dimensions, or `pool` is less than 1.
    """
    if keys.dim() != 2:
        raise InputError(f"must be [keys, dim], got {list(keys.shape)}", argument="keys")
    if pool < 1:
        raise InputError(f"must be at least 1, got {pool}", argument="pool")
    pools = keys.shape[0] // pool
    values = keys[: pools * pool].double().view(pools, pool, keys.shape[1])
    return (values.sum(1) / pool).to(keys.dtype)


@checked_arguments
def select_blocks(
    scores: torch.Tensor, k: int, lengths: torch.Tensor, *, block: int, local: int = 0
) -> torch.Tensor:
    """The k best blocks of each row and head, the local ones always among them.

    Parameters
    ----------
    scores : torch.Tensor
        Input, floating point ``[rows, heads, blocks]``, from `block_max_scores`.
    k : int
        Blocks to choose, at least 1.
    lengths : torch.Tensor
        Input, integers ``[rows]`` on the same device: keys that a row sees.
    block : int
        Keys of a block, at least 1.
    local : int
        How many of the last blocks that a row sees are chosen whatever their scores, 0 to `k`.

    Returns
    -------
    torch.Tensor
        int64 ``[rows, heads, k]``: block indices, ascending, then -1. Equal scores are taken by
        lower index.

    Raises
    ------
    ValueError
        The shapes do not belong together, or a number is out of its range.
    """
    if scores.dim() != 3 or lengths.shape != scores.shape[:1]:
        raise InputError(
            f"scores must be [rows, heads, blocks] and lengths [rows], got {list(scores.shape)} "
            f"and {list(lengths.shape)}"
        )
    if block < 1:
        raise InputError(f"must be at least 1, got {block}", argument="block")
    if not 0 <= local <= k:
        raise InputError(f"must be 0 to {k}, got {local}", argument="local")
    rows, heads, blocks = scores.shape
    seen = (lengths + block - 1) // block
    index = torch.arange(blocks, device=scores.device, dtype=torch.int64)
    is_local = (index < seen[:, None]) & (index >= (seen - local)[:, None])
    forced = scores.masked_fill(is_local[:, None], torch.inf).view(rows * heads, blocks)
    chosen = top_k_indices(forced, k, seen.repeat_interleave(heads))
    chosen = chosen.masked_fill(chosen < 0, blocks).sort(dim=1).values
    return chosen.masked_fill(chosen == blocks, -1).view(rows, heads, k)


def _require_shapes(query: torch.Tensor, keys: torch.Tensor) -> None:
    if query.dim() != 3 or keys.dim() != 2 or query.shape[2] != keys.shape[1]:
        raise InputError(
            f"query must be [rows, heads, dim] and keys [keys, dim], got {list(query.shape)} and "
            f"{list(keys.shape)}"
        )
