"""Scoring a cache: whole and in pieces to the same bits, within the memory that there is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sdsa_kernels.cute import backend as cute_backend
from sdsa_kernels.scoring import chunks
from sdsa_kernels.scoring.chunks import ChunkScorer, require_memory
from sdsa_kernels.scoring.task import ScoreTask, make_task, takes_tiled_scales
from sdsa_kernels.scoring.timing import time_scorer
from sdsa_kernels.testing.reference import reference_scores
from sdsa_quant.errors import InputError, UnsupportedError
from sdsa_quant.paging import PagedKeys
from support.caches import write_cache
from support.problems import gaussian_values

LENGTHS = [130, 0, 64, 300, 1]
# Every request at least once, one twice, one of length 0, out of order.
REQUESTS = [3, 0, 4, 1, 2, 3]


def paged_keys(tmp_path: Path, generator: torch.Generator, values: str = "nvfp4") -> PagedKeys:
    keys = gaussian_values((sum(LENGTHS), 128), generator)
    return write_cache(tmp_path / "cache.safetensors", keys, LENGTHS, values).paged_keys()


def cache_task(
    tmp_path: Path,
    generator: torch.Generator,
    *,
    rows_per_group: int = 2,
    values: str = "nvfp4",
    query_format: str = "nvfp4",
) -> ScoreTask:
    query = gaussian_values((len(REQUESTS) * rows_per_group, 128), generator)
    paged = paged_keys(tmp_path, generator, values)
    return make_task(query, paged, REQUESTS, query_format=query_format)


def all_scores(scorer: ChunkScorer) -> torch.Tensor:
    parts = [(first_row, scores.clone()) for first_row, scores in scorer.chunks()]
    assert [first_row for first_row, _ in parts] == sorted(first_row for first_row, _ in parts)
    return torch.cat([scores for _, scores in parts])


@pytest.mark.parametrize(
    ("values", "query_format"),
    [("nvfp4", "nvfp4"), ("nvfp4", "bf16"), ("bf16", "bf16")],
    ids=["nvfp4", "mixed", "bf16"],
)
@pytest.mark.parametrize("rows_per_group", [1, 2, 8], ids=lambda rows: f"rows{rows}")
def test_pieces_equal_the_whole_bit_for_bit(
    tmp_path: Path,
    generator: torch.Generator,
    values: str,
    query_format: str,
    rows_per_group: int,
) -> None:
    # CASES 64, the last part.
    task = cache_task(
        tmp_path,
        generator,
        rows_per_group=rows_per_group,
        values=values,
        query_format=query_format,
    )
    whole = all_scores(ChunkScorer(task))
    for chunk in (1, 2, 4, 5, 6, 99):
        pieces = all_scores(ChunkScorer(task, chunk))
        assert torch.equal(pieces.view(torch.int32), whole.view(torch.int32))


def test_scores_are_the_references_and_minus_infinity_past_a_length(
    tmp_path: Path, generator: torch.Generator
) -> None:
    task = cache_task(tmp_path, generator, values="bf16", query_format="bf16")
    scores = all_scores(ChunkScorer(task, 4))
    expected = reference_scores(task.problem(torch.empty(task.rows, task.max_context)).call())
    past = expected.isnan()
    assert (scores[past] == -torch.inf).all()
    torch.testing.assert_close(scores[~past].double(), expected[~past], rtol=1e-4, atol=1e-3)


def test_a_buffer_that_does_not_fit_is_refused_with_its_bytes(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    # CASES 64: 12 rows of up to 300 keys need 14,400 bytes, a group of two rows 2,400.
    task = cache_task(tmp_path, generator)
    monkeypatch.setattr(chunks, "available_bytes", lambda device: 7_199)
    with pytest.raises(
        UnsupportedError,
        match=r"needs 14,400 bytes \(12 rows x 300 keys x 4 bytes\), but only 7,199 are "
        r"available on cpu; give chunk=2 to score so many groups at a time",
    ):
        ChunkScorer(task)
    assert ChunkScorer(task, 2).buffer_bytes == 4_800
    monkeypatch.setattr(chunks, "available_bytes", lambda device: 2_399)
    with pytest.raises(UnsupportedError, match="not even one group at a time"):
        ChunkScorer(task, 1)


def test_the_field_case_needs_a_gibibyte(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    # CASES 64: 256 rows of 1,048,576 keys, of which nothing but the length has to exist.
    monkeypatch.setattr(chunks, "available_bytes", lambda device: 1 << 29)
    length = torch.tensor([1 << 20], dtype=torch.int32)
    paged = PagedKeys(
        torch.zeros(1, 64, 64, dtype=torch.uint8),
        torch.zeros(1, 64, 8, dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.zeros(1, 1 << 14, dtype=torch.int32),
        length,
    )
    query = torch.zeros(256, 128, dtype=torch.bfloat16)
    task = make_task(query, paged, [0] * 256, query_format="nvfp4")
    with pytest.raises(UnsupportedError, match=r"1,073,741,824 bytes \(256 rows x 1,048,576 keys"):
        require_memory(task, task.groups)


def test_run_repeats_what_chunks_gave(tmp_path: Path, generator: torch.Generator) -> None:
    scorer = ChunkScorer(cache_task(tmp_path, generator))
    (_, scores), *others = scorer.chunks()
    assert not others
    before = scores.clone()
    scores.copy_(torch.where(before.isfinite(), 12345.0, before))
    scorer.run()
    assert torch.equal(scores, before)


def test_timing_a_cpu_is_eager(tmp_path: Path, generator: torch.Generator) -> None:
    measurement = time_scorer(ChunkScorer(cache_task(tmp_path, generator), 2), 5)
    timing = measurement.timing
    assert measurement.rotation is None
    assert timing.replay == "eager"
    assert len(timing.samples_us) == 5
    assert 0 < timing.p10_us <= timing.median_us <= timing.p90_us


def test_traffic_counts_whole_pages_for_every_group(
    tmp_path: Path, generator: torch.Generator
) -> None:
    # CASES 61: groups of 300, 130, 1, 0, 64 and 300 keys have 5 + 3 + 1 + 0 + 1 + 5 pages.
    traffic = cache_task(tmp_path, generator).traffic()
    assert (traffic.pages, traffic.key_bytes) == (15, 15 * 4608)
    assert (traffic.query_bytes, traffic.score_bytes) == (12 * 72, 2 * 795 * 4)


def test_refuses_a_task_that_cannot_be(tmp_path: Path, generator: torch.Generator) -> None:
    paged, bf16 = paged_keys(tmp_path, generator), paged_keys(tmp_path, generator, "bf16")
    query = gaussian_values((4, 128), generator)
    infinite = query.clone()
    infinite[2, 5] = torch.inf
    for rows, keys, requests, query_format, message in (
        (query, paged, [], "nvfp4", "got 4 rows and 0 groups"),
        (query, paged, [0, 0, 0], "nvfp4", "got 4 rows and 3 groups"),
        (query.repeat(3, 1), paged, [0], "nvfp4", "got 12 rows and 1 groups"),
        (query, paged, [0, 5], "nvfp4", "requests must be 0 to 4, .* got 5 for group 1"),
        (query, paged, [-1, 0], "nvfp4", "got -1 for group 0"),
        (query, bf16, [0, 1], "nvfp4", "NVFP4 query rows go with NVFP4 keys only"),
        (infinite, paged, [0, 1], "nvfp4", "query rows must be finite, but row 2 is not"),
        (infinite, paged, [0, 1], "bf16", "query rows must be finite, but row 2 is not"),
    ):
        with pytest.raises(InputError, match=message):
            make_task(rows, keys, requests, query_format=query_format)
    with pytest.raises(InputError, match="chunk must be at least 1 group, got 0"):
        ChunkScorer(make_task(query, paged, [0, 1], query_format="nvfp4"), 0)


@pytest.mark.parametrize(
    ("device", "query_format", "backend", "taken"),
    [
        ("cuda", "nvfp4", "auto", True),
        ("cuda", "nvfp4", "cute", True),
        ("cuda", "nvfp4", "triton", False),
        ("cuda", "bf16", "auto", False),
        ("cpu", "nvfp4", "auto", False),
    ],
)
def test_tiled_scales_are_kept_where_the_tensor_cores_take_them(
    monkeypatch: pytest.MonkeyPatch, device: str, query_format: str, backend: str, taken: bool
) -> None:
    monkeypatch.setattr(cute_backend, "device_index", lambda device: 0)
    monkeypatch.setattr(cute_backend, "capability", lambda index: (10, 0))
    monkeypatch.setattr(cute_backend, "package_version", lambda name: "4.8.0")
    monkeypatch.setattr(cute_backend, "is_trusted", lambda index, variant: True)
    assert takes_tiled_scales(device, query_format, backend) == taken
    for name, answer in (
        ("is_trusted", lambda index, variant: False),
        ("package_version", lambda name: None),
        ("capability", lambda index: (9, 0)),
    ):
        monkeypatch.setattr(cute_backend, name, answer)
        assert not takes_tiled_scales(device, query_format, backend)
