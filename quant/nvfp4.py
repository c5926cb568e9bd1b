"""NVFP4 without a global scale: blocks of 16 values, E2M1 codes, one E4M3 scale per block.

Per block ``x``: ``amax = max |x|``; ``scale = e4m3(amax / 6)``; ``inverse = 1 / scale``, or 0 where
the scale is 0; ``code = e2m1(x * inverse)``. Every step is float32, rounds to nearest even and
saturates. The scale is stored and multiplies on decode. The bits are those of
``flashinfer.sdsa``'s writer and of the golden vectors in ``fixtures/``.
"""

from __future__ import annotations

import torch

from . import e2m1
from .errors import DtypeError, InputError
from .layout import BLOCK, E2M1_MAX, E4M3_MAX

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NONFINITE_CHOICES = ("error", "saturate")

# Values per pass: a few MB of temporaries, so that on a CPU they stay in its caches while each
# operation still has enough work for every thread.
_CPU_VALUES_PER_PASS = 1 << 18  # for each thread
_CUDA_VALUES_PER_PASS = 1 << 26

# The bits of a magnitude compare like the magnitude, and integer maxima are 4 times faster.
_BITS: dict[torch.dtype, tuple[torch.dtype, int, int]] = {
    # dtype: (integer dtype of the same width, bits of a magnitude, bits of infinity)
    torch.bfloat16: (torch.int16, 0x7FFF, 0x7F80),
    torch.float16: (torch.int16, 0x7FFF, 0x7C00),
    torch.float32: (torch.int32, 0x7FFFFFFF, 0x7F800000),
}


def values_per_pass(device: torch.device) -> int:
    """How many values to work on at a time on `device`, to bound the temporaries."""
    if device.type == "cpu":
        return _CPU_VALUES_PER_PASS * torch.get_num_threads()
    return _CUDA_VALUES_PER_PASS


def quantize_nvfp4(
    values: torch.Tensor, *, nonfinite: str = "error"
) -> tuple[torch.Tensor, torch.Tensor]:
    """``codes, scales`` of `values`, bit for bit as the module's docstring says.

    Parameters
    ----------
    values : torch.Tensor
        Input, bfloat16, float16 or float32 ``[..., n]``, ``n`` a multiple of 16, CPU or CUDA.
    nonfinite : str
        ``"error"`` refuses NaN and infinities. ``"saturate"`` does what the hardware does: NaN does
        not count towards ``amax`` and gets code +6, an infinity saturates scale and code.

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
        ``n`` is no multiple of 16, `nonfinite` is unknown, or `values` are not finite and
        `nonfinite` is ``"error"``.
    """
    if values.dtype not in FLOAT_DTYPES:
        raise DtypeError(f"values must be bfloat16, float16 or float32, got {values.dtype}")
    if values.dim() == 0 or values.shape[-1] % BLOCK:
        raise InputError(
            f"values must have a last dimension that is a multiple of {BLOCK}, "
            f"got {list(values.shape)}"
        )
    if nonfinite not in NONFINITE_CHOICES:
        raise InputError(f"nonfinite must be one of {NONFINITE_CHOICES}, got {nonfinite!r}")
    *outer, last = values.shape
    codes = torch.empty((*outer, last // 2), dtype=torch.uint8, device=values.device)
    scales = torch.empty((*outer, last // BLOCK), dtype=torch.float8_e4m3fn, device=values.device)
    blocks = values.reshape(-1, BLOCK)
    code_rows = codes.view(-1, BLOCK // 2)
    scale_rows = scales.view(-1)
    step = min(values_per_pass(values.device) // BLOCK, blocks.shape[0])
    workspace = torch.empty(3 * step * BLOCK, dtype=torch.int32, device=values.device)
    for start in range(0, blocks.shape[0], max(step, 1)):
        part = slice(start, start + step)
        _quantize_blocks(blocks[part], nonfinite, workspace, code_rows[part], scale_rows[part])
    return codes, scales


def _quantize_blocks(
    blocks: torch.Tensor,
    nonfinite: str,
    workspace: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """`quantize_nvfp4` of ``[blocks, 16]`` in one pass, into `codes` and `scales`.

    `workspace` is int32 with 3 elements for each value.
    """
    integer, magnitude_mask, infinity = _BITS[blocks.dtype]
    count = blocks.numel()
    scaled = workspace[:count].view(torch.float32).view(blocks.shape)
    rest = workspace[count : 3 * count]
    magnitudes = rest.view(integer)[:count].view(blocks.shape)
    torch.bitwise_and(blocks.view(integer), magnitude_mask, out=magnitudes)
    amax = magnitudes.amax(-1)
    nan = None
    if bool((amax >= infinity).any()):
        if nonfinite == "error":
            raise InputError(
                "values must be finite (or nonfinite='saturate' given), got NaN or infinity"
            )
        nan = blocks.isnan()
        amax = magnitudes.masked_fill_(nan, 0).amax(-1)
    scales.copy_(e4m3_scales(amax.view(blocks.dtype).float()))
    decoded = scales.float()
    inverse = decoded.reciprocal().masked_fill_(decoded == 0, 0.0)
    scaled.copy_(blocks).mul_(inverse.unsqueeze(-1))
    if nan is not None:
        scaled.masked_fill_(nan, E2M1_MAX)
    e2m1.pack_in_place(e2m1.encode_in_place(scaled, rest), codes)


def e4m3_scales(amax: torch.Tensor) -> torch.Tensor:
    """``e4m3(amax / 6)``, saturating at 448: float32 in, float8_e4m3fn of the same shape out."""
    # A tensor divisor: CUDA turns division by a Python number into a reciprocal multiplication.
    six = torch.full_like(amax, E2M1_MAX)
    # Clamped before the cast, which gives NaN above 464 on some devices instead of saturating.
    return (amax / six).clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn)


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
    step = min(values_per_pass(codes.device) // BLOCK, blocks.shape[0])
    workspace = torch.empty(step * BLOCK, dtype=torch.int32, device=codes.device)
    for start in range(0, blocks.shape[0], max(step, 1)):
        part = slice(start, start + step)
        factors = scale_rows[part].float() * e2m1.UNPACKED_UNIT
        blocks[part] = e2m1.unpack_float16(code_rows[part], workspace=workspace)
        blocks[part].mul_(factors.unsqueeze(-1))
    return values
