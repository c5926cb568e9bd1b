"""`sdsa doctor`: versions, devices, and which backend would serve what, or why none."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sdsa_quant.environment import describe_environment
from sdsa_quant.errors import CheckFailedError
from sdsa_quant.files.typed_json import to_json

from .json_documents import command_document
from .options import JsonFlag, examples
from .output import Output, fields_table, heading, table
from .text import byte_count

COMMAND = "doctor"
EXAMPLES = examples("sdsa doctor", "sdsa doctor --json", "sdsa doctor --self-test")


def doctor(
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test",
            help="Also let every backend score a small problem, and compare with float64.",
        ),
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Report versions and devices, and the backend of each pair of formats on each device.

    The backends are asked what `sdsa score` would ask them, about a small call that they could
    serve. Always succeeds: what is missing is in the report. With --self-test it fails where a
    backend that can run gives wrong scores, or does not run after all.
    """
    sink = Output(as_json=json)
    environment = to_json(describe_environment())
    backends = describe_backends(environment)
    document: dict[str, Any] = {"environment": environment, "backends": backends}
    tables = _tables(environment, backends)
    failures: list[str] = []
    if self_test:
        document["self_tests"] = tests = run_self_tests(environment)
        tables += ["", heading("self-test"), _self_test_table(tests)]
        failures = [
            f"{test['backend']} on {test['device']}, {test['query_format']} rows, "
            f"{_keys(test)} keys: {test['failure']}"
            for test in tests
            if test["failure"]
        ]
    sink.result(*tables)
    sink.document(command_document(COMMAND, document))
    if failures:
        raise CheckFailedError("self-test failed: " + "; ".join(failures))


def describe_backends(environment: dict[str, Any]) -> list[dict[str, Any]]:
    """For each device and pair of formats: what ``auto`` picks, and each backend's reason."""
    if environment["packages"]["torch"] is None:
        return []
    from sdsa_kernels.testing.problems import FORMAT_PAIRS

    return [_ask(device, values) for device in _devices(environment) for values in FORMAT_PAIRS]


def run_self_tests(environment: dict[str, Any]) -> list[dict[str, Any]]:
    """What every backend made of a small problem, on each device where it can run."""
    if environment["packages"]["torch"] is None:
        return []
    from dataclasses import asdict

    from sdsa_kernels.testing.self_test import self_tests

    return [asdict(test) for device in _devices(environment) for test in self_tests(device)]


def _devices(environment: dict[str, Any]) -> list[str]:
    return ["cpu", *(f"cuda:{index}" for index in range(len(environment["cuda"]["devices"])))]


def _keys(test: dict[str, Any]) -> str:
    """``nvfp4``, or ``nvfp4 128x4`` where that is the order of the scales."""
    from sdsa_quant.formats.scale_order import TILED

    name: str = test["key_format"]
    return f"{name} {TILED}" if test["scale_order"] == TILED else name


def _self_test_table(tests: list[dict[str, Any]]) -> Any:
    shown = table(
        "device", "query rows", "keys", "backend", "result", "largest difference", numbers_from=5
    )
    for test in tests:
        difference = test["largest_difference"]
        shown.add_row(
            test["device"],
            test["query_format"],
            _keys(test),
            test["backend"],
            test["failure"] or "ok",
            "-" if difference is None else f"{difference:.3g}",
        )
    return shown


def _ask(device: str, values: str) -> dict[str, Any]:
    import torch

    from sdsa_kernels.backends import BACKENDS, auto_order
    from sdsa_kernels.testing.problems import FORMAT_PAIRS, Shape, synthetic_problems

    query_format, key_format = FORMAT_PAIRS[values]
    answer: dict[str, Any] = {
        "device": device,
        "query_format": query_format,
        "key_format": key_format,
        "auto": None,
        "reasons": {},
    }
    try:
        shape = Shape((1,), 1, 1)
        problem = synthetic_problems(shape, values, torch.device(device), rotations=1, seed=0)[0]
        reasons = {backend.name: backend.reason_unsupported(problem) for backend in BACKENDS}
        order = auto_order(problem)
    except Exception as error:  # a broken install or driver is what a report has to show
        answer["reasons"] = {"all": f"{type(error).__name__}: {error}"}
        return answer
    names = [backend.name for backend in order]
    answer["auto"] = next((name for name in names if reasons[name] is None), None)
    answer["reasons"] = reasons
    return answer


def _tables(environment: dict[str, Any], backends: list[dict[str, Any]]) -> list[Any]:
    cuda = environment["cuda"]
    versions = {
        "sdsa": environment["sdsa"],
        "python": environment["python"],
        **{name: version or "not installed" for name, version in environment["packages"].items()},
        "CUDA of torch": cuda["version"] or "none",
    }
    for index, device in enumerate(cuda["devices"]):
        versions[f"cuda:{index}"] = (
            f"{device['name']}, compute capability {device['capability']}, "
            f"{device['multiprocessors']} multiprocessors, {byte_count(device['memory_bytes'])}"
        )
    if not cuda["devices"]:
        versions["GPUs"] = cuda["error"] or "none"
    shown = table("device", "query rows", "keys", "auto", "others", numbers_from=5)
    for answer in backends:
        others = [
            f"{name}: {reason or 'also'}"
            for name, reason in answer["reasons"].items()
            if name != answer["auto"]
        ]
        shown.add_row(
            answer["device"],
            answer["query_format"],
            answer["key_format"],
            answer["auto"] or "none",
            "\n".join(others),
        )
    return [heading("versions"), fields_table(versions), "", heading("backends"), shown]
