"""The slow, obviously right scores that every backend is compared with.

Plain loops over groups and keys' pages, float64 throughout, and an E4M3 and E2M1 decoding of its
own, so that an error in `sdsa_quant` cannot hide here.
"""

from __future__ import annotations

import math

import torch

from sdsa_kernels.problem import CallTensors
from sdsa_quant.layout import BLOCK, PAGE

_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def _e4m3(byte: int) -> float:
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


_E4M3 = [_e4m3(byte) for byte in range(256)]


def reference_decode(values: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """float64 ``[..., 128]`` of BF16 values, or of NVFP4 codes ``[..., 64]`` and their scales."""
    if values.dtype != torch.uint8:
        return values.double()
    assert scales is not None
    e2m1 = torch.tensor(_E2M1, dtype=torch.float64, device=values.device)
    e4m3 = torch.tensor(_E4M3, dtype=torch.float64, device=values.device)
    low, high = e2m1[(values % 16).long()], e2m1[(values // 16).long()]
    decoded = torch.stack((low, high), dim=-1).flatten(-2)
    factors = e4m3[scales.view(torch.uint8).long()]
    return decoded * factors.repeat_interleave(BLOCK, dim=-1)


def reference_scores(call: CallTensors) -> torch.Tensor:
    """float64 ``[rows, max_context]`` scores of a call, NaN at and past each row's length.

    Values may also be plain float64 ones, ``[..., 128]`` and without scales.
    """
    query, key_cache, block_table, context_lengths, requests, given, query_scales, key_scales = call
    max_context = given.shape[1]
    groups = context_lengths.shape[0]
    rows = query.shape[0]
    scores = torch.full((rows, max_context), math.nan, dtype=torch.float64, device=key_cache.device)
    decoded_query = reference_decode(query, query_scales)
    for group in range(groups):
        length = min(int(context_lengths[group]), max_context)
        rows_of_group = slice(group * rows // groups, (group + 1) * rows // groups)
        for first_key in range(0, length, PAGE):
            page = int(block_table[int(requests[group]), first_key // PAGE])
            scales = None if key_scales is None else key_scales[page]
            keys = reference_decode(key_cache[page], scales)[: length - first_key]
            scores[rows_of_group, first_key : first_key + keys.shape[0]] = (
                decoded_query[rows_of_group] @ keys.T
            )
    return scores
