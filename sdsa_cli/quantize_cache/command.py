"""`sdsa quantize-cache`: captured keys to paged cache files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sdsa_cli.options import (
    CenterOption,
    DeviceOption,
    ForceFlag,
    GainOption,
    JsonFlag,
    KeysOption,
    LengthsOption,
    ReportOption,
    RotateOption,
    choose_device,
    examples,
)
from sdsa_cli.output import report_sink

from .document import quantize_cache_document
from .loss import loss_note
from .tables import cache_tables

if TYPE_CHECKING:
    from sdsa_quant.quantize_cache import Quantizer

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
    key_format: Annotated[
        Literal["nvfp4", "bf16"], typer.Option("--format", help="How the cache stores keys.")
    ] = "nvfp4",
    keys_pattern: KeysOption = None,
    lengths_name: LengthsOption = None,
    layout: Annotated[
        Literal["interleaved", "separate"],
        typer.Option("--layout", help="Keys and scales of a page in one record, or two tensors."),
    ] = "interleaved",
    scale_order: Annotated[
        Literal["linear", "128x4"],
        typer.Option("--scale-order", help="Order of the scales; 128x4 needs --layout separate."),
    ] = "linear",
    rule: Annotated[
        Literal["amax/6", "4over6", "search", "covariance"],
        typer.Option(
            "--rule",
            help="How NVFP4 scales are chosen; 4over6 takes amax/4 where it loses less, search the "
            "best of all, covariance what a layer's query rows lose least by.",
        ),
    ] = "amax/6",
    calibration: Annotated[
        str | None,
        typer.Option(
            "--calibration",
            metavar="STATS",
            help="Statistics for --rule covariance, as sdsa calibrate writes them.",
        ),
    ] = None,
    rotate: RotateOption = "none",
    gain: GainOption = "none",
    center: CenterOption = "none",
    device: DeviceOption = "auto",
    nonfinite: Annotated[
        Literal["error", "saturate"],
        typer.Option(
            "--nonfinite",
            help="Refuse NaN and infinities, or convert them as the hardware does (in a BF16 "
            "cache: infinity to the largest value, NaN to 0).",
        ),
    ] = "error",
    json: JsonFlag = False,
    report: ReportOption = None,
    force: ForceFlag = False,
) -> None:
    """Build paged key caches from captured keys.

    Keys are BF16, F16 or F32: [tokens, 128] with the requests one after another, or
    [requests, tokens, 128] padded and with lengths. Several tensors become one cache each, in
    numeric order. In a folder whose files share names, FILE:NAME is a tensor. A cache appears whole
    or not at all, also when the run is killed. What is done to keys before they are stored (rotate,
    gain, center) is in the cache's header, and sdsa score goes by it. A note on stderr warns about
    a cache that loses much.
    """
    from sdsa_quant.caches import plan_caches
    from sdsa_quant.files.cache_header import CacheHeader
    from sdsa_quant.formats.transforms import TransformChoice

    plan = plan_caches(
        source,
        output,
        key_names=keys_pattern,
        lengths=lengths_name,
        header=CacheHeader(key_format, layout, scale_order, rule=rule),
        transform=TransformChoice(rotate, gain, center),
        nonfinite=nonfinite,
        force=force,
        calibration=calibration,
    )
    inputs = [plan.source.path, *([] if calibration is None else [Path(calibration)])]
    sink = report_sink(json, report, outputs=plan.paths, inputs=inputs, force=force)
    device = choose_device(device)
    with sink.progress_of("quantizing") as progress:
        built = plan.build(device=device, progress=progress, quantize=_quantizer(device))
    caches, seconds = built.caches, built.seconds
    document = quantize_cache_document(source, device, nonfinite, caches, seconds)
    sink.publish(document, *cache_tables(plan.source, caches, seconds, lengths_name))
    if note := loss_note(caches, nonfinite):
        sink.note(note)


def _quantizer(device: str) -> Quantizer:
    """On a GPU one kernel, where there is Triton for it; else torch's operations."""
    from sdsa_kernels.device import can_find
    from sdsa_kernels.quantize_write import quantize_keys
    from sdsa_quant.formats.nvfp4 import quantize_nvfp4

    on_gpu = device.startswith("cuda") and can_find("triton")
    return quantize_keys if on_gpu else quantize_nvfp4
