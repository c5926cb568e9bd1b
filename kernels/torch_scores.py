"""Backend `torch`: scores on CPU tensors, and on CUDA tensors where nothing better runs.

The pages that the lengths define, of all groups one after another, are worked on a chunk at a time
in a bounded workspace:

    block_table ── page numbers ──┐
                                  ▼
    key_cache ─── index_select ── codes ── int32 spread ── float16 view ── float32 ─┐
    key_scales ── index_select ── float32 ───────────────────────────── multiply ───┤
                                                                                    ▼
    query ── decode once ── the chunk's rows ─────────────── bmm, one [R,128]x[128,64] a page
                                                                                    │
    scores ◄── index_put, whole pages by page and last pages by entry ──────────────┘

One small matrix product per page, always of the same shape, makes a score independent of how the
pages were split into chunks and of the number of threads. Codes times scales are exact in float32,
so that the only rounding is that of the float32 sums.
"""

from __future__ import annotations

import torch

from sdsa_quant.formats import e2m1, e4m3
from sdsa_quant.formats.nvfp4 import dequantize_nvfp4
from sdsa_quant.layout import BLOCK, DIM, NVFP4, PAGE, SCALES_PER_KEY

from .pages import PageList, list_pages
from .problem import TILED_SCALES_REASON, ScoreProblem

# Measured on 2 cores with 1 MB of second-level cache each (2026-11): 32 pages a thread is 35 %
# slower (the cost of starting an operation), 256 a few percent faster for 4 times the memory.
_CPU_PAGES_PER_THREAD = 64
_CPU_MAX_PAGES = 1024
_CUDA_PAGES = 4096


def reason_unsupported(problem: ScoreProblem) -> str | None:
    """None where this backend can serve `problem`, else why not."""
    if problem.device.type not in ("cpu", "cuda"):
        return f"tensors must be on a CPU or CUDA device, not on {problem.device}"
    if problem.device.type == "cuda" and problem.tiled_scales:
        return TILED_SCALES_REASON
    if problem.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "it reads the context lengths on the host, which a graph capture forbids"
    return None


def _pages_per_chunk(device: torch.device) -> int:
    if device.type == "cpu":
        return min(_CPU_PAGES_PER_THREAD * torch.get_num_threads(), _CPU_MAX_PAGES)
    return _CUDA_PAGES


def _flat_pages(tensor: torch.Tensor) -> torch.Tensor:
    """View ``[pages, 64, n]`` as ``[pages, 64 * n]``; the page stride stays as it is."""
    return tensor.as_strided(
        (tensor.shape[0], tensor.shape[1] * tensor.shape[2]), (tensor.stride(0), 1)
    )


class _KeyDecoder:
    """Pages to float32 keys ``[pages, 64, 128]``, in a workspace that is allocated once."""

    def __init__(self, problem: ScoreProblem, pages: int) -> None:
        device = problem.device
        self._keys = torch.empty((pages * PAGE, DIM), dtype=torch.float32, device=device)
        self._cache = _flat_pages(problem.key_cache)
        self._scales = None
        scales = problem.linear_key_scales()
        if scales is not None:
            self._scales = _flat_pages(scales)
            self._unpacked = torch.empty(pages * PAGE * DIM, dtype=torch.int32, device=device)

    def decode(self, pages: torch.Tensor) -> torch.Tensor:
        keys = self._keys[: pages.shape[0] * PAGE]
        stored = self._cache.index_select(0, pages)
        if self._scales is None:
            keys.view(pages.shape[0], -1).copy_(stored)
        else:
            unpacked = e2m1.unpack_float16(stored, workspace=self._unpacked)
            keys.view(pages.shape[0], -1).copy_(unpacked)
            scales = self._scales.index_select(0, pages)
            factors = e4m3.decode(scales, unit=e2m1.UNPACKED_UNIT)
            keys.view(-1, SCALES_PER_KEY, BLOCK).mul_(factors.view(-1, SCALES_PER_KEY, 1))
        return keys.view(-1, PAGE, DIM)


def _grouped_query(problem: ScoreProblem) -> torch.Tensor:
    """float32 ``[groups, rows_per_group, 128]``."""
    if problem.query_format == NVFP4:
        assert problem.query_scales is not None
        query = dequantize_nvfp4(problem.query, problem.query_scales)
    else:
        query = problem.query.float()
    return query.view(problem.groups, problem.rows_per_group, DIM)


class _ScoreWriter:
    """Chunks of scores ``[pages, R, 64]`` into `scores`, and nothing past a length."""

    def __init__(self, problem: ScoreProblem) -> None:
        scores = problem.scores
        self._scores = scores
        self._rows = torch.arange(problem.rows_per_group, device=problem.device, dtype=torch.int64)
        self._rows_per_group = problem.rows_per_group
        self._columns = torch.arange(PAGE, device=problem.device, dtype=torch.int64)
        # Whole pages are written 64 entries at a time, through a view of them.
        self._pages = scores.as_strided(
            (scores.shape[0], scores.shape[1] // PAGE, PAGE), (scores.stride(0), PAGE, 1)
        )

    def write(self, part: PageList, values: torch.Tensor) -> None:
        rows = part.groups[:, None] * self._rows_per_group + self._rows  # [pages, R]
        whole = part.counts == PAGE
        if bool(whole.all()):
            self._pages[rows, part.blocks[:, None]] = values
            return
        self._pages[rows[whole], part.blocks[whole, None]] = values[whole]
        partial = ~whole
        seen = self._columns < part.counts[partial, None]  # [partial, 64]
        page, column = seen.nonzero(as_tuple=True)
        entry = part.blocks[partial][page] * PAGE + column  # [entries]
        self._scores[rows[partial][page], entry[:, None]] = values[partial][page, :, column]


def _page_products(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """``query @ keys^T`` of each page: ``[n, R, 128]`` and ``[n, 64, 128]`` to ``[n, R, 64]``."""
    if keys.shape[0] == 1:
        # The library sums a batch of one in another order, and splits it over threads; from two
        # on, a page's result depends on neither the batch nor the threads.
        return torch.bmm(query.repeat(2, 1, 1), keys.repeat(2, 1, 1).transpose(1, 2))[:1]
    return torch.bmm(query, keys.transpose(1, 2))


def launch(problem: ScoreProblem) -> None:
    """Write the scores of `problem`; see `sdsa_kernels.indexer_scores`.

    With ``torch.set_float32_matmul_precision("medium")`` the sums may be taken in another order;
    their terms are the same, since keys and query rows are exact in BF16.
    """
    # No autograd: the workspace is overwritten, and a graph would hold every chunk of it.
    with torch.inference_mode(), torch.autocast(problem.device.type, enabled=False):
        _launch(problem)


def _launch(problem: ScoreProblem) -> None:
    page_list = list_pages(problem)
    total = page_list.pages.shape[0]
    if total == 0:
        return
    step = min(_pages_per_chunk(problem.device), total)
    decoder = _KeyDecoder(problem, step)
    writer = _ScoreWriter(problem)
    query = _grouped_query(problem)
    for start in range(0, total, step):
        part = page_list.part(start, start + step)
        keys = decoder.decode(part.pages)
        writer.write(part, _page_products(query[part.groups], keys))
