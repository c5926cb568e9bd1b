"""`sdsa bench`: time scoring calls over a table of shapes, without files."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sdsa_cli.json_documents import command_document, write_document
from sdsa_cli.measurement import measurement_fields, share_text
from sdsa_cli.options import DeviceOption, ForceFlag, JsonFile, choose_device, examples, json_file
from sdsa_cli.output import Output, table
from sdsa_cli.output_paths import STDOUT, check_outputs
from sdsa_cli.score.inputs import at_least_one
from sdsa_quant.environment import describe_environment
from sdsa_quant.errors import InputError
from sdsa_quant.files.text import INT32_MAX

from .shapes import BenchShape, parse_shape, read_lengths_file

if TYPE_CHECKING:
    import torch

    from sdsa_kernels.measure.measurement import Measurement

COMMAND = "bench"
EXAMPLES = examples(
    "sdsa bench --shape 1,1,512 --values bf16,nvfp4 --repeats 5",
    "sdsa bench --shape 4,2,256 --shape 2,8,128,4096 --check --repeats 5 --json -",
)
DEFAULT_SHAPES = ("1,1,8192", "1,1,131072", "8,1,131072", "32,1,65536", "32,8,65536")
VALUES = ("bf16", "nvfp4", "mixed")
BACKENDS = ("auto", "cute", "triton", "torch")


@dataclasses.dataclass(frozen=True, slots=True)
class BenchOptions:
    """What one run of `sdsa bench` was asked to do."""

    shapes: Sequence[BenchShape]
    values: Sequence[str]
    backends: Sequence[str]
    repeats: int
    calls_per_replay: int
    hot: bool
    check: bool
    compare: bool
    device: str
    seed: int


@dataclasses.dataclass(frozen=True, slots=True)
class BenchResult:
    """One line of the table."""

    shape: BenchShape
    values: str
    backend: str
    measurement: Measurement
    checked: bool
    flashinfer_us: float | None
    gather_bmm_us: float | None


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
    values: Annotated[
        str,
        typer.Option("--values", metavar="LIST", help="Of bf16, nvfp4 and mixed (BF16 x NVFP4)."),
    ] = ",".join(VALUES),
    backend: Annotated[
        str, typer.Option("--backend", metavar="LIST", help="Of auto, cute, triton and torch.")
    ] = "auto",
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
    json: JsonFile = None,
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
        shapes=shapes or [parse_shape(text) for text in DEFAULT_SHAPES],
        values=_parse_list("--values", values, VALUES),
        backends=_parse_list("--backend", backend, BACKENDS),
        repeats=at_least_one("--repeats", repeats) or 1,
        calls_per_replay=at_least_one("--calls-per-replay", calls_per_replay) or 1,
        hot=hot,
        check=check,
        compare=compare,
        device=choose_device(device),
        seed=seed,
    )
    report_file = json_file(json)
    if report_file is not None:
        inputs = [] if lengths_file is None else [lengths_file]
        check_outputs([report_file], inputs, force=force)
    sink = Output(as_json=json == STDOUT)
    if options.device == "cpu" and (hot or options.calls_per_replay > 1):
        sink.note("--hot and --calls-per-replay are about graph replays; on a CPU they do nothing")
    results = run_bench(options, sink)
    document = _document(options, results)
    if report_file is not None:  # first, so that it is there even if nobody reads stdout
        write_document(report_file, document, force=force)
    sink.result(*_tables(results))
    sink.document(document)


def run_bench(options: BenchOptions, sink: Output) -> list[BenchResult]:
    """Measure every shape with all values and backends."""
    total = len(options.shapes) * len(options.values) * len(options.backends)
    results = []
    with sink.progress("measuring", total) as advance:
        for shape in options.shapes:
            for values in options.values:
                results += _measure_shape(options, shape, values)
                advance(len(options.backends))
    return results


def _measure_shape(options: BenchOptions, shape: BenchShape, values: str) -> list[BenchResult]:
    import torch

    from sdsa_kernels.backends import choose_backend
    from sdsa_kernels.measure.measurement import measure_problems
    from sdsa_kernels.measure.traffic import shape_traffic
    from sdsa_kernels.testing.problems import Shape, synthetic_problems

    device = torch.device(options.device)
    sizes = Shape(shape.lengths, shape.rows_per_group, shape.max_context)
    traffic = shape_traffic(sizes, values)
    problems = synthetic_problems(
        sizes,
        values,
        device,
        rotations=_rotations(options, traffic.key_bytes, device),
        seed=options.seed,
    )
    results = []
    for backend in options.backends:
        measurement = measure_problems(
            problems,
            traffic,
            options.repeats,
            backend=backend,
            calls_per_replay=options.calls_per_replay,
        )
        if options.check:  # after the measurement, whose first call is to be the first
            _check(problems[0], backend)
        results.append(
            BenchResult(
                shape=shape,
                values=values,
                backend=choose_backend(problems[0], backend).name,
                measurement=measurement,
                checked=options.check,
                flashinfer_us=None,
                gather_bmm_us=None,
            )
        )
    if device.type == "cuda":
        if options.compare:
            results = _add_others(results, problems, options)
        del problems
        torch.cuda.empty_cache()
    return results


def _add_others(
    results: Sequence[BenchResult], problems: Sequence[Any], options: BenchOptions
) -> list[BenchResult]:
    """The results beside the times of other ways to the same scores."""
    from sdsa_kernels.measure.peers import flashinfer_call, gather_bmm_call

    flashinfer_us, gather_bmm_us = (
        _time_other([make(problem) for problem in problems], options)
        for make in (flashinfer_call, gather_bmm_call)
    )
    return [
        dataclasses.replace(result, flashinfer_us=flashinfer_us, gather_bmm_us=gather_bmm_us)
        for result in results
    ]


def _rotations(options: BenchOptions, key_bytes: int, device: torch.device) -> int:
    if options.hot or device.type != "cuda":
        return 1
    from sdsa_kernels.measure.timing import rotations_for

    return rotations_for(key_bytes, device)


def _time_other(calls: Sequence[Any], options: BenchOptions) -> float | None:
    from sdsa_kernels.measure.timing import time_graph

    if any(call is None for call in calls):
        return None
    timing = time_graph(calls, options.repeats, calls_per_replay=options.calls_per_replay)
    return timing.median_us


def _check(problem: Any, backend: str) -> None:
    from sdsa_kernels.measure.measurement import scoring_call
    from sdsa_kernels.testing.compare import UNTOUCHED, compare_scores

    problem.scores.fill_(UNTOUCHED)
    scoring_call(problem, backend)()
    compare_scores(problem)


def _parse_list(option: str, text: str, choices: Sequence[str]) -> tuple[str, ...]:
    chosen = tuple(word.strip() for word in text.split(","))
    for word in chosen:
        if word not in choices:
            raise InputError(f"{option} must be of {', '.join(choices)}, got {word!r}")
    return chosen


def _document(options: BenchOptions, results: Sequence[BenchResult]) -> dict[str, Any]:
    return command_document(
        COMMAND,
        {
            "inputs": options,
            "results": [
                {
                    "shape": result.shape.fields(),
                    "values": result.values,
                    "backend": result.backend,
                    "checked": result.checked,
                    "flashinfer_us": result.flashinfer_us,
                    "gather_bmm_us": result.gather_bmm_us,
                    **measurement_fields(result.measurement),
                }
                for result in results
            ],
            "environment": describe_environment(),
        },
    )


def _tables(results: Sequence[BenchResult]) -> list[Any]:
    gpu = any(result.measurement.rotation is not None for result in results)
    return [_times_table(results), "", _roofs_table(results)] if gpu else [_times_table(results)]


def _tight_table(*headings: str, title: str | None, numbers_from: int) -> Any:
    """A table with one space between columns, so that a terminal of 80 shows them all."""
    shown = table(*headings, title=title, numbers_from=numbers_from)
    shown.show_edge = False
    shown.padding = (0, 0)
    return shown


def _times_table(results: Sequence[BenchResult]) -> Any:
    backends = sorted({result.backend for result in results})
    several = len(backends) > 1
    names = ("shape", "values", "backend") if several else ("shape", "values")
    shown = _tight_table(
        *names, "median us", "p10", "p90", "GB/s", "of read",
        title=None if several else f"Backend {backends[0]}",
        numbers_from=len(names),
    )  # fmt: skip
    for result in results:
        timing = result.measurement.timing
        shown.add_row(
            *_names(result)[: len(names)],
            *map(_microseconds, (timing.median_us, timing.p10_us, timing.p90_us)),
            _bandwidth(result.measurement),
            share_text(result.measurement.read_share),
        )
    return shown


def _bandwidth(measurement: Measurement) -> str:
    """The memory's bandwidth, or that a cache served the call."""
    if measurement.cache_resident:
        return "cache-resident"
    return f"{measurement.gigabytes_per_second:,.4g}"


def _roofs_table(results: Sequence[BenchResult]) -> Any:
    """What stands beside a GPU's times."""
    shown = _tight_table(
        "shape", "values", "roof us", "of roof", "host us", "first s", "flashinfer", "bmm",
        title="Beside: page-gather roof, eager call on the host, first call, other ways in us",
        numbers_from=2,
    )  # fmt: skip
    for result in results:
        measurement = result.measurement
        seconds, gather = measurement.compile_seconds, measurement.gather
        shown.add_row(
            *_names(result)[:2],
            _microseconds(None if gather is None else gather.median_us),
            share_text(measurement.gather_share),
            _microseconds(measurement.host_us),
            "-" if seconds is None else f"{seconds:.2f}",
            _microseconds(result.flashinfer_us),
            _microseconds(result.gather_bmm_us),
        )
    return shown


def _names(result: BenchResult) -> tuple[str, str, str]:
    return result.shape.name, result.values, result.backend


def _microseconds(time_us: float | None) -> str:
    return "-" if time_us is None else f"{time_us:,.1f}"
