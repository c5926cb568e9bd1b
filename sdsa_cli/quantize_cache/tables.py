"""What `sdsa quantize-cache` shows on a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sdsa_cli.output import fields_table, heading, table
from sdsa_cli.text import error_size, percent

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sdsa_quant.accuracy.blocks import BlockStatistics
    from sdsa_quant.captures.keys import CapturedKeys
    from sdsa_quant.files.tensor_source import TensorSource
    from sdsa_quant.quantize_cache import QuantizedCache

_MUCH = 0.1  # of a file, from which on a part of it is named
_PAGE_KEYS = 64


def cache_tables(
    tensors: TensorSource, caches: Sequence[QuantizedCache], seconds: float, lengths: str | None
) -> list[RenderableType]:
    """What a terminal shows: one cache in full, or a line for each of several."""
    from sdsa_quant.captures.keys import lengths_hint

    report = _one_cache(caches[0]) if len(caches) == 1 else _many_caches(caches)
    keys = sum(sum(cache.keys.context_lengths) for cache in caches)
    closing = f"{keys:,} keys in {seconds:.2f} s"
    hint = lengths_hint(tensors)
    if lengths is None and hint and not any(cache.keys.lengths_name for cache in caches):
        each = "each all one request" if len(caches) > 1 else "all one request"
        closing += f"; {each}, --lengths {shlex.quote(hint)} would divide them"
    return [*report, closing]


def _one_cache(cache: QuantizedCache) -> list[RenderableType]:
    header, statistics = cache.header, cache.statistics
    stored = f"{header.format}, {header.layout}"
    if header.format == "nvfp4":
        stored += f", {header.scale_order} scales, rule {header.rule}"
    fields = {
        "keys": f"{cache.keys.name}, {_dtype_and_shape(cache.keys)}",
        "requests": _requests(cache.keys),
        "stored as": stored,
        "pages": f"{cache.pages:,}",
        "bytes": f"{cache.cache_bytes:,}",
    }
    fields["file"] = _file_size(cache)
    if header.is_transformed:
        fields["transform"] = header.transform_label
    if header.calibration != "none":
        fields["calibration"] = header.calibration
    if header.format == "nvfp4":
        if cache.pages:
            smaller = f"{cache.ratio_to_bf16:.2f}x smaller than BF16's {cache.bf16_bytes:,}"
            fields["bytes"] += f", {smaller}"
        fields |= {
            "blocks": f"{statistics.blocks:,} of 16 values",
            "  flushed to zero": percent(statistics.share(statistics.flushed)),
            "  subnormal scale": percent(statistics.share(statistics.subnormal)),
            "  saturated": percent(statistics.share(statistics.saturated)),
        }
    if statistics.nonfinite:
        fields["non-finite values"] = f"{statistics.nonfinite:,} converted, not in the error"
    measured = "transformed keys" if header.is_transformed else "all keys"
    error = _error(statistics)
    fields["relative error"] = error if error == "-" else f"{error} (L2, {measured})"
    return [heading(str(cache.path)), fields_table(fields)]


def _file_size(cache: QuantizedCache) -> str:
    """Bytes of the whole file beside those of the keys in BF16, and what else takes much of it."""
    text = f"{cache.file_bytes:,} bytes"
    if cache.key_bytes:
        ratio = cache.key_bytes / cache.file_bytes
        size = f"{ratio:.2f}x smaller" if ratio >= 1 else f"{1 / ratio:.2f}x LARGER"
        text += f", {size} than the keys in BF16, {cache.key_bytes:,}"
    parts = []
    if cache.pages and cache.empty_keys * cache.cache_bytes > _MUCH * cache.pages * _PAGE_KEYS * (
        cache.file_bytes
    ):
        padding = cache.empty_keys * cache.cache_bytes // (cache.pages * _PAGE_KEYS)
        parts.append(f"{padding:,} of it fill up pages of {_PAGE_KEYS} keys")
    if cache.table_bytes > _MUCH * cache.file_bytes:
        parts.append(f"{cache.table_bytes:,} are the block table, requests x the longest one")
    return "; ".join([text, *parts])


def _requests(keys: CapturedKeys) -> str:
    """How many there are, and by which tensor."""
    by = "" if keys.lengths_name is None else f" by {keys.lengths_name}"
    return f"{len(keys.context_lengths):,}{by}"


def _error(statistics: BlockStatistics) -> str:
    """Relative error, ``-`` where there are no keys."""
    return error_size(statistics.relative_error if statistics.keys else None)


def _dtype_and_shape(keys: CapturedKeys) -> str:
    return f"{keys.tensor.dtype} {list(keys.tensor.shape)}"


def _many_caches(caches: Sequence[QuantizedCache]) -> list[RenderableType]:
    """A line for each cache, under what the names of their tensors and files have in common."""
    from sdsa_quant.files.names import without_common_ends

    key_format, cache_bytes = caches[0].header.format, sum(cache.cache_bytes for cache in caches)
    title = f"{len(caches)} {key_format} caches"
    if key_format == "nvfp4" and cache_bytes:
        ratio = sum(cache.bf16_bytes for cache in caches) / cache_bytes
        title += f", {ratio:.2f}x smaller than BF16"
    keys_pattern, names = without_common_ends([cache.keys.name for cache in caches])
    paths_pattern, files = without_common_ends([str(cache.path) for cache in caches])
    rows = table(
        "*", "pages", "bytes", "flushed", "subnormal", "saturated", "rel. error",
        *([] if files == names else ["file *"]),
        text=("file *",), style="grid",
    )  # fmt: skip
    for cache, name, file in zip(caches, names, files, strict=True):
        statistics = cache.statistics
        shares = [
            percent(statistics.share(count))
            for count in (statistics.flushed, statistics.subnormal, statistics.saturated)
        ]
        numbers = f"{cache.pages:,}", f"{cache.cache_bytes:,}", *shares, _error(statistics)
        rows.add_row(name, *numbers, *([] if files == names else [file]))
    return [heading(title), f"keys    {keys_pattern}", f"caches  {paths_pattern}", rows]
