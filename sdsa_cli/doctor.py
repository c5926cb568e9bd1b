"""`sdsa doctor`: versions, devices, and which backend would serve what, or why none would."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sdsa_quant.environment import Environment, describe_environment
from sdsa_quant.errors import CheckFailedError

from .options import ForceFlag, JsonFlag, ReportOption, examples
from .output import fields_table, heading, report_sink, table
from .table_data import TableData
from .text import byte_count

if TYPE_CHECKING:
    from rich.console import RenderableType

COMMAND = "doctor"
EXAMPLES = examples("sdsa doctor", "sdsa doctor --json", "sdsa doctor --self-test")


@dataclass(frozen=True, slots=True)
class BackendAnswer:
    """Which backend would serve a pair of formats on a device."""

    device: str
    """The device."""
    query_format: str
    """Format of the query rows: ``bf16`` or ``nvfp4``."""
    key_format: str
    """Format of the keys: ``bf16`` or ``nvfp4``."""
    auto: str | None
    """The backend that ``auto`` takes, or null."""
    reasons: dict[str, str | None]
    """Why each backend cannot run, null for one that can; ``all`` where none could be asked."""


@dataclass(frozen=True, slots=True)
class SelfTestRecord:
    """What one backend made of a small problem."""

    device: str
    """The device."""
    query_format: str
    """Format of the query rows."""
    key_format: str
    """Format of the keys."""
    scale_order: str | None
    """Order of the keys' scales; null where there are none."""
    backend: str
    """The backend, or ``all``."""
    largest_difference: float | None
    """Largest difference from float64; null where there are no right scores."""
    failure: str | None
    """What went wrong, or null."""


@dataclass(frozen=True, slots=True)
class SelectionTestRecord:
    """What one backend selected from rows that mislead a selection."""

    device: str
    """The device."""
    backend: str
    """The backend, or ``all``."""
    top_k: int
    """Keys to select in each row."""
    rows: int
    """Rows to select from: ties, NaN, plateaus, every order, lengths around k."""
    wrong_rows: int | None
    """Rows with other keys than a sort in Python gives; null where nothing was selected."""
    failure: str | None
    """What went wrong, or null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorDocument:
    """Versions, devices and backends."""

    schema: Literal["sdsa.doctor/1"] = "sdsa.doctor/1"
    """Name and version of this document."""
    command: Literal["doctor"] = "doctor"
    """The command that wrote it."""
    environment: Environment
    """Versions and devices."""
    backends: list[BackendAnswer]
    """One record for each device and pair of formats; empty without torch."""
    self_tests: list[SelfTestRecord] | None
    """One record for each self-test; null without ``--self-test``."""
    selection_tests: list[SelectionTestRecord] | None
    """One record for each device, backend and k; null without ``--self-test``."""


def doctor(
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test",
            help="Also let every backend score a small problem, and select from hard rows, and "
            "compare with float64.",
        ),
    ] = False,
    json: JsonFlag = False,
    report: ReportOption = None,
    force: ForceFlag = False,
) -> None:
    """Report versions and devices, and the backend of each pair of formats on each device.

    The backends are asked what `sdsa score` would ask them, about a small call that they could
    serve. Always succeeds: what is missing is in the report. With --self-test it fails where a
    backend that can run gives wrong scores or keys, or does not run after all.
    """
    sink = report_sink(json, report, force=force)
    environment = describe_environment()
    backends = describe_backends(environment)
    tests, lost = run_self_tests(environment) if self_test else (None, set())
    document = DoctorDocument(
        environment=environment,
        backends=backends,
        self_tests=tests,
        selection_tests=None if tests is None else run_selection_tests(environment, lost),
    )
    sink.publish(document, *_tables(document))
    failures = [
        f"{test.backend} on {test.device}, {test.query_format} rows, {_keys(test)} keys: "
        f"{test.failure}"
        for test in document.self_tests or ()
        if test.failure
    ]
    failures += [
        f"{test.backend} on {test.device}, top-{test.top_k}: {test.failure}"
        for test in document.selection_tests or ()
        if test.failure
    ]
    if failures:
        raise CheckFailedError("self-test failed: " + "; ".join(failures))


def describe_backends(environment: Environment) -> list[BackendAnswer]:
    """For each device and pair of formats: what ``auto`` picks, and each backend's reason."""
    if environment.packages["torch"] is None:
        return []
    from sdsa_quant.layout import FORMAT_PAIRS

    return [_ask(device, pair) for device in _devices(environment) for pair in FORMAT_PAIRS]


