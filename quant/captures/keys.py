"""Which tensors of a source are captured keys, and how they divide into requests.

Keys are BF16, F16 or F32, ``[tokens, 128]`` with the requests one after another, or
``[requests, tokens, 128]`` padded at the end of each request. ``[tokens, 1, 128]``, one head, is
taken as ``[tokens, 128]``. Lengths are a 1-D integer tensor: one length per request, or the offsets
(``cu_seqlens``) at which requests begin and end.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sdsa_quant.errors import DtypeError, Hint, InputError
from sdsa_quant.files.kinds import CACHE
from sdsa_quant.files.safetensors_reader import header_metadata
from sdsa_quant.files.tensor_source import StoredTensor, TensorSource
from sdsa_quant.layout import DIM, MAX_REQUESTS
from sdsa_quant.short_repr import short_repr

from .names import (
    FLOAT_DTYPES,
    INTEGER_DTYPES,
    KEY_NAMES,
    QUERY_NAMES,
    are_named_lengths,
    beside,
    common_pattern,
    companion,
    last_name,
    matching_tensors,
    usual_name,
)

if TYPE_CHECKING:
    import torch

_OFFSETS_NAME = re.compile("cu_?seq|offset|indptr|cumulative", re.IGNORECASE)
_LENGTHS_NAME = re.compile("len(gth)?s?(?![a-z])", re.IGNORECASE)
ONE_REQUEST = "none"  # in place of a tensor of lengths: not to look for any
# Quantized checkpoints keep scales beside a tensor under its name and one of these endings; the
# first two are telling wherever they are.
_GLOBAL_SCALE_ENDINGS = ("_global_scale", "_scale_2")
_SCALE_ENDINGS = ("_scale", "_scales", "_scale_inv", ".scale", ".scales")


@dataclass(frozen=True, slots=True)
class CapturedKeys:
    """One tensor of unquantized keys and where each request's keys lie in it."""

    source: TensorSource
    tensor: StoredTensor
    starts: tuple[int, ...]  # first row of each request in the tensor seen as [rows, 128]
    context_lengths: tuple[int, ...]  # keys of each request
    lengths_name: str | None = None  # the tensor that says so
    pool: int = 1  # consecutive keys of the tensor that are read as one, their mean

    def __repr__(self) -> str:
        return short_repr(self)

    @property
    def name(self) -> str:
        return self.tensor.name

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Rows of the tensor seen as ``[rows, 128]``, in its own dtype, read from the file.

        Raises
        ------
        ValueError
            The file has changed since it was opened, or cannot be read.
        """
        return self.source.read_rows(self.name, begin, end, DIM)

    def read(self, request: int, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Keys ``start`` to ``stop`` of one request: ``[n, 128]`` in the tensor's own dtype.

        They are means where there is a pool.

        Raises
        ------
        ValueError
            The range does not lie within the request's keys.
        """
        length = self.context_lengths[request]
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise InputError(f"keys must lie within 0 to {length}, got {start} to {stop}")
        first, pool = self.starts[request], self.pool
        keys = self.rows(first + start * pool, first + stop * pool)
        if pool == 1:
            return keys
        from sdsa_quant.selection.scores import mean_pooled_keys  # torch, which headers do without

        return mean_pooled_keys(keys, pool)


def select_keys(source: TensorSource, pattern: str | None = None) -> list[StoredTensor]:
    """The key tensors that `pattern` names, in natural order.

    Parameters
    ----------
    source : TensorSource
        Where to look.
    pattern : str, optional
        A tensor's name, or a pattern with ``*``, ``?`` and ``[..]``. By default the tensor named
        ``keys``, ``key`` or ``k``, or else the only float tensor whose last dimension is 128.

    Raises
    ------
    ValueError
        Nothing matches, the choice is not clear, a match is not ``[.., 128]``, or the keys are
        quantized already.
    TypeError
        A match is not BF16, F16 or F32.
    """
    for file in source.files:
        if header_metadata(file).get("format") == CACHE:
            raise InputError("is a cache already; unquantized keys are needed", source=file)
    if not len(source):
        raise InputError(f"{source.path}: there are no tensors in it; keys are needed")
    chosen = _default_keys(source) if pattern is None else matching_tensors(source, pattern)
    for tensor in chosen:
        _refuse_quantized(source, tensor)
        _require_key_shape(tensor)
    return chosen


