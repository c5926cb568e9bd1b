"""Cache files: one safetensors file of page records, written page by page, read memory-mapped.

Tensors: ``pages`` uint8 ``[pages, record]`` (interleaved), or ``keys`` and, for NVFP4, ``scales``
(separate: ``[pages, 64, 8]`` linear, or one-dimensional in the 128x4 order); ``block_table`` int32
``[requests, blocks]`` with -1 in unused entries; ``context_lengths`` int32 ``[requests]``;
``key_mean`` float32 ``[128]`` where it was subtracted from the keys. The
header's metadata says how to read them. Any safetensors reader opens such a file; the writer here
exists because the library's own needs the whole file in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sdsa_quant.arguments import checked_arguments
from sdsa_quant.errors import CacheFormatError, CheckFailedError, InputError
from sdsa_quant.formats import e4m3
from sdsa_quant.formats.scale_order import (
    LINEAR,
    TILE_ROWS,
    TILED,
    linear_from_128x4,
    linear_pages,
    linear_to_128x4,
    tiled_bytes,
)
from sdsa_quant.formats.transforms import CHANNEL, NONE, KeyTransform
from sdsa_quant.layout import (
    BF16,
    CODE_PAGE_BYTES,
    DIM,
    INT32_MAX,
    KEY_ALIGNMENT_BYTES,
    MAX_REQUESTS,
    NVFP4,
    PACKED_DIM,
    PAGE,
    SCALE_PAGE_BYTES,
    SCALES_PER_KEY,
    record_bytes,
)
from sdsa_quant.paging import PagedKeys, page_views
from sdsa_quant.short_repr import short_repr

from .cache_header import INTERLEAVED, CacheHeader
from .safetensors_reader import open_safetensors, read_expected, require_rank, tensor_shapes
from .safetensors_writer import HeaderEntry, StreamedFile, write_tensor

_TILE_BYTES = TILE_ROWS * SCALES_PER_KEY  # scales of two pages in the 128x4 order
_PAGES_AT_A_TIME = 4096  # whose scales are looked at in one go
_REQUESTS_AT_A_TIME, _ENTRIES_AT_A_TIME = 4096, 1 << 22  # of the block table
_LARGEST_SCALE = 0x7E  # as an E4M3 byte: 448


def _stored_tensors(
    header: CacheHeader, pages: int, requests: int, blocks: int
) -> dict[str, HeaderEntry]:
    """Every tensor of a cache file, in file order."""
    tensors: dict[str, HeaderEntry] = {}
    if header.layout == INTERLEAVED:
        size = record_bytes(header.format)
        tensors["pages"] = HeaderEntry("U8", (pages, size), pages * size)
    elif header.format == BF16:
        size = record_bytes(BF16)
        tensors["keys"] = HeaderEntry("BF16", (pages, PAGE, DIM), pages * size)
    else:
        tensors["keys"] = HeaderEntry("U8", (pages, PAGE, PACKED_DIM), pages * CODE_PAGE_BYTES)
        if header.scale_order == TILED:
            size = tiled_bytes(pages * PAGE, SCALES_PER_KEY)
            tensors["scales"] = HeaderEntry("U8", (size,), size)
        else:
            tensors["scales"] = HeaderEntry(
                "U8", (pages, PAGE, SCALES_PER_KEY), pages * SCALE_PAGE_BYTES
            )
    tensors["block_table"] = HeaderEntry("I32", (requests, blocks), requests * blocks * 4)
    tensors["context_lengths"] = HeaderEntry("I32", (requests,), requests * 4)
    if header.center == CHANNEL:
        tensors["key_mean"] = HeaderEntry("F32", (DIM,), DIM * 4)
    return tensors


def sequential_block_table(context_lengths: Sequence[int]) -> torch.Tensor:
    """int32 ``[requests, blocks]``: pages in request order, -1 past each request's own."""
    blocks = [-(-length // PAGE) for length in context_lengths]
    return _table_rows(blocks, max(blocks, default=0), 0)


def _table_rows(blocks: Sequence[int], columns: int, page: int) -> torch.Tensor:
    """Rows of a block table, for requests of so many blocks, from a page on."""
    table = torch.full((len(blocks), columns), -1, dtype=torch.int32, device="cpu")
    for request, count in enumerate(blocks):
        table[request, :count] = torch.arange(page, page + count, dtype=torch.int32, device="cpu")
        page += count
    return table


class CacheWriter(StreamedFile):
    """Write a cache file a few pages at a time, in bounded memory and atomically.

    A context manager: the file gets its final name when the block ends without an exception and
    every page was written, and is removed otherwise.

    Parameters
    ----------
    path : str or Path
        The cache file.
    header : CacheHeader
        How to store the keys.
    context_lengths : sequence of int
        Keys of each request. Pages are numbered request after request.
    force : bool
        Whether to replace an existing file.
    key_mean : torch.Tensor, optional
        float32 ``[128]``, with a header whose center is ``"channel"``: what was subtracted.

    Raises
    ------
    ValueError
        The file exists and `force` is false, its folder cannot be written, a length is negative or
        too large for int32, or `key_mean` does not go with the header.
    """

    @checked_arguments
    def __init__(
        self,
        path: str | Path,
        header: CacheHeader,
        context_lengths: Sequence[int],
        *,
        force: bool = False,
        key_mean: torch.Tensor | None = None,
    ) -> None:
        if (key_mean is None) != (header.center == NONE):
            raise InputError("key_mean must be given with center channel, and only with it")
        for request, length in enumerate(context_lengths):
            if not 0 <= length <= INT32_MAX:
                raise InputError(
                    f"context lengths must be 0 to {INT32_MAX}, got {length} for request {request}"
                )
        self.header = header
        if len(context_lengths) > MAX_REQUESTS:
            raise InputError(
                f"context lengths must be of at most {MAX_REQUESTS:,} requests, got "
                f"{len(context_lengths):,}"
            )
        blocks = [-(-length // PAGE) for length in context_lengths]
        columns, self.pages = max(blocks, default=0), sum(blocks)
        tensors = _stored_tensors(header, self.pages, len(blocks), columns)
        known = {
            "context_lengths": torch.tensor(context_lengths, dtype=torch.int32, device="cpu"),
        }
        if key_mean is not None:
            known["key_mean"] = key_mean.float().cpu()
        super().__init__(
            path, tensors, header.metadata(), known, parts=self.pages, noun="pages", force=force
        )
        try:
            self._write_table(blocks, columns)
        except BaseException:
            self._file.discard()
            raise

    def _write_table(self, blocks: Sequence[int], columns: int) -> None:
        """Write the block table a few rows at a time: it may be larger than the keys."""
        step = max(1, _ENTRIES_AT_A_TIME // max(columns, 1))
        page = 0
        for first in range(0, len(blocks), step):
            part = blocks[first : first + step]
            offset = self._offsets["block_table"] + first * columns * 4
            self._write_tensor(offset, _table_rows(part, columns, page))
            page += sum(part)

    @checked_arguments
    def write_pages(
        self, first_page: int, key_cache: torch.Tensor, key_scales: torch.Tensor | None
    ) -> None:
        """Write consecutive pages; every page of the cache exactly once.

        Parameters
        ----------
        first_page : int
            Number of the first page given.
        key_cache : torch.Tensor
            CPU, uint8 ``[n, 64, 64]`` or bfloat16 ``[n, 64, 128]``; the caller fills the end of a
            request's last page (with zeros, so that files are reproducible).
        key_scales : torch.Tensor or None
            CPU, float8_e4m3fn or uint8 ``[n, 64, 8]``, linear, with NVFP4.

        Raises
        ------
        ValueError
            The pages do not lie within the cache, the shapes do not fit it, or the disk is full.
        """
        count = key_cache.shape[0]
        self._check_pages(first_page, key_cache, key_scales)
        self._written += count
        if self.header.layout == INTERLEAVED:
            size = record_bytes(self.header.format)
            records = torch.empty((count, size), dtype=torch.uint8, device="cpu")
            cache_view, scale_view = page_views(records, self.header.format)
            cache_view.copy_(key_cache)
            if scale_view is not None and key_scales is not None:
                scale_view.view(torch.uint8).copy_(key_scales.view(torch.uint8))
            self._write_tensor(self._offsets["pages"] + first_page * size, records)
            return
        page_bytes = CODE_PAGE_BYTES if self.header.format == NVFP4 else record_bytes(BF16)
        self._write_tensor(self._offsets["keys"] + first_page * page_bytes, key_cache)
        if key_scales is None:
            return
        if self.header.scale_order == TILED:
            self._write_tiled_scales(first_page, key_scales.view(torch.uint8))
        else:
            offset = self._offsets["scales"] + first_page * SCALE_PAGE_BYTES
            self._write_tensor(offset, key_scales)

    def _check_pages(
        self, first_page: int, key_cache: torch.Tensor, key_scales: torch.Tensor | None
    ) -> None:
        nvfp4 = self.header.format == NVFP4
        count = key_cache.shape[0]
        shape = [count, PAGE, PACKED_DIM if nvfp4 else DIM]
        dtype = torch.uint8 if nvfp4 else torch.bfloat16
        if key_cache.dtype != dtype or list(key_cache.shape) != shape:
            raise InputError(
                f"key_cache must be {dtype} {shape} for {self.header.format}, "
                f"got {key_cache.dtype} {list(key_cache.shape)}"
            )
        if not 0 <= first_page <= self.pages - count:
            raise InputError(
                f"pages must lie within 0 to {self.pages}, got {first_page} to {first_page + count}"
            )
        scale_shape = [count, PAGE, SCALES_PER_KEY] if nvfp4 else None
        given = None if key_scales is None else list(key_scales.shape)
        if given != scale_shape:
            raise InputError(f"key_scales must be {scale_shape}, got {given}")

    def _write_tiled_scales(self, first_page: int, scales: torch.Tensor) -> None:
        """Write pages into tiles of two; the other page of a first or last tile is kept."""
        first_tile, end_tile = first_page // 2, (first_page + scales.shape[0] + 1) // 2
        offset = self._offsets["scales"] + first_tile * _TILE_BYTES
        size = (end_tile - first_tile) * _TILE_BYTES
        stored = torch.frombuffer(bytearray(self._file.read_at(offset, size)), dtype=torch.uint8)
        rows = (end_tile - first_tile) * TILE_ROWS
        plane = linear_from_128x4(stored, rows, SCALES_PER_KEY)
        begin = (first_page % 2) * PAGE
        plane[begin : begin + scales.shape[0] * PAGE] = scales.reshape(-1, SCALES_PER_KEY)
        self._write_tensor(offset, linear_to_128x4(plane))

    def _write_tensor(self, offset: int, tensor: torch.Tensor) -> None:
        write_tensor(self._file, offset, tensor)


@dataclass(frozen=True, slots=True)
class CacheFile:
    """An open cache file; its tensors are views of the mapped file, read when they are used."""

    path: Path
    header: CacheHeader
    pages: int
    file_bytes: int
    block_table: torch.Tensor  # int32 [requests, blocks]
    context_lengths: torch.Tensor  # int32 [requests]
    transform: KeyTransform  # what was done to the keys before they were stored
    _tensors: dict[str, torch.Tensor]

    def __repr__(self) -> str:
        return short_repr(self)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the pages alone: keys and scales, without table and header."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def page(self, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One page's keys ``[64, 64]`` or ``[64, 128]`` and, for NVFP4, its scales ``[64, 8]``."""
        paged = self.paged_keys(tiled_scales=True)
        scales = paged.key_scales
        if scales is not None and scales.dim() == 1:
            tile = scales[index // 2 * _TILE_BYTES : (index // 2 + 1) * _TILE_BYTES]
            plane = linear_from_128x4(tile, TILE_ROWS, SCALES_PER_KEY)
            first = index % 2 * PAGE
            return paged.key_cache[index], plane[first : first + PAGE]
        return paged.key_cache[index], None if scales is None else scales[index]

    def paged_keys(self, *, tiled_scales: bool = False) -> PagedKeys:
        """The keys on the CPU, memory-mapped and not copied.

        Two exceptions: scales in the 128x4 order are brought into the linear one, except with
        `tiled_scales`, and pages that another writer did not align to 16 bytes are copied.
        """
        if self.header.layout == INTERLEAVED:
            records = _aligned(self._tensors["pages"])
            key_cache, key_scales = page_views(records, self.header.format)
        else:
            key_cache = _aligned(self._tensors["keys"])
            key_scales = None
            if self.header.format == NVFP4:
                stored = _aligned(self._tensors["scales"])
                scales = stored if tiled_scales else self._linear_scales(stored)
                key_scales = scales.view(torch.float8_e4m3fn)
        return PagedKeys(key_cache, key_scales, self.block_table, self.context_lengths)

    def _linear_scales(self, scales: torch.Tensor) -> torch.Tensor:
        return scales if self.header.scale_order == LINEAR else linear_pages(scales, self.pages)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.data_ptr() % KEY_ALIGNMENT_BYTES else tensor


@checked_arguments
def open_cache(path: str | Path) -> CacheFile:
    """Open a cache file and check its header, sizes and dtypes; pages are not read.

    Raises
    ------
    ValueError
        The file cannot be read, is not a safetensors file or not a cache, or its tensors do not
        have the sizes that its header says. The message names the file and the field or tensor.
    """
    path = Path(path)
    with open_safetensors(path) as file:
        metadata = file.metadata() or {}
        try:
            header = CacheHeader.from_metadata(metadata)
        except InputError as error:
            raise CacheFormatError(f"{path}: {error}") from None
        wanted = _stored_tensors(header, *_sizes(path, header, tensor_shapes(file)))
        tensors = read_expected(path, file, wanted, CacheFormatError)
    block_table = tensors.pop("block_table")
    context_lengths = tensors.pop("context_lengths")
    transform = KeyTransform(header.rotate, header.gain, tensors.pop("key_mean", None))
    pages = next(iter(wanted.values())).shape[0]
    return CacheFile(
        path, header, pages, path.stat().st_size, block_table, context_lengths, transform, tensors
    )


def _sizes(
    path: Path, header: CacheHeader, shapes: dict[str, tuple[int, ...]]
) -> tuple[int, int, int]:
    """Pages, requests and blocks, taken from the tensors that define them."""
    name, rank = ("pages", 2) if header.layout == INTERLEAVED else ("keys", 3)
    pages = require_rank(path, shapes, name, rank, CacheFormatError)[0]
    requests, blocks = require_rank(path, shapes, "block_table", 2, CacheFormatError)
    if requests > MAX_REQUESTS:
        raise CacheFormatError(
            f"must have at most {MAX_REQUESTS:,} requests, got {requests:,}", source=path
        )
    return pages, requests, blocks


@checked_arguments
def validate_cache(cache: CacheFile) -> None:
    """Read a cache's tables and scales and check that every one can be scored.

    Raises
    ------
    CheckFailedError
        A length is negative or needs more blocks than the table has, a used table entry is not a
        page of the cache, the mean key is not finite, or a scale byte is NaN or negative.
    """
    lengths = cache.context_lengths.long()
    for request in (lengths < 0).nonzero().flatten().tolist():
        raise CheckFailedError(
            f"{cache.path}: context_lengths[{request}] must not be negative, "
            f"got {int(lengths[request])}"
        )
    blocks = (lengths + PAGE - 1) // PAGE
    columns = cache.block_table.shape[1]
    for request in (blocks > columns).nonzero().flatten().tolist():
        raise CheckFailedError(
            f"{cache.path}: block_table must have {int(blocks[request])} columns for the "
            f"{int(lengths[request])} keys of request {request}, got {columns}"
        )
    for first, table, used in _used_tables(cache):
        for row, block in (used & ((table < 0) | (table >= cache.pages))).nonzero().tolist():
            raise CheckFailedError(
                f"{cache.path}: block_table[{first + row}, {block}] must be a page, 0 to "
                f"{cache.pages - 1}, got {int(table[row, block])}"
            )
    mean = cache.transform.mean
    if mean is not None and not bool(mean.isfinite().all()):
        raise CheckFailedError(f"{cache.path}: key_mean must be finite, but is not")
    scales = cache.paged_keys().key_scales
    if scales is None:
        return
    for start in range(0, cache.pages, _PAGES_AT_A_TIME):
        part = scales[start : start + _PAGES_AT_A_TIME].view(torch.uint8)
        for page, key, block in ((part & 0x7F) == 0x7F).nonzero().tolist():
            raise CheckFailedError(
                f"{cache.path}: the scale of page {start + page}, key {key}, block {block} is NaN"
            )
        for page, key, block in (part >= 0x80).nonzero().tolist():
            raise CheckFailedError(
                f"{cache.path}: the scale of page {start + page}, key {key}, block {block} is "
                f"negative"
            )


@dataclass(frozen=True, slots=True)
class ScaleCounts:
    """What the scales of a cache's used keys say about its blocks.

    A zero scale is that of a block of zeros or of one that was flushed to zero; a largest scale,
    448, that of a block that saturated or just did not. The scale alone cannot tell which.
    """

    blocks: int
    zero: int
    subnormal: int
    largest: int

    def share(self, count: int) -> float:
        """`count` as a share of all blocks, NaN where there are none."""
        return count / self.blocks if self.blocks else math.nan


def count_scales(cache: CacheFile) -> ScaleCounts | None:
    """Count the scales of a valid cache's used keys, each once; None for BF16.

    Parameters
    ----------
    cache : CacheFile
        A cache that `validate_cache` has found nothing wrong with.
    """
    scales = cache.paged_keys().key_scales
    if scales is None:
        return None
    used = _used_keys(cache)
    blocks = zero = subnormal = largest = 0
    for start in range(0, cache.pages, _PAGES_AT_A_TIME):
        part = slice(start, start + _PAGES_AT_A_TIME)
        visible = torch.arange(PAGE, dtype=torch.int64, device="cpu") < used[part, None]
        values = scales[part].view(torch.uint8)[visible]
        blocks += values.numel()
        zero += int((values == 0).sum())
        subnormal += int(e4m3.is_subnormal(values).sum())
        largest += int((values == _LARGEST_SCALE).sum())
    return ScaleCounts(blocks, zero, subnormal, largest)


def _used_keys(cache: CacheFile) -> torch.Tensor:
    """int64 ``[pages]``: how many keys of each page belong to a request, 0 to 64."""
    most = torch.zeros(cache.pages, dtype=torch.int64, device="cpu")
    for first, table, in_use in _used_tables(cache):
        lengths = cache.context_lengths[first : first + table.shape[0]].long()
        first_keys = torch.arange(table.shape[1], dtype=torch.int64, device="cpu") * PAGE
        used = (lengths[:, None] - first_keys).clamp_(0, PAGE)
        # Requests may share pages, and see different numbers of a page's keys.
        most.scatter_reduce_(0, table[in_use].long(), used[in_use], "amax")
    return most


def _used_tables(cache: CacheFile) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """A few requests at a time: the first one's number, their table, and which entries are used.

    The table is cut to the columns that they use: a file may claim any number of columns.
    """
    blocks = (cache.context_lengths.long() + PAGE - 1) // PAGE
    first = 0
    while first < blocks.shape[0]:
        step, columns = _REQUESTS_AT_A_TIME, int(blocks[first : first + _REQUESTS_AT_A_TIME].max())
        while step > 1 and step * columns > _ENTRIES_AT_A_TIME:
            step //= 2
            columns = int(blocks[first : first + step].max())
        part = slice(first, first + step)
        table = cache.block_table[part, :columns]
        index = torch.arange(columns, dtype=torch.int64, device="cpu")
        yield first, table, index < blocks[part, None]
        first += step