def run_self_tests(environment: Environment) -> tuple[list[SelfTestRecord], set[str]]:
    """What every backend made of a small problem on each device, and devices where one hangs."""
    if environment.packages["torch"] is None:
        return [], set()
    from sdsa_kernels.testing.self_test import self_tests

    tests = [test for device in _devices(environment) for test in self_tests(device)]
    records = [
        SelfTestRecord(
            device=test.device,
            query_format=test.query_format,
            key_format=test.key_format,
            scale_order=test.scale_order,
            backend=test.backend,
            largest_difference=test.largest_difference,
            failure=test.failure,
        )
        for test in tests
    ]
    return records, {test.device for test in tests if test.device_lost}


def run_selection_tests(environment: Environment, lost: set[str]) -> list[SelectionTestRecord]:
    """What every backend selected on each device, except those on which a kernel hangs."""
    if environment.packages["torch"] is None:
        return []
    from sdsa_kernels.testing.selection_test import selection_tests

    tests = []
    for device in _devices(environment):
        if device in lost:
            continue
        tests += [
            SelectionTestRecord(
                device=test.device,
                backend=test.backend,
                top_k=test.top_k,
                rows=test.rows,
                wrong_rows=test.wrong_rows,
                failure=test.failure,
            )
            for test in selection_tests(device)
        ]
    return tests


def _devices(environment: Environment) -> list[str]:
    return ["cpu", *(f"cuda:{index}" for index in range(len(environment.cuda.devices)))]


def _keys(test: SelfTestRecord) -> str:
    """``nvfp4``, or ``nvfp4 128x4`` where that is the order of the scales."""
    from sdsa_quant.formats.scale_order import TILED

    return f"{test.key_format} {TILED}" if test.scale_order == TILED else test.key_format


def _self_test_table(tests: list[SelfTestRecord]) -> TableData:
    shown = table(
        "device", "query rows", "keys", "backend", "result", "largest difference", numbers_from=5
    )
    for test in tests:
        difference = test.largest_difference
        unknown = difference is None or math.isnan(difference)
        shown.add_row(
            test.device,
            test.query_format,
            _keys(test),
            test.backend,
            test.failure or "ok",
            "-" if unknown else f"{difference:.3g}",
        )
    return shown


def _selection_table(tests: list[SelectionTestRecord]) -> TableData:
    shown = table("device", "top-k of hard rows", "backend", "result", "rows", numbers_from=4)
    for test in tests:
        shown.add_row(
            test.device, f"{test.top_k}", test.backend, test.failure or "ok", f"{test.rows}"
        )
    return shown


def _ask(device: str, format_pair: str) -> BackendAnswer:
    import torch

    from sdsa_kernels.backends import BACKENDS, auto_order
    from sdsa_kernels.testing.problems import Shape, synthetic_problems
    from sdsa_quant.layout import FORMAT_PAIRS

    query_format, key_format = FORMAT_PAIRS[format_pair]
    try:
        problem = synthetic_problems(
            Shape((1,), 1, 1), format_pair, torch.device(device), rotations=1, seed=0
        )[0]
        reasons = {backend.name: backend.reason_unsupported(problem) for backend in BACKENDS}
        order = auto_order(problem)
    except Exception as error:  # a broken install or driver is what a report has to show
        reason = f"{type(error).__name__}: {error}"
        return BackendAnswer(device, query_format, key_format, None, {"all": reason})
    auto = next((backend.name for backend in order if reasons[backend.name] is None), None)
    return BackendAnswer(device, query_format, key_format, auto, reasons)


def _tables(document: DoctorDocument) -> list[RenderableType]:
    environment = document.environment
    cuda = environment.cuda
    versions = {
        "sdsa": environment.sdsa,
        "python": environment.python,
        **{name: version or "not installed" for name, version in environment.packages.items()},
        "CPU": f"{environment.cpu or 'unknown'}, {environment.cpu_threads} threads",
        "CUDA of torch": cuda.version or "none",
    }
    for index, device in enumerate(cuda.devices):
        versions[f"cuda:{index}"] = (
            f"{device.name}, compute capability {device.capability}, "
            f"{device.multiprocessors} multiprocessors, {byte_count(device.memory_bytes)}"
        )
    if not cuda.devices:
        versions["GPUs"] = cuda.error or "none"
    shown = table("device", "query rows", "keys", "auto", "others", numbers_from=5)
    for answer in document.backends:
        others = [
            f"{name}: {reason or 'also'}"
            for name, reason in answer.reasons.items()
            if name != answer.auto
        ]
        shown.add_row(
            answer.device,
            answer.query_format,
            answer.key_format,
            answer.auto or "none",
            others,
        )
    parts: list[RenderableType] = [
        heading("versions"),
        fields_table(versions),
        "",
        heading("backends"),
        shown,
    ]
    if document.self_tests is not None:
        parts += ["", heading("self-test"), _self_test_table(document.self_tests)]
    if document.selection_tests:
        parts += ["", _selection_table(document.selection_tests)]
    return parts
