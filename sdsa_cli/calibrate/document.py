"""The JSON document of `sdsa calibrate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sdsa_quant.environment import Environment, describe_environment

if TYPE_CHECKING:
    from sdsa_quant.calibration.file import Calibration


@dataclass(frozen=True, slots=True)
class CalibratedLayer:
    """The statistics of one layer."""

    name: str
    """Tensor of keys."""
    keys: int
    """Keys that were counted, those of merged files among them."""
    rows: int
    """Query rows that were counted."""
    digest: str
    """SHA-256 of the statistics, which a cache's header names."""


@dataclass(frozen=True, slots=True)
class CalibrationSource:
    """A capture that the statistics are from."""

    keys: str
    """Name of its file or folder of keys."""
    queries: str
    """Name of its file or folder of query rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateDocument:
    """What `sdsa calibrate` wrote."""

    schema: Literal["sdsa.calibrate/1"] = "sdsa.calibrate/1"
    """Name and version of this document."""
    command: Literal["calibrate"] = "calibrate"
    """The command that wrote it."""
    path: Path
    """The calibration file."""
    sources: list[CalibrationSource]
    """The captures, the one read now first."""
    layers: list[CalibratedLayer]
    """The layers, in the numeric order of their names."""
    environment: Environment
    """Where it was made."""


def calibrate_document(path: str, calibration: Calibration) -> CalibrateDocument:
    """The document of a run."""
    return CalibrateDocument(
        path=Path(path),
        sources=[CalibrationSource(each.keys, each.queries) for each in calibration.sources],
        layers=[
            CalibratedLayer(each.name, each.keys, each.rows, each.digest)
            for each in calibration.layers
        ],
        environment=describe_environment(),
    )
