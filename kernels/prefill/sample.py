"""Thresholds from a sample of the keys: `gather_key_sample` and `thresholds_from_sample`."""

from __future__ import annotations

import torch

from sdsa_quant.layout import PAGE

from .checks import check_sample, check_sample_thresholds


def gather_key_sample(
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    offsets: torch.Tensor,
    sample_ends: torch.Tensor,
    *,
    sample_keys: torch.Tensor,
    samples_per_run: int,
    pages_per_run: int,
    key_scales: torch.Tensor | None = None,
    sample_scales: torch.Tensor | None = None,
) -> None:
    """Copy a strided random sample of each request's paged keys into dense rows.

    Sample slot ``s`` takes the key at ``offsets[s]`` of run ``s // samples_per_run``, a run being
    `pages_per_run` consecutive pages of a request. Viewed as pages of 64 keys, `sample_keys` can be
    scored by `indexer_scores`. The arguments are those of ``flashinfer.sdsa.gather_key_sample``.
    Nothing reads device values on the host.

    Parameters
    ----------
    key_cache : torch.Tensor
        Input, bfloat16 ``[pages, 64, 128]`` or NVFP4 codes uint8 ``[pages, 64, 64]``.
    block_table : torch.Tensor
        Input, int32 ``[requests, blocks]``; only entries of pages that are sampled are read.
    offsets : torch.Tensor
        Input, uint8 ``[capacity]``, each below ``64 * pages_per_run``; the capacity is a multiple
        of 128.
    sample_ends : torch.Tensor
        Input, int32 ``[requests]``: samples of each request; later slots are left as they are.
    sample_keys : torch.Tensor
        Output, of the dtype of `key_cache`, ``[requests, capacity, 128]`` or
        ``[requests, capacity, 64]``, contiguous inside a request.
    samples_per_run : int
        Sample slots of a run, at least 1.
    pages_per_run : int
        Pages of a run, 1 to 4.
    key_scales : torch.Tensor, optional
        Input, float8_e4m3fn (or its uint8 bytes) ``[pages, 64, 8]``, with NVFP4 keys.
    sample_scales : torch.Tensor, optional
        Output, likewise ``[requests, capacity, 8]``, contiguous inside a request.

    Raises
    ------
    TypeError
        An argument is not a tensor or has the wrong dtype.
    ValueError
        A shape, stride, alignment, device or number is wrong, or scales are missing or superfluous.
    """
    scale_bytes, sample_bytes = check_sample(
        key_cache,
        block_table,
        offsets,
        sample_ends,
        sample_keys,
        samples_per_run,
        pages_per_run,
        key_scales,
        sample_scales,
    )
    requests, blocks = block_table.shape
    if not (requests and blocks and key_cache.shape[0] and offsets.shape[0]):
        return
    with torch.inference_mode():
        slot = torch.arange(offsets.shape[0], device=offsets.device, dtype=torch.int64)
        block = slot // samples_per_run * pages_per_run + offsets.long() // PAGE  # [capacity]
        live = (slot < sample_ends[:, None]) & (block < blocks)  # [requests, capacity]
        page = block_table[:, block.clamp(max=blocks - 1)].long().masked_fill(~live, 0)
        key = (offsets.long() % PAGE).expand_as(page)
        pairs = ((key_cache, sample_keys), (scale_bytes, sample_bytes))
        for stored, sample in pairs:
            if stored is not None and sample is not None:
                sample.copy_(torch.where(live[:, :, None], stored[page, key], sample))


def thresholds_from_sample(
    sample_scores: torch.Tensor,
    sample_top: torch.Tensor,
    *,
    thresholds: torch.Tensor,
    counters: torch.Tensor,
) -> None:
    """A row's threshold is the least of its sampled top scores; counters become 0.

    A position of -1 and a score of NaN count as -inf. The arguments are those of
    ``flashinfer.sdsa.thresholds_from_sample``. Nothing reads device values on the host.

    Parameters
    ----------
    sample_scores : torch.Tensor
        Input, float32 ``[rows, samples]``, row stride free.
    sample_top : torch.Tensor
        Input, int32 ``[rows, rank]``: positions in a row of `sample_scores`, or -1.
    thresholds : torch.Tensor
        Output, float32 ``[rows]``.
    counters : torch.Tensor
        Output, int32 ``[rows, 2]``, zeros.

    Raises
    ------
    TypeError
        An argument is not a tensor or has the wrong dtype.
    ValueError
        A shape, stride or device is wrong.
    """
    check_sample_thresholds(sample_scores, sample_top, thresholds, counters)
    counters.zero_()
    if not sample_scores.shape[1]:
        thresholds.fill_(-torch.inf)
        return
    with torch.inference_mode():
        scores = sample_scores.gather(1, sample_top.clamp(min=0).long())
        missing = (sample_top < 0) | scores.isnan()
        thresholds.copy_(scores.masked_fill(missing, -torch.inf).amin(1))
