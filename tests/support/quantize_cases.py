"""Rows whose quantization is hard to get right: every maximum, every value, every tie."""

from __future__ import annotations

import torch

from sdsa_quant.formats.nvfp4 import quantize_nvfp4

TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between neighbouring E2M1 magnitudes
_INFINITY = 0x7F80  # the BF16 bits above those of every finite magnitude


def _rows(blocks: torch.Tensor) -> torch.Tensor:
    """Blocks of 16 as rows of 8, the last one filled up with zeros."""
    missing = -blocks.shape[0] % 8
    return torch.cat([blocks, blocks.new_zeros(missing, 16)]).view(-1, 128)


def finite_bfloat16() -> torch.Tensor:
    """Every finite BF16 from 0 up."""
    return torch.arange(_INFINITY, dtype=torch.int16).view(torch.bfloat16)


def every_maximum() -> torch.Tensor:
    """BF16 rows: every finite magnitude is the largest of one block."""
    blocks = torch.zeros(_INFINITY, 16, dtype=torch.bfloat16)
    blocks[:, 5] = finite_bfloat16()
    return _rows(blocks)


def largest_of_each_scale() -> torch.Tensor:
    """BF16 [scales]: for every scale that there is, the largest magnitude that leads to it."""
    magnitudes = finite_bfloat16()
    blocks = torch.zeros(_INFINITY, 16, dtype=torch.bfloat16)
    blocks[:, 0] = magnitudes
    scales = quantize_nvfp4(blocks)[1].view(-1).view(torch.uint8)
    last = torch.ones_like(scales, dtype=torch.bool)
    last[:-1] = scales[:-1] != scales[1:]
    return magnitudes[last]


def every_value_under_every_scale() -> torch.Tensor:
    """BF16 rows: of every scale, every magnitude that it can meet, with both signs in turn."""
    parts = []
    magnitudes = finite_bfloat16()
    for largest in largest_of_each_scale():
        values = magnitudes[magnitudes <= largest].clone()
        values[1::2] *= -1
        values = torch.cat([values, values.new_zeros(-values.shape[0] % 15)]).view(-1, 15)
        parts.append(torch.cat([largest.expand(values.shape[0], 1), values], 1))
    return _rows(torch.cat(parts))


def ties_and_their_neighbours() -> torch.Tensor:
    """Float32 rows: the ties of every scale, and what is next to them on either side."""
    ties = torch.tensor(TIES)
    blocks = []
    for largest in largest_of_each_scale().float():
        block = torch.zeros(16)
        block[0] = largest
        scale = quantize_nvfp4(block.view(1, 16))[1].float()[0]
        exact = ties * scale
        for step in (-3, -2, -1, 0, 1, 2, 3):
            values = (exact.view(torch.int32) + step).clamp(min=0).view(torch.float32)
            block = torch.cat([largest.view(1), values, -values, torch.zeros(1)])
            blocks.append(block)
    return _rows(torch.stack(blocks))
