"""The layers of a study: key tensors and query tensors matched by name, rows matched to requests.

Two tensors belong to one layer by the rule of `sdsa_quant.captures.names`: ``layers.3.keys`` and
``layers.3.queries``. A row of queries sees all keys of its request or, in causal mode, those up to
its own position: the rows of a request are its last positions, unless positions are given.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from sdsa_quant.captures.keys import (
    CapturedKeys,
    captured_keys,
    lengths_for,
    select_keys,
)
from sdsa_quant.captures.names import (
    FLOAT_DTYPES,
    KEY_NAMES,
    QUERY_NAMES,
    companion,
    matching_tensors,
    partners,
    usual_name,
    usual_pattern,
)
from sdsa_quant.captures.queries import assumed_requests, stated_rows_per_group
from sdsa_quant.errors import DtypeError, Hint, InputError
from sdsa_quant.files.tensor_source import StoredTensor, TensorSource, open_tensors
from sdsa_quant.layout import DIM, MAX_ROWS

from .inputs import BLOCK_MAX, RELU_SUM, ROWS, SCORES, StudyInputs
from .ranking import Ranking

KEYS_AT_A_TIME = 16384  # of one request: bounds every temporary that is made of keys


@dataclass(frozen=True, slots=True)
class StudyLayer:
    """One layer's keys and query rows."""

    keys: CapturedKeys
    queries: TensorSource
    query_name: str
    row_requests: tuple[int, ...]  # request of each query row
    row_lengths: tuple[int, ...]  # keys that each query row sees
    request_rows: tuple[tuple[int, ...], ...]  # the query rows of each request
    ranking: Ranking  # by what keys are ranked
    weights_name: str | None = None  # of the heads, beside the query rows

    @property
    def name(self) -> str:
        """Name of the layer's key tensor."""
        return self.keys.name

    @property
    def heads(self) -> int | None:
        """Heads of a query row; None for rows without heads."""
        return self.ranking.heads

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self.keys.context_lengths)

    def read_query(self, rows: Sequence[int]) -> torch.Tensor:
        """bfloat16 ``[rows, 128]``, or ``[rows, heads, 128]``, of the rows with these numbers.

        Raises
        ------
        ValueError
            A value is not finite; the message names tensor and row.
        """
        values = self.queries.read(self.query_name)
        values = values.reshape(-1, DIM) if self.heads is None else values
        query = values[list(rows)].to(torch.bfloat16)
        if not bool(query.isfinite().all()):
            index = int((~query.isfinite()).flatten(1).any(dim=1).nonzero()[0])
            raise InputError(
                f"tensor {self.query_name} must be finite, but row {rows[index]} is not",
                source=self.queries.path,
            )
        return query

    def read_weights(self, rows: Sequence[int]) -> torch.Tensor | None:
        """float64 ``[rows, heads]`` weights of the rows with these numbers; None without any.

        Raises
        ------
        ValueError
            A value is not finite; the message names tensor and row.
        """
        if self.weights_name is None:
            return None
        weights = self.queries.read(self.weights_name)[list(rows)].double()
        if not bool(weights.isfinite().all()):
            index = int((~weights.isfinite()).any(dim=1).nonzero()[0])
            raise InputError(
                f"tensor {self.weights_name} must be finite, but row {rows[index]} is not",
                source=self.queries.path,
            )
        return weights

    def read_keys(self, request: int, start: int, stop: int) -> torch.Tensor:
        """Keys ``start`` to ``stop`` of one request, ``[n, 128]`` in the file's dtype.

        Raises
        ------
        ValueError
            A value is not finite; the message names tensor, request and key.
        """
        keys = self.keys.read(request, start, stop)
        # NaN and infinities are seen in the extremes, which are found much faster than flags.
        if keys.numel() and not all(bool(each.isfinite()) for each in keys.aminmax()):
            index = int((~keys.isfinite()).any(dim=1).nonzero()[0])
            raise InputError(
                f"tensor {self.name} must be finite, but key {start + index} of request {request} "
                f"is not",
                source=self.keys.tensor.path,
            )
        return keys

    def key_chunks(self, request: int) -> Iterator[tuple[int, torch.Tensor]]:
        """First key and keys of each chunk of one request."""
        length = self.keys.context_lengths[request]
        # Whole blocks, so that each chunk has all that the scores of its blocks are made of.
        block = self.ranking.block
        step = max(KEYS_AT_A_TIME // self.keys.pool // block, 1) * block
        for start in range(0, length, step):
            yield start, self.read_keys(request, start, min(start + step, length))

    def all_keys(self) -> Iterator[torch.Tensor]:
        """The keys of every request, chunk by chunk."""
        for request in range(self.requests):
            for _, keys in self.key_chunks(request):
                yield keys


def open_layers(inputs: StudyInputs) -> list[StudyLayer]:
    """The layers that `inputs` names, in the natural order of their key tensors.

    Raises
    ------
    ValueError
        A file or a tensor is not what it must be, keys and queries do not match by name, or rows
        and requests do not fit each other.
    """
    if inputs.score not in SCORES:
        raise InputError(
            f"must be one of {', '.join(SCORES)}, got {inputs.score!r}", argument="score"
        )
    _require_fitting_options(inputs)
    key_source, query_source = open_tensors(inputs.keys), open_tensors(inputs.queries)
    # With the patterns that chose the tensors, by which others are found to go with them.
    keys_pattern = _keys_pattern(key_source, inputs.keys_pattern)
    queries_pattern = _queries_pattern(query_source, inputs.queries_pattern)
    inputs = replace(inputs, keys_pattern=keys_pattern, queries_pattern=queries_pattern)
    key_tensors = select_keys(key_source, keys_pattern)
    query_tensors = _select_queries(query_source, queries_pattern)
    pairs = _match(
        key_source, key_tensors, keys_pattern, query_source, query_tensors, queries_pattern
    )
    return [_layer(inputs, keys, key_source, query, query_source) for keys, query in pairs]


def _require_fitting_options(inputs: StudyInputs) -> None:
    if inputs.weights is not None and inputs.score != RELU_SUM:
        raise InputError(
            f"must be left out where each {'head' if inputs.score == BLOCK_MAX else 'query row'} "
            f"is scored by itself",
            argument="weights",
            hint=Hint("score", "for a sum over heads", RELU_SUM),
        )
    for name in ("block", "mean_pool"):
        if getattr(inputs, name) < 1:
            raise InputError(f"must be at least 1, got {getattr(inputs, name)}", argument=name)
    if inputs.score == BLOCK_MAX and inputs.block == 1:
        raise InputError(
            f"must name blocks for the score {BLOCK_MAX}",
            argument="select",
            hint=Hint("select", "for MiniMax-M3", "blocks:128:16"),
        )
    if inputs.local_blocks < 0 or (inputs.local_blocks and inputs.block == 1):
        raise InputError(
            f"must be at least 0, and 0 where keys are selected one by one, got "
            f"{inputs.local_blocks}",
            argument="local_blocks",
        )


def _keys_pattern(source: TensorSource, pattern: str | None) -> str | None:
    """The pattern given, or that of the only usual name that many tensors end with."""
    if pattern is not None or usual_name(source, KEY_NAMES) is not None:
        return pattern
    return usual_pattern(source, KEY_NAMES)


def _queries_pattern(source: TensorSource, pattern: str | None) -> str:
    """The pattern given, or a usual name, or the pattern of one that many tensors end with."""
    pattern = pattern or usual_name(source, QUERY_NAMES) or usual_pattern(source, QUERY_NAMES)
    if pattern is None:
        raise InputError(
            f"no tensor is named queries or *.queries; {source.describe_names()}",
            source=source.path,
            hint=Hint("queries_pattern", "to name the query rows, with a pattern for many layers"),
        )
    return pattern


def _select_queries(source: TensorSource, pattern: str) -> list[StoredTensor]:
    chosen = matching_tensors(source, pattern)
    for tensor in chosen:
        if (
            tensor.dtype not in FLOAT_DTYPES
            or len(tensor.shape) not in (2, 3)
            or tensor.shape[-1] != DIM
        ):
            raise InputError(
                f"tensor {tensor.name} must be unquantized query rows, {', '.join(FLOAT_DTYPES)} "
                f"[rows, {DIM}] or [groups, rows, {DIM}], got {tensor.dtype} {list(tensor.shape)}",
                source=tensor.path,
            )
    return chosen


def _match(
    key_source: TensorSource,
    keys: list[StoredTensor],
    keys_pattern: str | None,
    query_source: TensorSource,
    queries: list[StoredTensor],
    queries_pattern: str,
) -> list[tuple[StoredTensor, StoredTensor]]:
    """Each key tensor and the query tensor that goes with it; every query tensor once."""
    if len(keys) == len(queries) == 1:
        return [(keys[0], queries[0])]
    taken: dict[str, StoredTensor] = {}
    pairs = []
    for tensor in keys:
        found = partners(tensor, keys_pattern, queries, queries_pattern)
        if not found:
            raise InputError(
                f"no query tensor goes with {tensor.name} by its name; there are {_names(queries)}",
                source=query_source.path,
            )
        if len(found) > 1:
            raise _alike(query_source, found[0], found[1])
        if found[0].name in taken:
            raise _alike(key_source, taken[found[0].name], tensor)
        taken[found[0].name] = tensor
        pairs.append((tensor, found[0]))
    for tensor in queries:
        if tensor.name not in taken:
            raise InputError(
                f"no key tensor goes with {tensor.name} by its name; there are {_names(keys)}",
                source=key_source.path,
            )
    return pairs


def _alike(source: TensorSource, first: StoredTensor, second: StoredTensor) -> InputError:
    return InputError(
        f"{first.name} and {second.name} have the same numbers in their names, so that layers "
        f"cannot be told apart; give a narrower pattern",
        source=source.path,
    )


def _names(tensors: Sequence[StoredTensor], most: int = 8) -> str:
    shown = ", ".join(tensor.name for tensor in tensors[:most])
    return shown + (f" and {len(tensors) - most} more" if len(tensors) > most else "")


def _layer(
    inputs: StudyInputs,
    key_tensor: StoredTensor,
    key_source: TensorSource,
    query_tensor: StoredTensor,
    query_source: TensorSource,
) -> StudyLayer:
    keys = _divided_keys(inputs, key_source, key_tensor, query_source)
    heads = _heads(inputs, query_tensor)
    rows = query_tensor.bytes // (_row_bytes(query_tensor) * (heads or 1))
    row_requests = _row_requests(inputs, keys, query_tensor, query_source, rows)
    row_lengths = [keys.context_lengths[request] for request in row_requests]
    if inputs.positions is not None:
        name = _query_companion(inputs, query_source, query_tensor, inputs.positions, "positions")
        row_lengths = _lengths_at_positions(
            query_source, name, row_requests, row_lengths, inputs.pool
        )
    elif inputs.causal:
        row_lengths = _causal_lengths(query_tensor, row_requests, row_lengths)
    if inputs.mean_pool > 1:
        longest = max(keys.context_lengths, default=0)
        if inputs.mean_pool > longest:
            raise InputError(
                f"is larger than every request: {inputs.mean_pool}, where the longest has "
                f"{longest} keys",
                argument="mean_pool",
                source=inputs.keys,
            )
        pool = inputs.mean_pool  # of whole pools only: the rest is not a key yet
        lengths = tuple(length // pool for length in keys.context_lengths)
        keys = replace(keys, context_lengths=lengths, pool=pool)
        row_lengths = [length // pool for length in row_lengths]
    request_rows: list[list[int]] = [[] for _ in keys.context_lengths]
    for row, request in enumerate(row_requests):
        request_rows[request].append(row)
    return StudyLayer(
        keys=keys,
        queries=query_source,
        query_name=query_tensor.name,
        row_requests=tuple(row_requests),
        row_lengths=tuple(row_lengths),
        request_rows=tuple(map(tuple, request_rows)),
        ranking=Ranking(inputs.score, heads, inputs.block, inputs.local_blocks),
        weights_name=_weights_name(inputs, query_source, query_tensor),
    )


def _divided_keys(
    inputs: StudyInputs, source: TensorSource, tensor: StoredTensor, query_source: TensorSource
) -> CapturedKeys:
    """The keys and their requests, by the lengths given or else those beside keys or query rows."""
    lengths = lengths_for(source, tensor, inputs.keys_pattern, inputs.lengths)
    if lengths is None and inputs.lengths is None:
        with contextlib.suppress(InputError, DtypeError):  # they may be of the query rows alone
            name = lengths_for(query_source, tensor, inputs.keys_pattern, None)
            return replace(captured_keys(query_source, tensor, name), source=source)
    return captured_keys(source, tensor, lengths)


def _heads(inputs: StudyInputs, query_tensor: StoredTensor) -> int | None:
    """Heads of each query row; None where a row is scored by itself."""
    if inputs.score != ROWS:
        if len(query_tensor.shape) != 3:
            raise InputError(
                f"tensor {query_tensor.name} must be [rows, heads, {DIM}] for {inputs.score}, "
                f"got {list(query_tensor.shape)}",
                source=query_tensor.path,
            )
        return query_tensor.shape[1]
    return None


def _weights_name(
    inputs: StudyInputs, source: TensorSource, query_tensor: StoredTensor
) -> str | None:
    """The tensor of weights that goes with query rows."""
    if inputs.weights is None:
        return None
    name = _query_companion(inputs, source, query_tensor, inputs.weights, "weights")
    weights = source[name]
    if weights.dtype not in FLOAT_DTYPES or weights.shape != query_tensor.shape[:2]:
        raise InputError(
            f"tensor {name} must be {', '.join(FLOAT_DTYPES)} {list(query_tensor.shape[:2])}, a "
            f"weight for each head of {query_tensor.name}, got {weights.dtype} "
            f"{list(weights.shape)}",
            source=weights.path,
        )
    return name


def _query_companion(
    inputs: StudyInputs, source: TensorSource, tensor: StoredTensor, name: str, argument: str
) -> str:
    return companion(source, name, tensor, inputs.queries_pattern, argument=argument)


def _row_bytes(tensor: StoredTensor) -> int:
    return DIM * (4 if tensor.dtype == "F32" else 2)


def _row_requests(
    inputs: StudyInputs,
    keys: CapturedKeys,
    query_tensor: StoredTensor,
    query_source: TensorSource,
    rows: int,
) -> list[int]:
    per_group = inputs.rows_per_group
    if per_group is None and inputs.score != ROWS:
        per_group = 1
    elif per_group is None:
        per_group = stated_rows_per_group(query_source, query_tensor) or 1
        if per_group > MAX_ROWS:
            raise InputError(
                f"tensor {query_tensor.name} {list(query_tensor.shape)} would make groups of "
                f"{per_group} rows, and a group has 1 to {MAX_ROWS}: heads are not rows",
                source=query_tensor.path,
                hint=Hint("score", "for rows with heads", RELU_SUM),
            )
    in_keys = len(keys.context_lengths)
    # No scores call is made here, so that a group may have more than 8 rows.
    if per_group < 1 or rows == 0 or rows % per_group:
        raise InputError(
            f"tensor {query_tensor.name} must make whole groups of {per_group} rows, got {rows} "
            f"rows",
            source=query_tensor.path,
            hint=Hint("rows_per_group", "to say how many rows a group has"),
        )
    groups = rows // per_group
    requests: Sequence[int]
    if inputs.requests is None:
        requests = assumed_requests(query_source, query_tensor, groups, in_keys)
    elif isinstance(inputs.requests, str):
        name = _query_companion(inputs, query_source, query_tensor, inputs.requests, "requests")
        requests = _integers(query_source, name)
    else:
        requests = inputs.requests
    if len(requests) != groups:
        raise InputError(
            f"must name the request of each of the {groups} groups of {query_tensor.name}, got "
            f"{len(requests)}",
            argument="requests",
        )
    for group, request in enumerate(requests):
        if not 0 <= request < in_keys:
            raise InputError(
                f"must be 0 to {in_keys - 1}, the requests of {keys.name}, got {request} for group "
                f"{group}",
                argument="requests",
            )
    return [request for request in requests for _ in range(per_group)]


def _causal_lengths(
    query_tensor: StoredTensor, row_requests: list[int], request_lengths: list[int]
) -> list[int]:
    """Keys seen by rows that are the last positions of their requests, in order."""
    remaining = Counter(row_requests)
    lengths = []
    for request, length in zip(row_requests, request_lengths, strict=True):
        remaining[request] -= 1
        seen = length - remaining[request]
        if seen < 1 and length:
            raise InputError(
                f"tensor {query_tensor.name} has more rows for request {request} than its {length} "
                f"keys, so that they are not its last positions",
                source=query_tensor.path,
                hint=Hint("positions", "to name the positions"),
            )
        lengths.append(max(seen, 0))
    return lengths


def _lengths_at_positions(
    source: TensorSource,
    name: str,
    row_requests: list[int],
    request_lengths: list[int],
    pool: int,
) -> list[int]:
    """Keys seen by rows at these positions; of pooled keys, those of whole pools."""
    stored, positions = source[name], _integers(source, name)
    if len(positions) != len(row_requests):
        raise InputError(
            f"tensor {name} must be the position of each of the {len(row_requests)} query rows, "
            f"got {list(stored.shape)}",
            source=stored.path,
        )
    lengths = []
    for row, position in enumerate(positions):
        # A request of whole pools and an incomplete one has one key less than pools.
        tokens = (request_lengths[row] + 1) * pool - 1 if pool > 1 else request_lengths[row]
        if not 0 <= position < tokens:
            raise InputError(
                f"tensor {name} must be 0 to {tokens - 1} for row {row}, a position in request "
                f"{row_requests[row]}, got {position}",
                source=stored.path,
            )
        lengths.append((position + 1) // pool)
    return lengths


def _integers(source: TensorSource, name: str) -> list[int]:
    stored, numbers = source[name], source.read(name)
    if numbers.is_floating_point() or numbers.dtype == torch.bool:
        raise InputError(
            f"tensor {name} must hold integers, got {stored.dtype} {list(stored.shape)}",
            source=stored.path,
        )
    return numbers.flatten().tolist()
