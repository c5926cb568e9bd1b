"""`sdsa bench`: time scoring calls over a table of shapes, without files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from sdsa_cli.completion import words
from sdsa_cli.options import (
    BackendListOption,
    BackendName,
    DeviceOption,
    ForceFlag,
    JsonFlag,
    ReportOption,
    at_least_one,
    choose_device,
    examples,
    parse_choices,
)
from sdsa_cli.output import report_sink
from sdsa_quant.files.text import INT32_MAX
from sdsa_quant.layout import FORMAT_PAIRS

from .document import BenchOptions, bench_document
from .shapes import parse_shape, read_lengths_file

COMMAND = "bench"
EXAMPLES = examples(
    "sdsa bench --shape 1,1,512 --format-pair bf16,nvfp4 --repeats 5",
    "sdsa bench --shape 4,2,256 --shape 2,8,128,4096 --check --repeats 5 --json",
)
DEFAULT_SHAPES = ("1,1,8192", "1,1,131072", "8,1,131072", "32,1,65536", "32,8,65536")
BACKENDS = get_args(BackendName)


def bench(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            metavar="SHAPE",
            help="Groups, rows of each, keys of each, such as 8,1,4096; a fourth number is that of "
            "columns of the scores (default: as many as keys). May be given again. Default: five "
            "shapes from small to large.",
        ),
    ] = None,
    lengths_file: Annotated[
        Path | None,
        typer.Option(
            "--lengths-file",
            metavar="FILE",
            help="Text file with one group's keys on each line: one more shape, of 1 row a group.",
        ),
    ] = None,
    format_pairs: Annotated[
        str,
        typer.Option(
            "--format-pair",
            metavar="LIST",
            help="Format pairs (query rows x keys): bf16, nvfp4, mixed (BF16 x NVFP4).",
            autocompletion=words(*FORMAT_PAIRS),
        ),
    ] = ",".join(FORMAT_PAIRS),
    backend: BackendListOption = "auto",
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", help="Samples to take.")] = 100,
    calls_per_replay: Annotated[
        int,
        typer.Option(
            "--calls-per-replay",
            metavar="N",
            help="Calls in a graph, which share what a replay and its events cost.",
        ),
    ] = 1,
    hot: Annotated[
        bool, typer.Option("--hot", help="Replay on the same pages instead of rotating.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Compare every timed result with float64; a miss is exit 1."),
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare/--no-compare",
            help="Also time flashinfer, where it is installed, and gather + torch.bmm (GPU only).",
        ),
    ] = True,
    device: DeviceOption = "auto",
    seed: Annotated[
        int,
        typer.Option("--seed", min=0, max=INT32_MAX, help="Of the random keys and queries."),
    ] = 0,
    json: JsonFlag = False,
    report: ReportOption = None,
    force: ForceFlag = False,
) -> None:
    """Time scoring calls on random keys, beside what the device's memory allows.

    On a GPU a sample is a CUDA graph replay, on pages that rotate through more than twice the L2
    cache, and every time stands beside the page-gather and the read roof. On a CPU a sample is a
    plain call, and those of the default shapes take minutes: give a --shape or fewer --repeats.
    """
    shapes = [parse_shape(text) for text in shape or ()]
    if lengths_file is not None:
        shapes.append(read_lengths_file(lengths_file))
    options = BenchOptions(
        shapes=tuple(shapes) or tuple(parse_shape(text) for text in DEFAULT_SHAPES),
        format_pairs=parse_choices("--format-pair", format_pairs, tuple(FORMAT_PAIRS)),
        backends=parse_choices("--backend", backend, BACKENDS),
        repeats=at_least_one("--repeats", repeats) or 1,
        calls_per_replay=at_least_one("--calls-per-replay", calls_per_replay) or 1,
        hot=hot,
        check=check,
        compare=compare,
        device=choose_device(device),
        seed=seed,
    )
    inputs = [] if lengths_file is None else [lengths_file]
    sink = report_sink(json, report, inputs=inputs, force=force)
    if options.device == "cpu" and (hot or options.calls_per_replay > 1):
        sink.note("--hot and --calls-per-replay are about graph replays; on a CPU they do nothing")
    from .run import run_bench
    from .tables import bench_tables

    results = run_bench(options, sink)
    sink.publish(bench_document(options, results), *bench_tables(results))
