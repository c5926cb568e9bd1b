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

from .inputs import StudyInputs
from .layers import StudyLayer, open_layers
from .records import StudyFolder, describe_study
from .settings import StudySettings
from .unit import LayerTransforms, fit_layer, measure_unit


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
            Unit(index, request, length * (_KEY_COST + len(layer.request_rows[request])) + 1)
            for index, layer in enumerate(self.layers)
            for request, length in enumerate(layer.keys.context_lengths)
        ]


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
    with _one_thread():
        for unit in units:
            if not study.folder.has(unit.layer, unit.request):
                layer = study.layers[unit.layer]
                if fitted is None or fitted[0] != unit.layer:
                    fitted = unit.layer, fit_layer(layer, study.settings)
                result = measure_unit(layer, unit.request, study.settings, fitted[1], study.device)
                study.folder.write(unit.layer, unit.request, result)
            advance(unit.cost)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
