"""Captured keys to a cache file, a few pages at a time.

A chunk of keys at a time is read from the mapped file, transformed, converted, counted, laid out in
pages and written, so memory does not grow with the number of keys. The end of a request's last page
is zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from .accuracy.blocks import BlockStatistics
from .calibration.layer import LayerCalibration
from .captures.keys import CapturedKeys
from .errors import Hint, InputError
from .files.cache_file import CacheWriter, open_cache
from .files.cache_header import CacheHeader
from .formats.nvfp4 import COVARIANCE, NONFINITE_CHOICES, quantize_nvfp4
from .formats.transforms import TransformChoice, fit_transforms
from .layout import BF16, BF16_RECORD_BYTES, DIM, NVFP4, PAGE, ratio_to_bf16

# 4 MB of BF16 keys on a CPU, to stay near its caches; a GPU needs more work for each launch.
_CPU_PAGES_PER_CHUNK = 256
_CUDA_PAGES_PER_CHUNK = 4096
PLAIN = TransformChoice()
# Keys, ``nonfinite=`` and ``rule=`` to codes and scales, as `quantize_nvfp4`.
Quantizer = Callable[..., tuple[torch.Tensor, torch.Tensor]]
_BF16_MAX = torch.finfo(torch.bfloat16).max


@dataclass(frozen=True, slots=True)
class QuantizedCache:
    """A cache file that was written, and what its format did to the keys."""

    path: Path
    """The file."""

    keys: CapturedKeys
    """The captured keys that it was made from, and their requests."""

    header: CacheHeader
    """How it stores them, with the gain that was found."""

    pages: int
    """Pages of 64 keys."""

    cache_bytes: int
    """Bytes of keys and scales in the file."""

    file_bytes: int
    """Bytes of the file, with block table, lengths and header."""

    statistics: BlockStatistics
    """Lost and coarse blocks, and the relative error."""

    @property
    def key_bytes(self) -> int:
        """Bytes of the keys alone in BF16, without what fills up pages."""
        return sum(self.keys.context_lengths) * DIM * 2

    @property
    def empty_keys(self) -> int:
        """Keys of zeros that fill up the last pages of requests."""
        return self.pages * PAGE - sum(self.keys.context_lengths)

    @property
    def table_bytes(self) -> int:
        """Bytes of the block table, which has a row for each request, as long as the longest."""
        lengths = self.keys.context_lengths
        return len(lengths) * -(-max(lengths, default=0) // PAGE) * 4

    @property
    def bf16_bytes(self) -> int:
        """Bytes of the same pages in BF16."""
        return self.pages * BF16_RECORD_BYTES

    @property
    def ratio_to_bf16(self) -> float:
        """How many times smaller than BF16 the cache is; 3.56 for NVFP4. NaN without pages."""
        ratio = ratio_to_bf16(self.pages, self.cache_bytes)
        return math.nan if ratio is None else ratio


@dataclass(frozen=True, slots=True)
class _Segment:
    """Keys of one request that fill whole pages, or end in its last page."""

    request: int
    start: int  # in keys of the request, a multiple of 64
    stop: int
    page: int  # of the cache, where `start` goes

    @property
    def pages(self) -> int:
        return -(-(self.stop - self.start) // PAGE)


def quantize_cache(
    keys: CapturedKeys,
    path: str | Path,
    header: CacheHeader,
    *,
    device: torch.device | str = "cpu",
    transform: TransformChoice = PLAIN,
    nonfinite: str = "error",
    force: bool = False,
    advance: Callable[[int], None] | None = None,
    quantize: Quantizer = quantize_nvfp4,
    calibration: LayerCalibration | None = None,
) -> QuantizedCache:
    """Write captured keys as a cache file.

    Parameters
    ----------
    keys : CapturedKeys
        The keys and their requests.
    path : str or Path
        The cache file; it appears whole or not at all.
    header : CacheHeader
        Format, layout, scale order and rule of the cache. What it says of a transform is replaced
        by `transform`, whose mean key and automatic gain are found here.
    device : torch.device or str
        Where to convert.
    transform : TransformChoice
        What to do to the keys before they are stored.
    nonfinite : str
        ``"error"`` refuses NaN and infinities. ``"saturate"`` converts them as `quantize_nvfp4`
        does for NVFP4; for BF16 an infinity becomes the largest finite value and NaN becomes 0.
    force : bool
        Whether to replace an existing file.
    advance : callable, optional
        Called with the number of keys done since the last call.
    quantize : callable
        What makes NVFP4 of keys: `quantize_nvfp4`, or another with the same arguments and bits.
    calibration : LayerCalibration, optional
        What the rule ``covariance`` needs. Its mean key is then what centering subtracts.

    Raises
    ------
    ValueError
        A key is not finite and `nonfinite` is ``"error"``, a transform is to be made with another
        `nonfinite`, or the file cannot be written.
    """
    require_transformable(transform, nonfinite)
    device = torch.device(device)
    chunk_pages = _CUDA_PAGES_PER_CHUNK if device.type == "cuda" else _CPU_PAGES_PER_CHUNK
    (fitted,) = fit_transforms(lambda: _finite_keys(keys, chunk_pages, device), [transform])
    if (calibration is not None) != (header.rule == COVARIANCE):
        raise InputError(
            f"must be given for the rule {COVARIANCE} and for no other", argument="calibration"
        )
    if calibration is not None:
        header = replace(header, calibration=calibration.digest)
        quantize = partial(quantize, weights=calibration.key_weights(fitted.rotate))
        if fitted.mean is not None:
            fitted = replace(fitted, mean=calibration.key_mean.float().to(device))
    header = header.with_transform(fitted)
    statistics = BlockStatistics()
    with CacheWriter(
        path, header, keys.context_lengths, force=force, key_mean=fitted.mean
    ) as writer:
        for chunk in _chunks(keys.context_lengths, chunk_pages):
            captured = _chunk_rows(keys, chunk).to(device)
            values = fitted.apply_keys(captured)
            try:
                codes, scales = _convert(values, header, nonfinite, statistics, quantize)
            except InputError:
                # A rotation spreads one value over its key: look for it in what was captured.
                culprits = values if bool(captured.isfinite().all()) else captured
                raise _nonfinite_error(keys, chunk, culprits, header.format) from None
            paged_scales = None if scales is None else _in_pages(scales, chunk)
            writer.write_pages(chunk[0].page, _in_pages(codes, chunk), paged_scales)
            if advance is not None:
                advance(values.shape[0])
    written = open_cache(path)
    return QuantizedCache(
        Path(path), keys, header, written.pages, written.cache_bytes, written.file_bytes, statistics
    )


def require_transformable(transform: TransformChoice, nonfinite: str) -> None:
    """Refuse to transform keys that need not be finite.

    Raises
    ------
    ValueError
        A transform is to be made and `nonfinite` is not ``"error"``.
    """
    if nonfinite not in NONFINITE_CHOICES:
        choices = ", ".join(NONFINITE_CHOICES)
        raise InputError(f"must be one of {choices}, got {nonfinite!r}", argument="nonfinite")
    if transform != PLAIN and nonfinite != "error":
        raise InputError(
            f"must be error, got {nonfinite}: keys must be finite to be transformed "
            f"({transform.label})",
            argument="nonfinite",
        )


def _chunks(context_lengths: Sequence[int], chunk_pages: int) -> Iterator[list[_Segment]]:
    """The pages of a cache in order, at most `chunk_pages` at a time."""
    chunk: list[_Segment] = []
    room, page = chunk_pages, 0
    for request, length in enumerate(context_lengths):
        start = 0
        while start < length:
            segment = _Segment(request, start, min(length, start + room * PAGE), page)
            chunk.append(segment)
            start, page, room = segment.stop, page + segment.pages, room - segment.pages
            if room == 0:
                yield chunk
                chunk, room = [], chunk_pages
    if chunk:
        yield chunk


def _chunk_rows(keys: CapturedKeys, chunk: Sequence[_Segment]) -> torch.Tensor:
    """Keys ``[n, 128]`` of a chunk, in one read where they lie side by side in the file."""
    starts = keys.starts
    ranges: list[tuple[int, int]] = []
    for segment in chunk:
        begin, end = starts[segment.request] + segment.start, starts[segment.request] + segment.stop
        if ranges and ranges[-1][1] == begin:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((begin, end))
    parts = [keys.rows(begin, end) for begin, end in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _finite_keys(
    keys: CapturedKeys, chunk_pages: int, device: torch.device
) -> Iterator[torch.Tensor]:
    """The keys a chunk at a time, for a transform that depends on all of them."""
    for chunk in _chunks(keys.context_lengths, chunk_pages):
        values = _chunk_rows(keys, chunk).to(device)
        if not bool(values.isfinite().all()):
            raise _nonfinite_error(keys, chunk, values, NVFP4)
        yield values


def _convert(
    values: torch.Tensor,
    header: CacheHeader,
    nonfinite: str,
    statistics: BlockStatistics,
    quantize: Quantizer,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the cache stores of ``[n, 128]`` keys: codes and scale bytes, or BF16 and None."""
    if header.format == BF16:
        return _to_bf16(values, nonfinite, statistics)
    codes, scales = quantize(values, nonfinite=nonfinite, rule=header.rule)
    statistics.add_nvfp4(values, codes, scales)
    return codes, scales.view(torch.uint8)


