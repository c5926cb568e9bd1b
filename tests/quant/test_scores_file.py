"""Scores files: written row after row, read back by anyone, refused when they are wrong."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sdsa_quant.errors import InputError
from sdsa_quant.files.scores_file import ScoresWriter, open_scores

LENGTHS = torch.tensor([5, 0, 3], dtype=torch.int32)
REQUESTS = torch.tensor([1, 0, 1], dtype=torch.int32)
SCORES = torch.arange(30, dtype=torch.float32).view(6, 5)
INDICES = torch.arange(12).view(6, 2) - 1


def writer(path: Path, *, force: bool = False) -> ScoresWriter:
    return ScoresWriter(
        path,
        LENGTHS,
        REQUESTS,
        rows=6,
        max_context=5,
        top_k=2,
        source={"cache": "cache.safetensors"},
        force=force,
    )


def write(path: Path, bounds: tuple[int, ...] = (0, 6)) -> None:
    with writer(path, force=True) as scores_writer:
        for first, stop in itertools.pairwise(bounds):
            scores_writer.write_rows(first, SCORES[first:stop], INDICES[first:stop])
    assert path.stat().st_size == scores_writer.file_bytes


@pytest.mark.parametrize("bounds", [(0, 6), (0, 2, 4, 6), (0, 1, 5, 6)], ids=str)
def test_round_trip(tmp_path: Path, bounds: tuple[int, ...]) -> None:
    path = tmp_path / "scores.safetensors"
    write(path, bounds)
    file = open_scores(path)
    assert torch.equal(file.scores, SCORES)
    assert torch.equal(file.top_k_indices, INDICES.int())
    assert torch.equal(file.context_lengths, LENGTHS)
    assert torch.equal(file.requests, REQUESTS)
    assert (file.shape.rows, file.shape.groups, file.rows_per_group) == (6, 3, 2)
    assert file.metadata == {"format": "sdsa-scores", "version": "1", "cache": "cache.safetensors"}


def test_the_order_of_keys_is_in_the_header(tmp_path: Path) -> None:
    path = tmp_path / "scores.safetensors"
    sizes = {"rows": 6, "max_context": 5, "top_k": 2, "source": {}, "force": True}
    for order in ("score", "key"):
        with ScoresWriter(path, LENGTHS, REQUESTS, top_k_order=order, **sizes) as scores_writer:
            scores_writer.write_rows(0, SCORES, INDICES)
        assert open_scores(path).top_k_order == order
    with pytest.raises(InputError, match="top_k_order must be 'score' or 'key', got 'row'"):
        ScoresWriter(path, LENGTHS, REQUESTS, top_k_order="row", **sizes)


def test_any_safetensors_reader_opens_it(tmp_path: Path) -> None:
    write(tmp_path / "scores.safetensors")
    tensors = load_file(tmp_path / "scores.safetensors")
    assert torch.equal(tensors["scores"], SCORES)
    assert tensors["top_k_indices"].dtype == torch.int32


def test_no_context_at_all(tmp_path: Path) -> None:
    path = tmp_path / "scores.safetensors"
    nothing = torch.zeros(1, dtype=torch.int32)
    with ScoresWriter(
        path, nothing, nothing, rows=2, max_context=0, top_k=3, source={}
    ) as scores_writer:
        scores_writer.write_rows(0, torch.empty(2, 0), torch.full((2, 3), -1))
    assert list(open_scores(path).scores.shape) == [2, 0]
    assert open_scores(path).top_k_indices.tolist() == [[-1] * 3] * 2


def test_an_existing_file_is_kept_without_force(tmp_path: Path) -> None:
    path = tmp_path / "scores.safetensors"
    path.write_bytes(b"mine")
    with pytest.raises(InputError, match="exists already; give force=True to replace it"):
        writer(path)
    assert path.read_bytes() == b"mine"


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="stop"),
        writer(tmp_path / "scores.safetensors") as scores_writer,
    ):
        scores_writer.write_rows(0, SCORES[:2], INDICES[:2])
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []


def test_missing_rows_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match="6 rows must be written, got 2"),
        writer(tmp_path / "scores.safetensors") as scores_writer,
    ):
        scores_writer.write_rows(0, SCORES[:2], INDICES[:2])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("first", "scores", "indices", "message"),
    [
        (0, SCORES[:, :4], INDICES, r"must be float32 \[6, 5\] and \[6, 2\], got .* \[6, 4\]"),
        (0, SCORES, INDICES[:, :1], r"got torch.float32 \[6, 5\] and \[6, 1\]"),
        (0, SCORES.double(), INDICES, "got torch.float64"),
        (1, SCORES, INDICES, "rows must lie within 0 to 6, got 1 to 7"),
    ],
    ids=["narrow-scores", "narrow-indices", "float64", "past-the-end"],
)
def test_refuses_rows_that_do_not_fit(
    tmp_path: Path, first: int, scores: torch.Tensor, indices: torch.Tensor, message: str
) -> None:
    with (
        pytest.raises(InputError, match=message),
        writer(tmp_path / "scores.safetensors") as scores_writer,
    ):
        scores_writer.write_rows(first, scores, indices)


@pytest.mark.parametrize(
    ("changes", "metadata", "message"),
    [
        ({}, {"format": "other"}, "header field format must be sdsa-scores, got 'other'"),
        ({}, {"version": "2"}, "header field version must be 1, got '2'"),
        ({}, {"top_k_order": "row"}, "field top_k_order must be 'score' or 'key', got 'row'"),
        ({"scores": None}, {}, "tensor scores is missing; found context_lengths, requests"),
        ({"scores": SCORES.flatten()}, {}, r"tensor scores must have 2 dimensions, got \[30\]"),
        ({"scores": SCORES.half()}, {}, r"tensor scores must be F32 \[6, 5\], got F16 \[6, 5\]"),
        ({"requests": REQUESTS[:2]}, {}, r"tensor requests must be I32 \[3\], got I32 \[2\]"),
        ({"top_k_indices": INDICES[:5].int()}, {}, r"must be I32 \[6, 2\], got I32 \[5, 2\]"),
        ({"context_lengths": LENGTHS.repeat(2)[:4]}, {}, "each of the 4 groups"),
        ({"context_lengths": LENGTHS[:0]}, {}, "each of the 0 groups .* got 6 rows"),
        ({"scores": torch.zeros(27, 5)}, {}, "1 to 8 rows for each of the 3 groups .* got 27 rows"),
        ({"context_lengths": LENGTHS - 9}, {}, "context_lengths must be 0 to 5, .* got -"),
    ],
    ids=[
        "format",
        "version",
        "order",
        "missing",
        "rank",
        "dtype",
        "requests",
        "indices",
        "groups",
        "no-groups",
        "too-many-rows",
        "negative-length",
    ],
)
def test_refuses_a_file_that_is_wrong(
    tmp_path: Path,
    changes: dict[str, torch.Tensor | None],
    metadata: dict[str, str],
    message: str,
) -> None:
    path = tmp_path / "scores.safetensors"
    write(path)
    with safe_open(path, framework="pt") as file:
        header = file.metadata() | metadata
    tensors = load_file(path) | changes
    save_file({name: t for name, t in tensors.items() if t is not None}, path, header)
    with pytest.raises(InputError, match=message) as error:
        open_scores(path)
    assert str(path) in str(error.value)
