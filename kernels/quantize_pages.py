"""`quantize_nvfp4` by the kernel of `quantize_write_nvfp4`, for many keys on a GPU."""

from __future__ import annotations

import torch

from sdsa_quant.errors import InputError
from sdsa_quant.formats.nvfp4 import AMAX_OVER_6, NONFINITE_MESSAGE, quantize_nvfp4
from sdsa_quant.layout import PACKED_DIM, PAGE, SCALES_PER_KEY

from .quantize_write import quantize_write_nvfp4


def quantize_keys(
    values: torch.Tensor, *, nonfinite: str = "error", rule: str = AMAX_OVER_6
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `sdsa_quant.quantize_nvfp4` returns for ``[n, 128]`` keys, in one launch on a GPU.

    The rule ``4over6``, which the kernel does not have, is left to `quantize_nvfp4`. Parameters,
    results and errors are those of that function.
    """
    if rule != AMAX_OVER_6:
        return quantize_nvfp4(values, nonfinite=nonfinite, rule=rule)
    if nonfinite == "error" and not bool(values.isfinite().all()):
        raise InputError(NONFINITE_MESSAGE)
    count = values.shape[0]
    pages = -(-count // PAGE)
    codes = values.new_empty((pages, PAGE, PACKED_DIM), dtype=torch.uint8)
    scales = values.new_empty((pages, PAGE, SCALES_PER_KEY), dtype=torch.uint8)
    slots = torch.arange(count, device=values.device)
    quantize_write_nvfp4(values.contiguous(), slots, key_cache=codes, key_scales=scales)
    return codes.flatten(0, 1)[:count], scales.flatten(0, 1)[:count].view(torch.float8_e4m3fn)
