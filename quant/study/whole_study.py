"""A whole study in one call: measured in every process there is, reduced, written to a folder."""

from __future__ import annotations

import contextlib
import inspect
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sdsa_quant.accuracy.blocks import FIRST_EXPONENT
from sdsa_quant.arguments import checked_arguments
from sdsa_quant.devices import known_device
from sdsa_quant.environment import describe_environment
from sdsa_quant.errors import Hint, InputError, SdsaError
from sdsa_quant.files.atomic_file import write_text
from sdsa_quant.files.typed_json import json_text
from sdsa_quant.formats.key_formats import key_format
from sdsa_quant.formats.transforms import NONE
from sdsa_quant.layout import DEFAULT_SOFTMAX_SCALE

from .captured import chosen_selection, with_stated
from .inputs import DEFAULT_FORMATS, StudyInputs
from .ranks import Ranks, joined_ranks, measure_with_workers
from .rendezvous import local_rank
from .report import (
    REPORT_NAME,
    FormatInfo,
    StudiedSettings,
    StudyReport,
    StudyTiming,
    TransformInfo,
)
from .settings import StudySettings, transform_choices
from .suggestion import suggest
from .summary import summarize_study
from .unit import ERROR_STEPS
from .verdict import Goal, judge
from .work import WORK_FOLDER, Study, open_study, share_units

_MOST_WORKERS = 8  # unless asked for more: each takes a few hundred MB

Progress = Callable[[int, int], None]  # work done and all work, in units of its own


