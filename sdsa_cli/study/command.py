"""`sdsa study`: what key formats and transforms would do to the top-k of a model's indexers."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sdsa_cli.completion import tensors_of_queries, words
from sdsa_cli.options import (
    DEFAULT_TOP_K_TEXT,
    CenterListOption,
    DeviceOption,
    ForceFlag,
    GainListOption,
    JsonFlag,
    KeysOption,
    LengthsOption,
    QueryNameOption,
    RequestsOption,
    RotateListOption,
    RowsPerGroupOption,
    SoftmaxScaleOption,
    at_least_one,
    choose_device,
    choose_softmax_scale,
    examples,
    listed,
    parse_numbers,
    parse_top_k,
)
from sdsa_cli.output import Output
from sdsa_cli.output_paths import require_name
from sdsa_cli.text import counted
from sdsa_quant.errors import InputError
from sdsa_quant.files.outputs import check_outputs, folders_made, refuse_inputs
from sdsa_quant.study.inputs import DEFAULT_FORMATS, FORMAT_NAMES

from .limits import check_limits, check_validity, parse_limits
from .markdown import study_markdown
from .pages import CSV_NAME, HTML_NAME, refuse_foreign_pages, write_pages
from .plots import choose_plots
from .tables import study_tables
from .verdict import (
    DEFAULT_BATCH,
    DEFAULT_CONTEXT,
    BatchOption,
    ContextOption,
    GoalOption,
    MarkdownFlag,
    Serving,
    parse_goal,
)

if TYPE_CHECKING:
    from sdsa_quant.study.report import StudyReport

COMMAND = "study"
EXAMPLES = examples(
    "sdsa study keys.safetensors queries.safetensors -o report --lengths lengths",
    "sdsa study capture/ capture/ -o layers --formats nvfp4,fp8 --rotate none,hadamard",
    "sdsa study keys.safetensors queries.safetensors -o causal --causal "
    "--lengths lengths --center none,channel",
    "sdsa study keys.safetensors queries.safetensors -o rules --lengths lengths "
    "--formats nvfp4,nvfp4-covariance --rotate hadamard",
    "sdsa study keys.safetensors queries.safetensors -o blocks --lengths lengths "
    "--select blocks:128:16 --local-blocks 1",
    "sdsa study capture/ capture/ -o chosen --rotate none,hadamard --center none,channel "
    "--goal recall@2048=0.98",
    "sdsa study capture/ capture/ -o checked --no-plots --fail-below recall@2048.p1=0.95",
    "sdsa study capture/ capture/ -o sharded --shard 0/1",
    "sdsa study --merge sharded",
    "torchrun --nproc-per-node 8 -m sdsa_cli study capture/ capture/ -o layers",
)


def study(
    keys: Annotated[
        Path | None,
        typer.Argument(
            metavar="KEYS",
            help="Unquantized keys: a safetensors file, a folder of them, or an index.",
            show_default=False,
        ),
    ] = None,
    queries: Annotated[
        Path | None,
        typer.Argument(
            metavar="QUERIES",
            help="Query rows, likewise; both may be the same files.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="Where the report goes."),
    ] = None,
    keys_pattern: KeysOption = None,
    query_name: QueryNameOption = None,
    lengths: LengthsOption = None,
    rows_per_group: RowsPerGroupOption = None,
    requests: RequestsOption = None,
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
            autocompletion=tensors_of_queries,
            help="Tensor of each row's position, from 0, for causal rows that are not the last.",
        ),
    ] = None,
    score: Annotated[
        str | None,
        typer.Option(
            "--score",
            metavar="KIND",
            help="Score of a key: rows, each query row by itself; relu-sum, the weighted sum of "
            "ReLUs over the heads of query rows [rows, heads, 128]; block-max, each head by "
            "itself, for blocks. Default: what files of sdsa capture state, else rows.",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights",
            metavar="NAME",
            autocompletion=tensors_of_queries,
            help="Tensor of the weights of heads, [rows, heads], for relu-sum; default: all 1.",
        ),
    ] = None,
    select: Annotated[
        str | None,
        typer.Option(
            "--select",
            metavar="WHAT",
            help="What is selected: tokens:2048, the best keys, or blocks:128:16, the best 16 "
            "blocks of 128 keys by the maximum of their scores. Default: what files of sdsa "
            "capture state, else keys as --top-k says.",
        ),
    ] = None,
    local_blocks: Annotated[
        int | None,
        typer.Option(
            "--local-blocks",
            metavar="N",
            help="Of the blocks that a row sees, how many of the last are selected whatever their "
            "scores. Default: what files of sdsa capture state, else none.",
        ),
    ] = None,
    mean_pool: Annotated[
        int,
        typer.Option(
            "--mean-pool",
            metavar="N",
            help="Consecutive keys of the files whose mean is one key of the study.",
        ),
    ] = 1,
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration",
            metavar="STATS",
            help="Statistics of another capture for the covariance formats; default: those of the "
            "layer's other requests.",
        ),
    ] = None,
    formats: Annotated[
        str,
        typer.Option(
            "--formats",
            metavar="LIST",
            autocompletion=words(*FORMAT_NAMES),
            help="Formats to compare: bf16, nvfp4, nvfp4-mixed (BF16 queries), nvfp4-4over6, "
            "nvfp4-search, nvfp4-covariance (both also -mixed), mxfp4, fp8.",
        ),
    ] = ",".join(DEFAULT_FORMATS),
    rotate: RotateListOption = "none",
    gain: GainListOption = "none",
    center: CenterListOption = "none",
    top_k: Annotated[
        str | None,
        typer.Option(
            "--top-k",
            metavar="LIST",
            help="Numbers of keys that an indexer selects; recall is of each. Default: what files "
            f"of sdsa capture state, else {DEFAULT_TOP_K_TEXT}.",
        ),
    ] = None,
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
    goal: GoalOption = None,
    batch: BatchOption = DEFAULT_BATCH,
    context: ContextOption = DEFAULT_CONTEXT,
    shard: Annotated[
        str | None,
        typer.Option(
            "--shard",
            metavar="I/N",
            help="Measure and record share I of N, from 0, and make no report; slurm takes both "
            "from an array task. Tasks may start, end and start again in any order.",
        ),
    ] = None,
    merge: Annotated[
        Path | None,
        typer.Option(
            "--merge",
            metavar="FOLDER",
            help="Make the report of a folder whose shards are all measured; KEYS, QUERIES and "
            "options of measuring are left out.",
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
        bool | None,
        typer.Option(
            "--plots/--no-plots",
            help="Draw pictures, with matplotlib; default: where it is installed.",
        ),
    ] = None,
    markdown: MarkdownFlag = False,
    json: JsonFlag = False,
    force: ForceFlag = False,
) -> None:
    """Study what formats and transforms of keys do to the top-k, layer by layer.

    Every combination of the listed formats and transforms is measured against the unquantized keys.
    The folder gets report.json, report.csv, report.html and pictures. A study that was interrupted
    continues when the same command is run again. Results are bit-identical, except for the recorded
    time, however often a run is interrupted and however many processes share it.
    """
    from sdsa_quant.study import run
    from sdsa_quant.study.captured import chosen_selection
    from sdsa_quant.study.rendezvous import place_of_environment
    from sdsa_quant.study.shards import merge as merge_shards
    from sdsa_quant.study.shards import parse_shard, recorded_study, run_shard

    sink = Output(as_json=json)
    serving = Serving.checked(batch, context)
    draws = choose_plots(plots, sink.note)
    if merge is not None:
        if keys or queries or output or shard:
            raise InputError("--merge stands without KEYS, QUERIES, -o and --shard")
        studied = recorded_study(merge).settings.top_k
        limits = parse_limits(fail_below or (), studied)
        report = merge_shards(
            merge,
            goal=None if goal is None else parse_goal(goal, studied),
            finish=lambda report: write_pages(
                merge, report, serving=serving, with_plots=draws, force=force
            ),
        )
        _show(report, merge, sink, serving, markdown=markdown)
        check_validity(report)
        check_limits(report, limits)
        return
    if keys is None or queries is None or output is None:
        raise InputError("KEYS, QUERIES and -o must be given, except with --merge")
    top_k_numbers = None if top_k is None else parse_top_k(top_k)
    chosen = chosen_selection(queries, select, top_k_numbers, local_blocks)
    limits = parse_limits(fail_below or (), chosen.top_k)
    wanted = None if goal is None else parse_goal(goal, chosen.top_k)
    _check_outputs(output, (keys, queries), force=force)
    if calibration is not None:
        _note_own_statistics(calibration, keys, queries, sink)
    given: dict[str, Any] = {
        "keys": keys,
        "queries": queries,
        "output": output,
        "keys_pattern": keys_pattern,
        "queries_pattern": query_name,
        "lengths": lengths,
        "rows_per_group": at_least_one("--rows-per-group", rows_per_group),
        "requests": None if requests is None else parse_numbers(requests) or requests,
        "causal": causal,
        "positions": positions,
        "score": score,
        "weights": weights,
        "select": select,
        "local_blocks": local_blocks,
        "mean_pool": mean_pool,
        "calibration": calibration,
        "formats": listed(formats),
        "rotate": listed(rotate),
        "gain": listed(gain),
        "center": listed(center),
        "top_k": top_k_numbers,
        "softmax_scale": choose_softmax_scale(softmax_scale),
        "device": choose_device(device),
    }
    workers = at_least_one("--workers", workers)
    place = place_of_environment()
    if shard is not None:
        if force or place is not None:
            raise InputError("--shard stands without --force and without torchrun")
        numbers = parse_shard(shard)
        with (
            folders_made([output / HTML_NAME]),
            sink.progress_of("measuring", goes_on=True) as progress,
        ):
            mine, every = run_shard(numbers, given, workers=workers, progress=progress)
        sink.result(
            f"Measured: {counted(mine, 'unit')} of {every}. Once every shard has been: "
            f"sdsa study --merge {shlex.quote(str(output))}"
        )
        return
    with (
        folders_made([output / HTML_NAME]),
        sink.progress_of("measuring", goes_on=True) as progress,
    ):
        report = run(
            **given,
            goal=wanted,
            workers=workers,
            force=force,
            progress=progress,
            notify=lambda line: sink.note(f"note: {line}"),
            finish=lambda report: write_pages(
                output, report, serving=serving, with_plots=draws, force=force
            ),
        )
    if place is not None and place.rank:
        return  # another process of torchrun writes and prints
    _show(report, output, sink, serving, markdown=markdown)
    check_validity(report)
    check_limits(report, limits)


def _show(
    report: StudyReport, folder: Path, sink: Output, serving: Serving, *, markdown: bool
) -> None:
    if markdown and not sink.as_json:
        sink.result(study_markdown(report, serving))
        return
    parts = study_tables(report, serving)
    sink.publish(report, *parts, "", f"Report: {folder / HTML_NAME}")


def _check_outputs(folder: Path, inputs: Sequence[Path], *, force: bool) -> None:
    from sdsa_quant.study.report import REPORT_NAME

    require_name("-o", str(folder))
    # Whether a report may be replaced is for the study to say, which may go on from it.
    check_outputs([folder / REPORT_NAME], inputs, force=True)
    refuse_inputs([folder / CSV_NAME, folder / HTML_NAME], inputs)
    if not force:
        refuse_foreign_pages(folder)


def _note_own_statistics(calibration: Path, keys: Path, queries: Path, sink: Output) -> None:
    """Say where the statistics may contain the rows that are to be measured with them."""
    from sdsa_quant.calibration.file import read_calibration

    paths = [path.resolve() for path in (keys, queries)]
    # Of a folder also its files, one of which may be what the statistics were made from.
    inner = [each for path in paths for each in path.glob("*.safetensors")]
    studied = {path.name for path in [*paths, *inner]}
    for source in read_calibration(calibration).sources:
        shared = sorted(studied & {source.keys, source.queries})
        if shared:
            sink.note(
                f"note: {calibration} was made from {' and '.join(shared)}, as what is studied is "
                f"called: if that is the same capture, its statistics contain the rows measured, "
                f"and the figures of covariance formats are too good"
            )
