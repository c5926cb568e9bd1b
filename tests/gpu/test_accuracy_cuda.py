"""Top-k, baseline, metrics and scoring in pieces on CUDA tensors: what the CPU gives."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from sdsa_kernels.scoring.chunks import ChunkScorer
from sdsa_kernels.scoring.task import make_task
from sdsa_quant.accuracy.baseline import baseline_scores
from sdsa_quant.accuracy.metrics import row_accuracy
from sdsa_quant.accuracy.top_k import top_k_indices
from support.caches import write_cache
from support.problems import gaussian_values

pytestmark = pytest.mark.gpu


def test_top_k(generator: torch.Generator) -> None:
    # Many ties, NaN, and a row of zeros of both signs.
    scores = torch.randint(-50, 50, (5, 4099), generator=generator).float()
    scores[2, ::7] = math.nan
    scores[3] *= torch.where(torch.arange(4099) % 2 == 0, 0.0, -0.0)
    lengths = torch.tensor([4099, 0, 4000, 17, 1])
    on_gpu = top_k_indices(scores.cuda(), 256, lengths.cuda())
    assert torch.equal(on_gpu.cpu(), top_k_indices(scores, 256, lengths))


def test_baseline_has_the_same_bits(generator: torch.Generator) -> None:
    query, keys = gaussian_values((8, 128), generator), gaussian_values((5000, 128), generator)

    def read_keys(request: int, start: int, stop: int) -> torch.Tensor:
        return keys[start:stop]

    on_gpu = baseline_scores(query.cuda(), read_keys, 0, 5000)
    assert on_gpu.is_cuda
    assert torch.equal(on_gpu.cpu(), baseline_scores(query, read_keys, 0, 5000))


def test_measures(generator: torch.Generator) -> None:
    baseline = torch.randn(5000, generator=generator).round(decimals=2)
    scores = baseline + 0.1 * torch.randn(5000, generator=generator)
    expected, measured = (
        row_accuracy(0, 0, s, b, top_k=(1, 64, 9999), softmax_scale=0.5)
        for s, b in ((scores, baseline), (scores.cuda(), baseline.cuda()))
    )
    for name in ("relative_l2", "max_abs", "cosine", "spearman"):
        assert getattr(measured, name) == pytest.approx(getattr(expected, name), rel=1e-12)
    for on_gpu, on_cpu in zip(measured.top_k, expected.top_k, strict=True):
        assert (on_gpu.recall, on_gpu.same_set) == (on_cpu.recall, on_cpu.same_set)
        assert on_gpu.mass == pytest.approx(on_cpu.mass, rel=1e-12)


@pytest.mark.parametrize("rows_per_group", [1, 2, 8], ids=lambda rows: f"rows{rows}")
def test_pieces_equal_the_whole_bit_for_bit(
    tmp_path: Path, generator: torch.Generator, rows_per_group: int
) -> None:
    lengths = [130, 0, 64, 3000, 1]
    keys = gaussian_values((sum(lengths), 128), generator)
    paged = write_cache(tmp_path / "cache.safetensors", keys, lengths).paged_keys()
    query = gaussian_values((6 * rows_per_group, 128), generator)
    task = make_task(query, paged, [3, 0, 4, 1, 2, 3], query_format="nvfp4", device="cuda")
    whole = torch.cat([scores.clone() for _, scores in ChunkScorer(task).chunks()])
    for chunk in (1, 2, 4, 5):
        pieces = [scores.clone() for _, scores in ChunkScorer(task, chunk).chunks()]
        assert torch.equal(torch.cat(pieces).view(torch.int32), whole.view(torch.int32))
