"""What a cache format did to the keys: lost blocks, coarse blocks, clipped blocks, and the error.

Counts are exact. The relative L2 error is ``sqrt(sum (x - y)^2 / sum x^2)`` of the keys ``x`` and
their decoded form ``y``, both sums in float64, over finite values.

Of a finished cache only its scales tell: `count_scales`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sdsa_quant.files.cache_file import CacheFile
from sdsa_quant.formats.nvfp4 import dequantize_nvfp4, values_per_pass
from sdsa_quant.layout import BLOCK, E4M3_LAST_SUBNORMAL, NVFP4_MAX, PAGE, SCALES_PER_KEY

_LARGEST_SCALE = 0x7E  # as an E4M3 byte: 448
_COUNTED_PAGES = 4096  # pages whose scales are looked at in one go


class BlockStatistics:
    """Running totals over the keys of a cache; give it each part of the keys once.

    Attributes
    ----------
    keys : int
        Keys seen.
    flushed : int
        Blocks with a nonzero value whose scale is zero, so that all of it decodes to zero.
    subnormal : int
        Blocks with a subnormal scale (bytes 1 to 7), known to fewer than 4 significant bits.
    saturated : int
        Blocks with a magnitude above 2688, which decodes to at most 2688.
    nonfinite : int
        Values that are NaN or infinite.
    """

    def __init__(self) -> None:
        self.keys = 0
        self.flushed = 0
        self.subnormal = 0
        self.saturated = 0
        self.nonfinite = 0
        self._squared_error = 0.0
        self._squared_norm = 0.0

    @property
    def blocks(self) -> int:
        """Blocks seen."""
        return self.keys * SCALES_PER_KEY

    def share(self, count: int) -> float:
        """`count` as a share of all blocks, NaN where there are none."""
        return count / self.blocks if self.blocks else math.nan

    @property
    def relative_error(self) -> float:
        """Relative L2 error of the decoded keys; 0 where nothing was lost, even of all zeros."""
        if self._squared_error == 0.0:
            return 0.0 if self.keys else math.nan
        return math.sqrt(self._squared_error / self._squared_norm)

    def add_nvfp4(self, keys: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Count quantized keys.

        Parameters
        ----------
        keys : torch.Tensor
            bfloat16, float16 or float32 ``[n, 128]``, before quantization.
        codes : torch.Tensor
            uint8 ``[n, 64]``.
        scales : torch.Tensor
            float8_e4m3fn ``[n, 8]``.
        """
        for part in self._parts(keys):
            scale_bytes = scales[part].view(torch.uint8)
            amax = keys[part].unflatten(-1, (-1, BLOCK)).abs().amax(-1)
            # A NaN is a value all the same, so that its block counts as nonzero.
            self.flushed += int(((scale_bytes == 0) & (amax != 0)).sum())
            subnormal = (scale_bytes > 0) & (scale_bytes <= E4M3_LAST_SUBNORMAL)
            self.subnormal += int(subnormal.sum())
            self.saturated += int((amax > NVFP4_MAX).sum())
            self._add_error(keys[part], dequantize_nvfp4(codes[part], scales[part], torch.float64))

    def add_decoded(self, keys: torch.Tensor, decoded: torch.Tensor) -> None:
        """Count keys that were stored without blocks, as ``[n, 128]`` before and after."""
        for part in self._parts(keys):
            self._add_error(keys[part], decoded[part].double())

    def _parts(self, keys: torch.Tensor) -> list[slice]:
        step = max(values_per_pass(keys.device) // (4 * keys.shape[-1]), 1)
        return [slice(start, start + step) for start in range(0, keys.shape[0], step)]

    def _add_error(self, keys: torch.Tensor, decoded: torch.Tensor) -> None:
        """Add keys and their decoded form (float64, overwritten)."""
        self.keys += keys.shape[0]
        exact = keys.double()
        squared_norm = float(_squared_sum(exact))
        if not math.isfinite(squared_norm):
            finite = exact.isfinite()
            self.nonfinite += finite.numel() - int(finite.sum())
            exact = exact.where(finite, 0.0)
            decoded = decoded.where(finite, 0.0)
            squared_norm = float(_squared_sum(exact))
        self._squared_norm += squared_norm
        self._squared_error += float(_squared_sum(decoded.sub_(exact)))


def _squared_sum(values: torch.Tensor) -> torch.Tensor:
    flat = values.flatten()
    return torch.dot(flat, flat)


@dataclass(frozen=True, slots=True)
class ScaleCounts:
    """What the scales of a cache's used keys say about its blocks.

    A zero scale is that of a block of zeros or of one that was flushed to zero; a largest scale,
    448, that of a block that saturated or just did not. The scale alone cannot tell which.
    """

    blocks: int
    zero: int
    subnormal: int
    largest: int

    def share(self, count: int) -> float:
        """`count` as a share of all blocks, NaN where there are none."""
        return count / self.blocks if self.blocks else math.nan


def count_scales(cache: CacheFile) -> ScaleCounts | None:
    """Count the scales of a valid cache's used keys, each once; None for BF16.

    Parameters
    ----------
    cache : CacheFile
        A cache that `validate_cache` has found nothing wrong with.
    """
    scales = cache.paged_keys().key_scales
    if scales is None:
        return None
    used = _used_keys(cache)
    blocks = zero = subnormal = largest = 0
    for start in range(0, cache.pages, _COUNTED_PAGES):
        part = slice(start, start + _COUNTED_PAGES)
        visible = torch.arange(PAGE) < used[part, None]
        values = scales[part].view(torch.uint8)[visible]
        blocks += values.numel()
        zero += int((values == 0).sum())
        subnormal += int(((values > 0) & (values <= E4M3_LAST_SUBNORMAL)).sum())
        largest += int((values == _LARGEST_SCALE).sum())
    return ScaleCounts(blocks, zero, subnormal, largest)


def _used_keys(cache: CacheFile) -> torch.Tensor:
    """int64 ``[pages]``: how many keys of each page belong to a request, 0 to 64."""
    first_keys = torch.arange(cache.block_table.shape[1]) * PAGE
    used = (cache.context_lengths.long()[:, None] - first_keys).clamp(0, PAGE)
    in_use = used > 0
    most = torch.zeros(cache.pages, dtype=torch.int64)
    # Requests may share pages, and see different numbers of a page's keys.
    return most.scatter_reduce(0, cache.block_table.long()[in_use], used[in_use], "amax")