def _default_keys(source: TensorSource) -> list[StoredTensor]:
    usual = usual_name(source, KEY_NAMES)
    if usual is not None:
        return [source[usual]]
    candidates = [tensor for tensor in source if can_be_keys(tensor)]
    others = [tensor for tensor in source if _may_be_stored_keys(tensor)]
    if len(candidates) == 1 and not are_queries(candidates[0]) and not others:
        return candidates
    found = "none" if not candidates else f"{len(candidates)} of them"
    if len(candidates) == 1:
        found = f"{candidates[0].name}, "
        found += f"beside {others[0]}" if others else "which is named as query rows are"
    pattern = common_pattern([tensor.name for tensor in candidates if not are_queries(tensor)])
    raise InputError(
        f"no tensor is named {KEY_NAMES[0]}, and there must be one float tensor [.., {DIM}], "
        f"got {found}; {source.describe_names()}",
        source=source.path,
        hint=Hint("key_names", "for one cache each", pattern)
        if pattern
        else Hint("key_names", "to name the keys, with a pattern for several caches"),
    )


def _refuse_quantized(source: TensorSource, tensor: StoredTensor) -> None:
    for other in source:
        companion = other.name in [tensor.name + ending for ending in _SCALE_ENDINGS]
        if companion or other.name.endswith(_GLOBAL_SCALE_ENDINGS):
            raise InputError(
                f"{other.path}: input must be unquantized keys, but tensor {other.name} holds the "
                f"scales of quantized ones"
            )
    if tensor.dtype not in FLOAT_DTYPES:
        raise DtypeError(
            f"{tensor.path}: tensor {tensor.name} must hold unquantized keys in "
            f"{', '.join(FLOAT_DTYPES)}, got {tensor.dtype} {list(tensor.shape)}"
        )


def can_be_keys(tensor: StoredTensor) -> bool:
    """Whether dtype and shape are those of unquantized keys."""
    return tensor.dtype in FLOAT_DTYPES and _has_key_shape(tensor)


def _may_be_stored_keys(tensor: StoredTensor) -> bool:
    """Whether a tensor could be quantized keys, so that a float one beside it may not be keys."""
    quantized = tensor.dtype.startswith("F8") or tensor.dtype in ("U8", "I8", "F4")
    return quantized and len(tensor.shape) >= 2 and tensor.shape[-1] >= DIM // 2


def are_queries(tensor: StoredTensor) -> bool:
    """Whether a tensor of that shape is named as query rows are."""
    return can_be_keys(tensor) and last_name(tensor) in QUERY_NAMES


def can_be_lengths(tensor: StoredTensor) -> bool:
    """Whether dtype and shape are those of lengths or offsets."""
    return tensor.dtype in INTEGER_DTYPES and len(tensor.shape) == 1 and tensor.shape[0] > 0


def _has_key_shape(tensor: StoredTensor) -> bool:
    return len(tensor.shape) in (2, 3) and tensor.shape[-1] == DIM


def _require_key_shape(tensor: StoredTensor) -> None:
    if not _has_key_shape(tensor):
        raise InputError(
            f"{tensor.path}: tensor {tensor.name} must be [tokens, {DIM}] or "
            f"[requests, tokens, {DIM}], got {list(tensor.shape)}{_squeeze_hint(tensor)}"
        )


def _squeeze_hint(tensor: StoredTensor) -> str:
    """What to do about dimensions of 1, such as a batch of one request; empty without any."""
    squeezed = [size for size in tensor.shape[:-1] if size != 1]
    if len(squeezed) + 1 == len(tensor.shape) or len(squeezed) > 2 or tensor.shape[-1] != DIM:
        return ""
    return f"; or squeeze it to {[*squeezed, DIM]}"


