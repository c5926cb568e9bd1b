"""The pass loop: rows of values are worked on a few megabytes at a time.

A pass takes as many whole rows (blocks of 16 or 32 values, keys, vectors) as give a CPU's caches
what they hold, or a GPU's launches enough to do. Every pass has the same workspace: new memory for
every operation would cost more than the operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from sdsa_quant.errors import DtypeError, InputError

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Values per pass: a few MB of temporaries, so that on a CPU they stay in its caches while each
# operation still has enough work for every thread.
_CPU_VALUES_PER_PASS = 1 << 18  # for each thread
_CUDA_VALUES_PER_PASS = 1 << 26

_QUANTIZING_WORKSPACE = 3  # int32 for each value: the scaled value, and two to encode it with

# What quantizes ``[blocks, block]`` in one pass: blocks, workspace, and the codes and the scales
# to write.
QuantizePass = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def values_per_pass(device: torch.device) -> int:
    """How many values to work on at a time on `device`, to bound the temporaries."""
    if device.type == "cpu":
        return _CPU_VALUES_PER_PASS * torch.get_num_threads()
    return _CUDA_VALUES_PER_PASS


def require_block_values(values: torch.Tensor, block: int) -> None:
    """Refuse what cannot be cut into blocks of `block` floating-point values along the last axis.

    Raises
    ------
    TypeError
        `values` is not bfloat16, float16 or float32.
    ValueError
        The last dimension is not a multiple of `block`.
    """
    if values.dtype not in FLOAT_DTYPES:
        raise DtypeError(f"values must be bfloat16, float16 or float32, got {values.dtype}")
    if values.dim() == 0 or values.shape[-1] % block:
        raise InputError(
            f"values must have a last dimension that is a multiple of {block}, "
            f"got {list(values.shape)}"
        )


def passes(
    rows: int, width: int, device: torch.device, *, workspace: int = 0
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Cut `rows` rows of `width` values into passes.

    Parameters
    ----------
    rows, width : int
        What there is to do.
    device : torch.device
        Where it is done.
    workspace : int
        int32 elements to have for each value of a pass.

    Yields
    ------
    rows : slice
        The rows of this pass.
    workspace : torch.Tensor
        int32, 1-D, uninitialized, the same memory in every pass.
    """
    step = max(min(values_per_pass(device) // max(width, 1), rows), 1)
    memory = torch.empty(workspace * step * width, dtype=torch.int32, device=device)
    for start in range(0, rows, step):
        yield slice(start, start + step), memory


def quantize_blocks(
    values: torch.Tensor, block: int, scale_dtype: torch.dtype, quantize_pass: QuantizePass
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to four bits a value and one scale a block, pass after pass.

    Parameters
    ----------
    values : torch.Tensor
        Input, bfloat16, float16 or float32 ``[..., n]``, ``n`` a multiple of `block`.
    block : int
        Values that share a scale.
    scale_dtype : torch.dtype
        Of the scales.
    quantize_pass : callable
        Quantizes ``[blocks, block]``, with 3 int32 of workspace for each value.

    Returns
    -------
    codes : torch.Tensor
        uint8 ``[..., n / 2]``.
    scales : torch.Tensor
        `scale_dtype` ``[..., n / block]``.

    Raises
    ------
    TypeError, ValueError
        What `require_block_values` and `quantize_pass` raise.
    """
    require_block_values(values, block)
    *outer, last = values.shape
    codes = torch.empty((*outer, last // 2), dtype=torch.uint8, device=values.device)
    scales = torch.empty((*outer, last // block), dtype=scale_dtype, device=values.device)
    blocks = values.reshape(-1, block)
    code_rows, scale_rows = codes.view(-1, block // 2), scales.view(-1)
    for part, memory in passes(
        blocks.shape[0], block, values.device, workspace=_QUANTIZING_WORKSPACE
    ):
        quantize_pass(blocks[part], memory, code_rows[part], scale_rows[part])
    return codes, scales
