"""NVFP4 without a global scale: blocks of 16 values, E2M1 codes, one E4M3 scale per block.

Per block ``x``: ``amax = max |x|``; ``scale = e4m3(amax / 6)``; ``inverse = 1 / scale``, or 0 where
the scale is 0; ``code = e2m1(x * inverse)``. Every step is float32, rounds to nearest even and
saturates. The scale is stored and multiplies on decode. The bits are those of
``flashinfer.sdsa``'s writer and of the golden vectors in ``fixtures/``.

That is the rule ``amax/6``. The rule ``4over6`` encodes each block twice, with ``e4m3(amax / 6)``
and with ``e4m3(amax / 4)``, and keeps the one whose decoded values have the smaller squared error,
the former where both are equal. Scaled to 4, a block leaves code 6 unused, but has a level at 3/4
of its largest magnitude, in the widest gap of one scaled to 6 ("Four Over Six", Cook et al., 2025).
Bytes and decoding are the same.

The rule ``search`` tries every scale that makes sense (`scale_search`); ``covariance`` chooses the
codes and scales of a whole key by what its error does to the scores of a layer's query rows
(`covariance`), and needs their covariance. docs/reference/rules.md has all of it step by step.
"""

from __future__ import annotations

from functools import partial

import torch

from sdsa_quant.arguments import checked_arguments
from sdsa_quant.errors import DtypeError, InputError
from sdsa_quant.layout import BLOCK, DIM, E2M1_MAX, E4M3_MAX

from . import e2m1, e4m3
from .blocks import passes, quantize_blocks, require_block_values
from .covariance import improve_keys
from .rule_weights import RuleWeights
from .scale_search import best_scales, inverse_of

NONFINITE_CHOICES = ("error", "saturate")
NONFINITE_MESSAGE = "values must be finite (or nonfinite='saturate' given), got NaN or infinity"

AMAX_OVER_6 = "amax/6"
FOUR_OVER_SIX = "4over6"
SEARCH = "search"
COVARIANCE = "covariance"
UNCALIBRATED_RULES = (AMAX_OVER_6, FOUR_OVER_SIX, SEARCH)
RULES = (*UNCALIBRATED_RULES, COVARIANCE)
_SMALLER_CODE = 4.0  # what 4over6 may scale a block's largest magnitude to

# How many to work on at a time, so that the temporaries stay in a CPU's caches: 2 cores, 2026-12.
_BLOCKS_OF_A_SEARCH = 1 << 13
_KEYS_OF_A_DESCENT = 1 << 11
_CUDA_KEYS_OF_A_DESCENT = 1 << 17

# The bits of a magnitude compare like the magnitude, and integer maxima are 4 times faster.
_BITS: dict[torch.dtype, tuple[torch.dtype, int, int]] = {
    # dtype: (integer dtype of the same width, bits of a magnitude, bits of infinity)
    torch.bfloat16: (torch.int16, 0x7FFF, 0x7F80),
    torch.float16: (torch.int16, 0x7FFF, 0x7C00),
    torch.float32: (torch.int32, 0x7FFFFFFF, 0x7F800000),
}


