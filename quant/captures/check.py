"""What is wrong with a capture, before anything is measured of it.

Every key of every tensor that can be keys is looked at once, in parts. What is found are faults of
captures that were seen in use: tensors that were allocated and never filled, rows written twice,
heads taken for positions, keys that were quantized before, keys taken before positions were applied
to them, and lengths that do not fit. Nothing here is a proof: a finding says what was seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sdsa_quant.errors import DtypeError, InputError
from sdsa_quant.files.safetensors_reader import header_metadata
from sdsa_quant.files.tensor_source import StoredTensor, TensorSource
from sdsa_quant.layout import DIM, MAX_ROWS

from .keys import are_queries, can_be_keys, captured_keys, lengths_for

_ROWS_AT_A_TIME = 16384
_MOST_HASHED = 1 << 22  # keys whose repetitions are counted, 32 MB of hashes
_SAMPLED_ROWS = 4096  # whose distinct values are counted
# Of 128 BF16 values about 108 have a magnitude of their own if they are normally distributed, of
# values that went through FP8 (E4M3) about 45, through FP4 at most 8 a scale.
_FEW_MAGNITUDES = 64
_MUCH = 0.01  # of the rows: below, repetitions are told only where rows are of zeros
_HEADS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_SEED = 20261201
ROWS = "rows"  # the score of query rows without heads, in a capture's header


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a tensor that a right capture does not have."""

    tensor: str
    """Name of the tensor."""

    path: Path
    """File that holds it."""

    text: str
    """What was seen, and what it may mean."""


def check_capture(source: TensorSource) -> list[Finding]:
    """Look for faults of keys and query rows.

    Parameters
    ----------
    source : TensorSource
        The capture.

    Returns
    -------
    list of Finding
        Empty for a capture in which nothing was seen.
    """
    return [
        Finding(tensor.name, tensor.path, text)
        for tensor in source
        if can_be_keys(tensor)
        for text in _faults(source, tensor)
    ]


def _faults(source: TensorSource, tensor: StoredTensor) -> Iterator[str]:
    rows = math.prod(tensor.shape[:-1])
    ranges = [(0, rows)]
    if are_queries(tensor):
        yield from _faults_of_groups(source, tensor)
    else:
        try:
            keys = captured_keys(source, tensor, lengths_for(source, tensor, None, None))
        except (InputError, DtypeError) as error:
            yield _fault_of_requests(tensor, error)
        else:  # what pads requests is not looked at
            pairs = zip(keys.starts, keys.context_lengths, strict=True)
            ranges = [(start, start + length) for start, length in pairs if length]
    if ranges and rows:
        yield from _Values(source, tensor, ranges).faults()


def _faults_of_groups(source: TensorSource, tensor: StoredTensor) -> Iterator[str]:
    """Query rows with heads, where neither weights beside nor the header say that they are."""
    heads = tensor.shape[1] if len(tensor.shape) == 3 else 1
    told = any(other.shape == tensor.shape[:2] for other in source)
    told = told or header_metadata(tensor.path).get("score", ROWS) != ROWS
    if heads > MAX_ROWS and not told:
        yield (
            f"{list(tensor.shape)}: groups of {heads} rows are more than {MAX_ROWS}; the middle "
            f"dimension may be heads"
        )


def _fault_of_requests(tensor: StoredTensor, error: InputError | DtypeError) -> str:
    heads = tensor.shape[1] if len(tensor.shape) == 3 else 1
    if heads in _HEADS and heads < tensor.shape[0]:
        return (
            f"{list(tensor.shape)} without lengths of {tensor.shape[0]:,} requests: the middle "
            f"dimension may be heads, and keys have one"
        )
    return f"its lengths do not fit: {error.message}"


class _Values:
    """Counts over the rows of a tensor."""

    def __init__(
        self, source: TensorSource, tensor: StoredTensor, ranges: Sequence[tuple[int, int]]
    ) -> None:
        self._source, self._tensor, self._ranges = source, tensor, ranges
        self._rows = sum(stop - start for start, stop in ranges)
        self._seen = 0
        self._zero = self._constant = self._nonfinite = 0
        self._hashes: list[torch.Tensor] = []
        generator = torch.Generator("cpu").manual_seed(_SEED)
        self._factors = torch.randint(
            -(2**62), 2**62, (DIM,), generator=generator, dtype=torch.int64, device="cpu"
        )
        self._magnitudes: float | None = None  # of a row on average

    def faults(self) -> Iterator[str]:
        for begin, end in self._ranges:
            for start in range(begin, end, _ROWS_AT_A_TIME):
                stop = min(start + _ROWS_AT_A_TIME, end)
                self._count(self._source.read_rows(self._tensor.name, start, stop, DIM))
        for count, what in (
            (self._nonfinite, "have values that are not finite"),
            (self._zero, "are zeros: never written, or padding that lengths do not leave out"),
            (self._constant, "have one value in all of their dimensions"),
        ):
            if count:
                yield f"{count:,} of {self._rows:,} rows {what}"
        yield from self._repetitions()
        if self._magnitudes is not None and self._magnitudes < _FEW_MAGNITUDES:
            yield (
                f"rows have {self._magnitudes:.0f} different magnitudes on average, and 128 values "
                f"of {self._tensor.dtype} have about 108: they were rounded to 8 bits or fewer "
                f"before, such as in an FP8 cache"
            )

    def _count(self, values: torch.Tensor) -> None:
        zero = (values == 0).all(1)
        self._zero += int(zero.sum())
        constant = (values == values[:, :1]).all(1)
        self._constant += int((constant & ~zero).sum())
        self._nonfinite += int((~values.isfinite()).any(1).sum())
        if self._seen < _MOST_HASHED:
            bits = values.view(torch.int16 if values.element_size() == 2 else torch.int32).long()
            hashes = (bits * self._factors).sum(1)
            self._hashes.append(hashes[~zero])
        self._seen += values.shape[0]
        sample = values[~constant][:_SAMPLED_ROWS].abs().sort(1).values
        if self._magnitudes is None and sample.shape[0]:
            steps = (sample[:, 1:] != sample[:, :-1]).sum(1) + 1
            self._magnitudes = float(steps.double().mean())

    def _repetitions(self) -> Iterator[str]:
        hashes = torch.cat(self._hashes) if self._hashes else self._factors[:0]
        count = hashes.shape[0]
        again = count - hashes.unique().shape[0] if count else 0
        if again > _MUCH * count and again > 1:
            yield (
                f"{again:,} of {count:,} rows repeat an earlier one: written twice, or taken "
                f"before positions (RoPE) were applied to them"
            )
