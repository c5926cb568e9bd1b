"""`sdsa quantize-cache`: captured keys to paged cache files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .json_documents import command_document
from .options import DeviceOption, ForceFlag, JsonFlag, choose_device, examples
from .output import Output, fields_table, heading, table
from .output_paths import output_paths, prepare_outputs
from .text import describe_transform, percent

if TYPE_CHECKING:
    from sdsa_quant.key_selection import CapturedKeys
    from sdsa_quant.quantize_cache import QuantizedCache
    from sdsa_quant.tensor_source import TensorSource

COMMAND = "quantize-cache"
EXAMPLES = examples(
    "sdsa quantize-cache keys.safetensors -o cache.safetensors",
    "sdsa quantize-cache keys.safetensors -o requests.safetensors --lengths lengths",
    "sdsa quantize-cache keys.safetensors -o bf16.safetensors --format bf16",
    "sdsa quantize-cache capture/ --keys 'layers.*.keys' -o caches/",
    "sdsa quantize-cache keys.safetensors -o rotated.safetensors --rotate hadamard --gain auto",
    "sdsa quantize-cache keys.safetensors -o cache.safetensors --force --json",
)


def quantize_cache(
    source: Annotated[
        str,
        typer.Argument(
            metavar="KEYS",
            help="A safetensors file, a folder of them, or a *.safetensors.index.json.",
        ),
    ],
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="CACHE",
            help="The cache file. For several key tensors: a folder (ending in /) for "
            "NAME.safetensors, or a path in which {name} stands for the tensor's name.",
        ),
    ],
    values: Annotated[
        Literal["nvfp4", "bf16"], typer.Option("--format", help="How the cache stores keys.")
    ] = "nvfp4",
    keys_pattern: Annotated[
        str | None,
        typer.Option(
            "--keys",
            metavar="NAME",
            help="Tensor of keys, or a pattern such as 'layers.*.keys' for one cache each. "
            "Default: the tensor named keys, or the only float tensor of 128 columns.",
        ),
    ] = None,
    lengths_name: Annotated[
        str | None,
        typer.Option(
            "--lengths",
            metavar="NAME",
            help="Integer tensor of each request's length, or of offsets from 0 as in cu_seqlens. "
            "Default: one request.",
        ),
    ] = None,
    layout: Annotated[
        Literal["interleaved", "separate"],
        typer.Option("--layout", help="Keys and scales of a page in one record, or two tensors."),
    ] = "interleaved",
    scale_order: Annotated[
        Literal["linear", "128x4"],
        typer.Option("--scale-order", help="Order of the scales; 128x4 needs --layout separate."),
    ] = "linear",
    rule: Annotated[
        Literal["amax/6", "4over6"],
        typer.Option(
            "--rule", help="How NVFP4 scales are chosen; 4over6 takes amax/4 where it loses less."
        ),
    ] = "amax/6",
    rotate: Annotated[
        Literal["none", "hadamard"],
        typer.Option("--rotate", help="Rotate keys, and by scoring the query rows alike."),
    ] = "none",
    gain: Annotated[
        str,
        typer.Option(
            "--gain",
            metavar="FACTOR",
            help="Multiply keys by a power of two: none, auto (the largest that saturates no "
            "scale), 64, 2^-3.",
        ),
    ] = "none",
    center: Annotated[
        Literal["none", "channel"],
        typer.Option("--center", help="Subtract the mean key, which is stored beside the pages."),
    ] = "none",
    device: DeviceOption = "auto",
    nonfinite: Annotated[
        Literal["error", "saturate"],
        typer.Option(
            "--nonfinite",
            help="Refuse NaN and infinities, or convert them as the hardware does (in a BF16 "
            "cache: infinity to the largest value, NaN to 0).",
        ),
    ] = "error",
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Build paged key caches from captured keys.

    Keys are BF16, F16 or F32: [tokens, 128] with the requests one after another, or
    [requests, tokens, 128] padded and with lengths. Several tensors become one cache each, in
    numeric order. A cache appears whole or not at all, also when the run is killed. What is done to
    keys before they are stored (rotate, gain, center) is in the cache's header, and sdsa score goes
    by it.
    """
    from sdsa_quant.cache_header import CacheHeader
    from sdsa_quant.key_selection import captured_keys, select_keys
    from sdsa_quant.quantize_cache import quantize_cache as write_cache
    from sdsa_quant.tensor_source import open_tensors
    from sdsa_quant.transforms import TransformChoice

    header = CacheHeader(values, layout, scale_order, Path(source).name, rule)
    transform = TransformChoice(rotate, gain, center)
    tensors = open_tensors(source)
    selected = [
        captured_keys(tensors, tensor, lengths_name)
        for tensor in select_keys(tensors, keys_pattern)
    ]
    paths = output_paths(output, [keys.name for keys in selected])
    prepare_outputs(paths, tensors.files, force=force)
    device = choose_device(device)
    out = Output(as_json=as_json)
    started = time.perf_counter()
    with out.progress("quantizing", sum(sum(keys.context_lengths) for keys in selected)) as advance:
        caches = [
            write_cache(
                keys,
                path,
                header,
                device=device,
                transform=transform,
                nonfinite=nonfinite,
                force=force,
                advance=advance,
            )
            for keys, path in zip(selected, paths, strict=True)
        ]
    seconds = time.perf_counter() - started
    out.result(*_report(tensors, caches, seconds, lengths_name))
    out.document(_document(source, device, nonfinite, caches, seconds))