@checked_arguments
def quantize_nvfp4(
    values: torch.Tensor,
    *,
    nonfinite: str = "error",
    rule: str = AMAX_OVER_6,
    weights: RuleWeights | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``codes, scales`` of `values`, bit for bit as the module's docstring says.

    Parameters
    ----------
    values : torch.Tensor
        Input, bfloat16, float16 or float32 ``[..., n]``, ``n`` a multiple of 16, CPU or CUDA.
    nonfinite : str
        ``"error"`` refuses NaN and infinities. ``"saturate"`` does what the hardware does: NaN does
        not count towards ``amax`` and gets code +6, an infinity saturates scale and code.
    rule : str
        ``"amax/6"``, ``"4over6"``, ``"search"`` or ``"covariance"``: how codes and scales are
        chosen. The last is for keys and query rows, ``n`` = 128.
    weights : RuleWeights, optional
        What the rule ``"covariance"`` weighs errors with, and no other rule takes.

    Returns
    -------
    codes : torch.Tensor
        uint8 ``[..., n / 2]``, two codes to a byte.
    scales : torch.Tensor
        float8_e4m3fn ``[..., n / 16]``.

    Raises
    ------
    TypeError
        `values` has another dtype.
    ValueError
        ``n`` is not a multiple of 16, `nonfinite` or `rule` is unknown, `weights` are missing or
        not for this rule, or `values` are not finite and `nonfinite` is ``"error"``.
    """
    if nonfinite not in NONFINITE_CHOICES:
        raise InputError(f"nonfinite must be one of {NONFINITE_CHOICES}, got {nonfinite!r}")
    if rule not in RULES:
        raise InputError(f"rule must be one of {RULES}, got {rule!r}")
    if (weights is not None) != (rule == COVARIANCE):
        raise InputError(f"weights must be given for the rule {COVARIANCE} and for no other")
    if weights is not None:
        return _quantize_keys(values, weights, nonfinite)
    quantize_pass = {
        AMAX_OVER_6: _quantize_blocks,
        FOUR_OVER_SIX: _quantize_blocks_twice,
        SEARCH: _quantize_blocks_at_best_scales,
    }[rule]
    return quantize_blocks(
        values, BLOCK, torch.float8_e4m3fn, partial(quantize_pass, nonfinite=nonfinite)
    )


def query_rule(rule: str) -> str:
    """The rule for the query rows of a cache whose keys were made by `rule`, without statistics."""
    return SEARCH if rule == COVARIANCE else rule


def _quantize_blocks(
    blocks: torch.Tensor,
    workspace: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    *,
    nonfinite: str,
    largest_code: float = E2M1_MAX,
) -> None:
    """`quantize_nvfp4` of ``[blocks, 16]`` in one pass, into `codes` and `scales`.

    `workspace` is int32 with 3 elements for each value. `largest_code` is what a block's largest
    magnitude is scaled to.
    """
    nan = _choose_scales(blocks, workspace, scales, nonfinite, largest_code)
    _encode(blocks, workspace, codes, scales, nan)


def _choose_scales(
    blocks: torch.Tensor,
    workspace: torch.Tensor,
    scales: torch.Tensor,
    nonfinite: str,
    largest_code: float = E2M1_MAX,
) -> torch.Tensor | None:
    """Scales that put each block's largest magnitude at `largest_code`; where there is NaN."""
    integer, magnitude_mask, infinity = _BITS[blocks.dtype]
    count = blocks.numel()
    magnitudes = workspace[count : 3 * count].view(integer)[:count].view(blocks.shape)
    torch.bitwise_and(blocks.view(integer), magnitude_mask, out=magnitudes)
    amax = magnitudes.amax(-1)
    nan = None
    if bool((amax >= infinity).any()):
        if nonfinite == "error":
            raise InputError(NONFINITE_MESSAGE)
        nan = blocks.isnan()
        amax = magnitudes.masked_fill_(nan, 0).amax(-1)
    scales.copy_(e4m3_scales(amax.view(blocks.dtype).float(), largest_code))
    return nan


def _encode(
    blocks: torch.Tensor,
    workspace: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    nan: torch.Tensor | None,
) -> None:
    """The nearest codes of ``[blocks, 16]`` under their scales; +6 where there is NaN."""
    count = blocks.numel()
    scaled = workspace[:count].view(torch.float32).view(blocks.shape)
    scaled.copy_(blocks).mul_(inverse_of(scales.float()).unsqueeze(-1))
    if nan is not None:
        scaled.masked_fill_(nan, E2M1_MAX)
    e2m1.pack_in_place(e2m1.encode_in_place(scaled, workspace[count : 3 * count]), codes)


def _quantize_blocks_twice(
    blocks: torch.Tensor,
    workspace: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    *,
    nonfinite: str,
) -> None:
    """`_quantize_blocks` by the rule ``4over6``."""
    _quantize_blocks(blocks, workspace, codes, scales, nonfinite=nonfinite)
    other_codes, other_scales = torch.empty_like(codes), torch.empty_like(scales)
    _quantize_blocks(
        blocks,
        workspace,
        other_codes,
        other_scales,
        nonfinite=nonfinite,
        largest_code=_SMALLER_CODE,
    )
    values = blocks.float()
    better = _squared_errors(values, other_codes, other_scales) < _squared_errors(
        values, codes, scales
    )
    codes.copy_(torch.where(better.unsqueeze(-1), other_codes, codes))
    scale_bytes = scales.view(torch.uint8)
    scale_bytes.copy_(torch.where(better, other_scales.view(torch.uint8), scale_bytes))


def _quantize_blocks_at_best_scales(
    blocks: torch.Tensor,
    workspace: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    *,
    nonfinite: str,
) -> None:
    """`_quantize_blocks` by the rule ``search``."""
    nan = _choose_scales(blocks, workspace, scales, nonfinite)
    scale_bytes = scales.view(torch.uint8)
    for start in range(0, blocks.shape[0], _BLOCKS_OF_A_SEARCH):
        part = slice(start, start + _BLOCKS_OF_A_SEARCH)
        columns = blocks[part].T.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        base = scale_bytes[part].to(torch.int32)
        scale_bytes[part] = best_scales(columns.abs_(), base).to(torch.uint8)
    _encode(blocks, workspace, codes, scales, nan)


def _quantize_keys(
    values: torch.Tensor, weights: RuleWeights, nonfinite: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_nvfp4` by the rule ``covariance``."""
    require_block_values(values, BLOCK)
    if values.shape[-1] != DIM:
        raise InputError(
            f"values must be [..., {DIM}] for the rule {COVARIANCE}, got {list(values.shape)}"
        )
    codes, scales = quantize_nvfp4(values, nonfinite=nonfinite)
    weights = weights.to(values.device)
    keys, key_codes = values.reshape(-1, DIM), codes.view(-1, DIM // 2)
    key_scales = scales.view(-1, DIM // BLOCK)
    step = _KEYS_OF_A_DESCENT if values.device.type == "cpu" else _CUDA_KEYS_OF_A_DESCENT
    for start in range(0, keys.shape[0], step):
        part = slice(start, start + step)
        improve_keys(keys[part].float(), weights, key_codes[part], key_scales[part])
    return codes, scales


def _squared_errors(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """float32 ``[blocks]`` squared errors of float32 ``[blocks, 16]``, added as a fixed tree.

    The order of the additions is spelled out so that every device chooses the same scale.
    """
    factors = e4m3.decode(scales, unit=e2m1.UNPACKED_UNIT)
    squares = e2m1.unpack_float16(codes).float().mul_(factors.unsqueeze(-1))
    squares.sub_(values).square_()
    while squares.shape[-1] > 1:
        half = squares.shape[-1] // 2
        squares = squares[..., :half] + squares[..., half:]
    return squares.squeeze(-1)


def e4m3_scales(amax: torch.Tensor, largest_code: float = E2M1_MAX) -> torch.Tensor:
    """``e4m3(amax / largest_code)``, saturating at 448: float32 in, float8_e4m3fn out."""
    # A tensor divisor: CUDA turns division by a Python number into a reciprocal multiplication.
    divisor = torch.full_like(amax, largest_code)
    # Clamped before the cast, which gives NaN above 464 on some devices instead of saturating.
    return (amax / divisor).clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn)


@checked_arguments
def dequantize_nvfp4(
    codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """``code * scale``, exact in float32, bfloat16 and float16 (at most 6 significant bits).

    Parameters
    ----------
    codes : torch.Tensor
        Input, uint8 ``[..., n / 2]``.
    scales : torch.Tensor
        Input, float8_e4m3fn or its uint8 bytes ``[..., n / 16]``.
    dtype : torch.dtype
        Of the result; float32 by default.

    Returns
    -------
    torch.Tensor
        ``[..., n]``.

    Raises
    ------
    TypeError
        `codes` or `scales` have the wrong dtype.
    ValueError
        Their shapes do not belong together.
    """
    if codes.dtype != torch.uint8:
        raise DtypeError(f"codes must be uint8, got {codes.dtype}")
    if scales.dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise DtypeError(f"scales must be float8_e4m3fn or uint8, got {scales.dtype}")
    wanted = [*codes.shape[:-1], codes.shape[-1] // (BLOCK // 2)]
    if codes.shape[-1] % (BLOCK // 2) or list(scales.shape) != wanted:
        raise InputError(
            f"scales must be {wanted} for codes {list(codes.shape)}, got {list(scales.shape)}"
        )
    values = torch.empty((*codes.shape[:-1], 2 * codes.shape[-1]), dtype=dtype, device=codes.device)
    blocks = values.view(-1, BLOCK)
    code_rows = codes.reshape(-1, BLOCK // 2)
    scale_rows = scales.view(torch.float8_e4m3fn).reshape(-1)
    for part, workspace in passes(blocks.shape[0], BLOCK, codes.device, workspace=1):
        factors = scale_rows[part].float() * e2m1.UNPACKED_UNIT
        blocks[part] = e2m1.unpack_float16(code_rows[part], workspace=workspace)
        blocks[part].mul_(factors.unsqueeze(-1))
    return values
