"""The note of `sdsa quantize-cache` about a cache that loses much."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sdsa_cli.text import error_size, percent

if TYPE_CHECKING:
    from sdsa_quant.files.cache_header import CacheHeader
    from sdsa_quant.quantize_cache import QuantizedCache

# Above these a note warns about a cache. Normally distributed keys lose 0.095 and no block.
_HIGH_ERROR = 0.25  # relative L2
_HIGH_SHARE = 0.1  # of blocks, flushed or saturated


def loss_note(caches: Sequence[QuantizedCache], nonfinite: str) -> str | None:
    """One line on the worst cache and what would help it; None where no cache loses much."""
    poor = [cache for cache in caches if _loses_much(cache)]
    if not poor:
        return None
    worst = max(poor, key=lambda cache: cache.statistics.relative_error)
    statistics = worst.statistics
    helpful = ["--format bf16"]
    if nonfinite == "error":  # else keys cannot be transformed
        helpful.insert(0, _helpful_transform(worst.header))
    which = str(worst.path)
    if len(caches) > 1:
        which = f"{len(poor)} of {len(caches)} caches lose much; the worst is {which}"
    return (
        f"note: {which}: relative error {error_size(statistics.relative_error)}, "
        f"{percent(statistics.share(statistics.flushed))} of blocks flushed to zero, "
        f"{percent(statistics.share(statistics.saturated))} saturated (noted above {_HIGH_ERROR}, "
        f"{percent(_HIGH_SHARE)}); try {' or '.join(helpful)}"
    )


def _loses_much(cache: QuantizedCache) -> bool:
    """Whether a cache is of little use. False for a cache without keys, whose numbers are NaN."""
    statistics = cache.statistics
    lost = statistics.share(statistics.flushed), statistics.share(statistics.saturated)
    return statistics.relative_error > _HIGH_ERROR or max(lost) > _HIGH_SHARE


def _helpful_transform(header: CacheHeader) -> str:
    """Option that may bring blocks back into the range of NVFP4."""
    if header.gain == 1.0:
        return "--gain auto"
    return "--rotate hadamard" if header.rotate == "none" else "--center channel"
