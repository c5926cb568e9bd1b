"""The part of `sdsa inspect` that decodes a page of a cache, or one key of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdsa_cli.output import Output, heading, table
from sdsa_cli.table_data import TableData

from .documents import PageDocument, PageOwner

if TYPE_CHECKING:
    import torch
    from rich.console import RenderableType

    from sdsa_quant.files.cache_file import CacheFile

# Terminal columns that one key takes in a page's table, with the space after it.
_NVFP4_KEY_WIDTH = 22
_BF16_KEY_WIDTH = 15
_INDEX_WIDTH = 6  # terminal columns that a key's table takes before its blocks


def inspect_page(sink: Output, path: str, page: int, key: int | None) -> None:
    """Show a page of a cache: an overview of its keys, or one key decoded.

    Raises
    ------
    InputError
        The cache has no such page.
    """
    from sdsa_quant.errors import InputError
    from sdsa_quant.files.cache_file import open_cache
    from sdsa_quant.formats.nvfp4 import dequantize_nvfp4

    cache = open_cache(path)
    if page >= cache.pages:
        wanted = f"must be 0 to {cache.pages - 1}" if cache.pages else "finds no pages"
        raise InputError(f"{path}: --page {wanted}, got {page}")
    keys, scales = cache.page(page)
    if scales is not None:
        keys = dequantize_nvfp4(keys, scales)
    keys = keys.float()
    owner = _find_owner(cache, page)
    title = heading(_page_title(path, page, owner))
    if key is None:
        parts: list[RenderableType] = [
            _page_table(keys, scales, owner.used, sink.width),
            "--key K shows the 128 values of one key",
        ]
    else:
        key_scales = None if scales is None else scales[key].float()
        parts = [
            heading(_key_title(key, owner)),
            *_key_tables(keys[key], key_scales, sink.width),
        ]
    shown = slice(None) if key is None else slice(key, key + 1)
    document = PageDocument(
        path=path,
        page=page,
        key=key,
        request=owner.request,
        first_key=owner.first_key,
        used=owner.used,
        keys=keys[shown].tolist(),
        scales=None if scales is None else scales[shown].float().tolist(),
    )
    sink.publish(document, title, *parts)


def _find_owner(cache: CacheFile, page: int) -> PageOwner:
    """Which request's keys are in a page, and how many."""
    from sdsa_quant.layout import PAGE

    for request, block in (cache.block_table == page).nonzero().tolist():
        used = min(int(cache.context_lengths[request]) - block * PAGE, PAGE)
        if used > 0:
            return PageOwner(request, block * PAGE, used)
    return PageOwner(None, None, 0)


def _page_title(path: str, page: int, owner: PageOwner) -> str:
    if owner.request is None or owner.first_key is None:
        return f"{path}, page {page}: in no request"
    first, used = owner.first_key, owner.used
    return (
        f"{path}, page {page}: request {owner.request}, keys {first:,} to {first + used - 1:,} "
        f"({used} of 64 used)"
    )


def _page_table(
    keys: torch.Tensor, scales: torch.Tensor | None, used: int, width: int
) -> TableData:
    """Every key's scale bytes (BF16: its norm), as many side by side as the terminal has room for.

    A key's number is in brackets where the key is past the length.
    """
    import torch

    if scales is None:
        heading, key_width = "norm", _BF16_KEY_WIDTH
        texts = [f"{norm:.4g}" for norm in keys.norm(dim=-1).tolist()]
    else:
        heading, key_width = "scale bytes", _NVFP4_KEY_WIDTH
        texts = [bytes(row).hex() for row in scales.view(torch.uint8).tolist()]
    side_by_side = max(width // key_width, 1)
    rows = table(*["key", heading] * side_by_side, numbers_from=0, style="grid")
    lines = -(-len(texts) // side_by_side)
    for line in range(lines):
        numbers = range(line, len(texts), lines)
        pairs = ((f"{key}" if key < used else f"({key})", texts[key]) for key in numbers)
        cells = [cell for pair in pairs for cell in pair]
        rows.add_row(*cells, *[""] * (2 * side_by_side - len(cells)))
    return rows


def _key_title(key: int, owner: PageOwner) -> str:
    if owner.first_key is not None and key < owner.used:
        return f"key {key} of the page, {owner.first_key + key:,} of request {owner.request}"
    return f"key {key} of the page, past the length"


def _key_tables(values: torch.Tensor, scales: torch.Tensor | None, width: int) -> list[TableData]:
    """One key in full: a column for each block, its scale on top of its 16 values.

    As many blocks side by side as the terminal has room for.
    """
    from sdsa_quant.layout import BLOCK

    # NVFP4 values are short decimals, shown exactly; four digits tell BF16 values apart.
    form = ".4g" if scales is None else ".17g"
    columns = [[f"{value:{form}}" for value in block] for block in values.view(-1, BLOCK).tolist()]
    if scales is not None:
        columns = [
            [f"{scale:.17g}", *column]
            for scale, column in zip(scales.tolist(), columns, strict=True)
        ]
    widest = max(len(cell) for column in columns for cell in column) + 1
    room = max((width - _INDEX_WIDTH) // max(widest, len("block 0 ")), 1)
    side_by_side = next(count for count in (8, 4, 2, 1) if count <= room)
    return [
        _blocks_table(columns[first : first + side_by_side], first, with_scale=scales is not None)
        for first in range(0, len(columns), side_by_side)
    ]


def _blocks_table(columns: list[list[str]], first: int, *, with_scale: bool) -> TableData:
    rows = table("", *(f"block {first + index}" for index in range(len(columns))), style="grid")
    for index, line in enumerate(zip(*columns, strict=True)):
        if with_scale and index == 0:
            rows.add_row("scale", *line, rule_below=True)
        else:
            rows.add_row(f"{index - with_scale}", *line)
    return rows
