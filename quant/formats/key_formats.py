"""The key formats that an accuracy study compares: bytes, encoder and decoder of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from sdsa_quant.errors import InputError
from sdsa_quant.layout import DIM, PACKED_DIM, SCALES_PER_KEY

from .fp8 import dequantize_fp8, quantize_fp8
from .mxfp4 import BLOCK as MX_BLOCK
from .mxfp4 import dequantize_mxfp4, quantize_mxfp4
from .nvfp4 import COVARIANCE, FOUR_OVER_SIX, SEARCH, dequantize_nvfp4, quantize_nvfp4
from .rule_weights import RuleWeights

Stored = tuple[torch.Tensor, ...]  # what one encoder makes: codes, and scales if it has any


@dataclass(frozen=True, slots=True)
class KeyFormat:
    """How keys are stored, and whether query rows go through the same format."""

    name: str
    bytes_per_key: int
    quantizes_query: bool  # else query rows stay BF16
    summary: str  # one line for a reader
    encode: Callable[..., Stored]  # float [..., 128], and weights, to the stored tensors
    decode: Callable[..., torch.Tensor]  # the stored tensors to float32 [..., 128]
    is_calibrated: bool = False  # whether `encode` takes weights: those of keys, or of query rows

    def round_trip(self, values: torch.Tensor, weights: RuleWeights | None = None) -> torch.Tensor:
        """float32 values of the stored form of floating point ``[..., 128]``.

        `weights` are for a calibrated format, which needs them, and nothing to the others.
        """
        stored = self.encode(values, weights) if self.is_calibrated else self.encode(values)
        return self.decode(*stored)


def _encode_bf16(values: torch.Tensor) -> Stored:
    return (values.to(torch.bfloat16),)


def _decode_bf16(values: torch.Tensor) -> torch.Tensor:
    return values.float()


def _encode_by_covariance(values: torch.Tensor, weights: RuleWeights) -> Stored:
    return quantize_nvfp4(values, rule=COVARIANCE, weights=weights)


_encode_by_search = partial(quantize_nvfp4, rule=SEARCH)
_NVFP4_BYTES = PACKED_DIM + SCALES_PER_KEY

KEY_FORMATS = {
    key_format.name: key_format
    for key_format in (
        KeyFormat("bf16", 2 * DIM, False, "BF16, the baseline itself", _encode_bf16, _decode_bf16),
        KeyFormat(
            "nvfp4",
            _NVFP4_BYTES,
            True,
            "NVFP4 keys and query rows, scale e4m3(amax / 6) per 16 values",
            quantize_nvfp4,
            dequantize_nvfp4,
        ),
        KeyFormat(
            "nvfp4-mixed",
            _NVFP4_BYTES,
            False,
            "NVFP4 keys, BF16 query rows",
            quantize_nvfp4,
            dequantize_nvfp4,
        ),
        KeyFormat(
            "nvfp4-4over6",
            _NVFP4_BYTES,
            True,
            "NVFP4 with scale amax / 6 or amax / 4, whichever loses less, block by block",
            partial(quantize_nvfp4, rule=FOUR_OVER_SIX),
            dequantize_nvfp4,
        ),
        KeyFormat(
            "mxfp4",
            PACKED_DIM + DIM // MX_BLOCK,
            True,
            "MXFP4 keys and query rows, one power-of-two scale per 32 values",
            quantize_mxfp4,
            dequantize_mxfp4,
        ),
        KeyFormat(
            "fp8",
            DIM + torch.float32.itemsize,
            True,
            "E4M3 keys and query rows, one FP32 scale per key",
            quantize_fp8,
            dequantize_fp8,
        ),
    )
}


# NVFP4 by the rules that search: slower, and no part of a study unless it is asked for them.
RULE_FORMATS = {
    key_format.name: key_format
    for key_format in (
        KeyFormat(
            "nvfp4-search",
            _NVFP4_BYTES,
            True,
            "NVFP4 with the scale of all between amax / 8 and amax / 3.5 that loses least",
            _encode_by_search,
            dequantize_nvfp4,
        ),
        KeyFormat(
            "nvfp4-search-mixed",
            _NVFP4_BYTES,
            False,
            "NVFP4 keys with the scale that loses least, BF16 query rows",
            _encode_by_search,
            dequantize_nvfp4,
        ),
        KeyFormat(
            "nvfp4-covariance",
            _NVFP4_BYTES,
            True,
            "NVFP4 keys chosen by the covariance of query rows, and query rows by that of keys",
            _encode_by_covariance,
            dequantize_nvfp4,
            True,
        ),
        KeyFormat(
            "nvfp4-covariance-mixed",
            _NVFP4_BYTES,
            False,
            "NVFP4 keys chosen by the covariance of query rows, BF16 query rows",
            _encode_by_covariance,
            dequantize_nvfp4,
            True,
        ),
    )
}


def key_format(name: str) -> KeyFormat:
    """The format of that name.

    Raises
    ------
    ValueError
        No format has that name; the message lists those there are.
    """
    formats = {**KEY_FORMATS, **RULE_FORMATS}
    if name not in formats:
        raise InputError(f"format must be one of {', '.join(formats)}, got {name!r}")
    return formats[name]
