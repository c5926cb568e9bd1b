"""The 128x4 order of block scales, and back to linear.

cuBLASLt, TensorRT-LLM and ``flashinfer.block_scale_interleave`` keep the scales of a ``[rows,
columns]`` matrix in tiles of 128 rows and 4 columns, 512 bytes each. The scale of row ``r``, column
``c`` of a matrix of ``C`` (padded) columns lies at
``((r // 128) * (C / 4) + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4``.
Rows and columns that only fill a tile hold zero bytes.
"""

from __future__ import annotations

import torch

from sdsa_quant.arguments import checked_arguments
from sdsa_quant.errors import DtypeError, InputError
from sdsa_quant.layout import PAGE, SCALES_PER_KEY

LINEAR = "linear"
TILED = "128x4"
SCALE_ORDERS = (LINEAR, TILED)

TILE_ROWS = 128
TILE_COLUMNS = 4


def tiled_bytes(rows: int, columns: int) -> int:
    """Bytes of the 128x4 form of ``[rows, columns]`` scales, padding included."""
    return _padded(rows, TILE_ROWS) * _padded(columns, TILE_COLUMNS)


@checked_arguments
def linear_to_128x4(scales: torch.Tensor) -> torch.Tensor:
    """Reorder ``[rows, columns]`` scales of one byte each to the 128x4 order.

    Parameters
    ----------
    scales : torch.Tensor
        uint8 or float8_e4m3fn ``[rows, columns]``.

    Returns
    -------
    torch.Tensor
        The same dtype, 1-D of `tiled_bytes` elements.

    Raises
    ------
    TypeError
        `scales` has another dtype.
    ValueError
        `scales` is not two-dimensional.
    """
    if scales.dtype not in (torch.uint8, torch.float8_e4m3fn):
        raise DtypeError(f"scales must be uint8 or float8_e4m3fn, got {scales.dtype}")
    if scales.dim() != 2:
        raise InputError(f"scales must be [rows, columns], got {list(scales.shape)}")
    rows, columns = scales.shape
    padded_rows, padded_columns = _padded(rows, TILE_ROWS), _padded(columns, TILE_COLUMNS)
    plane = torch.zeros((padded_rows, padded_columns), dtype=torch.uint8, device=scales.device)
    plane[:rows, :columns] = scales.view(torch.uint8)
    # [row tile, row // 32, row % 32, column tile, column] -> [.., row tile, column tile, ...]
    tiles = plane.view(-1, 4, 32, padded_columns // TILE_COLUMNS, TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


@checked_arguments
def linear_from_128x4(tiled: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Undo `linear_to_128x4`: 1-D of `tiled_bytes` elements to ``[rows, columns]``.

    Raises
    ------
    ValueError
        `tiled` does not have the size that ``[rows, columns]`` needs.
    """
    if tiled.dim() != 1 or tiled.numel() != tiled_bytes(rows, columns):
        raise InputError(
            f"tiled scales of [{rows}, {columns}] must be [{tiled_bytes(rows, columns)}], "
            f"got {list(tiled.shape)}"
        )
    column_tiles = _padded(columns, TILE_COLUMNS) // TILE_COLUMNS
    tiles = tiled.view(torch.uint8).view(-1, column_tiles, 32, 4, TILE_COLUMNS)
    plane = tiles.permute(0, 3, 2, 1, 4).reshape(-1, column_tiles * TILE_COLUMNS)
    return plane[:rows, :columns].contiguous().view(tiled.dtype)


def linear_pages(tiled: torch.Tensor, pages: int) -> torch.Tensor:
    """The linear scales ``[pages, 64, 8]`` of a cache whose scales are in the 128x4 order.

    Raises
    ------
    TypeError, ValueError
        What `linear_from_128x4` raises.
    """
    return linear_from_128x4(tiled, pages * PAGE, SCALES_PER_KEY).view(pages, PAGE, SCALES_PER_KEY)


def _padded(size: int, tile: int) -> int:
    return -(-size // tile) * tile
