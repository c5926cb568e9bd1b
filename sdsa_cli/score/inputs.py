"""What `sdsa score` is asked to do: its options, and the groups that its query rows make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sdsa_cli.text import shortened
from sdsa_quant.errors import CacheFormatError, InputError
from sdsa_quant.files.text import INT32_MAX, whole_number
from sdsa_quant.layout import DEFAULT_SOFTMAX_SCALE, DEFAULT_TOP_K, MAX_ROWS

if TYPE_CHECKING:
    from sdsa_quant.captures.queries import Queries
    from sdsa_quant.files.cache_file import CacheFile

DEFAULT_TOP_K_TEXT = ",".join(map(str, DEFAULT_TOP_K))


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """The command line of `sdsa score`, as it goes into the report."""

    cache: Path
    queries: Path
    query_name: str | None
    rows_per_group: int | None
    requests: str | None
    query_format: str | None
    baseline: Path | None
    keys: str | None
    top_k: tuple[int, ...]
    softmax_scale: float
    graph_replay: int | None
    hot: bool
    backend: str
    device: str
    chunk: int | None
    output: Path | None


def parse_top_k(text: str) -> tuple[int, ...]:
    """The k of a list such as ``64,256,2048``, in ascending order, each once.

    Raises
    ------
    InputError
        The text is no list of numbers from 1 to 2^31 - 1.
    """
    numbers = parse_numbers(text)
    if not numbers or min(numbers) < 1:
        raise InputError(
            f"--top-k must be numbers from 1 to {INT32_MAX} such as 64,256, got {shortened(text)!r}"
        )
    return tuple(sorted(set(numbers)))


def parse_numbers(text: str) -> list[int]:
    """Numbers, 0 to 2^31 - 1, of a list such as ``0,0,1``; empty for any other text."""
    numbers = [whole_number(part) for part in text.split(",")]
    known = [number for number in numbers if number is not None]
    return known if len(known) == len(numbers) else []


def at_least_one(option: str, given: int | None) -> int | None:
    """The number that an option was given, None where it was left out.

    Raises
    ------
    InputError
        It is less than 1 or more than 2^31 - 1.
    """
    if given is not None and given < 1:
        raise InputError(f"{option} must be at least 1, got {given}")
    if given is not None and given > INT32_MAX:
        raise InputError(f"{option} must be at most {INT32_MAX}, got {shortened(str(given))}")
    return given


def choose_softmax_scale(given: float | None) -> float:
    """The scale of ``--softmax-scale``, 1/sqrt(128) by default.

    Raises
    ------
    InputError
        It is not positive and finite.
    """
    scale = DEFAULT_SOFTMAX_SCALE if given is None else given
    if not 0 < scale < float("inf"):
        raise InputError(f"--softmax-scale must be positive and finite, got {scale}")
    return scale


def open_scored_cache(path: Path) -> CacheFile:
    """Open the cache to score; what is no cache file is told from a damaged one.

    Raises
    ------
    InputError
        It is a folder, no cache, or damaged.
    """
    from sdsa_quant.files.cache_file import open_cache
    from sdsa_quant.files.cache_header import FORMAT
    from sdsa_quant.files.safetensors_reader import header_metadata

    if path.is_dir():
        raise InputError(f"{path}: is a folder; score one cache file of it at a time")
    try:
        return open_cache(path)
    except CacheFormatError:
        kind = header_metadata(path).get("format", "none")
        if kind == FORMAT:
            raise
        raise InputError(
            f"{path}: is no cache (format in its header: {kind}); sdsa quantize-cache makes "
            f"caches from keys"
        ) from None


def requests_of_groups(options: ScoreOptions, queries: Queries, cache_requests: int) -> list[int]:
    """The request of each group: what ``--requests`` says, else groups spread evenly.

    Raises
    ------
    InputError
        The query rows make no whole groups, the list does not fit them, or they cannot be spread.
    """
    from sdsa_quant.captures.queries import read_requests, spread_groups

    groups = _count_groups(queries.values.shape[0], options.rows_per_group, queries.rows_per_group)
    if options.requests is None:
        return spread_groups(groups, cache_requests)
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
