"""`sdsa score --select`: the keys of the contract, their times, and the file that keeps them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from sdsa_kernels import indexer_top_k
from sdsa_kernels.measure import selected
from sdsa_kernels.testing.selection import reference_top_k
from sdsa_quant.files.cache_file import open_cache
from support.caches import write_cache
from support.score_files import LENGTHS, Files

K = 80
SELECT = ("--select", K)


def test_the_file_keeps_the_keys_in_ascending_order(files: Files) -> None:
    output = files.folder / "scores.st"
    report = files.report("-o", output, *SELECT, "--top-k", 3)
    assert report["selection"] == {"top_k": K, "backend": "torch", "times": None}
    stored = load_file(output)
    expected = reference_top_k(stored["scores"], LENGTHS, K, rows_per_group=2)
    assert stored["top_k_indices"].dtype == torch.int32
    assert torch.equal(stored["top_k_indices"], expected)
    assert (expected[2:4, LENGTHS[1] :] == -1).all()
    # What describes a row does not change.
    best = [row["best_keys"] for row in files.report("--top-k", 3)["rows"]]
    assert [row["best_keys"] for row in report["rows"]] == best

    shown = files.sdsa("inspect", output, "--json")
    shown.is_clean()
    assert shown.document["top_k"] == K
    assert shown.document["top_k_order"] == "key"
    found = [row["best_keys"] for row in shown.document["row_summaries"]]
    assert [keys[:3] for keys in found] == best
    assert "80 indices a row, in the order of their key" in files.sdsa("inspect", output).stdout


def test_chunks_select_the_same(files: Files) -> None:
    stored = []
    for options in ((), ("--chunk", 1), ("--chunk", 2)):
        output = files.folder / "scores.st"
        files.report("-o", output, "--force", *SELECT, *options)
        stored.append(output.read_bytes())
    assert stored[1] == stored[0]
    assert stored[2] == stored[0]


def test_more_keys_than_a_row_has_are_filled_up(files: Files) -> None:
    output = files.folder / "scores.st"
    files.report("-o", output, "--select", 300)
    keys = load_file(output)["top_k_indices"]
    assert keys.shape == (6, 300)
    for row, of_row in enumerate(keys.tolist()):
        length = LENGTHS[row // 2]
        assert of_row == [*range(length), *[-1] * (300 - length)]


def test_an_engines_scores_decide_and_not_those_brought_back(files: Files) -> None:
    # What centering takes is so large that scores brought back from it are equal to each other.
    generator = torch.Generator().manual_seed(5)
    save_file({"keys": torch.randn((200, 128), generator=generator) + 3e6}, files.keys)
    options = ("-o", files.cache, "--force", "--center", "channel", "--format", "bf16")
    files.sdsa("quantize-cache", files.keys, *options).is_clean()
    query = torch.randn((2, 128), generator=generator)
    files.save_queries(query)
    output = files.folder / "scores.st"
    files.report("-o", output, "--select", 100)
    stored = load_file(output)
    paged = open_cache(files.cache).paged_keys()
    expected = torch.empty_like(stored["top_k_indices"])
    indexer_top_k(
        query.bfloat16(), paged.key_cache, paged.block_table, stored["context_lengths"],
        requests=stored["requests"], top_keys=expected,
    )  # fmt: skip
    assert torch.equal(stored["top_k_indices"], expected)
    restored = reference_top_k(stored["scores"], [200], 100, rows_per_group=2)
    assert not torch.equal(restored, expected)


def test_times_stand_beside_those_of_the_scores(files: Files) -> None:
    report = files.report(*SELECT, "--graph-replay", 4)
    times = report["selection"]["times"]
    assert (times["replay"], times["repeats"], times["calls_per_replay"]) == ("eager", 4, 1)
    for what in ("scores_and_top_k", "top_k"):
        assert 0 < times[f"{what}_p10_us"] <= times[f"{what}_us"] <= times[f"{what}_p90_us"]
    shown = files.score(*SELECT, "--graph-replay", 4).stdout
    assert "80 keys of each row, by torch" in shown
    lines = [line.split("  ")[0] for line in shown.splitlines()]
    assert lines.index("with top-80") == lines.index("replay: eager") + 1
    assert "top-80 alone" in lines


@pytest.mark.parametrize("wrong", ["nothing", "one key"])
def test_what_does_not_select_gets_no_time(
    files: Files, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    select = selected.select_top_k

    def broken(*arguments: torch.Tensor, top_keys: torch.Tensor, backend: str) -> None:
        if wrong == "one key":
            select(*arguments, top_keys=top_keys, backend=backend)
            top_keys[3, 5] += 1

    monkeypatch.setattr(selected, "select_top_k", broken)
    outcome = files.score(*SELECT, "--graph-replay", 2)
    said = {"nothing": "left 80 of 80 keys unwritten in row 0", "one key": "other keys"}[wrong]
    outcome.fails_with(1, "what was timed is not the selection", said)


def test_whole_calls_are_compared_too(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selected, "indexer_top_k", lambda *arguments, **options: None)
    files.score(*SELECT, "--graph-replay", 2).fails_with(1, "left 80 of 80 keys unwritten in row 0")


@pytest.mark.parametrize("k", [0, -1, 65_536])
def test_other_numbers_of_keys_are_refused(files: Files, k: int) -> None:
    files.score("--select", k).fails_with(2, f"--select must be 1 to 65,535, got {k}")


def test_chunks_are_not_timed(files: Files) -> None:
    outcome = files.score(*SELECT, "--chunk", 1, "--graph-replay", 2)
    outcome.fails_with(2, "--chunk must be left out where a selection is timed")


def test_a_score_of_nan_is_last(files: Files) -> None:
    # NaN keys cannot be stored; a row of infinite scores can, and fails the run.
    keys = files.key_values[:70].clone()
    write_cache(files.cache, keys, [70], "bf16")
    queries = torch.ones(2, 128)
    queries[1] = torch.finfo(torch.bfloat16).max
    files.save_queries(queries)
    output = files.folder / "scores.st"
    outcome = files.score("-o", output, "--select", 10, "--json")
    stored = load_file(output)
    assert torch.equal(
        stored["top_k_indices"], reference_top_k(stored["scores"], [70], 10, rows_per_group=2)
    )
    invalid = int((~stored["scores"].isfinite()).any(dim=1).sum())
    assert outcome.document["rows_invalid"] == invalid
