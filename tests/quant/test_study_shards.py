"""Shards of a study: tasks that start, are killed and start again in any order, and one report."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sdsa_quant.errors import InputError
from sdsa_quant.study import Goal, StudyReport, run
from sdsa_quant.study.report import REPORT_NAME
from sdsa_quant.study.shards import merge, parse_shard, run_shard
from support.studies import save_layers

SHARDS = 8
OPTIONS = {
    "lengths": "*.lengths",
    "formats": ("nvfp4", "fp8"),
    "rotate": ("none", "hadamard"),
    "top_k": (16, 64),
}


@pytest.fixture
def given(tmp_path: Path, generator: torch.Generator) -> dict[str, Any]:
    path = save_layers(tmp_path / "layers.safetensors", generator)
    return {"keys": path, "queries": path, "output": tmp_path / "sharded", **OPTIONS}


def results(report: StudyReport) -> StudyReport:
    """A report without what a run may change."""
    environment = replace(report.environment, date="", command_line="")
    return replace(report, timing=replace(report.timing, seconds=0.0), environment=environment)


def _task(shard: int, given: Mapping[str, Any], dies_after: int) -> None:
    """One task; it dies without a word once it has measured so many units."""
    measured = 0

    def progress(done: int, total: int) -> None:
        nonlocal measured
        measured += done > 0
        if measured > dies_after:
            os.kill(os.getpid(), signal.SIGKILL)

    run_shard((shard, SHARDS), given, workers=1, progress=progress)


def test_any_order_of_starts_and_deaths_gives_the_same_bits(
    given: dict[str, Any], tmp_path: Path
) -> None:
    whole = run(**{**given, "output": tmp_path / "whole"}, workers=1, goal=Goal(16, 0.9))
    order = random.Random(12)
    for attempt in range(2):
        output = tmp_path / f"sharded-{attempt}"
        starts = [*range(SHARDS), *order.choices(range(SHARDS), k=3)]  # some twice at a time
        order.shuffle(starts)
        for start in range(0, len(starts), 4):
            context = multiprocessing.get_context("fork")
            tasks = [
                context.Process(
                    target=_in_task,
                    args=(shard, {**given, "output": output}, order.choice([0, 1, 9])),
                )
                for shard in starts[start : start + 4]
            ]
            for task in tasks:
                task.start()
            for task in order.sample(tasks, len(tasks)):
                task.join(order.uniform(0.1, 1.0))
                task.kill()  # in the midst of a unit, or of writing it
                task.join()
        leftover = order.sample(range(SHARDS), SHARDS)
        with pytest.raises(InputError, match="of 12 units have not been measured, the first"):
            merge(output)
        for shard in leftover:
            run_shard((shard, SHARDS), {**given, "output": output}, workers=1)
        report = merge(output, goal=Goal(16, 0.9))
        assert results(report) == results(whole)
        assert not (output / "work").exists()


def _in_task(shard: int, given: Mapping[str, Any], dies_after: int) -> None:
    torch.set_num_threads(1)
    _task(shard, given, dies_after)


def test_the_shares_are_the_whole(given: dict[str, Any]) -> None:
    shares = [run_shard((shard, 3), given, workers=1) for shard in (2, 0, 1)]
    assert sum(mine for mine, _ in shares) == 12
    assert {every for _, every in shares} == {12}
    assert merge(Path(given["output"])).overall


def test_what_cannot_be_merged_is_refused(given: dict[str, Any], tmp_path: Path) -> None:
    output = Path(given["output"])
    with pytest.raises(InputError, match="holds no study that was begun"):
        merge(output)
    run_shard((0, 2), given, workers=1)
    with pytest.raises(InputError, match="an unfinished study of other inputs or settings"):
        run_shard((1, 2), {**given, "top_k": (8,)}, workers=1)
    with pytest.raises(InputError, match="units have not been measured"):
        merge(output)
    run_shard((1, 2), given, workers=1)
    save_layers(given["keys"], torch.Generator().manual_seed(99))  # other keys meanwhile
    with pytest.raises(InputError, match="of other inputs or settings"):
        merge(output)
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / REPORT_NAME).write_text("{}")
    with pytest.raises(InputError, match="exists already; move it away"):
        run_shard((0, 2), {**given, "output": tmp_path / "done"}, workers=1)


def test_shards_by_name_and_by_slurm() -> None:
    assert parse_shard("3/8") == (3, 8)
    array = {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "8"}
    assert parse_shard("slurm", array) == (5, 8)
    assert parse_shard("slurm", {**array, "SLURM_ARRAY_TASK_MIN": "1"}) == (4, 8)
    steps = {"SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_STEP": "2"}
    assert parse_shard("slurm", {**array, **steps}) == (2, 8)
    for text in ("8/8", "-1/8", "1", "1/2/3", "a/b", ""):
        with pytest.raises(InputError, match="must be a number from 0 and a count"):
            parse_shard(text, {})
    with pytest.raises(InputError, match="SLURM_ARRAY_TASK_COUNT are not set"):
        parse_shard("slurm", {})