def captured_keys(
    source: TensorSource, tensor: StoredTensor, lengths_name: str | None = None
) -> CapturedKeys:
    """Divide a key tensor into requests.

    Parameters
    ----------
    source : TensorSource
        Where the lengths are.
    tensor : StoredTensor
        Keys ``[tokens, 128]`` or ``[requests, tokens, 128]``, from `select_keys`.
    lengths_name : str, optional
        Tensor of lengths ``[requests]`` or offsets ``[requests + 1]``. A list that starts with 0,
        never falls and ends with the number of tokens is offsets; one that could be either is what
        its name says. By default all of ``[tokens, 128]`` is one request.

    Raises
    ------
    ValueError
        The lengths are missing where they are needed, negative, or do not fit the keys.
    TypeError
        The lengths are not integers.
    """
    if (
        len(tensor.shape) == 3
        and tensor.shape[1] == 1
        and _is_one_head(source, tensor, lengths_name)
    ):
        tensor = replace(tensor, shape=(tensor.shape[0], DIM))
    padded = len(tensor.shape) == 3
    if lengths_name is None:
        if padded:
            known, squeeze = lengths_hint(source), _squeeze_hint(tensor)
            raise InputError(
                f"tensor {tensor.name} is {list(tensor.shape)}, padded requests"
                + ("" if known else f"; {source.describe_names()}"),
                source=tensor.path,
                hint=Hint("lengths", f"for the tensor of their lengths{squeeze}", known),
            )
        return CapturedKeys(source, tensor, (0,), (tensor.shape[0],))
    stored = source[lengths_name]
    numbers = _read_lengths(source, stored)
    if padded:
        requests, tokens, _ = tensor.shape
        lengths = _padded_lengths(tensor, stored, numbers)
        starts = tuple(request * tokens for request in range(requests))
        return CapturedKeys(source, tensor, starts, lengths, lengths_name)
    lengths = _flat_lengths(tensor, stored, numbers)
    starts = tuple(itertools.accumulate(lengths, initial=0))[:-1]
    return CapturedKeys(source, tensor, starts, lengths, lengths_name)


def _is_one_head(source: TensorSource, tensor: StoredTensor, lengths_name: str | None) -> bool:
    """Whether ``[n, 1, 128]`` is ``[tokens, 1, 128]`` and not n requests padded to one token.

    The two differ only where lengths say that some of the n requests are empty.
    """
    if lengths_name is None:
        return True
    numbers = _read_lengths(source, source[lengths_name])
    return _flat_divisions(numbers, tensor.shape[0]) is not None


def lengths_for(
    source: TensorSource, tensor: StoredTensor, keys_pattern: str | None, lengths: str | None
) -> str | None:
    """The name of the tensor of lengths that goes with a key tensor.

    Parameters
    ----------
    source : TensorSource
        Where the lengths are.
    tensor : StoredTensor
        Keys that `keys_pattern` selected.
    keys_pattern : str or None
        What `select_keys` was given.
    lengths : str or None
        A name, good for every key tensor, or a pattern. Of what a pattern matches, the tensor is
        taken that goes with the keys by the rule of `sdsa_quant.captures.names`. ``"none"`` is
        none, unless a tensor has that name. By default one of a usual name that lies beside the
        keys and fits them.

    Returns
    -------
    str or None
        The name; None for keys of one request.

    Raises
    ------
    ValueError
        No tensor matches the pattern, or none or several of those that do go with the keys; or, by
        default, those beside the keys do not fit them or divide them differently.
    TypeError
        Those beside the keys are not integers.
    """
    if lengths is None:
        return _lengths_beside(source, tensor)
    if lengths == ONE_REQUEST and lengths not in source:
        return None
    return companion(source, lengths, tensor, keys_pattern, argument="lengths")


def _lengths_beside(source: TensorSource, tensor: StoredTensor) -> str | None:
    """The name of the tensor of lengths that lies beside keys; they are never passed over."""
    divisions: dict[tuple[int, ...], str] = {}
    refusal: InputError | DtypeError | None = None
    for name in [each.name for each in beside(tensor, lengths_candidates(source))]:
        try:
            divisions.setdefault(captured_keys(source, tensor, name).context_lengths, name)
        except (InputError, DtypeError) as error:
            refusal = refusal or error
    if len(divisions) > 1:
        raise InputError(
            f"tensors {' and '.join(divisions.values())} divide {tensor.name} differently",
            source=source.path,
            hint=Hint("lengths", "to say which of them is right"),
        )
    if refusal is not None and not divisions:
        raise type(refusal)(
            refusal.message,
            source=refusal.source,
            hint=Hint("lengths", f"to take {tensor.name} for one request", ONE_REQUEST),
        )
    return next(iter(divisions.values()), None)


