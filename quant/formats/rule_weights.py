"""What the rule ``covariance`` weighs errors with: one matrix a layer, damped, rounded once.

A key with error ``e`` moves the score of a query row ``q`` by ``q . e``; over many rows the mean
square of that is ``e' H e``, ``H`` the mean of ``q q'``. The rule minimizes ``e' W e`` with
``W = H + 0.2 mean(diag H) I``: the damping keeps errors small that the rows of the calibration
happen not to see, and other rows will. Query rows are quantized the other way about, with the
covariance of the keys.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from sdsa_quant.errors import InputError
from sdsa_quant.layout import DIM

DAMPING = 0.2  # times the mean of the diagonal; docs/explanation/rules.md has what others lose


@dataclass(frozen=True, slots=True, eq=False)
class RuleWeights:
    """The matrix of `sdsa_quant.formats.covariance`, as every device uses it."""

    matrix: torch.Tensor  # float32 [128, 128], symmetric, positive diagonal of mean 1
    inverse_diagonal: torch.Tensor  # float32 [128]

    def to(self, device: torch.device | str) -> RuleWeights:
        """The same weights on another device."""
        return RuleWeights(self.matrix.to(device), self.inverse_diagonal.to(device))

    @property
    def digest(self) -> str:
        """SHA-256 of the matrix's bytes, hexadecimal."""
        return tensor_digest(self.matrix)


def tensor_digest(*tensors: torch.Tensor) -> str:
    """SHA-256 of the bytes of some tensors, one after another, hexadecimal."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(
            bytes(tensor.detach().cpu().contiguous().view(torch.uint8).flatten().tolist())
        )
    return digest.hexdigest()


def rule_weights(covariance: torch.Tensor) -> RuleWeights:
    """``W / mean(diag W)`` in float32, ``W = H + 0.2 mean(diag H) I``, of a covariance ``H``.

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
    matrix = (damped / (1 + DAMPING if mean > 0 else 1.0)).float()
    return RuleWeights(matrix, matrix.diagonal().reciprocal().contiguous())
