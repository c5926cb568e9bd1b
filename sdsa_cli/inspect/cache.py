"""The part of `sdsa inspect` that reads caches: their header, their scales, their validity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sdsa_cli.json_documents import command_document
from sdsa_cli.output import Output, fields_table, heading
from sdsa_cli.text import byte_count, describe_transform, percent

from .text import describe_lengths

if TYPE_CHECKING:
    from sdsa_quant.files.cache_file import CacheFile, ScaleCounts


def inspect_cache(out: Output, path: str) -> None:
    """Show a cache and check it.

    Raises
    ------
    CheckFailedError
        It is not valid; what could be read of it has been shown.
    """
    from sdsa_quant.errors import CheckFailedError

    record = check_cache(path)
    if "pages" in record:
        out.result(*_cache_report(path, record))
    out.document(command_document("inspect", {"kind": "cache", **record}))
    if not record["valid"]:
        raise CheckFailedError(record["reason"])


def check_cache(path: str) -> dict[str, Any]:
    """What a cache is, as far as it can be read, and whether it is valid: fields for JSON."""
    from sdsa_quant.errors import CheckFailedError, InputError
    from sdsa_quant.files.cache_file import count_scales, open_cache, validate_cache
    from sdsa_quant.files.safetensors_reader import header_metadata

    reason, scales = None, None
    record: dict[str, Any] = {"header": header_metadata(path)}
    try:
        cache = open_cache(path)
        record = _cache_record(cache)
        validate_cache(cache)
        scales = count_scales(cache)
    except (InputError, CheckFailedError) as error:
        reason = str(error)
    if "pages" in record:
        record["scales"] = None if scales is None else _scales_record(scales)
    return {"path": path, "valid": reason is None, "reason": reason, **record}


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


def _scales_record(scales: ScaleCounts) -> dict[str, Any]:
    return {
        "count": scales.blocks,
        "zero": scales.zero,
        "zero_share": scales.share(scales.zero),
        "subnormal": scales.subnormal,
        "subnormal_share": scales.share(scales.subnormal),
        "largest": scales.largest,
        "largest_share": scales.share(scales.largest),
    }


def _cache_report(path: str, record: dict[str, Any]) -> list[Any]:
    from sdsa_quant.files.cache_header import CacheHeader

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
        **_describe_scales(record["scales"]),
        "valid": "yes" if record["valid"] else "no",
    }
    if not nvfp4:
        del fields["scales"]
    if transform == "none":
        del fields["transform"]
    title = heading(f"{path}: a cache, version {header['version']}")
    return [title, fields_table(fields)]


def _describe_scales(scales: dict[str, Any] | None) -> dict[str, str]:
    """Lines on the blocks of used keys; none for BF16 and for a cache that is not valid."""
    if scales is None:
        return {}
    blocks = f"{scales['count']:,} of used keys"
    if not scales["count"]:
        return {"blocks": blocks}
    return {
        "blocks": blocks,
        "  zero scale": f"{percent(scales['zero_share'])} (flushed, or all zeros)",
        "  subnormal scale": percent(scales["subnormal_share"]),
        "  scale of 448": f"{percent(scales['largest_share'])} (saturated, or nearly)",
    }
