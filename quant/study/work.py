"""The work of a study: its units, shared out, measured, and recorded in a folder.

A unit is one request of one layer. A unit is measured with one thread, so that every sum has one
order whatever the machine; several processes use several cores, GPUs or machines. They exchange
nothing except result files in the work folder, which all of them must see.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sdsa_quant.calibration.file import read_calibration
from sdsa_quant.calibration.layer import LayerCalibration, Moments
from sdsa_quant.calibration.requests import held_out, request_moments

from .inputs import StudyInputs
from .layers import StudyLayer, open_layers
from .records import StudyFolder, describe_study
from .settings import StudySettings
from .unit import LayerTransforms, fit_layer, measure_unit

WORK_FOLDER = "work"  # in the folder of the report


@dataclass(frozen=True, slots=True)
class Unit:
    """One request of one layer, and what measuring it costs relative to others."""

    layer: int
    request: int
    cost: int


@dataclass(frozen=True, slots=True)
class Study:
    """An open study: where its data is and what it measures. Cheap to make; reads headers only."""

    inputs: StudyInputs
    settings: StudySettings
    device: str
    layers: tuple[StudyLayer, ...]
    folder: StudyFolder

    def units(self) -> list[Unit]:
        """Every unit, layer by layer."""
        return [
            Unit(index, request, _cost(layer, request, length))
            for index, layer in enumerate(self.layers)
            for request, length in enumerate(layer.keys.context_lengths)
        ]


def _cost(layer: StudyLayer, request: int, length: int) -> int:
    products = len(layer.request_rows[request]) * (layer.heads or 1)
    return length * (_KEY_COST + products) + 1


# What transforming, encoding and decoding a key costs, in units of measuring one row's score of it.
_KEY_COST = 8


def open_study(
    inputs: StudyInputs, settings: StudySettings, folder: Path, device: str = "cpu"
) -> Study:
    """Open the layers of a study and describe its work folder, which is not touched.

    Raises
    ------
    ValueError
        The inputs are not what they must be; see `open_layers`.
    """
    layers = tuple(open_layers(inputs))
    description = describe_study(inputs, settings, layers, device)
    return Study(inputs, settings, device, layers, StudyFolder(folder, description))


def share_units(units: Sequence[Unit], rank: int, ranks: int) -> list[Unit]:
    """The units of one of `ranks`: consecutive ones of about the same cost for every rank.

    Consecutive, so that few layers are fitted by two ranks.
    """
    total = sum(unit.cost for unit in units)
    mine, before = [], 0
    for unit in units:
        middle = before + unit.cost / 2
        if rank * total <= middle * ranks < (rank + 1) * total:
            mine.append(unit)
        before += unit.cost
    return mine


def measure_units(
    study: Study, units: Sequence[Unit], advance: Callable[[int], None] = lambda cost: None
) -> None:
    """Measure and record the units that have no result file yet.

    Parameters
    ----------
    study : Study
        The study, its work folder prepared.
    units : sequence of Unit
        Some of the study's units, those of a layer together.
    advance : callable
        Called with the cost of each unit that is done.

    Raises
    ------
    ValueError
        A key or a query value is not finite, or a result file cannot be written.
    """
    fitted: tuple[int, LayerTransforms] | None = None
    calibrations = _Calibrations(study)
    with _one_thread():
        for unit in units:
            if not study.folder.has(unit.layer, unit.request):
                layer = study.layers[unit.layer]
                if fitted is None or fitted[0] != unit.layer:
                    fitted = unit.layer, fit_layer(layer, study.settings)
                result = measure_unit(
                    layer,
                    unit.request,
                    study.settings,
                    fitted[1],
                    study.device,
                    calibrations.of(unit),
                )
                study.folder.write(unit.layer, unit.request, result)
            advance(unit.cost)


class _Calibrations:
    """The statistics that each unit is measured with: never its own."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self._read = None
        if study.inputs.calibration is not None:
            self._read = read_calibration(study.inputs.calibration)
        self._moments: tuple[int, list[Moments]] | None = None  # of a layer

    def of(self, unit: Unit) -> LayerCalibration | None:
        """Those of another capture, or of the layer's other requests; None if none are needed."""
        if not self._study.settings.is_calibrated:
            return None
        layer = self._study.layers[unit.layer]
        if self._read is not None:
            return self._read.layer(layer.name)
        if self._moments is None or self._moments[0] != unit.layer:
            self._moments = unit.layer, request_moments(layer)
        return held_out(layer, self._moments[1], unit.request)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
