"""The rule ``covariance``: codes and scales of a key that lose least of its scores.

The rule makes ``e' W e`` of a whole key's error ``e = decoded - x`` small, ``W`` the damped
covariance of the query rows (`rule_weights`). With the gradient ``g = W e`` at hand, the best value
of one code, all others kept, is the grid point nearest to ``q_j - g_j / W_jj``, and a code that
moves by ``d`` adds ``d`` times a column of ``W`` to the gradient.

1. *Start*: scales by `scale_search`, weighted with the diagonal of ``W``; nearest codes; ``g = 0``,
   then ``g += W[:, j] e_j`` for ``j`` from 0 to 127.
2. *Passes*, `PASSES` of them, each over blocks 0 to 7. A block tries its scale, the next larger and
   the next smaller one (bytes kept in 1 to 126; scale 0 stays). For each: codes to the nearest of
   the decoded values so far, then `SWEEPS` sweeps over its 16 values, with the gradient of the
   block alone kept. The change of ``e' W e`` is the sum of ``d_j (g_j + g'_j)``, ``g'`` the
   gradient after; the least wins, the first of equal ones. Then the other 112 values of ``g`` get
   ``W[:, j] d_j`` for the block's ``j`` in ascending order.
3. *Guard*: where the sum of ``e_j g_j`` is not below that of the rule amax/6, whose ``g`` is summed
   as in 1, the key gets the bytes of amax/6. So the rule is never worse, keeps what is exact, and
   has a defined result for infinities and NaN.

Every multiplication and addition is float32 and rounded by itself, never fused; sums of 16 and 128
are trees, value ``i`` and ``i + half`` first. So the bits are the same on every device. A code of
value zero has the sign of ``x``.

Here the keys lie side by side, ``[128, n]``: one step of a sweep is a few operations on rows of
``n`` values.
"""

from __future__ import annotations

import torch

from sdsa_quant.layout import BLOCK, DIM, SCALES_PER_KEY

from . import e2m1, e4m3
from .rule_weights import RuleWeights
from .scale_search import best_scales, inverse_of, round_to_e2m1

PASSES = 3
SWEEPS = 2
_STEPS = (0, 1, -1)  # of a scale byte, in the order in which ties are decided
_LAST_SCALE = 0x7E


def improve_keys(
    values: torch.Tensor, weights: RuleWeights, codes: torch.Tensor, scales: torch.Tensor
) -> None:
    """Replace the amax/6 bytes of keys by those of the rule, where they lose less.

    Parameters
    ----------
    values : torch.Tensor
        float32 ``[n, 128]``.
    weights : RuleWeights
        On the device of `values`.
    codes : torch.Tensor
        uint8 ``[n, 64]``, those of the rule amax/6; overwritten.
    scales : torch.Tensor
        float8_e4m3fn ``[n, 8]``, likewise.
    """
    if not values.shape[0]:
        return
    x = values.T.contiguous()
    base = scales.view(torch.uint8).T.to(torch.int32)
    plain = e2m1.decode(e2m1.unpack(codes)).T.contiguous()
    _by_block(plain).mul_(e4m3.decode(base.to(torch.uint8)).unsqueeze(1))
    plain_loss = _loss(plain.sub_(x), weights)
    magnitudes = _by_block(x).abs()
    diagonal = weights.matrix.diagonal().reshape(SCALES_PER_KEY, BLOCK, 1)
    descent = _Descent(x, best_scales(magnitudes, base, diagonal), weights)
    for _ in range(PASSES):
        for block in range(SCALES_PER_KEY):
            descent.improve_block(block)
    better = descent.loss() < plain_loss
    new_codes, new_scales = descent.stored()
    codes.copy_(torch.where(better.unsqueeze(-1), new_codes, codes))
    scale_bytes = scales.view(torch.uint8)
    scale_bytes.copy_(torch.where(better.unsqueeze(-1), new_scales, scale_bytes))


