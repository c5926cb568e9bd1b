"""The rules that search, on CUDA tensors: the bits of the CPU."""

from __future__ import annotations

import pytest
import torch

from sdsa_quant.formats.nvfp4 import COVARIANCE, SEARCH, quantize_nvfp4
from support.rule_cases import adversarial_keys, correlated, some_weights

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rule", [SEARCH, COVARIANCE])
def test_same_bits_as_the_cpu(generator: torch.Generator, rule: str) -> None:
    weights = some_weights(generator) if rule == COVARIANCE else None
    keys = torch.cat([correlated(60_000, generator), adversarial_keys(60_000, generator)])
    here = quantize_nvfp4(keys, rule=rule, weights=weights)
    there = quantize_nvfp4(keys.cuda(), rule=rule, weights=weights)
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8).cpu())
