"""`sdsa score`: score query rows against a key cache, and see what its quantization costs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sdsa_cli.options import (
    DEFAULT_TOP_K_TEXT,
    BackendOption,
    DeviceOption,
    ForceFlag,
    JsonFlag,
    KeysOption,
    QueryNameOption,
    ReportOption,
    RequestsOption,
    RowsPerGroupOption,
    SoftmaxScaleOption,
    TopKOption,
    at_least_one,
    choose_device,
    choose_softmax_scale,
    examples,
    parse_top_k,
)
from sdsa_cli.output import Output, report_sink
from sdsa_cli.output_paths import file_output
from sdsa_cli.selection import SelectOption, check_select
from sdsa_quant.errors import CheckFailedError, InputError
from sdsa_quant.files.outputs import folders_made

from .inputs import ScoreOptions, open_scored_cache, requests_of_groups

if TYPE_CHECKING:
    from sdsa_kernels.scoring.chunks import ChunkScorer
    from sdsa_kernels.scoring.rows import RowScores
    from sdsa_kernels.scoring.task import ScoreTask
    from sdsa_quant.captures.queries import Queries
    from sdsa_quant.files.cache_file import CacheFile
    from sdsa_quant.files.scores_file import ScoresWriter

    from .document import ScoreReport

COMMAND = "score"
EXAMPLES = examples(
    "sdsa score cache.safetensors --queries queries.safetensors",
    "sdsa score cache.safetensors --queries queries.safetensors --baseline keys.safetensors",
    "sdsa score cache.safetensors --queries queries.safetensors --requests 0,0,1 --top-k 64,256",
    "sdsa score cache.safetensors --queries queries.safetensors --select 64 --graph-replay 20",
    "sdsa score cache.safetensors --queries queries.safetensors --graph-replay 100 --json",
    "sdsa score cache.safetensors --queries queries.safetensors --chunk 4 -o scores.safetensors",
)


def score(
    cache: Annotated[
        Path, typer.Argument(metavar="CACHE", help="Cache file, as quantize-cache writes it.")
    ],
    queries: Annotated[
        Path,
        typer.Option(
            "--queries",
            metavar="FILE",
            help="Safetensors file with the query rows, rows x 128 or groups x rows x 128.",
        ),
    ],
    query_name: QueryNameOption = None,
    rows_per_group: RowsPerGroupOption = None,
    requests: RequestsOption = None,
    query_format: Annotated[
        Literal["bf16", "nvfp4"] | None,
        typer.Option(
            "--query-format",
            metavar="FORMAT",
            help="What the query rows are scored as, bf16 or nvfp4; default: as the cache's keys.",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration",
            metavar="STATS",
            help="Choose the codes of NVFP4 query rows by what the cache's layer of keys loses "
            "least by: statistics, as sdsa calibrate writes them.",
        ),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            "--baseline",
            metavar="FILE",
            help="The unquantized keys to measure accuracy against: the keys that the cache was "
            "made from, or a BF16 cache of them.",
        ),
    ] = None,
    keys: KeysOption = None,
    top_k: TopKOption = DEFAULT_TOP_K_TEXT,
    softmax_scale: SoftmaxScaleOption = None,
    graph_replay: Annotated[
        int | None,
        typer.Option(
            "--graph-replay",
            metavar="N",
            help="Time N replays of a CUDA graph; on a CPU N plain repeats.",
        ),
    ] = None,
    hot: Annotated[
        bool,
        typer.Option(
            "--hot", help="Replay on the cache itself, not on copies that exceed the L2 cache."
        ),
    ] = False,
    backend: BackendOption = "auto",
    device: DeviceOption = "auto",
    chunk: Annotated[
        int | None,
        typer.Option(
            "--chunk",
            metavar="GROUPS",
            help="Score so many groups at a time, for scores that do not fit into memory; the "
            "result is the same to the bit.",
        ),
    ] = None,
    select: SelectOption = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write scores, lengths, requests and top-k indices (of the largest k, highest "
            "score first; with --select those of K, in ascending order); -inf and -1 fill up "
            "rows.",
        ),
    ] = None,
    json: JsonFlag = False,
    report: ReportOption = None,
    force: ForceFlag = False,
) -> None:
    """Score query rows against a key cache and report recall, errors and time.

    With --baseline the report leads with recall@k: how much of the unquantized keys' top-k the
    cache's scores still choose. A row with a score that is not finite fails the run (exit code 1).
    """
    if keys is not None and baseline is None:
        raise InputError(f"--keys {keys} names a tensor of --baseline, which is not given")
    options = ScoreOptions(
        cache=cache,
        queries=queries,
        query_name=query_name,
        rows_per_group=at_least_one("--rows-per-group", rows_per_group),
        requests=requests,
        query_format=query_format,
        calibration=calibration,
        baseline=baseline,
        keys=keys,
        top_k=parse_top_k(top_k),
        softmax_scale=choose_softmax_scale(softmax_scale),
        graph_replay=at_least_one("--graph-replay", graph_replay),
        hot=hot,
        backend=backend,
        device=choose_device(device),
        chunk=at_least_one("--chunk", chunk),
        select=check_select(select),
        output=None if output is None else file_output("-o", output),
    )
    from .document import score_document
    from .tables import report_tables

    sink = _sink(options, json, report, force)
    result = run_score(options, sink, force=force)
    sink.publish(score_document(result), *report_tables(result))
    _require_finite(result.rows)
    _require_differences(result)


def _sink(options: ScoreOptions, as_json: bool, report: str | None, force: bool) -> Output:
    others = (options.baseline, options.calibration)
    inputs = [options.queries, *(each for each in others if each is not None)]
    if not options.cache.is_dir():  # which is refused when it is opened
        inputs.append(options.cache)
    outputs = [] if options.output is None else [options.output]
    return report_sink(as_json, report, outputs=outputs, inputs=inputs, force=force)


def run_score(options: ScoreOptions, sink: Output, *, force: bool) -> ScoreReport:
    """Do what `sdsa score` is asked to do, except for printing and writing its report."""
    from sdsa_kernels.scoring.chunks import ChunkScorer
    from sdsa_kernels.scoring.rows import score_rows
    from sdsa_kernels.scoring.timing import time_scorer, time_selection
    from sdsa_quant.accuracy.doubts import accuracy_doubts
    from sdsa_quant.accuracy.summary import summarize_accuracy
    from sdsa_quant.captures.baseline import describe_other_source, open_baseline
    from sdsa_quant.captures.queries import read_queries
    from sdsa_quant.files.cache_file import validate_cache

    from .document import ScoreReport, is_valid
    from .tables import query_loss_words

    cache = open_scored_cache(options.cache)
    validate_cache(cache)
    queries = read_queries(options.queries, options.query_name)
    baseline = None
    if options.baseline is not None:
        baseline = open_baseline(options.baseline, cache, options.keys)
        if other := describe_other_source(cache, baseline):
            sink.note(f"note: {other}")
    scorer = ChunkScorer(_plan(options, cache, queries), options.chunk, select=options.select)
    if scorer.task.query_loss is not None and scorer.task.query_loss.rows_lost:
        sink.note(f"note: {query_loss_words(scorer.task.query_loss, scorer.task.rows)}")
    outputs = [] if options.output is None else [options.output]
    with (
        folders_made(outputs),
        _scores_writer(options, queries, scorer, force) as writer,
        sink.progress("scoring", scorer.task.rows) as advance,
    ):
        rows = score_rows(
            scorer,
            top_k=options.top_k,
            softmax_scale=options.softmax_scale,
            read_keys=None if baseline is None else baseline.read_keys,
            writer=writer,
            advance=advance,
        )
    measured = [row.accuracy for row in rows if row.accuracy is not None]
    doubts = accuracy_doubts(measured, options.top_k)
    for doubt in doubts:
        sink.note(f"note: {doubt}")
    timing = selection = None
    if options.graph_replay is not None and all(is_valid(row) for row in rows):
        with sink.progress(f"timing {options.graph_replay:,} runs", 1, calm=True):
            timing = time_scorer(scorer, options.graph_replay, hot=options.hot)
            if options.select is not None:
                selection = time_selection(
                    scorer, options.select, options.graph_replay, hot=options.hot
                )
    return ScoreReport(
        options=options,
        cache=cache,
        scorer=scorer,
        queries=queries.tensor,
        baseline=baseline,
        rows=rows,
        accuracy=None if baseline is None else summarize_accuracy(measured, options.top_k),
        timing=timing,
        selection=selection,
        scores_file_bytes=None if writer is None else writer.file_bytes,
        doubts=doubts,
    )


def _plan(options: ScoreOptions, cache: CacheFile, queries: Queries) -> ScoreTask:
    from sdsa_kernels.scoring.task import make_task, takes_tiled_scales
    from sdsa_quant.calibration.file import read_calibration
    from sdsa_quant.formats.nvfp4 import COVARIANCE, query_rule
    from sdsa_quant.formats.scale_order import TILED
    from sdsa_quant.layout import NVFP4

    requests = requests_of_groups(options, queries, cache.context_lengths.shape[0])
    query_format = options.query_format or cache.header.format
    tiled = cache.header.scale_order == TILED
    tiled = tiled and takes_tiled_scales(options.device, query_format, options.backend)
    rule, weights = query_rule(cache.header.rule), None
    if options.calibration is not None:
        if query_format != NVFP4:
            raise InputError(
                f"is for NVFP4 query rows, and these are scored as {query_format}",
                argument="calibration",
            )
        layer = read_calibration(options.calibration).layer_of_cache(cache.header.calibration)
        rule, weights = COVARIANCE, layer.query_weights(cache.header.rotate)
    return make_task(
        queries.values,
        cache.paged_keys(tiled_scales=tiled),
        requests,
        query_format=query_format,
        query_name=f"{queries.tensor.path}, tensor {queries.tensor.name}",
        transform=cache.transform,
        rule=rule,
        weights=weights,
        device=options.device,
        backend=options.backend,
    )


def _scores_writer(
    options: ScoreOptions, queries: Queries, scorer: ChunkScorer, force: bool
) -> AbstractContextManager[ScoresWriter | None]:
    """The writer of ``-o``, or a context of None without it."""
    from sdsa_kernels.scoring.rows import stored_k
    from sdsa_quant.files.scores_file import BY_KEY, BY_SCORE, ScoresWriter

    if options.output is None:
        return contextlib.nullcontext()
    task = scorer.task
    return ScoresWriter(
        options.output,
        task.context_lengths,
        task.requests,
        rows=task.rows,
        max_context=task.max_context,
        top_k=options.select or stored_k(task, options.top_k),
        top_k_order=BY_SCORE if options.select is None else BY_KEY,
        source={
            "cache": options.cache.name,
            "queries": options.queries.name,
            "query_name": queries.tensor.name,
            "query_format": task.query_format,
            "key_format": task.paged.format,
            "backend": scorer.backend,
        },
        force=force,
    )


def _require_differences(report: ScoreReport) -> None:
    """Fail a run whose baseline gives every key of a row the same score."""
    constant = 0 if report.accuracy is None else report.accuracy.rows_constant
    if constant:
        raise CheckFailedError(
            f"{constant} of {len(report.rows)} rows have one baseline score for all of their keys: "
            f"the keys or the query rows are constant, an error of the capture"
        )


def _require_finite(rows: Sequence[RowScores]) -> None:
    from .document import is_valid

    invalid = [row for row in rows if not is_valid(row)]
    if invalid:
        first = invalid[0]
        raise CheckFailedError(
            f"{len(invalid)} of {len(rows)} rows have a score or baseline score that is not "
            f"finite; the first is row {first.row} of request {first.request}, {first.length} keys"
        )
