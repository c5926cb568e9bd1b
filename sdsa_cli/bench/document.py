"""What one run of `sdsa bench` was asked to do and found out, and the document of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sdsa_cli.measurement import MeasurementRecord, measurement_fields
from sdsa_quant.environment import Environment, describe_environment

from .shapes import BenchShape, ShapeRecord

if TYPE_CHECKING:
    from sdsa_kernels.measure.measurement import Measurement


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What one run of `sdsa bench` was asked to do."""

    shapes: tuple[BenchShape, ...]
    """Sizes of the calls."""
    format_pairs: tuple[str, ...]
    """Formats of query rows and keys: ``bf16``, ``nvfp4``, ``mixed`` (BF16 x NVFP4)."""
    backends: tuple[str, ...]
    """Backends, as ``--backend`` names them."""
    repeats: int
    """Samples to take."""
    calls_per_replay: int
    """Calls in a graph."""
    hot: bool
    """Whether every replay is on the same pages."""
    check: bool
    """Whether every timed result is compared with float64."""
    compare: bool
    """Whether other ways to the same scores are timed too."""
    device: str
    """Device, ``auto`` resolved."""
    seed: int
    """Of the random keys and queries."""


@dataclass(frozen=True, slots=True)
class BenchResult:
    """One line of the table."""

    shape: BenchShape
    format_pair: str
    backend: str
    measurement: Measurement
    checked: bool
    flashinfer: float | str  # microseconds, or why there is no time
    gather_bmm: float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRecord(MeasurementRecord):
    """One shape, measured with one pair of formats on one backend."""

    shape: ShapeRecord
    """Sizes of the call."""
    format_pair: str
    """Formats of query rows and keys: ``bf16``, ``nvfp4`` or ``mixed`` (BF16 x NVFP4)."""
    backend: str
    """Backend that was timed, ``auto`` resolved."""
    checked: bool
    """Whether the scores were compared with float64."""
    flashinfer_us: float | None
    """Median of flashinfer on the same problem, or null."""
    flashinfer_reason: str | None
    """Why there is no time of flashinfer, or null."""
    gather_bmm_us: float | None
    """Median of a gather of the keys and ``torch.bmm``, or null."""
    gather_bmm_reason: str | None
    """Why there is no time of that, or null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchDocument:
    """Times of scoring calls on random keys."""

    schema: Literal["sdsa.bench/2"] = "sdsa.bench/2"
    """Name and version of this document."""
    command: Literal["bench"] = "bench"
    """The command that wrote it."""
    inputs: BenchOptions
    """The command line."""
    results: list[BenchRecord]
    """One record for each shape, pair of formats and backend."""
    environment: Environment
    """Where the report was made."""


def bench_document(options: BenchOptions, results: Sequence[BenchResult]) -> BenchDocument:
    """The document of a run."""
    return BenchDocument(
        inputs=options,
        results=[
            BenchRecord(
                shape=result.shape.record(),
                format_pair=result.format_pair,
                backend=result.backend,
                checked=result.checked,
                flashinfer_us=_time(result.flashinfer),
                flashinfer_reason=_reason(result.flashinfer),
                gather_bmm_us=_time(result.gather_bmm),
                gather_bmm_reason=_reason(result.gather_bmm),
                **measurement_fields(result.measurement),
            )
            for result in results
        ],
        environment=describe_environment(),
    )


def _time(answer: float | str) -> float | None:
    return None if isinstance(answer, str) else answer


def _reason(answer: float | str) -> str | None:
    return answer if isinstance(answer, str) else None
