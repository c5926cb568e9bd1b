"""Studies in shards without a rendezvous: tasks that measure a share, and one that merges.

A task knows only its own number and how many there are. It records its units in the folder that all
tasks see, and ends; tasks may start, end and start again in any order, and several times.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sdsa_quant.errors import Hint, InputError
from sdsa_quant.files.text import whole_number
from sdsa_quant.files.typed_json import from_json
from sdsa_quant.formats.transforms import TransformChoice

from .inputs import StudyInputs
from .ranks import measure_with_workers
from .records import described
from .report import REPORT_NAME, StudyReport, StudyTiming
from .settings import StudySettings
from .verdict import Goal
from .whole_study import Progress, default_workers, open_whole, write_report
from .work import WORK_FOLDER, Study, Unit, open_study, share_units

SLURM = "slurm"


def parse_shard(text: str, environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Number and count of a shard such as ``3/8``, or ``slurm`` for those of an array task.

    Raises
    ------
    InputError
        The text is not a shard, or there is no array task.
    """
    if text == SLURM:
        names = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_STEP")
        number, first, step = (
            whole_number(environment.get(name, default))
            for name, default in zip(names, ("", "0", "1"), strict=True)
        )
        count = whole_number(environment.get("SLURM_ARRAY_TASK_COUNT", ""))
        if None in (number, first, step, count):
            raise InputError(
                "must be numbers such as 0/8 outside a SLURM array: SLURM_ARRAY_TASK_ID and "
                "SLURM_ARRAY_TASK_COUNT are not set",
                argument="shard",
            )
        index = ((number or 0) - (first or 0)) // (step or 1)
        text = f"{index}/{count}"
    numbers = [whole_number(part) for part in text.split("/")]
    if len(numbers) == 2 and None not in numbers:
        index, total = (number or 0 for number in numbers)
        if index < total:
            return index, total
    raise InputError(
        f"must be a number from 0 and a count, such as 0/8 to 7/8, got {text!r}", argument="shard"
    )


def run_shard(
    shard: tuple[int, int],
    given: Mapping[str, Any],
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> tuple[int, int]:
    """Measure and record one share of a study; returns the units of the share and of the study.

    Parameters
    ----------
    shard : tuple of int
        Its number, from 0, and how many there are.
    given : mapping
        Arguments of `sdsa_quant.study.run`, by their names.
    workers : int or None
        Processes; by default as for `run`.
    progress : callable, optional
        Called with the work done and all work of the shard.

    Raises
    ------
    ValueError
        As `run`.
    """
    study = open_whole(given)
    _refuse_report(study)
    units = study.units()
    share = share_units(units, *shard)
    cost, done = sum(unit.cost for unit in share), 0

    def advance(more: int) -> None:
        nonlocal done
        done += more
        if progress is not None:
            progress(done, cost)

    with study.folder.held(shared=True):
        study.folder.prepare(restart=False)
        advance(0)
        measure_with_workers(study, share, workers or default_workers(1, study.device), advance)
    return len(share), len(units)


def merge(
    output: Path, *, goal: Goal | None = None, finish: Callable[[StudyReport], object] | None = None
) -> StudyReport:
    """Make the report of a study whose shards have all been measured.

    Parameters
    ----------
    output : Path
        The folder that every shard was given.
    goal, finish
        As for `sdsa_quant.study.run`.

    Raises
    ------
    ValueError
        There is no study in it, units are missing, inputs have changed since, or a task is at work.
    """
    started = time.monotonic()
    study = recorded_study(output)
    with study.folder.held():
        study.folder.prepare(restart=False)
        missing = [each for each in study.units() if not study.folder.has(each.layer, each.request)]
        if missing:
            raise InputError(_missing(study, missing), source=output)
        timing = StudyTiming(time.monotonic() - started, 1, None, 1)
        return write_report(study, timing, goal, finish)


def _missing(study: Study, missing: list[Unit]) -> str:
    first, count = missing[0], len(study.units())
    return (
        f"{len(missing)} of {count} units have not been measured, the first of them request "
        f"{first.request} of {study.layers[first.layer].name}: run the shards that have not ended"
    )


def _refuse_report(study: Study) -> None:
    path = study.folder.path.parent / REPORT_NAME
    if path.exists() and not study.folder.is_unfinished:
        raise InputError("exists already; move it away, or give another folder", source=path)


def recorded_study(output: Path) -> Study:
    """The study whose shards were measured into a folder, opened anew from its description.

    Raises
    ------
    ValueError
        There is none, or its inputs are not there any more.
    """
    folder = output / WORK_FOLDER
    description = described(folder)
    if description is None:
        raise InputError(
            "holds no study that was begun",
            source=output,
            hint=Hint("shard", "to measure a part of one first", "0/8"),
        )
    inputs = from_json(StudyInputs, description.get("inputs"), source=folder)
    try:
        settings = description["settings"]
        opened = StudySettings(
            formats=tuple(settings["formats"]),
            transforms=tuple(TransformChoice(**each) for each in settings["transforms"]),
            top_k=tuple(settings["top_k"]),
            softmax_scale=settings["softmax_scale"],
        )
    except (KeyError, TypeError, ValueError):
        raise InputError(
            "is not the description of a study, or is damaged", source=folder
        ) from None
    return open_study(inputs, opened, folder, str(description.get("device")))