@checked_arguments
def run(
    keys: str | Path,
    queries: str | Path,
    output: str | Path,
    *,
    keys_pattern: str | None = None,
    queries_pattern: str | None = None,
    lengths: str | None = None,
    rows_per_group: int | None = None,
    requests: Sequence[int] | str | None = None,
    causal: bool = False,
    positions: str | None = None,
    score: str | None = None,
    weights: str | None = None,
    select: str | None = None,
    local_blocks: int | None = None,
    mean_pool: int = 1,
    calibration: str | Path | None = None,
    formats: Sequence[str] = DEFAULT_FORMATS,
    rotate: Sequence[str] = (NONE,),
    gain: Sequence[str] = (NONE,),
    center: Sequence[str] = (NONE,),
    top_k: Sequence[int] | None = None,
    softmax_scale: float = DEFAULT_SOFTMAX_SCALE,
    goal: Goal | None = None,
    device: torch.device | str = "cpu",
    workers: int | None = 1,
    force: bool = False,
    progress: Progress | None = None,
    finish: Callable[[StudyReport], object] | None = None,
    notify: Callable[[str], object] | None = None,
) -> StudyReport:
    """Study what formats and transforms of keys do to the top-k, layer by layer.

    Every combination of formats, rotations, gains and centers is measured on every request of every
    layer, against the unquantized keys. One name stands for a list of one. A study that was
    interrupted continues when the same call is made again. Under ``torchrun`` every rank makes the
    same call: the ranks share the work, the first one writes, and all return the same report.

    Parameters
    ----------
    keys, queries : str or Path
        Unquantized keys and query rows: a safetensors file, a folder of them, or an index. Both may
        be the same.
    output : str or Path
        The folder that gets ``report.json`` and, during the run, a folder ``work``; it is made if
        it does not exist.
    keys_pattern, queries_pattern : str, optional
        Names or patterns of the key and the query tensors; by default those of the usual names.
        Layers are matched by the numbers in the names.
    lengths : str, optional
        Tensor of request lengths or offsets, or a pattern; by default one of a usual name beside
        keys or query rows, without any each layer is one request, as with ``"none"``.
    rows_per_group : int, optional
        Consecutive rows of one request; by default what the queries' shape or metadata says, or 1.
    requests : sequence of int, or str, optional
        Request of each group, or a tensor's name or pattern; spread evenly by default.
    causal : bool
        Whether a row sees the keys up to its own position; the rows of a request are its last
        positions.
    positions : str, optional
        Tensor of each row's position, from 0, or a pattern, for causal rows that are not the last.
    score : str, optional
        Score of a key: ``rows``, each query row by itself; ``relu-sum``, the weighted sum of
        ReLUs over the heads of query rows ``[rows, heads, 128]``; ``block-max``, each head by
        itself, for blocks. By default what a capture's files state, or ``rows``. They also state
        weights, requests and positions.
    weights : str, optional
        Tensor of the weights of heads ``[rows, heads]``, or a pattern, for ``relu-sum``; every
        weight is 1 by default.
    select : str, optional
        What is selected: ``tokens:2048``, the best keys, or ``blocks:128:16``, the best 16 blocks
        of 128 keys by the maximum of their scores. By default what a capture's files state, or
        keys, `top_k` of them.
    local_blocks : int, optional
        Of the blocks that a row sees, how many of the last are selected whatever their scores; by
        default as a capture's files state, or none.
    mean_pool : int
        Consecutive keys of the files whose mean is one key of the study.
    calibration : str or Path, optional
        A calibration file of another capture, whose mean keys and covariances the covariance
        formats are to use instead of those of the other requests.
    formats : sequence of str
        One or several of ``bf16``, ``nvfp4``, ``nvfp4-mixed``, ``nvfp4-4over6``, ``nvfp4-search``,
        ``nvfp4-search-mixed``, ``nvfp4-covariance``, ``nvfp4-covariance-mixed``, ``mxfp4`` and
        ``fp8``. With a covariance format among them every request is measured with the mean key and
        the covariances of the layer's other requests, or with those of `calibration`.
    rotate, gain, center : sequence of str
        Transforms to combine: ``none`` and ``hadamard``; ``none``, ``auto`` and powers of two;
        ``none`` and ``channel``.
    top_k : sequence of int, optional
        Numbers of keys that an indexer selects; by default what a capture's files state, or 64, 256
        and 2048. Left out with `select`.
    softmax_scale : float
        What a score is multiplied by before the softmax of mass@k.
    goal : Goal, optional
        What every layer must reach, for the verdict and a choice for each layer.
    device : torch.device or str
        ``cpu``, ``cuda`` or ``cuda:N``; under ``torchrun``, ``cuda`` is the rank's own device.
    workers : int or None
        Processes of this rank; None for one for each core up to 8, or one under ``torchrun`` and
        on a GPU. For more than one, a script needs ``if __name__ == "__main__":``.
    force : bool
        Whether to replace a report, and to start an unfinished study over.
    progress : callable, optional
        Called in the first rank with the work done and all of its work, at the start and after each
        unit.
    finish : callable, optional
        Called in the first rank with the report once it is in the file, for what is made of it:
        where that fails, the same call goes on from there.
    notify : callable, optional
        Called with one line if this rank has to wait for others.

    Returns
    -------
    StudyReport
        What ``report.json`` holds.

    Raises
    ------
    ValueError
        An input or an argument is not what it must be, or there is a report already and `force` is
        false. The error names what is wrong.
    SdsaError
        A worker or another rank failed.
    """
    given = dict(locals())
    started = time.monotonic()
    study = open_whole(given)
    if goal is not None and goal.k not in study.settings.top_k:
        raise InputError(
            f"must be of a k that is studied, {', '.join(map(str, study.settings.top_k))}, got "
            f"{goal.k}",
            argument="goal",
        )
    if workers is not None and workers < 1:
        raise InputError(f"must be at least 1, got {workers}", argument="workers")
    device = study.device
    path = Path(output) / REPORT_NAME
    # A run that ended between its report and the pages made of it goes on as any other.
    if path.exists() and not force and not study.folder.is_unfinished:
        raise InputError("exists already", source=path, hint=Hint("force", "to replace it", True))
    with joined_ranks(device, notify) as ranks, contextlib.ExitStack() as stack:
        processes = workers or default_workers(ranks.count, device)

        def prepare() -> None:
            if ranks.is_first:
                stack.enter_context(study.folder.held())
                study.folder.prepare(restart=force)

        ranks.in_step(prepare)
        _measure(study, ranks, processes, progress)

        def write() -> None:
            if ranks.is_first:
                seconds = time.monotonic() - started
                timing = StudyTiming(seconds, ranks.count, ranks.joined_by, processes)
                write_report(study, timing, goal, finish)

        ranks.in_step(write)
    return StudyReport.read(path)  # what the file holds, in every rank


