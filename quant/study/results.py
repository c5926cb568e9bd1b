"""The results of a study, typed: by setting, layer and transform, and what they suggest.

Each is a part of the study's report, with a description below every field. Nothing here needs
torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from sdsa_quant.accuracy.summary import Accuracy, Summary

NO_TRANSFORM = "none"
STANDARD_ERRORS = 2.0  # a mean that is further from zero than this many of its own is clear


def setting_label(format_name: str, transform: str) -> str:
    """Short name of a setting for tables and plots: ``nvfp4``, or ``nvfp4, center + hadamard``."""
    return format_name if transform == NO_TRANSFORM else f"{format_name}, {transform}"


class _OfSetting:
    """A record that names a setting."""

    __slots__ = ()
    format: str
    transform: str

    @property
    def label(self) -> str:
        """Short name of the setting."""
        return setting_label(self.format, self.transform)


@dataclass(frozen=True, slots=True)
class SettingInfo(_OfSetting):
    """A setting: a format after a transform."""

    format: str
    """Name of the format."""

    transform: str
    """Label of the transform, ``"none"`` without one."""

    bytes_per_key: int
    """Bytes that a stored key takes."""


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """Names and sizes of one layer."""

    name: str
    """Name of the key tensor, which is the layer's name."""

    query_name: str
    """Name of the tensor of query rows."""

    requests: int
    """Number of requests."""

    keys: int
    """Keys of all requests."""

    rows: int
    """Query rows."""

    heads: int | None
    """Heads of a query row; null for rows without heads."""


@dataclass(frozen=True, slots=True)
class LengthBin:
    """Recall of the rows whose lengths lie in a range."""

    shortest: int
    """Smallest number of keys of the range."""

    longest: int
    """Largest number of keys of the range."""

    rows: int
    """Rows in it."""

    rows_longer_than_k: tuple[int, ...]
    """Those of them that can lose a key, by k."""

    recall: tuple[float | None, ...]
    """Mean recall of those that can lose a key, by k; null without any."""


@dataclass(frozen=True, slots=True)
class SettingResult(_OfSetting):
    """What one setting does to one layer, or to all of them."""

    layer: str | None
    """The layer; null for all layers."""

    format: str
    """Name of the format."""

    transform: str
    """Label of the transform."""

    bytes_per_key: int
    """Bytes that a stored key takes."""

    accuracy: Accuracy
    """Measures over the query rows."""

    worst_layers: tuple[str | None, ...]
    """By k, the layer of the row with the least recall."""

    no_better_than_chance: tuple[bool | None, ...]
    """By k, whether the mean recall is within three standard errors of that of random choices;
    null if no row is longer than k."""

    by_length: tuple[LengthBin, ...]
    """Recall by the number of keys that rows see."""

    key_error: float | None
    """Relative L2 error of the keys, transforms undone."""

    channel_errors: tuple[float, ...] | None
    """RMS error of each of the 128 channels over the RMS of all key values."""

    error_counts: tuple[int, ...]
    """Histogram of score errors in standard deviations of the row's baseline scores, from -1 to 1
    in steps of 1 / `error_steps`; what lies outside is in the outer bins."""

    query_rows_lost: int
    """Query rows of which the format keeps so little that their relative L2 error is above 0.25."""

    def recall(self, index: int) -> Summary:
        """Recall of the k at `index`."""
        return self.accuracy.top_k[index].recall


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Counts of the blocks of 16 values that vectors make, transformed, as NVFP4 scales them."""

    blocks: int
    """All blocks."""

    flushed: int
    """Blocks with a nonzero value whose scale e4m3(amax / 6) is 0, so that every value is lost."""

    subnormal: int
    """Blocks with a subnormal scale, below 2^-6."""

    saturated: int
    """Blocks with a magnitude above 2688."""

    outliers: int
    """Blocks whose largest magnitude is more than 8 times the lower median one."""

    zero: int
    """Blocks of zeros."""

    by_exponent: tuple[int, ...]
    """Blocks by floor(log2 amax), from `first_exponent` up; the outer bins take the rest."""


@dataclass(frozen=True, slots=True)
class BlockResult:
    """What one transform makes of one layer's keys and query rows, or of all layers'."""

    layer: str | None
    """The layer; null for all layers."""

    transform: str
    """Label of the transform."""

    gain: float | None
    """The factor that keys were multiplied by; null if layers have different ones."""

    profile: BlockCounts
    """The blocks of the transformed keys."""

    query_profile: BlockCounts
    """The blocks of the transformed query rows."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Recall of one setting less that of another, over the same rows."""

    mean: float
    """Mean of the differences, row by row."""

    standard_error: float | None
    """Standard error of the mean, which takes the rows of one request and layer for one
    observation, and the rows of a single request each for one; null for a single row."""

    requests: int
    """Requests that the rows are of, counted in every layer."""

    rows_better: int
    """Rows with a higher recall."""

    rows_worse: int
    """Rows with a lower recall."""

    rows: int
    """Rows compared."""

    @property
    def is_clear(self) -> bool:
        """Whether the mean is more than two standard errors from zero."""
        return self.standard_error is not None and (
            abs(self.mean) > STANDARD_ERRORS * self.standard_error
        )


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a suggested setting gains over the plain one of its size."""

    plain: SettingInfo
    """The first setting of this size without a transform."""

    gain: Difference
    """Recall of the suggestion less that of `plain`."""

    is_clear: bool
    """Whether the mean of `gain` is more than two standard errors from zero."""

    layers_better: int
    """Layers whose mean recall is higher than with `plain`."""

    layers_worse: int
    """Layers whose mean recall is lower."""


@dataclass(frozen=True, slots=True)
class Suggestion(_OfSetting):
    """The setting to take at one size of a key, and why.

    It is the simplest setting of that size (fewest transforms, then the order of the formats) that
    is not clearly below the best: the mean of the differences in recall, row by row, is within two
    standard errors of zero.
    """

    format: str
    """Name of the format."""

    transform: str
    """Label of the transform."""

    bytes_per_key: int
    """The size that this is about."""

    candidates: int
    """Settings of this size."""

    recall: float
    """Mean recall of the suggested setting over the rows longer than k."""

    best: SettingInfo
    """The setting of the highest mean recall at this size; it may be the same."""

    evidence: Evidence | None
    """The gain over the plain setting; null if the suggestion is that one, or there is none."""


@dataclass(frozen=True, slots=True)
class Suggestions:
    """What to take at each size of a key."""

    k: int | None
    """The largest k that most rows are longer than; null, and no suggestions, without one."""

    by_size: tuple[Suggestion, ...]
    """One suggestion for each size, smallest first."""
