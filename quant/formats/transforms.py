"""What may be done to keys before they are quantized, so that the scores lose less.

In this order, and undone in the opposite order:

    center   k - m, m the mean key. q . k = q . (k - m) + q . m, and the second term is the same for
             every key: the ranking of a row does not change, its scores are shifted by q . m.
    rotate   R k, and R q. R is the orthonormal Hadamard matrix, so R q . R k = q . k.
    gain     g k, g a power of two. q . g k = g (q . k): no ranking changes either. It moves small
             keys out of E4M3's subnormal scales, and is exact to undo.

`KeyTransform` does all three to keys and query rows and brings scores back to the scale of the
untransformed ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from sdsa_quant.arguments import check_fields, checked_arguments
from sdsa_quant.errors import InputError
from sdsa_quant.layout import DIM, E4M3_MAX
from sdsa_quant.short_repr import short_repr

from .blocks import passes

NONE = "none"
HADAMARD = "hadamard"
CHANNEL = "channel"
AUTO = "auto"
ROTATIONS = (NONE, HADAMARD)
CENTERS = (NONE, CHANNEL)

_GAINED_MAX = 4 * E4M3_MAX
_LARGEST_EXPONENT = 40  # of a gain, either sign: BF16 and FP32 hold gained keys without loss


@checked_arguments
def hadamard(values: torch.Tensor) -> torch.Tensor:
    """``R x`` along the last dimension: 128-point, orthonormal, symmetric, its own inverse.

    ``R[i, j] = (-1)^popcount(i & j) / sqrt(128)`` (Sylvester's order), computed as 7 stages of sums
    and differences in float32, so that the result is the same bits on every device.

    Parameters
    ----------
    values : torch.Tensor
        Input, floating point ``[..., 128]``.

    Returns
    -------
    torch.Tensor
        float32 of the same shape.

    Raises
    ------
    ValueError
        The last dimension is not 128.
    """
    if values.dim() == 0 or values.shape[-1] != DIM:
        raise InputError(f"values must be [..., {DIM}], got {list(values.shape)}")
    rotated = torch.empty(values.shape, dtype=torch.float32, device=values.device)
    rows, rotated_rows = values.reshape(-1, DIM), rotated.view(-1, DIM)
    for part, _ in passes(rows.shape[0], DIM, values.device):
        # A copy in any case: one float32 row would be its own contiguous transpose.
        columns = rows[part].T.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        rotated_rows[part] = _hadamard_columns(columns).T
    return rotated


def _hadamard_columns(columns: torch.Tensor) -> torch.Tensor:
    """`hadamard` of contiguous float32 ``[128, n]``, which is overwritten.

    With the vectors side by side every stage adds and subtracts long contiguous rows.
    """
    source, target = columns, torch.empty_like(columns)
    half = DIM // 2
    while half:
        pairs = source.view(-1, 2, half, columns.shape[1])
        results = target.view(pairs.shape)
        torch.add(pairs[:, 0], pairs[:, 1], out=results[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=results[:, 1])
        source, target = target, source
        half //= 2
    return source.mul_(1 / math.sqrt(DIM))


def transform_label(rotate: str, gain: str, center: str) -> str:
    """A transform in words, in the order in which it is done: ``center + hadamard + gain 64``.

    ``none`` where nothing is done. `gain` is as a user or `gain_text` writes it.
    """
    parts = [
        "center" if center != NONE else "",
        rotate if rotate != NONE else "",
        f"gain {gain}" if gain != NONE else "",
    ]
    return " + ".join(part for part in parts if part) or NONE


@dataclass(frozen=True, slots=True)
class TransformChoice:
    """A transform as a user asks for it, before it has met any keys."""

    rotate: str = NONE
    gain: str = NONE  # "none", "auto" or a power of two
    center: str = NONE

    def __post_init__(self) -> None:
        check_fields(self)
        for name, value, choices in (
            ("rotate", self.rotate, ROTATIONS),
            ("center", self.center, CENTERS),
        ):
            if value not in choices:
                raise InputError(
                    f"must be one of {', '.join(choices)}, got {value!r}", argument=name
                )
        parse_gain(self.gain)

    @property
    def label(self) -> str:
        """Short name for tables: ``center + hadamard``, or ``none``."""
        return transform_label(self.rotate, self.gain, self.center)


def parse_gain(text: str) -> float | None:
    """The factor that ``none``, ``auto`` or a power of two such as ``64`` or ``2^-3`` means.

    None stands for ``auto``: to be chosen from the keys.

    Raises
    ------
    ValueError
        `text` means none of these, or a factor outside 2^-40 to 2^40.
    """
    if text == NONE:
        return 1.0
    if text == AUTO:
        return None
    base, _, exponent = text.partition("^")
    try:
        factor = 2.0 ** int(exponent) if base == "2" and exponent else float(text)
    except (ValueError, OverflowError):
        factor = math.nan
    require_gain(factor, repr(text))
    return factor


def gain_text(factor: float) -> str:
    """A gain as `parse_gain` reads it: ``none``, ``128``, or ``2^21`` if 6 digits fail."""
    if factor == 1.0:
        return NONE
    text = f"{factor:g}"
    return text if float(text) == factor else f"2^{math.frexp(factor)[1] - 1}"


def require_gain(factor: float, found: str) -> None:
    """Refuse a factor that is not a power of two from 2^-40 to 2^40; `found` is how to show it.

    Raises
    ------
    ValueError
        `factor` is not a power of two in that range.
    """
    mantissa, exponent = math.frexp(factor)
    if mantissa != 0.5 or abs(exponent - 1) > _LARGEST_EXPONENT:
        raise InputError(
            f"must be none, auto or a power of two from 2^-{_LARGEST_EXPONENT} to "
            f"2^{_LARGEST_EXPONENT}, got {found}",
            argument="gain",
        )


def automatic_gain(amax: float) -> float:
    """Largest power of two that saturates no scale: ``g * amax <= 1792``; 1 for keys of zeros.

    1792 is 4 x 448: up to there the scales of both of NVFP4's rules, amax / 6 and amax / 4, are
    below E4M3's largest value.
    A power of two changes only the exponent of a normal scale. Nothing is lost by taking the
    largest, and every block that can leave E4M3's subnormal scales does.
    """
    if amax == 0:
        return 1.0
    mantissa, exponent = math.frexp(amax)
    limit_mantissa, limit_exponent = math.frexp(_GAINED_MAX)
    power = limit_exponent - exponent - (mantissa > limit_mantissa)
    return 2.0 ** max(-_LARGEST_EXPONENT, min(_LARGEST_EXPONENT, power))


@dataclass(frozen=True, slots=True)
class KeyTransform:
    """One cache's transform, its gain and mean known."""

    rotate: str = NONE  # or "hadamard"
    gain: float = 1.0  # a power of two
    mean: torch.Tensor | None = None  # float32 [128], what is subtracted from every key

    def __repr__(self) -> str:
        return short_repr(self)

    @property
    def changes_nothing(self) -> bool:
        """Whether keys pass through as they are."""
        return self.rotate == NONE and self.gain == 1.0 and self.mean is None

    def to(self, device: torch.device | str) -> KeyTransform:
        """The same transform on another device."""
        return self if self.mean is None else replace(self, mean=self.mean.to(device))

    def apply_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys to quantize: float32 ``[n, 128]``, or `keys` themselves where nothing changes."""
        if self.changes_nothing:
            return keys
        values = keys.float() if self.mean is None else keys.float() - self.mean
        if self.rotate == HADAMARD:
            values = hadamard(values)
        return values * self.gain if self.gain != 1.0 else values

    def restore_keys(self, values: torch.Tensor) -> torch.Tensor:
        """Undo `apply_keys` on decoded float32 ``[n, 128]``, to float32 rounding."""
        if self.gain != 1.0:
            values = values / self.gain
        if self.rotate == HADAMARD:
            values = hadamard(values)
        return values if self.mean is None else values + self.mean

    def apply_query(self, query: torch.Tensor) -> torch.Tensor:
        """Query rows ``[rows, 128]`` to score with, rotated as the keys are."""
        return hadamard(query) if self.rotate == HADAMARD else query

    @property
    def center(self) -> str:
        """``"channel"`` or ``"none"``."""
        return NONE if self.mean is None else CHANNEL

    def score_shifts(self, query: torch.Tensor) -> torch.Tensor:
        """float64 ``[rows]``: ``q . m`` of untransformed rows, what centering took from scores."""
        if self.mean is None:
            return query.new_zeros(query.shape[0], dtype=torch.float64)
        return query.double() @ self.mean.double()


class KeyMean:
    """The mean key of parts that are added in turn, in float64."""

    def __init__(self) -> None:
        self._count = 0
        self._sum: torch.Tensor | None = None

    def add(self, keys: torch.Tensor) -> None:
        """Add floating point ``[n, 128]``."""
        total = keys.sum(dim=0, dtype=torch.float64)
        self._count += keys.shape[0]
        self._sum = total if self._sum is None else self._sum + total

    def mean(self) -> torch.Tensor:
        """float32 ``[128]``; zeros if there were no keys."""
        if self._sum is None or not self._count:
            return torch.zeros(DIM, dtype=torch.float32, device="cpu")
        return (self._sum / self._count).float()


def fit_transforms(
    read_keys: Callable[[], Iterable[torch.Tensor]], choices: Sequence[TransformChoice]
) -> tuple[KeyTransform, ...]:
    """The transforms that `choices` mean for some keys: their mean key and automatic gains found.

    Parameters
    ----------
    read_keys : callable
        Gives the keys from the first to the last, finite floating point ``[n, 128]`` at a time;
        called once for the mean and once for each automatic gain, where there are any.
    choices : sequence of TransformChoice
        What is asked for.
    """
    mean = None
    if any(choice.center == CHANNEL for choice in choices):
        key_mean = KeyMean()
        for keys in read_keys():
            key_mean.add(keys)
        mean = key_mean.mean()
    return tuple(
        _fit_gain(read_keys, choice, mean if choice.center == CHANNEL else None)
        for choice in choices
    )


def _fit_gain(
    read_keys: Callable[[], Iterable[torch.Tensor]],
    choice: TransformChoice,
    mean: torch.Tensor | None,
) -> KeyTransform:
    gain = parse_gain(choice.gain)
    if gain is not None:
        return KeyTransform(choice.rotate, gain, mean)
    without_gain = KeyTransform(choice.rotate, 1.0, mean)
    amax = max(
        (float(without_gain.apply_keys(keys).abs().max()) for keys in read_keys() if keys.numel()),
        default=0.0,
    )
    return KeyTransform(choice.rotate, automatic_gain(amax), mean)