def open_whole(given: Mapping[str, Any]) -> Study:
    """The study that arguments of `run` describe, by their names; defaults are those of `run`.

    Raises
    ------
    ValueError
        An input or an argument is not what it must be.
    """
    known = inspect.signature(run).parameters
    value = {name: each.default for name, each in known.items()} | dict(given)
    queries, calibration, requests = (value[n] for n in ("queries", "calibration", "requests"))
    selection = chosen_selection(
        Path(queries), value["select"], value["top_k"], value["local_blocks"]
    )
    inputs = StudyInputs(
        keys=Path(value["keys"]),
        queries=Path(queries),
        keys_pattern=value["keys_pattern"],
        queries_pattern=value["queries_pattern"],
        lengths=value["lengths"],
        rows_per_group=value["rows_per_group"],
        requests=requests if requests is None or isinstance(requests, str) else tuple(requests),
        # Positions are what rows see keys up to.
        causal=value["causal"] or value["positions"] is not None,
        positions=value["positions"],
        weights=value["weights"],
        block=selection.block,
        local_blocks=selection.local,
        mean_pool=value["mean_pool"],
        calibration=None if calibration is None else Path(calibration),
    )
    inputs = with_stated(inputs, value["score"])
    settings = StudySettings(
        formats=tuple(value["formats"]),
        transforms=transform_choices(value["rotate"], value["gain"], value["center"]),
        top_k=selection.top_k,
        softmax_scale=value["softmax_scale"],
    )
    device = _device_of_rank(str(value["device"]))
    return open_study(inputs, settings, Path(value["output"]) / WORK_FOLDER, device)


def write_report(
    study: Study,
    timing: StudyTiming,
    goal: Goal | None,
    finish: Callable[[StudyReport], object] | None,
) -> StudyReport:
    """Write the report of a study whose units are all measured, and remove its work folder."""
    path = study.folder.path.parent / REPORT_NAME
    write_text(path, json_text(_report(study, timing, goal)) + "\n", force=True)
    report = StudyReport.read(path)
    if finish is not None:
        finish(report)
    study.folder.remove()
    return report


def _device_of_rank(device: str) -> str:
    """``cuda`` under torchrun is a device by the process's own number on its machine."""
    known_device(device)
    rank = local_rank() if device == "cuda" else None
    return device if rank is None else f"cuda:{rank % torch.cuda.device_count()}"


def default_workers(ranks: int, device: str) -> int:
    """Processes of a rank: one for each core, up to 8, unless a GPU or other ranks do the work."""
    if ranks > 1 or device != "cpu":
        return 1
    return min(len(os.sched_getaffinity(0)), _MOST_WORKERS)


def _measure(study: Study, ranks: Ranks, workers: int, progress: Progress | None) -> None:
    """Measure this rank's share of the study, in step with the others."""
    units = share_units(study.units(), ranks.rank, ranks.count)
    cost, done = sum(unit.cost for unit in units), 0

    def advance(more: int) -> None:
        nonlocal done
        done += more
        if progress is not None and ranks.is_first:
            progress(done, cost)

    def measure() -> None:
        advance(0)
        measure_with_workers(study, units, workers, advance)

    try:
        ranks.in_step(measure)
    except SdsaError:
        if ranks.is_first:  # by now no rank is at work
            study.folder.remove_unless_used()
        raise


def _report(study: Study, timing: StudyTiming, goal: Goal | None) -> StudyReport:
    """The report of a study whose units are all measured."""
    summary = summarize_study(study)
    names = [layer.name for layer in summary.layers]
    results = tuple(
        result for results in (summary.overall, *summary.by_layer) for result in results
    )
    suggestions = suggest(summary)
    return StudyReport(
        schema="sdsa.study/5",
        command="study",
        inputs=study.inputs,
        device=study.device.partition(":")[0],  # the same for every rank
        settings=_settings(study.settings),
        layers=summary.layers,
        rows_invalid=summary.rows_invalid,
        rows_constant=summary.overall[0].accuracy.rows_constant,
        suggestions=suggestions,
        verdict=judge(names, results, study.settings.top_k, suggestions, goal),
        results=results,
        blocks=summary.blocks,
        environment=describe_environment(),
        timing=timing,
    )


def _settings(settings: StudySettings) -> StudiedSettings:
    formats = [key_format(name) for name in settings.formats]
    return StudiedSettings(
        formats=tuple(
            FormatInfo(each.name, each.bytes_per_key, each.quantizes_query, each.summary)
            for each in formats
        ),
        transforms=tuple(
            TransformInfo(each.label, each.center, each.rotate, each.gain)
            for each in settings.transforms
        ),
        top_k=settings.top_k,
        softmax_scale=settings.softmax_scale,
        error_steps=ERROR_STEPS,
        first_exponent=FIRST_EXPONENT,
    )
