"""How engines lay out quantized keys in a page's bytes, and which layout a dump is of.

A page holds 64 keys, whose bytes are, with one scale or four to a key:

    fp8-rows      64 rows of 128 E4M3 codes and an FP32 scale (132 bytes)
    fp8-planes    64 x 128 E4M3 codes, then 64 FP32 scales
    mxfp4-rows    64 rows of 64 bytes of E2M1 codes and 4 E8M0 scales, one per 32 values (68 bytes)
    mxfp4-planes  64 x 64 bytes of codes, then 64 x 4 scales

Numbers are little-endian; value ``2i`` of an MXFP4 key is in the low nibble of byte ``i``. The
shape of a dump does not tell rows from planes. Read in the wrong one, codes become scales: their
exponents lie all over the range, and FP32 scales have either sign, so that decoded rows differ from
each other by many powers of ten, where the keys of a model are of similar lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sdsa_quant.errors import InputError
from sdsa_quant.formats.fp8 import dequantize_fp8
from sdsa_quant.formats.mxfp4 import BLOCK as MX_BLOCK
from sdsa_quant.formats.mxfp4 import dequantize_mxfp4
from sdsa_quant.layout import DIM, PACKED_DIM, PAGE

FP8_BYTES = DIM + 4
MXFP4_BYTES = PACKED_DIM + DIM // MX_BLOCK
_NAN_CODE = 0x7F  # of E4M3, with either sign
_NAN_SCALE = 0xFF  # of E8M0
# Scales of one dump may differ by 2^32 between their first and last percentile. Those of real keys
# differ by less than 2^12; E4M3 codes read as FP32 scales, and E2M1 codes as E8M0, by over 2^100.
_MOST_OCTAVES = 32


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """One way to lay out keys in a page."""

    name: str
    """Such as ``fp8-planes``."""
    key_bytes: int
    """Bytes of a key with its scales."""
    split: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """uint8 ``[pages, 64 * key_bytes]`` to codes and scales, uint8 ``[pages, 64, bytes]``."""


def _rows(code_bytes: int, scale_bytes: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def split(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = pages.reshape(-1, PAGE, code_bytes + scale_bytes)
        return rows[..., :code_bytes], rows[..., code_bytes:]

    return split


def _planes(code_bytes: int, scale_bytes: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def split(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = pages.reshape(-1, PAGE * (code_bytes + scale_bytes))
        codes, scales = flat[:, : PAGE * code_bytes], flat[:, PAGE * code_bytes :]
        return codes.reshape(-1, PAGE, code_bytes), scales.reshape(-1, PAGE, scale_bytes)

    return split


_MX_SCALES = DIM // MX_BLOCK
ENGINE_LAYOUTS = {
    layout.name: layout
    for layout in (
        EngineLayout("fp8-rows", FP8_BYTES, _rows(DIM, 4)),
        EngineLayout("fp8-planes", FP8_BYTES, _planes(DIM, 4)),
        EngineLayout("mxfp4-rows", MXFP4_BYTES, _rows(PACKED_DIM, _MX_SCALES)),
        EngineLayout("mxfp4-planes", MXFP4_BYTES, _planes(PACKED_DIM, _MX_SCALES)),
    )
}


def engine_layout(name: str) -> EngineLayout:
    """The layout of that name.

    Raises
    ------
    ValueError
        There is none; the message lists those there are.
    """
    if name not in ENGINE_LAYOUTS:
        raise InputError(
            f"must be one of {', '.join(ENGINE_LAYOUTS)}, got {name!r}", argument="layout"
        )
    return ENGINE_LAYOUTS[name]


def decode_pages(pages: torch.Tensor, layout: EngineLayout) -> torch.Tensor:
    """float32 ``[pages, 64, 128]`` keys of pages: each code times its scale, rounded once.

    Parameters
    ----------
    pages : torch.Tensor
        Input, uint8 ``[pages, 64 * key_bytes]`` or ``[pages, 64, key_bytes]``, CPU.
    layout : EngineLayout
        How they are laid out.
    """
    codes, scales = layout.split(pages)
    if layout.key_bytes == FP8_BYTES:
        decoded = codes.contiguous().view(torch.float8_e4m3fn)
        return dequantize_fp8(decoded, _fp32(scales))
    return dequantize_mxfp4(codes.contiguous(), scales.contiguous())


def what_is_wrong(
    pages: torch.Tensor, layout: EngineLayout, used: torch.Tensor | None = None
) -> str | None:
    """Why pages are not of this layout; None where they may be.

    Parameters
    ----------
    pages : torch.Tensor
        Input, uint8 ``[pages, 64 * key_bytes]``.
    layout : EngineLayout
        The layout in question.
    used : torch.Tensor, optional
        bool ``[pages, 64]``: the keys that belong to a request. Every key by default.
    """
    codes, scales = layout.split(pages)
    if used is not None:
        codes, scales = codes[used], scales[used]
    if layout.key_bytes == FP8_BYTES:
        if bool((codes & 0x7F == _NAN_CODE).any()):
            return "a code is NaN"
        numbers = _fp32(scales).flatten()
        if not bool(numbers.isfinite().all()):
            return "a scale is not finite"
        if bool((numbers < 0).any()):
            return f"{float((numbers < 0).double().mean()):.0%} of the scales are negative"
        exponents = numbers[numbers > 0].double().log2()
    else:
        if bool((scales == _NAN_SCALE).any()):
            return "a scale is NaN"
        # A block of zeros says nothing of its scale.
        blocks = codes.reshape(-1, MX_BLOCK // 2)
        exponents = scales.reshape(-1)[(blocks & 0x77 != 0).any(-1)].double()
    if exponents.numel() < 2:
        return None
    ordered = exponents.sort().values
    low, high = ordered[ordered.numel() // 100], ordered[-1 - ordered.numel() // 100]
    if high - low > _MOST_OCTAVES:
        return f"its scales differ by 2^{float(high - low):.0f}"
    return None


def find_layout(
    pages: torch.Tensor, key_bytes: int, used: torch.Tensor | None = None
) -> EngineLayout:
    """The only layout of this size in which pages decode to finite keys of similar lengths.

    Parameters
    ----------
    pages, used : torch.Tensor
        As `what_is_wrong`.
    key_bytes : int
        Bytes of a key with its scales: 132 or 68.

    Raises
    ------
    ValueError
        No layout has that size, none fits, or more than one does.
    """
    candidates = [each for each in ENGINE_LAYOUTS.values() if each.key_bytes == key_bytes]
    if not candidates:
        raise InputError(
            f"a key must have {FP8_BYTES} bytes (FP8) or {MXFP4_BYTES} (MXFP4), got {key_bytes}"
        )
    faults = {each.name: what_is_wrong(pages, each, used) for each in candidates}
    fitting = [each for each in candidates if faults[each.name] is None]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise InputError(
            f"{' and '.join(each.name for each in fitting)} both decode to keys of similar "
            f"lengths, so that the layout cannot be found"
        )
    found = "; ".join(f"as {name} {fault}" for name, fault in faults.items())
    raise InputError(f"no layout decodes to finite keys of similar lengths: {found}")


def _fp32(scales: torch.Tensor) -> torch.Tensor:
    """The float32 of every four bytes."""
    return scales.contiguous().view(torch.float32).squeeze(-1)
