"""`sdsa score --baseline` where the result shows that its inputs do not belong together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file

from sdsa_quant.files.cache_file import open_cache
from support.caches import write_cache
from support.problems import gaussian_values
from support.score_files import LENGTHS, Files


def other_keys(files: Files) -> None:
    """Keys of another layer."""
    values = torch.randn(files.key_values.shape, generator=torch.Generator().manual_seed(1))
    save_file({"keys": values.bfloat16()}, files.keys)


def swapped_nibbles(files: Files) -> None:
    """A cache whose writer had the other order of the two codes of a byte."""
    tensors, header = load_file(files.cache), open_cache(files.cache).header
    codes = tensors["pages"][:, :4096]
    tensors["pages"][:, :4096] = (codes >> 4) | (codes << 4)
    save_file(tensors, files.cache, header.metadata())


def rotated_by_hand(files: Files) -> None:
    """Keys rotated before they were cached, query rows not."""
    square = torch.randn(128, 128, generator=torch.Generator().manual_seed(2))
    rotation = torch.linalg.qr(square).Q
    write_cache(files.cache, (files.key_values.float() @ rotation).bfloat16(), LENGTHS)


WRONG = (other_keys, swapped_nibbles, rotated_by_hand)


@pytest.mark.parametrize("make_wrong", WRONG, ids=lambda make: make.__name__)
def test_an_accuracy_that_proves_its_inputs_wrong_is_flagged(
    files: Files, make_wrong: Callable[[Files], None]
) -> None:
    make_wrong(files)
    outcome = files.score("--baseline", files.keys, "--top-k", "16", "--json")
    assert outcome.exit_code == 0
    reason = "the baseline, the layout or a rotation does not belong to this cache"
    assert reason in outcome.stderr
    assert "relative L2 error" in outcome.stderr
    doubts = outcome.document["doubts"]
    assert all(f"note: {doubt}" in outcome.stderr for doubt in doubts)
    assert len(doubts) >= 1
    if make_wrong is not swapped_nibbles:  # which keeps half of what neighbours have in common
        assert any("no better than chance" in doubt for doubt in doubts)


def test_a_right_accuracy_is_not(files: Files) -> None:
    document = files.report("--baseline", files.keys, "--top-k", "16,64,249")
    assert document["doubts"] == []


def test_rows_that_keep_every_key_say_nothing_about_chance(files: Files) -> None:
    other_keys(files)
    doubts = files.score("--baseline", files.keys, "--top-k", "249", "--json").document["doubts"]
    assert not any("chance" in doubt for doubt in doubts)
    assert any("relative L2" in doubt for doubt in doubts)


def test_a_baseline_from_a_file_of_another_name_is_remarked_on(
    files: Files, generator: torch.Generator
) -> None:
    other = files.folder / "layer_4.safetensors"
    save_file({"keys": gaussian_values((sum(LENGTHS), 128), generator)}, other)
    stderr = files.score("--baseline", other).stderr
    assert "was made from file keys.safetensors, but the baseline is layer_4.safetensors" in stderr
    assert "no better than chance" in stderr


@pytest.mark.parametrize(
    ("factors", "lost", "words"),
    [
        ((1e-6,) * 6, 6, "100 % of their blocks flushed to zero, 0 % saturated"),
        ((1e5,) * 6, 6, "saturated"),
        ((1, 1, 1, 1e-4, 1, 1), 1, "the first is row 3"),
        ((0, 1, 1, 1, 1, 1e-2), 0, ""),
    ],
    ids=["flushed", "saturated", "one", "none"],
)
def test_query_rows_that_nvfp4_loses_are_told(
    files: Files, factors: tuple[float, ...], lost: int, words: str
) -> None:
    files.save_queries(files.query_values * torch.tensor(factors)[:, None])
    outcome = files.score("--json")
    assert outcome.exit_code == 0
    loss = outcome.document["problem"]["query_loss"]
    assert (loss["blocks"], loss["rows_lost"]) == (48, lost)
    assert ("--query-format bf16 keeps them" in outcome.stderr) == bool(lost)
    assert words in outcome.stderr
    kept = files.report("--query-format", "bf16")
    assert kept["problem"]["query_loss"] is None
