"""One layer's calibration: the sums that add up over captures, and the statistics they give.

Everything is of keys and query rows as they were captured, before any transform, so that one
calibration serves every transform: centering changes no covariance of keys, a rotation ``R`` makes
``R H R'`` of it, and a gain does not change which codes are best.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from sdsa_quant.errors import InputError
from sdsa_quant.formats.rule_weights import RuleWeights, rule_weights, tensor_digest
from sdsa_quant.formats.transforms import HADAMARD, hadamard
from sdsa_quant.layout import DIM
from sdsa_quant.short_repr import short_repr


class Moments:
    """Counts, sums and second moments of keys and query rows, float64, added part by part."""

    def __init__(self) -> None:
        self.keys = 0
        self.rows = 0
        self.key_sum = torch.zeros(DIM, dtype=torch.float64, device="cpu")
        self.key_squares = torch.zeros((DIM, DIM), dtype=torch.float64, device="cpu")
        self.query_squares = torch.zeros((DIM, DIM), dtype=torch.float64, device="cpu")

    def add_keys(self, keys: torch.Tensor) -> None:
        """Add floating point ``[n, 128]``."""
        wide = keys.double().cpu()
        self.keys += wide.shape[0]
        self.key_sum += wide.sum(0)
        self.key_squares += wide.T @ wide

    def add_rows(self, rows: torch.Tensor) -> None:
        """Add query rows, floating point ``[n, 128]``."""
        wide = rows.double().cpu()
        self.rows += wide.shape[0]
        self.query_squares += wide.T @ wide

    @classmethod
    def total(cls, parts: Iterable[Moments]) -> Moments:
        """The moments of all parts together."""
        total = cls()
        for part in parts:
            total.keys += part.keys
            total.rows += part.rows
            total.key_sum += part.key_sum
            total.key_squares += part.key_squares
            total.query_squares += part.query_squares
        return total


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """What the rule ``covariance`` weighs the errors of one layer with, after one rotation."""

    keys: RuleWeights
    """For keys: from the covariance of query rows."""

    queries: RuleWeights
    """For query rows: from the covariance of keys."""

    def to(self, device: torch.device | str) -> LayerWeights:
        """The same weights on another device."""
        return LayerWeights(self.keys.to(device), self.queries.to(device))

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.keys.pivots.device


@dataclass(frozen=True, slots=True, eq=False)
class LayerCalibration:
    """The statistics of one layer."""

    name: str
    """Name of the tensor of keys that they were taken from."""

    keys: int
    """Number of keys."""

    rows: int
    """Number of query rows."""

    key_mean: torch.Tensor
    """float64 ``[128]``: the mean key."""

    key_covariance: torch.Tensor
    """float64 ``[128, 128]``: of keys about their mean."""

    query_covariance: torch.Tensor
    """float64 ``[128, 128]``: the mean of ``q q'`` of query rows, about zero."""

    def __repr__(self) -> str:
        return short_repr(self)

    @classmethod
    def of(cls, name: str, moments: Moments) -> LayerCalibration:
        """The statistics of some sums.

        Raises
        ------
        ValueError
            There are no keys or no query rows.
        """
        if not moments.keys or not moments.rows:
            raise InputError(
                f"calibration of {name} needs keys and query rows, "
                f"got {moments.keys} and {moments.rows}"
            )
        mean = moments.key_sum / moments.keys
        key_covariance = moments.key_squares / moments.keys - torch.outer(mean, mean)
        return cls(
            name,
            moments.keys,
            moments.rows,
            mean,
            _symmetric(key_covariance),
            _symmetric(moments.query_squares / moments.rows),
        )

    def moments(self) -> Moments:
        """The sums that these statistics come from, to float64 rounding."""
        sums = Moments()
        sums.keys, sums.rows = self.keys, self.rows
        sums.key_sum = self.key_mean * self.keys
        sums.key_squares = (
            self.key_covariance + torch.outer(self.key_mean, self.key_mean)
        ) * self.keys
        sums.query_squares = self.query_covariance * self.rows
        return sums

    def key_weights(self, rotate: str) -> RuleWeights:
        """What the errors of keys weigh after a rotation, ``"none"`` or ``"hadamard"``."""
        return rule_weights(_rotated(self.query_covariance, rotate))

    def query_weights(self, rotate: str) -> RuleWeights:
        """What the errors of query rows weigh after a rotation."""
        return rule_weights(_rotated(self.key_covariance, rotate))

    def weights(self, rotate: str) -> LayerWeights:
        """Both, as `sdsa_kernels.quantize_write_nvfp4` takes them."""
        return LayerWeights(self.key_weights(rotate), self.query_weights(rotate))

    @property
    def digest(self) -> str:
        """SHA-256 of the statistics, hexadecimal: what a cache file names its calibration by."""
        counts = torch.tensor([self.keys, self.rows], dtype=torch.int64, device="cpu")
        return tensor_digest(counts, self.key_mean, self.key_covariance, self.query_covariance)


def _symmetric(matrix: torch.Tensor) -> torch.Tensor:
    """The same up to rounding, symmetric to the bit, its diagonal not below zero."""
    symmetric = (matrix + matrix.T) / 2
    symmetric.diagonal().clamp_(min=0.0)
    return symmetric


def _rotated(covariance: torch.Tensor, rotate: str) -> torch.Tensor:
    if rotate != HADAMARD:
        return covariance
    # +-1 exactly: the products are then of float64 precision, the factor a power of two.
    signs = hadamard(torch.eye(DIM, dtype=torch.float32, device="cpu")).sign().double()
    return _symmetric(signs @ covariance @ signs / DIM)
