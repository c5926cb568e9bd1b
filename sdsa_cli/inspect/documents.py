"""The JSON documents of `sdsa inspect`, one for each kind of thing that it shows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)  # without slots, so that documents can have a second base
class Heading:
    """What every document of the command begins with."""

    schema: Literal["sdsa.inspect/1"] = "sdsa.inspect/1"
    """Name and version of this document."""
    command: Literal["inspect"] = "inspect"
    """The command that wrote it."""
    kind: str
    """What is shown."""


@dataclass(frozen=True, slots=True)
class ScaleShares:
    """What the scales of a cache's used keys say about its blocks."""

    count: int
    """Blocks of used keys."""
    zero: int
    """Blocks with a scale of zero: flushed to zero, or all zeros."""
    zero_share: float | None
    """`zero` as a share of `count`; null without blocks."""
    subnormal: int
    """Blocks with a subnormal scale."""
    subnormal_share: float | None
    """`subnormal` as a share of `count`; null without blocks."""
    largest: int
    """Blocks with the largest scale, 448: saturated, or just not."""
    largest_share: float | None
    """`largest` as a share of `count`; null without blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRecord:
    """What a cache file is, as far as it can be read; the rest is null."""

    path: str
    """The cache file."""
    valid: bool
    """Whether the cache is valid."""
    reason: str | None
    """Why the cache is not valid, or null."""
    header: dict[str, str]
    """Metadata of the file."""
    requests: int | None = None
    """Number of requests."""
    keys: int | None = None
    """Keys of all requests."""
    context_lengths: list[int] | None = None
    """Keys of each request."""
    blocks: int | None = None
    """Columns of the block table."""
    pages: int | None = None
    """Pages of 64 keys."""
    cache_bytes: int | None = None
    """Bytes of keys and scales."""
    file_bytes: int | None = None
    """Bytes of the whole file."""
    bf16_bytes: int | None = None
    """Bytes that the same pages take in BF16."""
    ratio_to_bf16: float | None = None
    """`bf16_bytes` over `cache_bytes`; null without pages."""
    scales: ScaleShares | None = None
    """The scales of used keys; null for BF16, and where the cache is not valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheDocument(CacheRecord, Heading):
    """A cache file."""

    kind: Literal["cache"] = "cache"
    """What the file is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachesDocument(Heading):
    """A folder of cache files."""

    kind: Literal["caches"] = "caches"
    """What `path` is."""
    path: str
    """The folder."""
    caches: list[CacheRecord]
    """Its caches, in natural order of their names; other files are left out."""


@dataclass(frozen=True, slots=True)
class PageOwner:
    """Which request's keys are in a page."""

    request: int | None
    """The request; null for a page of no request."""
    first_key: int | None
    """Index in the request of the page's first key; null for a page of no request."""
    used: int
    """How many of the 64 keys belong to the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageDocument(PageOwner, Heading):
    """One page of a cache, decoded."""

    kind: Literal["page"] = "page"
    """What is shown."""
    path: str
    """The cache file."""
    page: int
    """Index of the page."""
    key: int | None
    """The key of ``--key``, or null for all keys of the page."""
    keys: list[list[float]]
    """Values of each key as they are stored, decoded; transforms are not undone."""
    scales: list[list[float]] | None
    """Decoded scales of each key; null for BF16."""


@dataclass(frozen=True, slots=True)
class RowRecord:
    """One row of a scores file."""

    row: int
    """Index of the row."""
    request: int
    """Request of its group."""
    length: int
    """Keys that the row sees."""
    min: float | None
    """Lowest finite score, or null."""
    max: float | None
    """Highest finite score, or null."""
    nonfinite: int
    """Scores below the length that are not finite."""
    best_keys: list[int]
    """The first few of the row's top-k, highest score first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoresDocument(Heading):
    """A scores file."""

    kind: Literal["scores"] = "scores"
    """What the file is."""
    path: str
    """The scores file."""
    rows: int
    """Query rows."""
    groups: int
    """Groups of query rows."""
    rows_per_group: int
    """Query rows of a group."""
    max_context: int
    """Columns of the scores."""
    top_k: int
    """Indices stored for each row."""
    top_k_order: str
    """Their order in the file: ``score``, highest first, or ``key``, ascending."""
    file_bytes: int
    """Bytes of the whole file."""
    metadata: dict[str, str]
    """Metadata of the file."""
    row_summaries: list[RowRecord]
    """One record for each row."""


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor of a safetensors file."""

    name: str
    """Its name, with its file's name before it where files share names."""
    dtype: str
    """Its dtype, as the file has it."""
    shape: tuple[int, ...]
    """Its shape."""
    bytes: int
    """Bytes of its data."""
    file: Path
    """The file that holds it."""
    use: (
        Literal["keys", "queries", "lengths", "weights", "requests", "positions", "selected"] | None
    )
    """What the tensor can be, by dtype, shape and name, or null."""


@dataclass(frozen=True, slots=True)
class CaptureFinding:
    """Something about a tensor that a right capture does not have."""

    tensor: str
    """Name of the tensor."""
    path: Path
    """File that holds it."""
    text: str
    """What was seen, and what it may mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorsDocument(Heading):
    """Any other safetensors file, folder or index."""

    kind: Literal["tensors"] = "tensors"
    """What the file is."""
    path: Path
    """The file, folder or index."""
    files: list[Path]
    """The files that hold its tensors."""
    tensors: list[TensorRecord]
    """One record for each tensor."""
    metadata: dict[str, str]
    """Metadata of the file."""
    findings: list[CaptureFinding] | None
    """What ``--check`` saw of faults of a capture; null without it."""