def _report(
    tensors: TensorSource, caches: Sequence[QuantizedCache], seconds: float, lengths: str | None
) -> list[Any]:
    from sdsa_quant.key_selection import lengths_candidates

    report = _one_cache(caches[0]) if len(caches) == 1 else _many_caches(caches)
    keys = sum(sum(cache.keys.context_lengths) for cache in caches)
    closing = f"{keys:,} keys in {seconds:.2f} s"
    candidates = lengths_candidates(tensors)
    if lengths is None and candidates:
        closing += f"; all one request, --lengths {candidates[0]} would divide them"
    return [*report, closing]


def _one_cache(cache: QuantizedCache) -> list[Any]:
    header, statistics = cache.header, cache.statistics
    stored = f"{header.values}, {header.layout}"
    if header.values == "nvfp4":
        stored += f", {header.scale_order} scales, rule {header.rule}"
    fields = {
        "keys": f"{cache.keys.name}, {_dtype_and_shape(cache.keys)}",
        "requests": f"{len(cache.keys.context_lengths):,}",
        "stored as": stored,
        "pages": f"{cache.pages:,}",
        "bytes": f"{cache.cache_bytes:,}",
    }
    if header.is_transformed:
        fields["transform"] = describe_transform(header)
    if header.values == "nvfp4":
        fields["bytes"] += f", {cache.ratio_to_bf16:.2f}x smaller than BF16's {cache.bf16_bytes:,}"
        fields |= {
            "blocks": f"{statistics.blocks:,} of 16 values",
            "  flushed to zero": percent(statistics.share(statistics.flushed)),
            "  subnormal scale": percent(statistics.share(statistics.subnormal)),
            "  saturated": percent(statistics.share(statistics.saturated)),
        }
    if statistics.nonfinite:
        fields["non-finite values"] = f"{statistics.nonfinite:,} converted, not in the error"
    measured = "transformed keys" if header.is_transformed else "all keys"
    fields["relative error"] = f"{statistics.relative_error:.4g} (L2, {measured})"
    return [heading(str(cache.path)), fields_table(fields)]


def _dtype_and_shape(keys: CapturedKeys) -> str:
    return f"{keys.tensor.dtype} {list(keys.tensor.shape)}"


def _many_caches(caches: Sequence[QuantizedCache]) -> list[Any]:
    rows = table("keys", "pages", "bytes", "flushed", "subnormal", "saturated", "rel. error")
    rows.columns[0].overflow = "fold"
    values, folder = caches[0].header.values, caches[0].path.parent
    title = f"{len(caches)} {values} caches in {folder}"
    cache_bytes = sum(cache.cache_bytes for cache in caches)
    if values == "nvfp4" and cache_bytes:
        ratio = sum(cache.bf16_bytes for cache in caches) / cache_bytes
        title += f", {ratio:.2f}x smaller than BF16"
    for cache in caches:
        statistics = cache.statistics
        shares = [
            percent(statistics.share(count))
            for count in (statistics.flushed, statistics.subnormal, statistics.saturated)
        ]
        rows.add_row(
            cache.keys.name,
            f"{cache.pages:,}",
            f"{cache.cache_bytes:,}",
            *shares,
            f"{statistics.relative_error:.4g}",
        )
    return [heading(title), rows]


def _document(
    source: str,
    device: str,
    nonfinite: str,
    caches: Sequence[QuantizedCache],
    seconds: float,
) -> dict[str, Any]:
    from .environment import describe_environment

    return command_document(
        COMMAND,
        {
            "input": source,
            "device": device,
            "nonfinite": nonfinite,
            "seconds": seconds,
            "caches": [_cache_record(cache) for cache in caches],
            "environment": describe_environment(),
        },
    )


def _cache_record(cache: QuantizedCache) -> dict[str, Any]:
    header, statistics = cache.header, cache.statistics
    blocks = None
    if header.values == "nvfp4":
        blocks = {
            "count": statistics.blocks,
            "flushed": statistics.flushed,
            "flushed_share": statistics.share(statistics.flushed),
            "subnormal": statistics.subnormal,
            "subnormal_share": statistics.share(statistics.subnormal),
            "saturated": statistics.saturated,
            "saturated_share": statistics.share(statistics.saturated),
        }
    return {
        "path": cache.path,
        "tensor": cache.keys.name,
        "values": header.values,
        "layout": header.layout,
        "scale_order": header.scale_order,
        "rule": header.metadata()["rule"],
        "rotate": header.rotate,
        "gain": header.gain,
        "center": header.center,
        "requests": len(cache.keys.context_lengths),
        "keys": sum(cache.keys.context_lengths),
        "pages": cache.pages,
        "cache_bytes": cache.cache_bytes,
        "file_bytes": cache.file_bytes,
        "bf16_bytes": cache.bf16_bytes,
        "ratio_to_bf16": cache.ratio_to_bf16,
        "blocks": blocks,
        "nonfinite_values": statistics.nonfinite,
        "relative_error": statistics.relative_error,
    }
