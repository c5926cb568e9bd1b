"""The rule ``covariance``: codes and scales of a key that lose least of its scores.

The rule makes ``e' W e`` of a whole key's error ``e = decoded - x`` small, ``W`` the weights of
`rule_weights`, which are kept as ``W = L' D L``: ``L`` lower triangular with a diagonal of ones,
``D`` the pivots. So ``e' W e`` is the sum of ``D_k z_k^2`` with ``z_k = e_k + sum over i < k of
L_ki e_i``: what value ``k`` adds depends on the values before it alone. One after another, each
value is rounded not to what is nearest to itself, but to what makes its own ``z`` least; later
values make up for the errors of earlier ones.

A block tries the scales of `STEPS` around that of the rule ``amax/6``, each with its own 16 codes,
and takes the one whose 16 terms ``D z^2`` have the least sum. At last the key is stored so only if
it loses less than by the rule ``amax/6``. So the rule is never worse, keeps what is exact, and has
a defined result for infinities and NaN.

**The same bits everywhere.** ``L`` has few bits (`rule_weights`). Between blocks, errors are taken
as two integers of 10 bits and a sign, in units that go with the largest magnitude of the key:
products and sums with ``L`` are then integers below 2^24, exact in any order, by matrix products or
tensor cores. Within a block, errors are taken in steps of 2^-9 of the scale, so that each product
is exact, and fusing it with the subtraction that follows changes nothing. All else is float32,
every operation rounded by itself. docs/reference/rules.md has every step.

Here the keys lie side by side, ``[128, n]``: a step is a few operations on rows of ``n`` values.
"""

from __future__ import annotations

import torch

from sdsa_quant.layout import BLOCK, DIM, SCALES_PER_KEY

from . import e2m1, e4m3
from .rule_weights import LIMB_BITS, LIMB_MAX, RuleWeights
from .scale_search import round_to_e2m1

STEPS = tuple(range(-2, 6))  # 8 of the scale byte from that of amax/6
LARGEST_MAGNITUDE = 3584.0  # 8 * 448: keys beyond keep the bytes of amax/6
LEAST_POWER = 2.0**-60  # so that the unit of a key of zeros has an inverse
ROUND_WITHIN_BLOCK = 1.5 * 2.0**14  # added and taken away, it rounds to multiples of 2^-9
ZERO_SCALE = 2.0**20  # stands for a scale of 0: every code is 0 under it
BLOCK_MARGIN = 2.0**-8  # in squared steps of the scale, and
MARGIN = 2.0**-5  # relative: what rounding within a block may hide
_LAST_SCALE = 0x7E
_EXPONENT_MASK = 0x7F800000  # of a float32


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
    keys = _Keys(x, base, weights)
    plain_loss = keys.loss_of(plain)
    for block in range(SCALES_PER_KEY):
        keys.quantize_block(block)
    better = keys.total.add(keys.total * MARGIN) < plain_loss
    better &= keys.amax <= LARGEST_MAGNITUDE
    new_codes, new_scales = keys.stored()
    codes.copy_(torch.where(better.unsqueeze(-1), new_codes, codes))
    scale_bytes = scales.view(torch.uint8)
    scale_bytes.copy_(torch.where(better.unsqueeze(-1), new_scales, scale_bytes))


