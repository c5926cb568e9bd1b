"""`sdsa study`: what key formats and transforms would do to the top-k of a model's indexers."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sdsa_cli.json_documents import strict_json
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
from sdsa_quant.errors import SdsaError

from .document import COMMAND as COMMAND
from .document import REPORT_NAME, Document, study_document
from .limits import check_limits, check_validity, parse_limits
from .pages import CSV_NAME, HTML_NAME, write_pages
from .plots import require_matplotlib
from .tables import study_tables

if TYPE_CHECKING:
    from sdsa_quant.study.layers import StudyInputs
    from sdsa_quant.study.run import Study
    from sdsa_quant.study.settings import StudySettings

EXAMPLES = examples(
    "sdsa study keys.safetensors queries.safetensors -o report --lengths lengths",
    "sdsa study capture/ capture/ -o layers --formats nvfp4,fp8 --rotate none,hadamard",
    "sdsa study keys.safetensors queries.safetensors -o causal --causal --center none,channel",
    "sdsa study capture/ capture/ -o checked --no-plots --fail-below recall@2048.p1=0.95",
    "torchrun --nproc-per-node 8 -m sdsa_cli study capture/ capture/ -o layers",
)
WORK_FOLDER = "work"
_MOST_WORKERS = 8  # unless asked for more: each takes a few hundred MB


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
        typer.Argument(metavar="QUERIES", help="Query rows, likewise; may be the same files."),
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
            show_default="all but bf16",
            help="Of bf16, nvfp4, nvfp4-mixed (BF16 queries), nvfp4-4over6, mxfp4, fp8.",
        ),
    ] = "nvfp4,nvfp4-mixed,nvfp4-4over6,mxfp4,fp8",
    rotate: Annotated[
        str, typer.Option("--rotate", metavar="LIST", help="Of none, hadamard.")
    ] = "none",
    gain: Annotated[
        str,
        typer.Option(
            "--gain",
            metavar="LIST",
            help="Of none, auto, or powers of two to multiply keys by: 64, 2^-3.",
        ),
    ] = "none",
    center: Annotated[
        str,
        typer.Option(
            "--center",
            metavar="LIST",
            help="Of none, channel: subtract each layer's mean key, which shifts all scores of a "
            "row alike and changes no ranking by itself.",
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
    continues where it was when the same command is run again. The result is the same to the bit,
    but for the time it took, however often that happens and for any number of processes, under
    torchrun too.
    """
    from sdsa_quant.study.layers import StudyInputs

    settings = _settings(formats, rotate, gain, center, top_k, softmax_scale)
    limits = parse_limits(fail_below or (), settings.top_k)
    inputs = StudyInputs(
        keys=keys,
        queries=queries,
        keys_pattern=keys_pattern,
        queries_pattern=query_name,
        lengths=lengths,
        rows_per_group=at_least_one("--rows-per-group", rows_per_group),
        requests=None if requests is None else tuple(parse_numbers(requests)) or requests,
        causal=causal,
        positions=positions,
    )
    if plots:
        require_matplotlib()
    _check_outputs(output, (keys, queries), force=force)
    sink = Output(as_json=as_json)
    document = run_study(
        inputs,
        settings,
        output,
        device=_device_of_rank(choose_device(device)),
        workers=at_least_one("--workers", workers),
        plots=plots,
        force=force,
        sink=sink,
    )
    if document is None:
        return
    sink.document(document)
    sink.result(*study_tables(document), "", f"Report: {output / 'report.html'}")
    check_validity(document)
    check_limits(document, limits)


def run_study(
    inputs: StudyInputs,
    settings: StudySettings,
    output: Path,
    *,
    device: str,
    workers: int | None,
    plots: bool,
    force: bool,
    sink: Output,
) -> Document | None:
    """Measure, reduce and write a report; None on the ranks that only measure."""
    from sdsa_quant.study.ranks import joined_ranks, measure_with_workers
    from sdsa_quant.study.run import open_study, share_units

    started = time.monotonic()
    study = open_study(inputs, settings, output / WORK_FOLDER, device)
    with folders_made([study.folder.path]), joined_ranks(device) as ranks:
        ranks.in_step(lambda: study.folder.prepare(restart=force) if ranks.is_first else None)
        units = share_units(study.units(), ranks.rank, ranks.count)
        processes = workers or _default_workers(ranks.count, device)

        def measure() -> None:
            cost = sum(unit.cost for unit in units)
            with sink.progress("measuring", cost if ranks.is_first else 0) as advance:
                measure_with_workers(study, units, processes, advance)

        try:
            ranks.in_step(measure)
        except SdsaError:
            if ranks.is_first:  # by now no rank is at work
                study.folder.remove_unless_used()
            raise
        if not ranks.is_first:
            return None
        document = _write_report(
            study,
            output,
            timing={
                "seconds": time.monotonic() - started,
                "ranks": ranks.count,
                "joined_by": ranks.joined_by,
                "workers": processes,
            },
            plots=plots,
        )
    study.folder.remove()
    return document


def _write_report(study: Study, output: Path, *, timing: Document, plots: bool) -> Document:
    import json

    from sdsa_quant.files.atomic_file import write_text
    from sdsa_quant.study.summary import summarize_study

    text = strict_json(study_document(study, summarize_study(study), timing))
    write_text(output / REPORT_NAME, text + "\n", force=True)
    # What the pages are made from is what the file holds, so that `sdsa report` makes the same.
    document: Document = json.loads(text)
    write_pages(output, document, with_plots=plots)
    return document


def _check_outputs(folder: Path, inputs: Sequence[Path], *, force: bool) -> None:
    require_name("-o", str(folder))
    check_outputs([folder / REPORT_NAME], inputs, force=force)
    refuse_inputs([folder / CSV_NAME, folder / HTML_NAME], inputs)


def _settings(
    formats: str,
    rotate: str,
    gain: str,
    center: str,
    top_k: str,
    softmax_scale: float | None,
) -> StudySettings:
    from sdsa_quant.study.settings import StudySettings, transform_choices

    return StudySettings(
        formats=_listed(formats),
        transforms=transform_choices(_listed(rotate), _listed(gain), _listed(center)),
        top_k=parse_top_k(top_k),
        softmax_scale=choose_softmax_scale(softmax_scale),
    )


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _device_of_rank(device: str) -> str:
    """``cuda`` under torchrun is a device by the process's own number on its machine."""
    rank = os.environ.get("LOCAL_RANK")
    if device != "cuda" or rank is None:
        return device
    import torch

    return f"cuda:{int(rank) % torch.cuda.device_count()}"


def _default_workers(ranks: int, device: str) -> int:
    if ranks > 1 or device != "cpu":
        return 1
    return min(len(os.sched_getaffinity(0)), _MOST_WORKERS)
