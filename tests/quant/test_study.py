"""Sharing, recording, resuming and reducing a study: the same bits however it was measured."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sdsa_quant.accuracy.summary import summarize_accuracy
from sdsa_quant.errors import CheckFailedError, InputError
from sdsa_quant.study import work as study_work
from sdsa_quant.study.inputs import StudyInputs
from sdsa_quant.study.ranks import Ranks, measure_with_workers
from sdsa_quant.study.results import Suggestions
from sdsa_quant.study.settings import StudySettings, transform_choices
from sdsa_quant.study.suggestion import paired_difference, suggest
from sdsa_quant.study.summary import StudySummary, summarize_study
from sdsa_quant.study.unit import unpack_rows
from sdsa_quant.study.work import Study, Unit, measure_units, open_study, share_units
from support.studies import LENGTHS, layer_inputs, measured_study, save_layers

SETTINGS = StudySettings(
    formats=("nvfp4", "fp8"),
    transforms=transform_choices(("none", "hadamard"), ("auto",), ("none", "channel")),
    top_k=(5, 64),
)


@pytest.fixture
def inputs(tmp_path: Path, generator: torch.Generator) -> StudyInputs:
    return layer_inputs(save_layers(tmp_path / "layers.safetensors", generator))


def assert_same(first: StudySummary, second: StudySummary) -> None:
    for field in dataclasses.fields(first):
        ours, theirs = getattr(first, field.name), getattr(second, field.name)
        if isinstance(ours, torch.Tensor):
            assert torch.equal(ours.nan_to_num(-1.0), theirs.nan_to_num(-1.0))
        else:
            assert ours == theirs, field.name


# Sharing.


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 40])
def test_every_unit_is_shared_to_one_rank(ranks: int) -> None:
    units = [Unit(index // 5, index % 5, 1 + (index * 37) % 11) for index in range(30)]
    shares = [share_units(units, rank, ranks) for rank in range(ranks)]
    assert [unit for share in shares for unit in share] == units
    total = sum(unit.cost for unit in units)
    for share in shares:
        assert sum(unit.cost for unit in share) <= total / ranks + 11


def test_a_layer_is_whole_in_one_share_where_it_can_be() -> None:
    units = [Unit(layer, request, 10) for layer in range(4) for request in range(6)]
    for rank in range(2):
        assert {unit.layer for unit in share_units(units, rank, 2)} == {2 * rank, 2 * rank + 1}


# Measuring: ranks, workers, resuming.


def test_shares_and_workers_give_the_same_results(inputs: StudyInputs, tmp_path: Path) -> None:
    alone = summarize_study(measured_study(inputs, SETTINGS, tmp_path / "alone"))
    shared = open_study(inputs, SETTINGS, tmp_path / "shared")
    shared.folder.prepare(restart=False)
    for rank in (2, 0, 1):
        measure_units(shared, share_units(shared.units(), rank, 3))
    assert_same(summarize_study(shared), alone)
    done: list[int] = []
    workers = open_study(inputs, SETTINGS, tmp_path / "workers")
    workers.folder.prepare(restart=False)
    measure_with_workers(workers, workers.units(), 2, done.append)
    assert_same(summarize_study(workers), alone)
    assert sum(done) == sum(unit.cost for unit in workers.units())


def test_the_number_of_threads_does_not_matter(inputs: StudyInputs, tmp_path: Path) -> None:
    summaries = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            study = measured_study(inputs, SETTINGS, tmp_path / str(threads))
            summaries.append(summarize_study(study))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert_same(*summaries)


def test_a_study_continues_where_it_was(
    inputs: StudyInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = summarize_study(measured_study(inputs, SETTINGS, tmp_path / "whole"))
    first = open_study(inputs, SETTINGS, tmp_path / "cut")
    first.folder.prepare(restart=False)
    measure_units(first, first.units()[:7])
    measured = []
    real = study_work.measure_unit
    monkeypatch.setattr(
        study_work, "measure_unit", lambda *args: (measured.append(args[1]), real(*args))[1]
    )
    continued = summarize_study(measured_study(inputs, SETTINGS, tmp_path / "cut"))
    assert len(measured) == len(first.units()) - 7
    assert_same(continued, whole)


def test_another_study_is_not_continued(inputs: StudyInputs, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    study = measured_study(inputs, SETTINGS, folder)
    other = dataclasses.replace(SETTINGS, top_k=(7,))
    with pytest.raises(
        InputError,
        match=r"unfinished study .* \(different settings\); give force=True to start over",
    ):
        open_study(inputs, other, folder).folder.prepare(restart=False)
    path = inputs.keys
    os.utime(path, ns=(0, 0))
    with pytest.raises(InputError, match=r"\(different files\)"):
        open_study(inputs, SETTINGS, folder).folder.prepare(restart=False)
    restarted = open_study(inputs, other, folder)
    restarted.folder.prepare(restart=True)
    assert not restarted.folder.has(0, 0)
    assert study.folder.fingerprint != restarted.folder.fingerprint


def test_records_of_another_study_are_not_read(inputs: StudyInputs, tmp_path: Path) -> None:
    measured_study(inputs, SETTINGS, tmp_path / "work")
    other = open_study(inputs, dataclasses.replace(SETTINGS, top_k=(7,)), tmp_path / "work")
    with pytest.raises(InputError, match="is the result file of another study"):
        other.folder.read(0, 0)


def test_a_damaged_description_is_refused(inputs: StudyInputs, tmp_path: Path) -> None:
    measured_study(inputs, SETTINGS, tmp_path / "work")
    (tmp_path / "work" / "study.json").write_text("{")
    with pytest.raises(InputError, match="is not the description of a study"):
        open_study(inputs, SETTINGS, tmp_path / "work").folder.prepare(restart=False)


def test_removing_leaves_what_is_not_ours(inputs: StudyInputs, tmp_path: Path) -> None:
    study = measured_study(inputs, SETTINGS, tmp_path / "work")
    (tmp_path / "work" / "notes.txt").write_text("mine")
    study.folder.remove()
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["notes.txt"]


def test_a_worker_reports_its_error(inputs: StudyInputs, tmp_path: Path) -> None:
    tensors = load_file(inputs.keys)
    tensors["layers.10.keys"][3, 3] = math.inf
    save_file(tensors, inputs.keys)
    study = open_study(inputs, SETTINGS, tmp_path / "work")
    study.folder.prepare(restart=False)
    with pytest.raises(InputError, match=r"tensor layers\.10\.keys must be finite, but key 3"):
        measure_with_workers(study, study.units(), 2, lambda cost: None)


def test_ranks_share_their_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(0, 2)
    monkeypatch.setattr(ranks, "_gather", lambda message: [message, "no such file"])
    with pytest.raises(CheckFailedError, match="rank 1 failed: no such file"):
        ranks.in_step(lambda: None)

    def fail() -> None:
        raise InputError("mine")

    with pytest.raises(InputError, match="mine"):
        ranks.in_step(fail)


# Reducing.


def test_the_summary_is_that_of_all_rows(inputs: StudyInputs, tmp_path: Path) -> None:
    study = measured_study(inputs, SETTINGS, tmp_path / "work")
    summary = summarize_study(study)
    units = [
        [study.folder.read(layer, request) for request in range(len(LENGTHS))] for layer in range(3)
    ]
    for place, result in enumerate(summary.overall):
        rows = [
            row
            for of_layer in units
            for unit in of_layer
            for row in unpack_rows(unit.rows[place], SETTINGS.top_k)
        ]
        assert result.accuracy == summarize_accuracy(rows, SETTINGS.top_k)
        assert (result.accuracy.rows, result.accuracy.rows_empty) == (24, 6)
        assert sum(result.error_counts) == 3 * 2 * sum(LENGTHS)
        recall = result.accuracy.top_k[0].recall
        worst = [
            each[place].layer
            for each in summary.by_layer
            if each[place].accuracy.top_k[0].recall.minimum == recall.minimum
        ]
        assert result.worst_layers[0] == worst[0]
    squares = sum(unit.channel_squares.sum() for of_layer in units for unit in of_layer)
    errors = sum(unit.channel_errors[0].sum() for of_layer in units for unit in of_layer)
    assert summary.overall[0].key_error == pytest.approx(math.sqrt(errors / squares))
    channels = summary.overall[0].channel_errors
    assert channels is not None
    assert math.hypot(*channels) / math.sqrt(128) == pytest.approx(summary.overall[0].key_error)
    assert [layer.keys for layer in summary.layers] == [sum(LENGTHS)] * 3


def test_rows_are_binned_by_length(inputs: StudyInputs, tmp_path: Path) -> None:
    summary = summarize_study(measured_study(inputs, SETTINGS, tmp_path / "work"))
    bins = summary.overall[0].by_length
    assert [(each.shortest, each.longest, each.rows) for each in bins] == [
        (65, 128, 6),
        (129, 256, 6),
        (257, 512, 6),
    ]
    mean = summary.overall[0].accuracy.top_k[1].recall.mean
    assert sum((each.recall[1] or 0) * each.rows for each in bins) / 18 == pytest.approx(mean)
    assert [each.rows_longer_than_k for each in bins] == [(6, 6)] * 3


def test_gains_are_those_of_each_layer(tmp_path: Path, generator: torch.Generator) -> None:
    keys = torch.randn(50, 128, generator=generator)
    query = torch.ones(1, 128)
    path = tmp_path / "two.safetensors"
    save_file(
        {"a0.keys": keys, "a1.keys": keys / 1024, "a0.queries": query, "a1.queries": query.clone()},
        path,
    )
    settings = StudySettings(
        formats=("nvfp4",), transforms=transform_choices(("none",), ("none", "auto"), ("none",))
    )
    summary = summarize_study(measured_study(StudyInputs(path, path), settings, tmp_path / "work"))
    gains = {(each.layer, each.transform): each.gain for each in summary.blocks}
    assert gains["a1.keys", "gain auto"] == 1024 * (gains["a0.keys", "gain auto"] or 0)
    assert gains[None, "gain auto"] is None
    assert gains[None, "none"] == 1
    without, with_gain = summary.by_layer[1]
    assert with_gain.key_error < without.key_error / 2
    assert summary.by_layer[0][1].key_error == summary.by_layer[0][0].key_error


def chance_study(scale: float, tmp_path: Path, generator: torch.Generator) -> StudySummary:
    """Keys that NVFP4 flushes to zero where `scale` is tiny: every score is then 0."""
    path = tmp_path / "keys.safetensors"
    keys = torch.randn(2000, 128, generator=generator) * scale
    query = torch.randn(16, 128, generator=generator)
    save_file({"keys": keys.bfloat16(), "queries": query.bfloat16()}, path)
    settings = StudySettings(formats=("nvfp4",), top_k=(64, 4096))
    return summarize_study(measured_study(StudyInputs(path, path), settings, tmp_path / "work"))


def test_flushed_keys_are_no_better_than_chance(tmp_path: Path, generator: torch.Generator) -> None:
    result = chance_study(2.0**-14, tmp_path, generator).overall[0]
    assert result.no_better_than_chance == (True, None)


def test_ordinary_keys_are_better_than_chance(tmp_path: Path, generator: torch.Generator) -> None:
    result = chance_study(1.0, tmp_path, generator).overall[0]
    assert result.no_better_than_chance == (False, None)


# Suggestions.


def test_paired_differences_by_hand() -> None:
    ours = torch.tensor([1.0, 0.5, 0.75, 0.75], dtype=torch.float64)
    theirs = torch.tensor([0.5, 0.5, 0.5, 1.0], dtype=torch.float64)
    # Differences .5, 0, .25, -.25: mean .125, squares about it .140625 x 2 + .015625 x 2 = .3125
    difference = paired_difference(ours, theirs, torch.arange(4))
    assert difference.mean == 0.125
    assert difference.standard_error == pytest.approx(math.sqrt(0.3125 / 3 / 4))
    assert (difference.rows_better, difference.rows_worse, difference.rows) == (2, 1, 4)
    assert not difference.is_clear
    assert difference.requests == 4
    assert paired_difference(ours[:1], theirs[:1], torch.arange(1)).standard_error is None


def test_rows_of_one_request_are_one_observation() -> None:
    ours = torch.tensor([1.0, 0.5, 0.75, 0.75], dtype=torch.float64)
    theirs = torch.tensor([0.5, 0.5, 0.5, 1.0], dtype=torch.float64)
    # About the mean .125: .375 - .125 in the first request, .125 - .375 in the second, so squares
    # of .0625 each, times 2 / 1.
    difference = paired_difference(ours, theirs, torch.tensor([7, 7, 3, 3]))
    assert difference.standard_error == pytest.approx(math.sqrt(0.125 * 2) / 4)
    assert (difference.requests, difference.rows) == (2, 4)
    # The same rows over and over say no more than once.
    again = paired_difference(ours.repeat(9), theirs.repeat(9), torch.arange(4).repeat(9))
    once = paired_difference(ours, theirs, torch.arange(4))
    assert again.standard_error == pytest.approx(once.standard_error)
    alone = paired_difference(ours, theirs, torch.zeros(4, dtype=torch.int64))
    assert alone.standard_error == once.standard_error
    assert alone.requests == 1, "which is said beside it"


def with_recalls(study: StudySummary, recalls: dict[str, list[float]]) -> StudySummary:
    """The summary with other rows: recall at the first k by label of the setting."""
    settings = study.settings.settings
    table = torch.tensor([recalls[setting.label] for setting in settings], dtype=torch.float64)
    both = torch.stack((table, torch.ones_like(table)), dim=-1)
    return dataclasses.replace(
        study,
        row_recalls=both,
        row_tells=torch.tensor([[True, False]]).expand(table.shape[1], 2),
        row_units=torch.arange(table.shape[1]),
    )


@pytest.fixture
def summary(inputs: StudyInputs, tmp_path: Path) -> StudySummary:
    settings = StudySettings(
        formats=("nvfp4", "nvfp4-mixed", "fp8"),
        transforms=transform_choices(("none", "hadamard"), ("none",), ("none",)),
        top_k=(5, 64),
    )
    return summarize_study(measured_study(inputs, settings, tmp_path / "work"))


def test_the_simplest_of_equals_is_suggested(summary: StudySummary) -> None:
    recalls = {
        "nvfp4": [0.5, 0.6, 0.5, 0.6],
        "nvfp4-mixed": [0.9, 0.8, 0.9, 0.8],  # within noise of the best
        "nvfp4, hadamard": [0.7, 0.7, 0.7, 0.7],
        "nvfp4-mixed, hadamard": [0.9, 0.82, 0.88, 0.81],  # the best
        "fp8": [0.9, 0.9, 0.9, 0.9],
        "fp8, hadamard": [0.95, 0.96, 0.95, 0.96],  # clearly better
    }
    suggestions = suggest(with_recalls(summary, recalls))
    small, large = suggestions.by_size
    assert suggestions.k == 5
    assert (small.bytes_per_key, small.label) == (72, "nvfp4-mixed")
    assert (small.candidates, large.candidates) == (4, 2)
    assert small.best.label == "nvfp4-mixed, hadamard"
    assert small.evidence is not None
    assert small.evidence.plain.label == "nvfp4"
    assert small.evidence.gain.mean == pytest.approx(0.3)
    assert (large.bytes_per_key, large.label) == (132, "fp8, hadamard")
    assert large.evidence is not None
    assert large.evidence.plain.label == "fp8"
    assert (large.evidence.gain.rows_better, large.evidence.gain.rows) == (4, 4)


def test_the_plain_setting_needs_no_evidence(summary: StudySummary) -> None:
    recalls = {setting.label: [0.9, 0.8] for setting in summary.settings.settings}
    small, _ = suggest(with_recalls(summary, recalls)).by_size
    assert (small.label, small.evidence) == ("nvfp4", None)


def test_without_rows_longer_than_k_there_is_no_suggestion(summary: StudySummary) -> None:
    recalls = {setting.label: [1.0, 1.0] for setting in summary.settings.settings}
    short = dataclasses.replace(
        with_recalls(summary, recalls), row_tells=torch.zeros(2, 2, dtype=torch.bool)
    )
    assert suggest(short) == Suggestions(None, ())


def test_invalid_rows_take_a_setting_out_of_the_suggestions(summary: StudySummary) -> None:
    recalls = {setting.label: [0.9, 0.8] for setting in summary.settings.settings}
    recalls["nvfp4"] = [math.nan, 0.8]
    small, _ = suggest(with_recalls(summary, recalls)).by_size
    assert small.label == "nvfp4-mixed"


def test_the_description_is_plain_json(inputs: StudyInputs, tmp_path: Path) -> None:
    study: Study = open_study(inputs, SETTINGS, tmp_path / "work")
    study.folder.prepare(restart=False)
    description = json.loads((tmp_path / "work" / "study.json").read_text())
    assert description["layers"] == ["layers.0.keys", "layers.2.keys", "layers.10.keys"]
    assert description["settings"]["top_k"] == [5, 64]