def lengths_candidates(source: TensorSource) -> list[StoredTensor]:
    """Tensors that have a usual name of lengths or offsets."""
    return [each for each in source if are_named_lengths(each) and len(each.shape) > 0]


def lengths_hint(source: TensorSource) -> str | None:
    """What `lengths` could be: a name, or a pattern where there are several; None without any."""
    names = [each.name for each in lengths_candidates(source)]
    return common_pattern(names) or names[0] if names else None


def _read_lengths(source: TensorSource, stored: StoredTensor) -> list[int]:
    if stored.dtype not in INTEGER_DTYPES:
        raise DtypeError(
            f"{stored.path}: tensor {stored.name} must hold integer lengths, got {stored.dtype}"
        )
    if len(stored.shape) != 1 or stored.shape[0] == 0:
        raise InputError(
            f"{stored.path}: tensor {stored.name} must be [requests] lengths or [requests + 1] "
            f"offsets, got {list(stored.shape)}"
        )
    if stored.shape[0] > MAX_REQUESTS + 1:
        raise InputError(
            f"tensor {stored.name} must be of at most {MAX_REQUESTS:,} requests, got "
            f"{stored.shape[0]:,} numbers",
            source=stored.path,
        )
    numbers = source.read(stored.name).tolist()
    for index, number in enumerate(numbers):
        if number < 0:
            raise InputError(
                f"{stored.path}: tensor {stored.name} must not be negative, got {number} at {index}"
            )
    return numbers


def _are_offsets(numbers: Sequence[int]) -> bool:
    rising = all(before <= after for before, after in itertools.pairwise(numbers))
    return len(numbers) > 1 and numbers[0] == 0 and rising


def _differences(offsets: Sequence[int]) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in itertools.pairwise(offsets))


def _flat_divisions(numbers: Sequence[int], tokens: int) -> tuple[int, ...] | None:
    """Each request's length, by lengths or offsets; None where they do not fit the tokens."""
    if _are_offsets(numbers) and numbers[-1] == tokens:
        return _differences(numbers)
    return tuple(numbers) if sum(numbers) == tokens else None


def _flat_lengths(
    tensor: StoredTensor, stored: StoredTensor, numbers: Sequence[int]
) -> tuple[int, ...]:
    tokens = tensor.shape[0]
    both = _are_offsets(numbers) and numbers[-1] == tokens == sum(numbers)
    if both and not _OFFSETS_NAME.search(stored.name_in_file):
        if _LENGTHS_NAME.search(stored.name_in_file):
            return tuple(numbers)
        raise InputError(
            f"tensor {stored.name} could be lengths or offsets: its numbers are 0 except the last, "
            f"{tokens}; a name such as lengths or cu_seqlens tells them apart",
            source=stored.path,
        )
    lengths = _flat_divisions(numbers, tokens)
    if lengths is not None:
        return lengths
    raise InputError(
        f"{stored.path}: tensor {stored.name} must sum to the {tokens} keys of {tensor.name}, or "
        f"rise from 0 to {tokens} as offsets; it sums to {sum(numbers)}, from {numbers[0]} to "
        f"{numbers[-1]}"
    )


def _padded_lengths(
    tensor: StoredTensor, stored: StoredTensor, numbers: Sequence[int]
) -> tuple[int, ...]:
    requests, tokens, _ = tensor.shape
    if len(numbers) == requests + 1 and _are_offsets(numbers):
        lengths = _differences(numbers)
    elif len(numbers) == requests:
        lengths = tuple(numbers)
    else:
        raise InputError(
            f"{stored.path}: tensor {stored.name} must be [{requests}] lengths or "
            f"[{requests + 1}] offsets from 0 for {tensor.name} {list(tensor.shape)}, "
            f"got {len(numbers)} numbers from {numbers[0]}"
        )
    for request, length in enumerate(lengths):
        if length > tokens:
            raise InputError(
                f"{stored.path}: tensor {stored.name} must not exceed the {tokens} tokens of "
                f"{tensor.name} {list(tensor.shape)}, got {length} for request {request}"
            )
    return lengths
