"""`sdsa quantize-cache`: captured keys to paged cache files."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .json_documents import command_document
from .options import DeviceOption, ForceFlag, JsonFlag, choose_device, examples
from .output import Output, fields_table, heading, table
from .text import describe_transform, error_size, percent

if TYPE_CHECKING:
    from sdsa_quant.accuracy.blocks import BlockStatistics
    from sdsa_quant.captures.keys import CapturedKeys
    from sdsa_quant.files.cache_header import CacheHeader
    from sdsa_quant.files.tensor_source import TensorSource
    from sdsa_quant.quantize_cache import QuantizedCache, Quantizer

COMMAND = "quantize-cache"
EXAMPLES = examples(
    "sdsa quantize-cache keys.safetensors -o cache.safetensors",
    "sdsa quantize-cache keys.safetensors -o requests.safetensors --lengths lengths",
    "sdsa quantize-cache keys.safetensors -o bf16.safetensors --format bf16",
    "sdsa quantize-cache capture/ --keys 'layers.*.keys' -o caches/",
    "sdsa quantize-cache layers/ --keys '*:keys' --lengths '*:lengths' -o layer-caches/",
    "sdsa quantize-cache keys.safetensors -o rotated.safetensors --rotate hadamard --gain auto",
    "sdsa quantize-cache keys.safetensors -o cache.safetensors --force --json",
)
# Above these a cache is remarked on. Normally distributed keys lose 0.095 and no block.
_HIGH_ERROR = 0.25  # relative L2
_HIGH_SHARE = 0.1  # of blocks, flushed or saturated


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
            help="Integer tensor of each request's length, or of offsets from 0 as in cu_seqlens; "
            "or a pattern, such as 'layers.*.lengths' for each layer's own. Default: one request.",
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
    numeric order. In a folder whose files share names, FILE:NAME is a tensor. A cache appears whole
    or not at all, also when the run is killed. What is done to keys before they are stored (rotate,
    gain, center) is in the cache's header, and sdsa score goes by it. A cache that loses much is
    remarked on in a line on stderr.
    """
    from sdsa_quant.caches import plan_caches
    from sdsa_quant.files.cache_header import CacheHeader
    from sdsa_quant.formats.transforms import TransformChoice

    plan = plan_caches(
        source,
        output,
        key_names=keys_pattern,
        lengths=lengths_name,
        header=CacheHeader(values, layout, scale_order, rule=rule),
        transform=TransformChoice(rotate, gain, center),
        nonfinite=nonfinite,
        force=force,
    )
    device = choose_device(device)
    out = Output(as_json=as_json)
    with out.progress("quantizing", plan.total_keys) as advance:
        progress = _in_steps(advance)
        built = plan.build(device=device, progress=progress, quantize=_quantizer(device))
    caches, seconds = built.caches, built.seconds
    out.result(*_report(plan.source, caches, seconds, lengths_name))
    out.document(_document(source, device, nonfinite, caches, seconds))
    poor = [cache for cache in caches if _loses_much(cache)]
    if poor:
        out.note(_describe_loss(poor, len(caches), nonfinite))


def _in_steps(advance: Callable[[int], None]) -> Callable[[int, int], None]:
    """What shows how much is done by what shows how much more is."""
    shown = 0

    def show(done: int, total: int) -> None:
        nonlocal shown
        advance(done - shown)
        shown = done

    return show


def _quantizer(device: str) -> Quantizer:
    """On a GPU one kernel, where there is Triton for it; else torch's operations."""
    from sdsa_kernels.device import can_find
    from sdsa_kernels.quantize_write import quantize_keys
    from sdsa_quant.formats.nvfp4 import quantize_nvfp4

    on_gpu = device.startswith("cuda") and can_find("triton")
    return quantize_keys if on_gpu else quantize_nvfp4


def _loses_much(cache: QuantizedCache) -> bool:
    """Whether a cache is hardly of use. False of one without keys, whose numbers are NaN."""
    statistics = cache.statistics
    lost = statistics.share(statistics.flushed), statistics.share(statistics.saturated)
    return statistics.relative_error > _HIGH_ERROR or max(lost) > _HIGH_SHARE


