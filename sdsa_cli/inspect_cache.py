"""The part of `sdsa inspect` that reads caches: their header, their validity, one page decoded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .json_documents import command_document
from .output import Output, fields_table, heading, table
from .text import byte_count, describe_lengths, describe_transform

if TYPE_CHECKING:
    import torch

    from sdsa_quant.cache_file import CacheFile

# Terminal columns that one key takes in a page's table.
_NVFP4_KEY_WIDTH = 23
_BF16_KEY_WIDTH = 16


def inspect_cache(out: Output, path: str) -> None:
    """Show a cache and check it.

    Raises
    ------
    CheckFailedError
        It is not valid; what could be read of it has been shown.
    """
    from sdsa_quant.cache_file import open_cache, validate_cache
    from sdsa_quant.errors import CheckFailedError, InputError

    reason = None
    record: dict[str, Any] = {}
    try:
        cache = open_cache(path)
        record = _cache_record(cache)
        validate_cache(cache)
    except (InputError, CheckFailedError) as error:
        reason = str(error)
    if record:
        out.result(*_cache_report(path, record, valid=reason is None))
    validity = {"kind": "cache", "path": path, "valid": reason is None, "reason": reason}
    out.document(command_document("inspect", validity | record))
    if reason is not None:
        raise CheckFailedError(reason)


def _cache_record(cache: CacheFile) -> dict[str, Any]:
    from sdsa_quant.layout import BF16_RECORD_BYTES

    bf16_bytes = cache.pages * BF16_RECORD_BYTES
    return {
        "header": cache.header.metadata(),
        "requests": cache.context_lengths.shape[0],
        "keys": int(cache.context_lengths.sum()),
        "context_lengths": cache.context_lengths.tolist(),
        "blocks": cache.block_table.shape[1],
        "pages": cache.pages,
        "cache_bytes": cache.cache_bytes,
        "file_bytes": cache.file_bytes,
        "bf16_bytes": bf16_bytes,
        "ratio_to_bf16": bf16_bytes / cache.cache_bytes if cache.pages else None,
    }


def _cache_report(path: str, record: dict[str, Any], valid: bool) -> list[Any]:
    from sdsa_quant.cache_header import CacheHeader

    header, ratio = record["header"], record["ratio_to_bf16"]
    transform = describe_transform(CacheHeader.from_metadata(header))
    nvfp4 = header["values"] == "nvfp4"
    smaller = f", {ratio:.2f}x smaller than BF16" if nvfp4 and ratio is not None else ""
    fields = {
        "values": header["values"],
        "layout": header["layout"],
        "scales": f"{header['scale_order']} order, rule {header['rule']}",
        "transform": transform,
        "source": header["source"] or "-",
        "requests": f"{record['requests']:,}",
        "lengths": describe_lengths(record["context_lengths"]),
        "block table": f"{record['requests']:,} x {record['blocks']:,}",
        "pages": f"{record['pages']:,}",
        "bytes": f"{byte_count(record['cache_bytes'])}{smaller}",
        "valid": "yes" if valid else "no",
    }
    if not nvfp4:
        del fields["scales"]
    if transform == "none":
        del fields["transform"]
    title = heading(f"{path}: a cache, version {header['version']}")
    return [title, fields_table(fields)]


def inspect_page(out: Output, path: str, page: int, key: int) -> None:
    """Show one page of a cache decoded: every key's scales, and one key in full.

    Raises
    ------
    InputError
        The cache has no such page.
    """
    from sdsa_quant.cache_file import open_cache
    from sdsa_quant.errors import InputError
    from sdsa_quant.nvfp4 import dequantize_nvfp4

    cache = open_cache(path)
    if page >= cache.pages:
        raise InputError(f"{path}: --page must be 0 to {cache.pages - 1}, got {page}")
    paged = cache.paged_keys()
    scales, keys = None, paged.key_cache[page]
    if paged.key_scales is not None:
        scales = paged.key_scales[page]
        keys = dequantize_nvfp4(keys, scales)
    keys = keys.float()
    owner = _find_owner(cache, page)
    out.result(
        heading(_page_title(path, page, owner)),
        _page_table(keys, scales, owner["used"], out.width),
        _key_table(keys[key], None if scales is None else scales[key].float(), key),
    )
    decoded = {
        "kind": "page",
        "path": path,
        "page": page,
        **owner,
        "keys": keys.tolist(),
        "scales": None if scales is None else scales.float().tolist(),
    }
    out.document(command_document("inspect", decoded))


def _find_owner(cache: CacheFile, page: int) -> dict[str, Any]:
    """Which request's keys are in a page: ``request``, ``first_key``, and how many are ``used``."""
    from sdsa_quant.layout import PAGE

    for request, block in (cache.block_table == page).nonzero().tolist():
        used = min(int(cache.context_lengths[request]) - block * PAGE, PAGE)
        if used > 0:
            return {"request": request, "first_key": block * PAGE, "used": used}
    return {"request": None, "first_key": None, "used": 0}


def _page_title(path: str, page: int, owner: dict[str, Any]) -> str:
    if owner["request"] is None:
        return f"{path}, page {page}: in no request"
    first, used = owner["first_key"], owner["used"]
    return (
        f"{path}, page {page}: request {owner['request']}, keys {first:,} to {first + used - 1:,} "
        f"({used} of 64 used)"
    )


def _page_table(keys: torch.Tensor, scales: torch.Tensor | None, used: int, width: int) -> Any:
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
    rows = table(*["key", heading] * side_by_side, numbers_from=0)
    rows.padding, rows.pad_edge = (0, 1, 0, 0), False
    lines = -(-len(texts) // side_by_side)
    for line in range(lines):
        numbers = range(line, len(texts), lines)
        pairs = ((f"{key}" if key < used else f"({key})", texts[key]) for key in numbers)
        rows.add_row(*(cell for pair in pairs for cell in pair))
    return rows


def _key_table(values: torch.Tensor, scales: torch.Tensor | None, key: int) -> Any:
    """One key in full: a column for each block, its scale on top of its 16 values."""
    from sdsa_quant.layout import BLOCK

    blocks = values.unflatten(0, (-1, BLOCK))
    headings = [f"block {block}" for block in range(blocks.shape[0])]
    rows = table(f"key {key}", *headings)
    rows.padding, rows.pad_edge = (0, 1, 0, 0), False
    for column in rows.columns:
        column.overflow = "fold"
    if scales is not None:
        rows.add_row("scale", *(f"{scale:.4g}" for scale in scales.tolist()), end_section=True)
    for index, line in enumerate(blocks.T.tolist()):
        rows.add_row(f"{index}", *(f"{value:.3g}" for value in line))
    return rows
