"""Paged keys in memory: views of page records, and one request's keys read back.

A record is one page's bytes in an interleaved cache: 64 keys, then (NVFP4) their scales. Views of
a ``[pages, record]`` buffer as ``key_cache`` and ``key_scales`` copy nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sdsa_quant.short_repr import short_repr

from .arguments import checked_arguments
from .errors import InputError
from .formats.nvfp4 import dequantize_nvfp4
from .formats.scale_order import linear_pages
from .layout import (
    BF16,
    CODE_PAGE_BYTES,
    DIM,
    NVFP4,
    PACKED_DIM,
    PAGE,
    SCALES_PER_KEY,
    record_bytes,
)


@dataclass(frozen=True, slots=True)
class PagedKeys:
    """Keys of several requests in pages, as `indexer_scores` takes them."""

    key_cache: torch.Tensor  # bf16 [pages, 64, 128] or uint8 [pages, 64, 64]
    key_scales: torch.Tensor | None  # float8_e4m3fn [pages, 64, 8]; 1-D if in 128x4 order
    block_table: torch.Tensor  # int32 [requests, blocks], unused entries -1
    context_lengths: torch.Tensor  # int32 [requests]

    def __repr__(self) -> str:
        return short_repr(self)

    @property
    def format(self) -> str:
        """``"nvfp4"`` or ``"bf16"``."""
        return NVFP4 if self.key_cache.dtype == torch.uint8 else BF16

    @property
    def pages(self) -> int:
        return self.key_cache.shape[0]

    def to(self, device: torch.device | str) -> PagedKeys:
        """The same keys on another device, in the same layout; no copy where they are already."""
        moved = self._moved_records(torch.device(device))
        scales = self.key_scales
        if moved is None:
            moved = self.key_cache.to(device), None if scales is None else scales.to(device)
        return replace(
            self,
            key_cache=moved[0],
            key_scales=moved[1],
            block_table=self.block_table.to(device),
            context_lengths=self.context_lengths.to(device),
        )

    def _moved_records(
        self, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Views of moved records where these are such views; None otherwise, or if there."""
        if self.key_cache.device == device or not _shared_records(self.key_cache, self.key_scales):
            return None
        size = record_bytes(NVFP4)
        records = self.key_cache.as_strided((self.pages, size), (size, 1))
        return page_views(records.to(device), NVFP4)


def _shared_records(key_cache: torch.Tensor, key_scales: torch.Tensor | None) -> bool:
    """Whether keys and scales are the two parts of page records in one buffer."""
    return (
        key_scales is not None
        and key_scales.dim() == 3
        and key_cache.dtype == torch.uint8
        and key_cache.shape[0] > 0
        and key_cache.stride(0) == key_scales.stride(0) == record_bytes(NVFP4)
        and key_scales.untyped_storage().data_ptr() == key_cache.untyped_storage().data_ptr()
        and key_scales.storage_offset() == key_cache.storage_offset() + CODE_PAGE_BYTES
    )


@checked_arguments
def page_views(records: torch.Tensor, key_format: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``key_cache`` and ``key_scales`` as views of page records, copying nothing.

    Parameters
    ----------
    records : torch.Tensor
        uint8 ``[pages, record]``, row stride free (a multiple of 16 bytes).
    key_format : str
        ``"nvfp4"`` or ``"bf16"``.

    Returns
    -------
    key_cache : torch.Tensor
        uint8 ``[pages, 64, 64]`` or bfloat16 ``[pages, 64, 128]``.
    key_scales : torch.Tensor or None
        float8_e4m3fn ``[pages, 64, 8]`` for NVFP4.

    Raises
    ------
    ValueError
        The records do not have the size of `key_format`.
    """
    size = record_bytes(key_format)
    if records.dtype != torch.uint8 or records.dim() != 2 or records.shape[1] != size:
        raise InputError(
            f"records must be uint8 [pages, {size}] for {key_format} keys, "
            f"got {records.dtype} {list(records.shape)}"
        )
    if key_format == BF16:
        return records.view(torch.bfloat16).unflatten(1, (PAGE, DIM)), None
    codes = records[:, :CODE_PAGE_BYTES].unflatten(1, (PAGE, PACKED_DIM))
    scales = records[:, CODE_PAGE_BYTES:].unflatten(1, (PAGE, SCALES_PER_KEY))
    return codes, scales.view(torch.float8_e4m3fn)


@checked_arguments
def gather_keys(
    paged: PagedKeys, request: int, start: int = 0, stop: int | None = None
) -> torch.Tensor:
    """Keys ``start`` to ``stop`` of one request, decoded: float32 ``[stop - start, 128]``.

    Raises
    ------
    ValueError
        The range does not lie within the request's keys.
    """
    length = int(paged.context_lengths[request])
    stop = length if stop is None else stop
    if not 0 <= start <= stop <= length:
        raise InputError(f"keys must lie within 0 to {length}, got {start} to {stop}")
    first_block = start // PAGE
    pages = paged.block_table[request, first_block : -(-stop // PAGE)].long()
    offset = first_block * PAGE
    keys = paged.key_cache[pages].flatten(0, 1)[start - offset : stop - offset]
    if paged.key_scales is None:
        return keys.float()
    scales = paged.key_scales.view(torch.uint8)
    scale_bytes = (linear_pages(scales, paged.pages) if scales.dim() == 1 else scales)[pages]
    return dequantize_nvfp4(keys, scale_bytes.flatten(0, 1)[start - offset : stop - offset])
