"""Keys and weights for the rules that search: usual ones, and those on which a rule could break."""

from __future__ import annotations

import torch

from sdsa_quant.formats.rule_weights import RuleWeights, rule_weights


def correlated(count: int, generator: torch.Generator, *, rank: int = 24) -> torch.Tensor:
    """float32 ``[count, 128]`` vectors with a few strong directions, as of attention."""
    directions = torch.randn(rank, 128, generator=generator)
    strengths = torch.randn(count, rank, generator=generator) * torch.linspace(2, 0.2, rank)
    return strengths @ directions + 0.3 * torch.randn(count, 128, generator=generator)


def some_weights(generator: torch.Generator) -> RuleWeights:
    """Weights of correlated vectors."""
    vectors = correlated(512, generator).double()
    covariance = vectors.T @ vectors / len(vectors)
    return rule_weights((covariance + covariance.T) / 2)


def adversarial_keys(count: int, generator: torch.Generator) -> torch.Tensor:
    """float32 ``[count, 128]``: from zero to saturation, ties, outliers, equal values."""
    exponents = torch.randint(-16, 14, (count, 8, 1), generator=generator).float()
    keys = torch.randn(count, 8, 16, generator=generator) * torch.exp2(exponents)
    kinds = torch.arange(count) % 6
    ties = torch.randint(-24, 25, (count, 8, 16), generator=generator) * torch.exp2(exponents) / 4
    keys[kinds == 1] = ties[kinds == 1]
    keys[kinds == 2, :4] = 0
    keys[kinds == 3, :, 0] = 4096.0
    keys[kinds == 4] = keys[kinds == 4, :, :1].expand(-1, -1, 16)
    keys[kinds == 5, 3] *= 2.0**-9
    return keys.view(count, 128)


def not_finite_keys(generator: torch.Generator) -> torch.Tensor:
    """float32 ``[48, 128]`` with NaN, infinities and what saturates, beside usual values."""
    keys = correlated(48, generator)
    keys[0:8, 5] = torch.nan
    keys[8:16, 21] = torch.inf
    keys[16:24, 37] = -torch.inf
    keys[24:28, 16:32] = torch.nan
    keys[28] = torch.nan
    keys[29] = -torch.inf
    keys[30:36] *= torch.exp2(torch.arange(8.0, 14.0)).unsqueeze(1)
    keys[36:40, 40] = 60000.0
    keys[40:44] *= 2.0**-14
    keys[44] = 0.0
    keys[45] = -0.0
    return keys
