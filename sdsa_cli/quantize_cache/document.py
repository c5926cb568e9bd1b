"""The JSON document of `sdsa quantize-cache`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sdsa_quant.environment import Environment, describe_environment

if TYPE_CHECKING:
    from sdsa_quant.quantize_cache import QuantizedCache


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """What NVFP4 did to the blocks of a cache; shares are null without blocks."""

    count: int
    """Blocks of 16 values."""
    flushed: int
    """Blocks with a nonzero value that decode to zero, because their scale is zero."""
    flushed_share: float | None
    """`flushed` as a share of `count`."""
    subnormal: int
    """Blocks with a subnormal scale."""
    subnormal_share: float | None
    """`subnormal` as a share of `count`."""
    saturated: int
    """Blocks with a magnitude above 2688."""
    saturated_share: float | None
    """`saturated` as a share of `count`."""


@dataclass(frozen=True, slots=True)
class QuantizedCacheRecord:
    """One cache file that was written."""

    path: Path
    """The cache file."""
    tensor: str
    """Tensor that its keys came from."""
    values: str
    """Format of its keys: ``nvfp4`` or ``bf16``."""
    layout: str
    """``interleaved`` or ``separate``."""
    scale_order: str
    """``linear`` or ``128x4``."""
    rule: str
    """How codes and scales were chosen."""
    calibration: str | None
    """Digest of the statistics that the rule ``covariance`` used; null with other rules."""
    rotate: str
    """How keys were rotated before they were stored, or ``none``."""
    gain: float
    """What keys were multiplied by before they were stored, ``auto`` resolved; 1 for nothing."""
    center: str
    """What was subtracted from keys before they were stored, or ``none``."""
    requests: int
    """Number of requests."""
    keys: int
    """Keys of all requests."""
    pages: int
    """Pages of 64 keys."""
    cache_bytes: int
    """Bytes of keys and scales."""
    file_bytes: int
    """Bytes of the whole file."""
    bf16_bytes: int
    """Bytes that the same pages take in BF16."""
    ratio_to_bf16: float | None
    """`bf16_bytes` over `cache_bytes`; null without pages."""
    blocks: BlockRecord | None
    """What the format did to blocks; null in a BF16 cache."""
    nonfinite_values: int
    """NaN and infinities that were converted; they are not part of the error."""
    relative_error: float | None
    """L2 norm of what the format changed, relative to that of the (transformed) keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeCacheDocument:
    """What `sdsa quantize-cache` wrote. Sizes are in bytes."""

    schema: Literal["sdsa.quantize-cache/1"] = "sdsa.quantize-cache/1"
    """Name and version of this document."""
    command: Literal["quantize-cache"] = "quantize-cache"
    """The command that wrote it."""
    input: str
    """The file, folder or index of keys, as given."""
    device: str
    """Where keys were converted, ``auto`` resolved."""
    nonfinite: str
    """``error`` or ``saturate``."""
    seconds: float
    """Time from opening the first cache file until the last one was complete."""
    caches: list[QuantizedCacheRecord]
    """One record for each cache file, in the numeric order of the tensors' names."""
    environment: Environment
    """Where the caches were made."""


def quantize_cache_document(
    source: str,
    device: str,
    nonfinite: str,
    caches: Sequence[QuantizedCache],
    seconds: float,
) -> QuantizeCacheDocument:
    """The document of a run."""
    return QuantizeCacheDocument(
        input=source,
        device=device,
        nonfinite=nonfinite,
        seconds=seconds,
        caches=[_cache_record(cache) for cache in caches],
        environment=describe_environment(),
    )


def _cache_record(cache: QuantizedCache) -> QuantizedCacheRecord:
    header, statistics = cache.header, cache.statistics
    blocks = None
    if header.format == "nvfp4":
        blocks = BlockRecord(
            count=statistics.blocks,
            flushed=statistics.flushed,
            flushed_share=statistics.share(statistics.flushed),
            subnormal=statistics.subnormal,
            subnormal_share=statistics.share(statistics.subnormal),
            saturated=statistics.saturated,
            saturated_share=statistics.share(statistics.saturated),
        )
    return QuantizedCacheRecord(
        path=cache.path,
        tensor=cache.keys.name,
        values=header.format,
        layout=header.layout,
        scale_order=header.scale_order,
        rule=header.metadata()["rule"],
        calibration=None if header.calibration == "none" else header.calibration,
        rotate=header.rotate,
        gain=header.gain,
        center=header.center,
        requests=len(cache.keys.context_lengths),
        keys=sum(cache.keys.context_lengths),
        pages=cache.pages,
        cache_bytes=cache.cache_bytes,
        file_bytes=cache.file_bytes,
        bf16_bytes=cache.bf16_bytes,
        ratio_to_bf16=cache.ratio_to_bf16,
        blocks=blocks,
        nonfinite_values=statistics.nonfinite,
        relative_error=statistics.relative_error,
    )
