"""The unquantized keys that a cache is measured against, from a keys file or a BF16 cache.

A keys file needs no lengths of its own: it has the keys that the cache was made from, in the same
order, so the cache's context lengths divide it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sdsa_quant.accuracy.baseline import KeyReader
from sdsa_quant.errors import InputError
from sdsa_quant.files.cache_file import CacheFile, open_cache, validate_cache
from sdsa_quant.files.cache_header import FORMAT as CACHE_FORMAT
from sdsa_quant.files.safetensors_reader import header_metadata
from sdsa_quant.files.tensor_source import TensorSource, open_tensors
from sdsa_quant.layout import BF16
from sdsa_quant.paging import gather_keys

from .keys import CapturedKeys, select_keys


@dataclass(frozen=True, slots=True)
class Baseline:
    """Where the baseline's keys come from, and how to read them."""

    path: Path
    kind: str  # "keys" or "cache"
    name: str | None  # the keys' tensor; None for a cache that does not say
    dtype: str  # as safetensors writes it
    read_keys: KeyReader
    file_name: str = ""  # that holds the keys, or that a cache was made from; empty if not known


def open_baseline(path: str | Path, cache: CacheFile, key_name: str | None = None) -> Baseline:
    """Open the unquantized keys of a cache.

    Parameters
    ----------
    path : str or Path
        Keys BF16, F16 or F32 ``[tokens, 128]`` or ``[requests, tokens, 128]``, those that the cache
        was built from, or a BF16 cache file.
    cache : CacheFile
        The cache to measure.
    key_name : str, optional
        The keys' tensor, for a keys file; by default the one that the cache says it was made from,
        else see `select_keys`.

    Raises
    ------
    ValueError
        The file cannot be read, holds no such keys, is a cache of quantized keys, or its keys do
        not divide into the cache's requests.
    CheckFailedError
        It is a cache that cannot be scored.
    """
    path = Path(path)
    source = open_tensors(path)
    if header_metadata(path).get("format") == CACHE_FORMAT:
        if key_name is not None:
            raise InputError(
                "must be left out: the baseline is a cache, which has no tensor to choose",
                argument="key_name",
                source=path,
            )
        return _cache_baseline(path, cache)
    if key_name is None and _tensor_of(cache.header.source) in source:
        key_name = _tensor_of(cache.header.source)
    tensors = select_keys(source, key_name)
    if len(tensors) != 1:
        raise InputError(
            f"{key_name} must match one tensor, the baseline, "
            f"got {', '.join(tensor.name for tensor in tensors)}",
            argument="key_name",
            source=path,
        )
    keys = _divide(source, tensors[0].name, cache)
    return Baseline(path, "keys", keys.name, keys.tensor.dtype, keys.read, keys.tensor.path.name)


def describe_other_source(cache: CacheFile, baseline: Baseline) -> str | None:
    """Where a cache and its baseline say that they hold different keys; None otherwise.

    Files of one capture often share the names of their tensors, so files are compared too.
    """
    pairs = (
        ("tensor", _tensor_of(cache.header.source), baseline.name),
        ("file", _file_of(cache.header.source), baseline.file_name),
    )
    for what, mine, other in pairs:
        if mine and other and mine != other:
            return (
                f"{cache.path} was made from {what} {mine}, but the baseline is {other}: "
                f"unless they hold the same keys, the accuracy means nothing"
            )
    return None


def _file_of(source: str) -> str:
    """The file in a cache's header field ``file:tensor``."""
    return source.partition(":")[0]


def _tensor_of(source: str) -> str:
    """The tensor in a cache's header field ``file:tensor``; empty where it names only a file."""
    return source.partition(":")[2]


def _cache_baseline(path: Path, cache: CacheFile) -> Baseline:
    other = open_cache(path)
    if other.header.format != BF16:
        raise InputError(
            f"{path}: the baseline must be unquantized keys or a bf16 cache, "
            f"but is a cache of {other.header.format} keys"
        )
    if other.header.is_transformed:
        raise InputError(
            f"{path}: the baseline must be the keys as they were captured, but is a cache of "
            f"transformed keys (header fields rotate, gain, center)"
        )
    validate_cache(other)
    lengths, wanted = other.context_lengths.tolist(), cache.context_lengths.tolist()
    if lengths != wanted:
        raise InputError(
            f"{path}: the baseline must have the context lengths of {cache.path}, "
            f"{_shorten(wanted)}, got {_shorten(lengths)}"
        )
    paged = other.paged_keys()
    return Baseline(
        path,
        "cache",
        _tensor_of(other.header.source) or None,
        "BF16",
        lambda request, start, stop: gather_keys(paged, request, start, stop),
        _file_of(other.header.source),
    )


def _divide(source: TensorSource, name: str, cache: CacheFile) -> CapturedKeys:
    tensor = source[name]
    lengths = tuple(cache.context_lengths.tolist())
    one_head = tensor.shape[1:-1] == (1,) and sum(lengths) == tensor.shape[0]
    if len(tensor.shape) == 2 or one_head:
        if sum(lengths) != tensor.shape[0]:
            raise InputError(
                f"{tensor.path}: tensor {name} must have the {sum(lengths)} keys of {cache.path}, "
                f"got {tensor.shape[0]}"
            )
        starts = tuple(itertools.accumulate(lengths, initial=0))[:-1]
        return CapturedKeys(source, tensor, starts, lengths)
    requests, tokens, _ = tensor.shape
    if len(lengths) != requests or max(lengths, default=0) > tokens:
        raise InputError(
            f"{tensor.path}: tensor {name} must hold the requests of {cache.path}, "
            f"{_shorten(lengths)} keys, got {list(tensor.shape)}"
        )
    starts = tuple(request * tokens for request in range(requests))
    return CapturedKeys(source, tensor, starts, lengths)


def _shorten(lengths: Sequence[int], shown: int = 8) -> str:
    """The first few lengths of a list, for an error message."""
    more = f", ... ({len(lengths)} requests)" if len(lengths) > shown else ""
    return "[" + ", ".join(map(str, lengths[:shown])) + more + "]"
