"""What the rule ``covariance`` weighs errors with: one matrix a layer, damped, rounded once.

A key with error ``e`` moves the score of a query row ``q`` by ``q . e``; over many rows the mean
square of that is ``e' H e``, ``H`` the mean of ``q q'``. The rule minimizes ``e' W e`` with
``W = H + 0.2 mean(diag H) I``: the damping keeps errors small that the rows of the calibration
happen not to see, and other rows will. Query rows are quantized the other way about, with the
covariance of the keys.

The rule works on ``W = L' D L``, ``L`` lower triangular with ones on its diagonal. Its entries are
rounded to multiples of a power of two, so coarse that its products and sums with errors of
`LIMB_BITS` bits are exact in float32, in any order. The weights are what the rounded factors give.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from sdsa_quant.errors import InputError
from sdsa_quant.layout import BLOCK, DIM
from sdsa_quant.short_repr import short_repr

DAMPING = 0.2  # times the mean of the diagonal; docs/explanation/rules.md has what others lose
LIMB_BITS = 10  # of an integer that stands for an error, besides its sign
LIMB_MAX = 2**LIMB_BITS - 1
_LARGEST_ENTRY = 2**10  # of the factor, in steps: within a block errors have 14 bits
_LARGEST_SUM = 2**24  # up to here float32 has every integer
_LEAST_EXPONENT = -24  # of a step


@dataclass(frozen=True, slots=True, eq=False)
class RuleWeights:
    """The weights of `sdsa_quant.formats.covariance`, as every device uses them."""

    factor: torch.Tensor
    """float16 ``[128, 128]``, below the diagonal: ``L`` without its ones, in steps, integers."""

    within: torch.Tensor
    """float32 ``[8, 120]``: ``L`` within each block, column after column below the diagonal."""

    pivots: torch.Tensor
    """float32 ``[128]``: ``D``."""

    step: float
    """What the entries of `factor` are multiples of, a power of two."""

    def __repr__(self) -> str:
        return short_repr(self)

    def to(self, device: torch.device | str) -> RuleWeights:
        """The same weights on another device."""
        factor, within, pivots = (
            self.factor.to(device),
            self.within.to(device),
            self.pivots.to(device),
        )
        return RuleWeights(factor, within, pivots, self.step)

    @property
    def matrix(self) -> torch.Tensor:
        """float64 ``[128, 128]``: ``W``, symmetric, its diagonal of mean 1 except for rounding."""
        lower = self.factor.double() * self.step
        lower.diagonal().fill_(1.0)
        return lower.T @ (self.pivots.double().unsqueeze(1) * lower)

    @property
    def digest(self) -> str:
        """SHA-256 of the factors' bytes, hexadecimal."""
        return tensor_digest(self.factor.double() * self.step, self.pivots)


def tensor_digest(*tensors: torch.Tensor) -> str:
    """SHA-256 of the bytes of some tensors, one after another, hexadecimal."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(
            bytes(tensor.detach().cpu().contiguous().view(torch.uint8).flatten().tolist())
        )
    return digest.hexdigest()


def rule_weights(covariance: torch.Tensor) -> RuleWeights:
    """``W / mean(diag W)`` in its factors, ``W = H + 0.2 mean(diag H) I``, of a covariance ``H``.

    Parameters
    ----------
    covariance : torch.Tensor
        float64 ``[128, 128]``: the mean of ``v v'`` over vectors ``v``. Where it is zero, the
        weights are the identity.

    Raises
    ------
    ValueError
        It is not finite, not symmetric, or has a negative diagonal.
    """
    if tuple(covariance.shape) != (DIM, DIM):
        raise InputError(f"covariance must be [{DIM}, {DIM}], got {list(covariance.shape)}")
    wide = covariance.detach().double().cpu()
    if not bool(wide.isfinite().all()):
        raise InputError("covariance must be finite, got NaN or infinity")
    if not torch.equal(wide, wide.T) or bool((wide.diagonal() < 0).any()):
        raise InputError("covariance must be symmetric, with a diagonal that is not negative")
    mean = float(wide.diagonal().mean())
    identity = torch.eye(DIM, dtype=torch.float64, device="cpu")
    damped = wide / mean + DAMPING * identity if mean > 0 else identity
    # A division by a number, not by a tensor's mean: one rounding, the same everywhere.
    lower, pivots = _factors(damped / (1 + DAMPING if mean > 0 else 1.0))
    factor, exponent = (lower * 2.0**-_LEAST_EXPONENT).round_(), _LEAST_EXPONENT
    while not _is_exact(factor):
        exponent += 1
        factor = (lower * 2.0**-exponent).round_()
    columns, rows = torch.triu_indices(BLOCK, BLOCK, offset=1, dtype=torch.int64, device="cpu")
    blocks = torch.arange(0, DIM, BLOCK, dtype=torch.int64, device="cpu").unsqueeze(1)
    within = factor[blocks + rows, blocks + columns] * 2.0**exponent
    return RuleWeights(factor.half(), within.float(), pivots.float(), 2.0**exponent)


def _is_exact(factor: torch.Tensor) -> bool:
    """Whether products and sums of such a factor with errors are integers that float32 has."""
    largest_sum = float(factor.abs().sum(1).max()) * LIMB_MAX
    return float(factor.abs().max()) <= _LARGEST_ENTRY and largest_sum < _LARGEST_SUM


def _factors(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``L`` without its ones, and ``D``, float64: ``matrix = L' D L``.

    Operations on whole rows, each rounded by itself, so that no library's order of sums matters.
    """
    rest, lower = matrix.clone(), torch.zeros_like(matrix)
    pivots = torch.empty(DIM, dtype=torch.float64, device="cpu")
    for k in range(DIM - 1, -1, -1):
        pivots[k] = rest[k, k]
        row = rest[k, :k].clone()
        lower[k, :k] = row / rest[k, k]
        rest[:k, :k] -= torch.outer(lower[k, :k], row)
    return lower, pivots