def _to_bf16(
    values: torch.Tensor, nonfinite: str, statistics: BlockStatistics
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """BF16 keys, without scales, of ``[n, 128]`` keys."""
    converted = values.bfloat16()
    if not bool(converted.isfinite().all()):
        if nonfinite == "error":
            raise InputError("values must be finite in BF16, got NaN or infinity")
        converted = converted.nan_to_num(nan=0.0, posinf=_BF16_MAX, neginf=-_BF16_MAX)
    statistics.add_decoded(values, converted)
    return converted, None


def _in_pages(rows: torch.Tensor, chunk: Sequence[_Segment]) -> torch.Tensor:
    """``[n, width]`` laid out as ``[pages, 64, width]`` on the CPU, zeros past each request."""
    rows = rows.cpu()
    pages = chunk[-1].page + chunk[-1].pages - chunk[0].page
    paged = rows.new_zeros((pages * PAGE, rows.shape[1]))
    done = 0
    for segment in chunk:
        first, count = (segment.page - chunk[0].page) * PAGE, segment.stop - segment.start
        paged[first : first + count] = rows[done : done + count]
        done += count
    return paged.view(pages, PAGE, -1)


def _nonfinite_error(
    keys: CapturedKeys, chunk: Sequence[_Segment], values: torch.Tensor, key_format: str
) -> InputError:
    """The error that says where a chunk's first value without a finite form is."""
    stored = values if key_format == NVFP4 else values.bfloat16()
    row, dimension = (~stored.isfinite()).nonzero()[0].tolist()
    value = float(values[row, dimension])
    request, key = _locate(chunk, row)
    return InputError(
        f"tensor {keys.name} must be finite, got {value} in key {key} of request {request}, "
        f"dimension {dimension}",
        source=keys.tensor.path,
        hint=Hint("nonfinite", "to convert such values", "saturate"),
    )


def _locate(chunk: Sequence[_Segment], row: int) -> tuple[int, int]:
    """Request and key of a row of a chunk."""
    for segment in chunk:
        count = segment.stop - segment.start
        if row < count:
            return segment.request, segment.start + row
        row -= count
    raise IndexError(f"row {row} is past the chunk")
