"""The part of `sdsa inspect` that reads caches: their header, their validity, one page decoded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .json_documents import command_document
from .output import Output, fields_table, table
from .text import byte_count, describe_lengths

if TYPE_CHECKING:
    import torch

    from sdsa_quant.cache_file import CacheFile

_KEY_COLUMNS_WIDTH = 37  # terminal columns that a key takes in a page's table


def inspect_cache(out: Output, path: str) -> None:
    """Show a cache and check it.

    Raises
    ------
    CheckFailedError
        It is not valid; what could be read of it has been shown.
    """
    from sdsa_quant.cache_file import open_cache, validate_cache
    from sdsa_quant.errors import CacheFormatError, CheckFailedError

    reason = None
    record: dict[str, Any] = {}
    try:
        cache = open_cache(path)
        record = _cache_record(cache)
        validate_cache(cache)
    except (CacheFormatError, CheckFailedError) as error:
        reason = str(error)
    if record:
        out.result(_cache_table(path, record, valid=reason is None))
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


def _cache_table(path: str, record: dict[str, Any], valid: bool) -> Any:
    header, ratio = record["header"], record["ratio_to_bf16"]
    smaller = "" if ratio is None else f", {ratio:.2f}x smaller than BF16"
    fields = {
        "values": header["values"],
        "layout": header["layout"],
        "scales": f"{header['scale_order']} order, rule {header['rule']}",
        "source": header["source"] or "-",
        "requests": f"{record['requests']:,}",
        "lengths": describe_lengths(record["context_lengths"]),
        "block table": f"{record['requests']:,} x {record['blocks']:,}",
        "pages": f"{record['pages']:,}",
        "bytes": f"{byte_count(record['cache_bytes'])}{smaller}",
        "valid": "yes" if valid else "no",
    }
    if header["values"] == "bf16":
        del fields["scales"]
    return fields_table(fields, title=f"{path}: a cache, version {header['version']}")


def inspect_page(out: Output, path: str, page: int, key: int) -> None:
    """Show one page of a cache decoded: every key's scales and norm, and one key in full.

    Raises
    ------
    InputError
        The cache has no such page.
    """
    from sdsa_quant.cache_file import open_cache
    from sdsa_quant.errors import InputError
    from sdsa_quant.layout import DIM
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
        _page_title(path, page, owner),
        _page_table(keys, scales, owner["used"], out.width),
        _key_table(keys[key], None if scales is None else scales[key].float(), key, DIM),
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
    """Every key's largest magnitude, norm and scale bytes, several keys side by side."""
    import torch

    headings = ["key", "max", "norm"] + ([] if scales is None else ["scale bytes"])
    side_by_side = max(width // _KEY_COLUMNS_WIDTH, 1)
    rows = table(*headings * side_by_side, numbers_from=0)
    rows.padding = (0, 1, 0, 0)
    largest, norms = keys.abs().amax(-1), keys.norm(dim=-1)
    cells = []
    for index in range(keys.shape[0]):
        name = f"{index}" if index < used else f"({index})"
        row = [name, f"{float(largest[index]):.3g}", f"{float(norms[index]):.4g}"]
        if scales is not None:
            row.append(bytes(scales[index].view(torch.uint8).tolist()).hex())
        cells.append(row)
    lines = -(-len(cells) // side_by_side)
    for line in range(lines):
        rows.add_row(*(cell for row in cells[line::lines] for cell in row))
    rows.caption = "(key): past the length" if used < keys.shape[0] else None
    return rows


def _key_table(values: torch.Tensor, scales: torch.Tensor | None, key: int, dim: int) -> Any:
    from sdsa_quant.layout import BLOCK

    rows = table("block", "scale", "values", numbers_from=1, title=f"key {key} decoded")
    rows.columns[2].justify = "left"
    for block in range(dim // BLOCK):
        part = values[block * BLOCK : (block + 1) * BLOCK].tolist()
        scale = "-" if scales is None else f"{float(scales[block]):.4g}"
        rows.add_row(f"{block}", scale, " ".join(f"{value:.4g}" for value in part))
    return rows