class _Keys:
    """Some keys, quantized block after block."""

    def __init__(self, x: torch.Tensor, base: torch.Tensor, weights: RuleWeights) -> None:
        count, device = x.shape[1], x.device
        self._x = x
        self._base = base
        self._weights = weights
        self._factor = weights.factor.double()
        self.amax = x.abs().amax(0)
        power = torch.bitwise_and(self.amax.view(torch.int32), _EXPONENT_MASK).view(torch.float32)
        unit = power.clamp_(min=LEAST_POWER).mul_(2.0**-LIMB_BITS)
        self._inverse_unit = unit.reciprocal()
        self._factor_unit = unit * weights.step
        # What the errors of blocks done so far add to every value, in units: exact integers, over
        # 2^LIMB_BITS. float64, because no setting lets a matrix product round that.
        self._sums = torch.zeros((DIM, count), dtype=torch.float64, device=device)
        self._codes = torch.empty_like(x)
        self._bytes = torch.empty_like(base)
        self.total = torch.zeros(count, dtype=torch.float32, device=device)

    def _limbs(self, errors: torch.Tensor) -> torch.Tensor:
        """float64 errors in units, as two integers: the second in units of 2^-LIMB_BITS."""
        scaled = errors * self._inverse_unit
        upper = scaled.clamp(-LIMB_MAX, LIMB_MAX).round_()
        lower = scaled.sub_(upper).mul_(2.0**LIMB_BITS).clamp_(-LIMB_MAX, LIMB_MAX).round_()
        return lower.double().mul_(2.0**-LIMB_BITS).add_(upper)

    def loss_of(self, decoded: torch.Tensor) -> torch.Tensor:
        """float32 ``[n]``: ``e' W e`` of keys decoded to float32 ``[128, n]``, overwritten."""
        errors = decoded.sub_(self._x)
        sums = (self._factor @ self._limbs(errors)).float()
        z = errors.add_(sums.mul_(self._factor_unit))
        terms = _by_block(z.square_().mul_(self._weights.pivots.unsqueeze(1)))
        losses = terms[:, 0].clone()
        for j in range(1, BLOCK):
            losses.add_(terms[:, j])
        while losses.shape[0] > 1:
            half = losses.shape[0] // 2
            losses = losses[:half] + losses[half:]
        return losses[0]

    def quantize_block(self, block: int) -> None:
        """Choose the scale and the codes of one block of every key."""
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        x, base = self._x[rows], self._base[block]
        steps = torch.tensor(STEPS, dtype=torch.int32, device=x.device).unsqueeze(1)
        tried = base.add(steps).clamp_(1, _LAST_SCALE).masked_fill_(base == 0, 0)
        scales = e4m3.decode(tried.to(torch.uint8)).masked_fill_(tried == 0, ZERO_SCALE)
        inverse = scales.reciprocal()
        if bool((base == 0).any()):
            # What a block without a scale adds to its own later values: its errors are known.
            known = self._limbs(x.neg().masked_fill_(base != 0, 0.0))
            self._sums[rows].addmm_(self._factor[rows, rows], known)
        targets = x - self._sums[rows].float().mul_(self._factor_unit)
        # [16, steps, n]: targets, later their distances from the codes
        z = targets.unsqueeze(1) * inverse
        own = x.unsqueeze(1) * inverse
        own.add_(ROUND_WITHIN_BLOCK).sub_(ROUND_WITHIN_BLOCK)
        codes, units = torch.empty_like(z), torch.empty_like(scales)
        columns = self._weights.factor[rows, rows].float().mul_(self._weights.step)
        for j in range(BLOCK):
            round_to_e2m1(codes[j].copy_(z[j]), units)
            torch.sub(codes[j], z[j], out=z[j])
            own[j].neg_().add_(codes[j])
            if j < BLOCK - 1:
                # The product is exact: fused with the subtraction or not is the same.
                z[j + 1 :].addcmul_(columns[j + 1 :, j].view(-1, 1, 1), own[j], value=-1)
        terms = z.square_().mul_(self._weights.pivots[rows].view(BLOCK, 1, 1))
        losses = terms[0]
        for j in range(1, BLOCK):
            losses.add_(terms[j])
        margin = torch.full_like(targets[0], BLOCK_MARGIN).masked_fill_(base == 0, 0.0)
        losses.add_(margin).mul_(scales.square())
        # Compared without the last bits, where the index is: the least is the first of equal ones.
        ranked = losses.view(torch.int32).bitwise_and_(-len(STEPS))
        ranked.bitwise_or_(
            torch.arange(len(STEPS), dtype=torch.int32, device=x.device).unsqueeze(1)
        )
        least = ranked.amin(0)
        self.total.add_(least.bitwise_and(-len(STEPS)).view(torch.float32))
        chosen = least.bitwise_and_(len(STEPS) - 1).long()
        chosen = chosen.unsqueeze(0)
        torch.gather(codes, 1, chosen.expand(BLOCK, 1, -1), out=self._codes[rows].unsqueeze(1))
        self._bytes[block] = tried.gather(0, chosen)[0]
        if rows.stop < DIM:
            errors = self._codes[rows] * scales.gather(0, chosen)
            factor = self._factor[rows.stop :, rows]
            self._sums[rows.stop :].addmm_(factor, self._limbs(errors.sub_(x)))

    def stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Packed codes uint8 ``[n, 64]`` and scale bytes ``[n, 8]``; zeros have the sign of x."""
        signed = torch.where(
            self._codes == 0, torch.copysign(torch.zeros_like(self._x), self._x), self._codes
        )
        signed = signed.nan_to_num_(nan=0.0)  # which is not stored
        return e2m1.pack(e2m1.encode(signed.T)), self._bytes.T.to(torch.uint8)


def _by_block(keys: torch.Tensor) -> torch.Tensor:
    """``[8, 16, n]`` view of contiguous ``[128, n]``."""
    return keys.view(SCALES_PER_KEY, BLOCK, keys.shape[1])
