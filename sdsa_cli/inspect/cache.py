"""The part of `sdsa inspect` that reads caches, one or a folder of them, and checks them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sdsa_cli.output import Output, fields_table, heading, table
from sdsa_cli.text import byte_count, counted, describe_lengths, percent

from .documents import CacheDocument, CacheRecord, CachesDocument, ScaleShares

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sdsa_quant.files.cache_file import CacheFile, ScaleCounts


def cache_files(folder: str) -> list[Path]:
    """The caches among the ``*.safetensors`` files of a folder, in natural order."""
    from sdsa_quant.files.kinds import CACHE
    from sdsa_quant.files.names import natural_order
    from sdsa_quant.files.safetensors_reader import header_metadata

    files = sorted(Path(folder).glob("*.safetensors"), key=lambda file: natural_order(file.name))
    return [file for file in files if header_metadata(file).get("format") == CACHE]


def inspect_cache(sink: Output, path: str) -> None:
    """Show a cache and check it.

    Raises
    ------
    CheckFailedError
        It is not valid; what could be read of it has been shown.
    """
    from sdsa_quant.errors import CheckFailedError

    record = check_cache(path)
    fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    sink.publish(CacheDocument(**fields), *([] if record.pages is None else _cache_report(record)))
    if record.reason is not None:
        raise CheckFailedError(record.reason)


def inspect_folder(sink: Output, folder: str, files: Sequence[Path]) -> None:
    """Show and check the caches of a folder, a line each.

    Raises
    ------
    CheckFailedError
        Some are not valid; all have been shown.
    """
    from sdsa_quant.errors import CheckFailedError

    records = [check_cache(str(file)) for file in files]
    sink.publish(
        CachesDocument(path=folder, caches=records), *_folder_report(folder, files, records)
    )
    bad = [record.reason for record in records if not record.valid]
    if bad:
        raise CheckFailedError(f"{len(bad)} of {counted(len(files), 'cache')} not valid: {bad[0]}")


def check_cache(path: str) -> CacheRecord:
    """What a cache is, as far as it can be read, and whether it is valid."""
    from sdsa_quant.errors import CheckFailedError, InputError
    from sdsa_quant.files.cache_file import count_scales, open_cache, validate_cache
    from sdsa_quant.files.safetensors_reader import header_metadata

    record = CacheRecord(path=path, valid=True, reason=None, header=header_metadata(path))
    try:
        cache = open_cache(path)
        record = _cache_record(path, cache)
        validate_cache(cache)
        scales = count_scales(cache)
    except (InputError, CheckFailedError) as error:
        return dataclasses.replace(record, valid=False, reason=str(error))
    return dataclasses.replace(record, scales=None if scales is None else _scale_shares(scales))


def _cache_record(path: str, cache: CacheFile) -> CacheRecord:
    from sdsa_quant.layout import BF16_RECORD_BYTES, ratio_to_bf16

    bf16_bytes = cache.pages * BF16_RECORD_BYTES
    return CacheRecord(
        path=path,
        valid=True,
        reason=None,
        header=cache.header.metadata(),
        requests=cache.context_lengths.shape[0],
        keys=int(cache.context_lengths.sum()),
        context_lengths=cache.context_lengths.tolist(),
        blocks=cache.block_table.shape[1],
        pages=cache.pages,
        cache_bytes=cache.cache_bytes,
        file_bytes=cache.file_bytes,
        bf16_bytes=bf16_bytes,
        ratio_to_bf16=ratio_to_bf16(cache.pages, cache.cache_bytes),
    )


def _scale_shares(scales: ScaleCounts) -> ScaleShares:
    return ScaleShares(
        count=scales.blocks,
        zero=scales.zero,
        zero_share=scales.share(scales.zero),
        subnormal=scales.subnormal,
        subnormal_share=scales.share(scales.subnormal),
        largest=scales.largest,
        largest_share=scales.share(scales.largest),
    )


def _cache_report(record: CacheRecord) -> list[RenderableType]:
    from sdsa_quant.files.cache_header import CacheHeader

    header, ratio = record.header, record.ratio_to_bf16
    transform = CacheHeader.from_metadata(header).transform_label
    nvfp4 = header["values"] == "nvfp4"
    smaller = f", {ratio:.2f}x smaller than BF16" if nvfp4 and ratio is not None else ""
    fields = {
        "format": header["values"],
        "layout": header["layout"],
        "scales": f"{header['scale_order']} order, rule {header['rule']}",
        "transform": transform,
        "source": header["source"] or "-",
        "requests": f"{record.requests:,}",
        "lengths": describe_lengths(record.context_lengths or ()),
        "block table": f"{record.requests:,} x {record.blocks:,}",
        "pages": f"{record.pages:,}",
        "bytes": f"{byte_count(record.cache_bytes or 0)}{smaller}",
        **_describe_scales(record.scales),
        "valid": "yes" if record.valid else "no",
    }
    if not nvfp4:
        del fields["scales"]
    if transform == "none":
        del fields["transform"]
    title = heading(f"{record.path}: a cache, version {header['version']}")
    return [title, fields_table(fields)]


def _folder_report(
    folder: str, files: Sequence[Path], records: Sequence[CacheRecord]
) -> list[RenderableType]:
    from sdsa_quant.files.names import without_common_ends

    pattern, names = without_common_ends([file.name for file in files])
    total = sum(record.file_bytes or 0 for record in records)
    title = f"{folder}: {counted(len(files), 'cache')}, {total:,} bytes"
    rows = table("*", "format", "requests", "keys", "pages", "bytes", "valid", style="grid")
    for name, record in zip(names, records, strict=True):
        sizes = (record.requests, record.keys, record.pages, record.cache_bytes)
        numbers = ("-" if size is None else f"{size:,}" for size in sizes)
        key_format = record.header.get("values", "-")
        rows.add_row(name, key_format, *numbers, "yes" if record.valid else "no")
    report: list[RenderableType] = [heading(title), f"files  {pattern}", rows]
    others = len(list(Path(folder).glob("*.safetensors"))) - len(files)
    if others:
        report.append(f"{counted(others, 'other file')} of the folder left out: not of caches")
    return report


def _describe_scales(scales: ScaleShares | None) -> dict[str, str]:
    """Lines on the blocks of used keys; none for BF16 and for a cache that is not valid."""
    if scales is None:
        return {}
    blocks = f"{scales.count:,} of used keys"
    if not scales.count:
        return {"blocks": blocks}
    zero, subnormal, largest = (
        percent(math.nan if share is None else share)
        for share in (scales.zero_share, scales.subnormal_share, scales.largest_share)
    )
    return {
        "blocks": blocks,
        "  zero scale": f"{zero} (flushed, or all zeros)",
        "  subnormal scale": subnormal,
        "  scale of 448": f"{largest} (saturated, or nearly)",
    }
