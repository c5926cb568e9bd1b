"""`sdsa study`: what key formats and transforms would do to the top-k of a model's indexers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from sdsa_cli.options import (
    DeviceOption,
    ForceFlag,
    JsonFlag,
    SoftmaxScaleOption,
    choose_device,
    examples,
)
from sdsa_cli.output import Output
from sdsa_cli.output_paths import check_outputs, folders_made, refuse_inputs, require_name
from sdsa_cli.score.inputs import (
    DEFAULT_TOP_K_TEXT,
    at_least_one,
    choose_softmax_scale,
    parse_numbers,
    parse_top_k,
)
from sdsa_quant.study.inputs import DEFAULT_FORMATS
from sdsa_quant.study.report import REPORT_NAME

from .limits import check_limits, check_validity, parse_limits
from .pages import CSV_NAME, HTML_NAME, write_pages
from .plots import require_matplotlib
from .tables import study_tables

COMMAND = "study"
EXAMPLES = examples(
    "sdsa study keys.safetensors queries.safetensors -o report --lengths lengths",
    "sdsa study capture/ capture/ -o layers --formats nvfp4,fp8 --rotate none,hadamard",
    "sdsa study keys.safetensors queries.safetensors -o causal --causal --center none,channel",
    "sdsa study capture/ capture/ -o checked --no-plots --fail-below recall@2048.p1=0.95",
    "torchrun --nproc-per-node 8 -m sdsa_cli study capture/ capture/ -o layers",
)
_PROGRESS_STEPS = 1000


def study(
    keys: Annotated[
        Path,
        typer.Argument(
            metavar="KEYS",
            help="Unquantized keys: a safetensors file, a folder of them, or an index.",
        ),
    ],
    queries: Annotated[
        Path,
        typer.Argument(metavar="QUERIES", help="Query rows, likewise; both may be the same files."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the report goes.")
    ],
    keys_pattern: Annotated[
        str | None,
        typer.Option(
            "--keys",
            metavar="NAME",
            help="Key tensors: a name, or a pattern such as 'layers.*.keys'; default: keys, "
            "*.keys, *.key or *.k. Layers are matched by the text that the wildcard stands for, "
            "else by the numbers in the names.",
        ),
    ] = None,
    query_name: Annotated[
        str | None,
        typer.Option(
            "--query-name",
            metavar="NAME",
            help="Query tensors, likewise; default: queries and so on.",
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            "--lengths",
            metavar="NAME",
            help="Tensor of request lengths or offsets, one for all layers or a pattern; default: "
            "each layer is one request.",
        ),
    ] = None,
    rows_per_group: Annotated[
        int | None,
        typer.Option(
            "--rows-per-group",
            metavar="ROWS",
            help="Consecutive rows of one request; default: what the queries' shape or metadata "
            "says, else 1.",
        ),
    ] = None,
    requests: Annotated[
        str | None,
        typer.Option(
            "--requests",
            metavar="LIST|NAME",
            help="Request of each group: 0,0,1, or a tensor beside the queries; default: groups "
            "are spread evenly.",
        ),
    ] = None,
    causal: Annotated[
        bool,
        typer.Option(
            "--causal",
            help="A row sees the keys up to its own position; the rows of a request are its last "
            "positions.",
        ),
    ] = False,
    positions: Annotated[
        str | None,
        typer.Option(
            "--positions",
            metavar="NAME",
            help="Tensor of each row's position, from 0, for causal rows that are not the last.",
        ),
    ] = None,
    formats: Annotated[
        str,
        typer.Option(
            "--formats",
            metavar="LIST",
            show_default="all except bf16",
            help="Formats to compare: bf16, nvfp4, nvfp4-mixed (BF16 queries), nvfp4-4over6, "
            "mxfp4, fp8.",
        ),
    ] = ",".join(DEFAULT_FORMATS),
    rotate: Annotated[
        str, typer.Option("--rotate", metavar="LIST", help="Rotations to try: none, hadamard.")
    ] = "none",
    gain: Annotated[
        str,
        typer.Option(
            "--gain",
            metavar="LIST",
            help="Gains to try: none, auto, or powers of two to multiply keys by: 64, 2^-3.",
        ),
    ] = "none",
    center: Annotated[
        str,
        typer.Option(
            "--center",
            metavar="LIST",
            help="Centers to try: none, channel. Channel subtracts each layer's mean key, which "
            "shifts all scores of a row alike and by itself changes no ranking.",
        ),
    ] = "none",
    top_k: Annotated[
        str, typer.Option("--top-k", metavar="LIST", help="Numbers of keys an indexer selects.")
    ] = DEFAULT_TOP_K_TEXT,
    softmax_scale: SoftmaxScaleOption = None,
    fail_below: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-below",
            metavar="LIMIT",
            help="Exit with 1 if a setting is below this over all layers, such as "
            "recall@2048.p1=0.95; repeatable.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            metavar="N",
            help="Processes to measure with; default: one for each core up to 8, under torchrun "
            "or on a GPU one.",
        ),
    ] = None,
    device: DeviceOption = "auto",
    plots: Annotated[
        bool, typer.Option("--plots/--no-plots", help="Draw pictures; needs matplotlib.")
    ] = True,
    as_json: JsonFlag = False,
    force: ForceFlag = False,
) -> None:
    """Study what formats and transforms of keys do to the top-k, layer by layer.

    Every combination of the listed formats and transforms is measured against the unquantized keys.
    The folder gets report.json, report.csv, report.html and pictures. A study that was interrupted
    continues when the same command is run again. Results are bit-identical, except for the recorded
    time, however often a run is interrupted and however many processes share it.
    """
    top_k_numbers = parse_top_k(top_k)
    limits = parse_limits(fail_below or (), top_k_numbers)
    if plots:
        require_matplotlib()
    _check_outputs(output, (keys, queries), force=force)
    from sdsa_quant.study import run

    sink = Output(as_json=as_json)
    with folders_made([output / REPORT_NAME]), _progress(sink) as progress:
        report = run(
            keys,
            queries,
            output,
            keys_pattern=keys_pattern,
            queries_pattern=query_name,
            lengths=lengths,
            rows_per_group=at_least_one("--rows-per-group", rows_per_group),
            requests=None if requests is None else parse_numbers(requests) or requests,
            causal=causal,
            positions=positions,
            formats=_listed(formats),
            rotate=_listed(rotate),
            gain=_listed(gain),
            center=_listed(center),
            top_k=top_k_numbers,
            softmax_scale=choose_softmax_scale(softmax_scale),
            device=choose_device(device),
            workers=at_least_one("--workers", workers),
            force=force,
            progress=progress,
        )
    if os.environ.get("RANK", "0") != "0":
        return  # another process of torchrun writes and prints
    write_pages(output, report, with_plots=plots)
    sink.document(report)
    sink.result(*study_tables(report), "", f"Report: {output / HTML_NAME}")
    check_validity(report)
    check_limits(report, limits)


@contextmanager
def _progress(sink: Output) -> Iterator[Callable[[int, int], None]]:
    """A progress bar as `run` reports to it."""
    with sink.progress("measuring", _PROGRESS_STEPS) as advance:
        shown = 0

        def show(done: int, total: int) -> None:
            nonlocal shown
            steps = _PROGRESS_STEPS * done // max(total, 1)
            advance(steps - shown)
            shown = steps

        yield show


def _check_outputs(folder: Path, inputs: Sequence[Path], *, force: bool) -> None:
    require_name("-o", str(folder))
    check_outputs([folder / REPORT_NAME], inputs, force=force)
    refuse_inputs([folder / CSV_NAME, folder / HTML_NAME], inputs)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))