def _describe_loss(poor: Sequence[QuantizedCache], caches: int, nonfinite: str) -> str:
    """One line on the worst cache and what would help it."""
    worst = max(poor, key=lambda cache: cache.statistics.relative_error)
    statistics = worst.statistics
    helpful = ["--format bf16"]
    if nonfinite == "error":  # else keys cannot be transformed
        helpful.insert(0, _helpful_transform(worst.header))
    which = str(worst.path)
    if caches > 1:
        which = f"{len(poor)} of {caches} caches lose much; the worst is {which}"
    return (
        f"note: {which}: relative error {error_size(statistics.relative_error)}, "
        f"{percent(statistics.share(statistics.flushed))} of blocks flushed to zero, "
        f"{percent(statistics.share(statistics.saturated))} saturated (noted above {_HIGH_ERROR}, "
        f"{percent(_HIGH_SHARE)}); try {' or '.join(helpful)}"
    )


def _helpful_transform(header: CacheHeader) -> str:
    """Option that may bring blocks back into the range of NVFP4."""
    if header.gain == 1.0:
        return "--gain auto"
    return "--rotate hadamard" if header.rotate == "none" else "--center channel"


def _report(
    tensors: TensorSource, caches: Sequence[QuantizedCache], seconds: float, lengths: str | None
) -> list[Any]:
    from sdsa_quant.captures.keys import lengths_hint

    report = _one_cache(caches[0]) if len(caches) == 1 else _many_caches(caches)
    keys = sum(sum(cache.keys.context_lengths) for cache in caches)
    closing = f"{keys:,} keys in {seconds:.2f} s"
    hint = lengths_hint(tensors)
    if lengths is None and hint:
        each = "each all one request" if len(caches) > 1 else "all one request"
        closing += f"; {each}, --lengths {shlex.quote(hint)} would divide them"
    return [*report, closing]


def _one_cache(cache: QuantizedCache) -> list[Any]:
    header, statistics = cache.header, cache.statistics
    stored = f"{header.format}, {header.layout}"
    if header.format == "nvfp4":
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


def _error(statistics: BlockStatistics) -> str:
    """Relative error, ``-`` where there are no keys."""
    return error_size(statistics.relative_error if statistics.keys else None)


def _dtype_and_shape(keys: CapturedKeys) -> str:
    return f"{keys.tensor.dtype} {list(keys.tensor.shape)}"


def _many_caches(caches: Sequence[QuantizedCache]) -> list[Any]:
    """A line for each cache, under what the names of their tensors and files have in common."""
    from sdsa_quant.files.tensor_source import without_common_ends

    values, cache_bytes = caches[0].header.format, sum(cache.cache_bytes for cache in caches)
    title = f"{len(caches)} {values} caches"
    if values == "nvfp4" and cache_bytes:
        ratio = sum(cache.bf16_bytes for cache in caches) / cache_bytes
        title += f", {ratio:.2f}x smaller than BF16"
    keys_pattern, names = without_common_ends([cache.keys.name for cache in caches])
    paths_pattern, files = without_common_ends([str(cache.path) for cache in caches])
    rows = table("*", "pages", "bytes", "flushed", "subnormal", "saturated", "rel. error")
    rows.padding, rows.pad_edge = (0, 1, 0, 0), False
    for column in rows.columns[1:]:
        column.no_wrap = True
    rows.columns[0].overflow = "fold"
    if files != names:
        rows.add_column("file *", overflow="fold")
    for cache, name, file in zip(caches, names, files, strict=True):
        statistics = cache.statistics
        shares = [
            percent(statistics.share(count))
            for count in (statistics.flushed, statistics.subnormal, statistics.saturated)
        ]
        numbers = f"{cache.pages:,}", f"{cache.cache_bytes:,}", *shares, _error(statistics)
        rows.add_row(name, *numbers, *([] if files == names else [file]))
    return [heading(title), f"keys    {keys_pattern}", f"caches  {paths_pattern}", rows]


def _document(
    source: str,
    device: str,
    nonfinite: str,
    caches: Sequence[QuantizedCache],
    seconds: float,
) -> dict[str, Any]:
    from sdsa_quant.environment import describe_environment

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
    if header.format == "nvfp4":
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
        "values": header.format,
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