class _Descent:
    """Decoded values, scales and gradient of some keys on their way down."""

    def __init__(self, x: torch.Tensor, scale_bytes: torch.Tensor, weights: RuleWeights) -> None:
        self._x = x
        self._bytes = scale_bytes  # int32 [8, n]
        self._weights = weights
        scales = e4m3.decode(scale_bytes.to(torch.uint8)).unsqueeze(1)
        self._decoded = torch.empty_like(x)
        blocks = _by_block(self._decoded)
        torch.mul(_by_block(x), inverse_of(scales), out=blocks)
        round_to_e2m1(self._decoded, torch.empty_like(x))
        blocks.mul_(scales)
        self._gradient = _gradient(self._decoded - x, weights)

    def improve_block(self, block: int) -> None:
        """Find better codes and a better scale for one block of every key."""
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        count = self._x.shape[1]
        tried = torch.stack([self._bytes[block] + step for step in _STEPS])
        tried.clamp_(1, _LAST_SCALE).masked_fill_(self._bytes[block] == 0, 0)
        scales = e4m3.decode(tried.to(torch.uint8))  # [steps, n]
        inverse = inverse_of(scales)
        before, gradient = self._decoded[rows], self._gradient[rows]
        # [16, steps, n]
        decoded = before.unsqueeze(1) * inverse
        workspace = torch.empty_like(decoded)
        round_to_e2m1(decoded, workspace).mul_(scales)
        moved = decoded - before.unsqueeze(1)
        gradients = gradient.unsqueeze(1).repeat(1, len(_STEPS), 1)
        columns = self._weights.matrix[rows, rows].contiguous().view(BLOCK, BLOCK, 1, 1)
        for j in range(BLOCK):
            gradients.add_(torch.mul(columns[j], moved[j], out=workspace))
        units = torch.empty(len(_STEPS), count, device=self._x.device, dtype=torch.float32)
        inverse_diagonal = self._weights.inverse_diagonal[rows].view(BLOCK, 1, 1)
        for _ in range(SWEEPS):
            for j in range(BLOCK):
                target = gradients[j] * inverse_diagonal[j]
                torch.sub(decoded[j], target, out=target)
                round_to_e2m1(target.mul_(inverse), units).mul_(scales)
                torch.sub(target, decoded[j], out=units)
                decoded[j] = target
                gradients.add_(torch.mul(columns[j], units, out=workspace))
        torch.sub(decoded, before.unsqueeze(1), out=moved)
        changes = _sum_of_rows((gradients + gradient.unsqueeze(1)).mul_(moved))
        chosen = _first_least(changes)
        for step in range(1, len(_STEPS)):
            is_chosen = chosen == step
            for tensor in (decoded, gradients, moved):
                tensor[:, 0] = torch.where(is_chosen, tensor[:, step], tensor[:, 0])
            self._bytes[block] = torch.where(is_chosen, tried[step], self._bytes[block])
        self._decoded[rows] = decoded[:, 0]
        self._gradient[rows] = gradients[:, 0]
        self._add_to_others(rows, moved[:, 0])

    def _add_to_others(self, rows: slice, moved: torch.Tensor) -> None:
        for others in (slice(0, rows.start), slice(rows.stop, DIM)):
            gradient = self._gradient[others]
            workspace = torch.empty_like(gradient)
            for j in range(BLOCK):
                column = self._weights.matrix[others, rows.start + j].unsqueeze(1)
                gradient.add_(torch.mul(column, moved[j], out=workspace))

    def loss(self) -> torch.Tensor:
        """float32 ``[n]``: ``e' W e`` of every key."""
        return _sum_of_rows((self._decoded - self._x).mul_(self._gradient))

    def stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Packed codes uint8 ``[n, 64]`` and scale bytes ``[n, 8]``."""
        scale_bytes = self._bytes.to(torch.uint8)
        inverse = inverse_of(e4m3.decode(scale_bytes)).unsqueeze(1)
        scaled = torch.empty_like(self._decoded)
        torch.mul(_by_block(self._decoded), inverse, out=_by_block(scaled))
        signed = torch.where(
            scaled == 0,
            torch.copysign(torch.zeros((), dtype=torch.float32, device=self._x.device), self._x),
            scaled,
        )
        signed = signed.nan_to_num_(nan=0.0)  # which the guard does not let through
        return e2m1.pack(e2m1.encode(signed.T)), scale_bytes.T


def _by_block(keys: torch.Tensor) -> torch.Tensor:
    """``[8, 16, n]`` view of contiguous ``[128, n]``."""
    return keys.view(SCALES_PER_KEY, BLOCK, keys.shape[1])


def _gradient(errors: torch.Tensor, weights: RuleWeights) -> torch.Tensor:
    """``W e`` of float32 ``[128, n]``, column after column."""
    gradient, workspace = torch.zeros_like(errors), torch.empty_like(errors)
    for j in range(DIM):
        column = weights.matrix[:, j].unsqueeze(1)
        gradient.add_(torch.mul(column, errors[j], out=workspace))
    return gradient


def _loss(errors: torch.Tensor, weights: RuleWeights) -> torch.Tensor:
    return _sum_of_rows(_gradient(errors, weights).mul_(errors))


def _sum_of_rows(values: torch.Tensor) -> torch.Tensor:
    """Sum over the first dimension, a power of two long, as a tree."""
    while values.shape[0] > 1:
        half = values.shape[0] // 2
        values = values[:half] + values[half:]
    return values[0]


def _first_least(changes: torch.Tensor) -> torch.Tensor:
    """int64 ``[n]``: which of ``[steps, n]`` is the least, the first of equal ones; never NaN."""
    least, chosen = changes[0], torch.zeros_like(changes[0], dtype=torch.int64)
    for step in range(1, changes.shape[0]):
        better = changes[step] < least
        least = torch.where(better, changes[step], least)
        chosen = torch.where(better, step, chosen)
    return chosen
