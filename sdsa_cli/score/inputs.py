"""What `sdsa score` is asked to do: its options, and the groups that its query rows make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sdsa_cli.options import parse_numbers
from sdsa_quant.errors import CacheFormatError, InputError
from sdsa_quant.layout import MAX_ROWS

if TYPE_CHECKING:
    from sdsa_quant.captures.queries import Queries
    from sdsa_quant.files.cache_file import CacheFile


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """The command line of `sdsa score`, as it goes into the report; null for what was left out."""

    cache: Path
    """Cache file."""
    queries: Path
    """File of query rows."""
    query_name: str | None
    """Tensor of query rows, as ``--query-name`` names it."""
    rows_per_group: int | None
    """Rows of a group, as ``--rows-per-group`` gives them."""
    requests: str | None
    """Requests of the groups, or the name of their tensor, as ``--requests`` gives them."""
    query_format: str | None
    """What the rows are to be scored as, as ``--query-format`` names it."""
    calibration: Path | None
    """Statistics that NVFP4 query rows are quantized with."""
    baseline: Path | None
    """File of unquantized keys."""
    keys: str | None
    """Tensor of unquantized keys, as ``--keys`` names it."""
    top_k: tuple[int, ...]
    """Numbers of keys that an indexer selects, ascending, each once."""
    softmax_scale: float
    """Multiplies a score before the softmax of mass@k."""
    graph_replay: int | None
    """Replays to time, as ``--graph-replay`` gives them."""
    hot: bool
    """Whether to replay on the cache itself."""
    backend: str
    """Backend, as ``--backend`` names it."""
    device: str
    """Device, ``auto`` resolved."""
    chunk: int | None
    """Groups scored at a time, as ``--chunk`` gives them."""
    select: int | None
    """Keys to select in each row, as ``--select`` gives them."""
    output: Path | None
    """Scores file of ``-o``."""


def open_scored_cache(path: Path) -> CacheFile:
    """Open the cache to score; what is not a cache file is told from a damaged one.

    Raises
    ------
    InputError
        It is a folder, not a cache, or damaged.
    """
    from sdsa_quant.files.cache_file import open_cache
    from sdsa_quant.files.cache_header import FORMAT
    from sdsa_quant.files.safetensors_reader import header_metadata

    if path.is_dir():
        raise InputError(f"{path}: is a folder; score one cache file of it at a time")
    try:
        return open_cache(path)
    except CacheFormatError:
        stated = header_metadata(path).get("format", "none")
        if stated == FORMAT:
            raise
        raise InputError(
            f"{path}: is not a cache (format in its header: {stated}); sdsa quantize-cache makes "
            f"caches from keys"
        ) from None


def requests_of_groups(options: ScoreOptions, queries: Queries, cache_requests: int) -> list[int]:
    """The request of each group: what ``--requests`` says, else groups spread evenly.

    Raises
    ------
    InputError
        The query rows make no whole groups, the list does not fit them, or they cannot be spread.
    """
    from sdsa_quant.captures.queries import assumed_requests, read_requests

    groups = _count_groups(queries.rows, options.rows_per_group, queries.rows_per_group)
    if options.requests is None:
        return assumed_requests(queries.source, queries.tensor, groups, cache_requests)
    requests: Sequence[int] = parse_numbers(options.requests)
    if not requests:
        requests = read_requests(queries, options.requests)
    if len(requests) != groups:
        raise InputError(
            f"--requests must give the request of each of the {groups} groups, got {len(requests)}"
        )
    return list(requests)


def _count_groups(rows: int, given: int | None, stated: int | None) -> int:
    rows_per_group = given or stated or 1
    if rows_per_group > MAX_ROWS:
        raise InputError(
            f"rows per group must be 1 to {MAX_ROWS} (see --rows-per-group), got {rows_per_group}"
        )
    if rows == 0 or rows % rows_per_group:
        raise InputError(
            f"query rows must make whole groups of {rows_per_group} (see --rows-per-group), "
            f"got {rows} rows"
        )
    return rows // rows_per_group
