"""A dump of an engine's cache: pages as bytes, with the block table that says whose they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from sdsa_quant.arguments import checked_arguments
from sdsa_quant.captures.names import INTEGER_DTYPES
from sdsa_quant.errors import Hint, InputError
from sdsa_quant.files.tensor_source import StoredTensor, TensorSource, open_tensors
from sdsa_quant.layout import DIM, PAGE

from .layouts import (
    EngineLayout,
    decode_pages,
    engine_layout,
    find_layout,
    what_is_wrong,
)

_PAGES_AT_A_TIME = 1024  # 8.7 MB of FP8, 34 MB of float32
_PAGES_LOOKED_AT = 4096  # to find a layout by


@dataclass(frozen=True, slots=True)
class EngineCache:
    """An open dump; pages are read from the mapped file when they are decoded."""

    path: Path
    """The file."""
    name: str
    """Tensor of the pages."""
    layout: EngineLayout
    """How a page is laid out, as it was found or given."""
    context_lengths: tuple[int, ...]
    """Keys of each request."""
    _pages: torch.Tensor  # uint8 [pages, 64 * key_bytes]
    _tables: tuple[torch.Tensor, ...]  # int64 pages of each request, in order

    @property
    def bytes_per_key(self) -> int:
        """Bytes of a key with its scales."""
        return self.layout.key_bytes

    def chunks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Request and float32 keys ``[n, 128]``, in the order of requests and keys."""
        for request, table in enumerate(self._tables):
            left = self.context_lengths[request]
            for start in range(0, len(table), _PAGES_AT_A_TIME):
                pages = self._pages[table[start : start + _PAGES_AT_A_TIME]]
                keys = decode_pages(pages, self.layout).view(-1, DIM)[:left]
                left -= keys.shape[0]
                yield request, keys

    def keys(self, request: int) -> torch.Tensor:
        """float32 ``[keys, 128]``, all of a request's."""
        pages = self._pages[self._tables[request]]
        return decode_pages(pages, self.layout).view(-1, DIM)[: self.context_lengths[request]]


@checked_arguments
def open_engine_cache(
    path: str | Path,
    *,
    pages: str | None = None,
    block_table: str = "block_table",
    lengths: str | None = None,
    layout: str | None = None,
) -> EngineCache:
    """Open a dump and find its layout.

    Parameters
    ----------
    path : str or Path
        A safetensors file with the pages, uint8 ``[pages, 64, bytes]`` (also ``[pages, 64, 1,
        bytes]`` and ``[pages, 64 * bytes]``), the block table and the lengths.
    pages : str, optional
        Tensor of the pages; by default the only uint8 tensor of such a shape.
    block_table : str
        Tensor ``[requests, blocks]`` of integers: the pages of each request.
    lengths : str, optional
        Tensor ``[requests]`` of integers, ``context_lengths``, ``lengths`` or ``seq_lens`` by
        default.
    layout : str, optional
        One of `ENGINE_LAYOUTS`, for a dump that does not tell; it is refused where it does not fit.

    Raises
    ------
    ValueError
        A tensor is missing or is not what it must be, an entry of the table is not a page, or the
        layout cannot be found or is not the one that was given.
    """
    source = open_tensors(path)
    stored = source[pages] if pages is not None else _only_pages(source)
    count = stored.shape[0] if stored.shape else 0
    size = stored.bytes // (count * PAGE) if count else 0
    flat = source.read(stored.name).reshape(count, -1)
    numbers = _lengths(source, lengths)
    tables = _tables(source, block_table, numbers, count)
    used, whole = _used(tables, numbers)
    looked_at = flat[whole]
    try:
        if layout is None:
            found = find_layout(looked_at, size, used)
        else:
            found = engine_layout(layout)
            _require_fit(looked_at, found, size, used)
    except InputError as error:
        if error.argument is not None:
            raise
        hint = None if layout is not None else error.hint
        raise InputError(f"tensor {stored.name}: {error.message}", source=path, hint=hint) from None
    return EngineCache(Path(path), stored.name, found, tuple(numbers), flat, tables)


def _require_fit(
    pages: torch.Tensor, layout: EngineLayout, key_bytes: int, used: torch.Tensor
) -> None:
    fault: str | None = f"a key has {key_bytes} bytes"
    if key_bytes == layout.key_bytes:
        fault = what_is_wrong(pages, layout, used)
    if fault is not None:
        raise InputError(f"is not of the layout {layout.name}: {fault}")


def _only_pages(source: TensorSource) -> StoredTensor:
    found = [
        tensor
        for tensor in source
        if tensor.dtype == "U8" and len(tensor.shape) >= 2 and tensor.bytes % PAGE == 0
    ]
    if len(found) != 1:
        raise InputError(
            f"one tensor must be uint8 [pages, {PAGE}, bytes], the engine's pages; "
            f"{source.describe_names()}",
            source=source.path,
            hint=Hint("pages", "to name it"),
        )
    return found[0]


def _lengths(source: TensorSource, name: str | None) -> list[int]:
    usual = ("context_lengths", "lengths", "seq_lens")
    name = name or next((each for each in usual if each in source), usual[0])
    stored = source[name]
    if stored.dtype not in INTEGER_DTYPES or len(stored.shape) != 1:
        raise InputError(
            f"tensor {name} must be integers [requests], got {stored.dtype} {list(stored.shape)}",
            source=source.path,
        )
    numbers: list[int] = source.read(name).tolist()
    if numbers and min(numbers) < 0:
        raise InputError(f"tensor {name} must not be negative, got {min(numbers)}", source=name)
    return numbers


def _tables(
    source: TensorSource, name: str, lengths: list[int], pages: int
) -> tuple[torch.Tensor, ...]:
    """The pages of each request that its length needs."""
    stored = source[name]
    if stored.dtype not in INTEGER_DTYPES or len(stored.shape) != 2:
        raise InputError(
            f"tensor {name} must be integers [requests, blocks], got {stored.dtype} "
            f"{list(stored.shape)}",
            source=source.path,
        )
    table = source.read(name).long()
    if table.shape[0] != len(lengths):
        raise InputError(
            f"tensor {name} must have a row for each of the {len(lengths)} lengths, got "
            f"{table.shape[0]}",
            source=source.path,
        )
    found = []
    for request, length in enumerate(lengths):
        blocks = -(-length // PAGE)
        if blocks > table.shape[1]:
            raise InputError(
                f"tensor {name} must have {blocks} columns for the {length} keys of request "
                f"{request}, got {table.shape[1]}",
                source=source.path,
            )
        row = table[request, :blocks]
        wrong = ((row < 0) | (row >= pages)).nonzero()
        if len(wrong):
            block = int(wrong[0])
            raise InputError(
                f"tensor {name} must have pages from 0 to {pages - 1}, got {int(row[block])} for "
                f"block {block} of request {request}",
                source=source.path,
            )
        found.append(row)
    return tuple(found)


def _used(
    tables: tuple[torch.Tensor, ...], lengths: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """bool ``[n, 64]`` keys that are used, of the n pages with these numbers; not of all pages."""
    used, numbers, left = [], [], _PAGES_LOOKED_AT
    for table, length in zip(tables, lengths, strict=True):
        some = table[:left]
        keys = (
            torch.arange(len(some) * PAGE, dtype=torch.int64, device="cpu").view(-1, PAGE) < length
        )
        used.append(keys)
        numbers.append(some)
        left -= len(some)
    if not used:
        return torch.zeros(0, PAGE, dtype=torch.bool, device="cpu"), torch.zeros(
            0, dtype=torch.int64, device="cpu"
        )
    return torch.cat(used), torch.cat(numbers)
