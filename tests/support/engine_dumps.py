"""Dumps of engines' caches, and decoders of theirs written from the formats' definitions alone."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e4m3(byte: int) -> float:
    """OCP E4M3: sign, four bits of exponent with bias 7, three of mantissa; no infinity."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 0xF, byte & 7
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def fp8_key(codes: bytes, scale: bytes) -> list[float]:
    """128 E4M3 codes times a little-endian FP32."""
    (factor,) = struct.unpack("<f", scale)
    return [e4m3(code) * factor for code in codes]


def mxfp4_key(codes: bytes, scales: bytes) -> list[float]:
    """128 E2M1 codes, the even ones in low nibbles, times 2^(byte - 127) of each 32."""
    values = []
    for index in range(128):
        code = codes[index // 2] >> (4 * (index % 2)) & 0xF
        sign = -1.0 if code & 8 else 1.0
        values.append(sign * E2M1[code & 7] * 2.0 ** (scales[index // 32] - 127))
    return values


@dataclass(frozen=True, slots=True)
class Dump:
    """Tensors of a dump, and the keys of each request as their definitions have them."""

    tensors: dict[str, torch.Tensor]
    keys: list[torch.Tensor]  # float32 [keys, 128], products of doubles rounded once


def engine_dump(layout: str, lengths: list[int], seed: int = 3, outlier: float = 1.0) -> Dump:
    """Random codes with scales as quantized keys have them, in pages that are not in order."""
    drawn = torch.Generator().manual_seed(seed)
    kind, order = layout.split("-")
    code_bytes, scale_bytes = (128, 4) if kind == "fp8" else (64, 4)
    blocks = [-(-length // 64) for length in lengths]
    count = sum(blocks) + 2  # and pages that are nobody's, with bytes of anything
    shuffled = torch.randperm(count, generator=drawn)
    table = torch.full((len(lengths), max(blocks)), -1, dtype=torch.int32)
    pages = torch.randint(0, 256, (count, 64 * (code_bytes + scale_bytes)), generator=drawn)
    pages = pages.to(torch.uint8)
    keys = []
    first = 0
    for request, length in enumerate(lengths):
        rows = []
        for block in range(blocks[request]):
            page = int(shuffled[first + block])
            table[request, block] = page
            values = torch.randn(64, 128, generator=drawn)
            values[:, 5] *= outlier
            codes, scales = _quantized(kind, values)
            if order == "rows":
                pages[page] = torch.cat([codes, scales], 1).flatten()
            else:
                pages[page] = torch.cat([codes.flatten(), scales.flatten()])
            decode = fp8_key if kind == "fp8" else mxfp4_key
            rows += [
                decode(bytes(code.tolist()), bytes(scale.tolist()))
                for code, scale in zip(codes, scales, strict=True)
            ]
        keys.append(torch.tensor(rows[:length], dtype=torch.float64).view(-1, 128).float())
        first += blocks[request]
    tensors = {
        "pages": pages.view(count, 64, code_bytes + scale_bytes),
        "block_table": table,
        "context_lengths": torch.tensor(lengths, dtype=torch.int32),
    }
    return Dump(tensors, keys)


def _quantized(kind: str, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 codes and scales of ``[64, 128]``, near enough to what engines write."""
    if kind == "fp8":
        scales = (values.abs().amax(-1) / 448).float()
        codes = (values / scales[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
        return codes, scales.view(torch.uint8).view(64, 4)
    blocks = values.view(64, 4, 32)
    exponents = blocks.abs().amax(-1).log2().floor() - 2
    scaled = blocks / (2.0 ** exponents[..., None])
    levels = torch.tensor(E2M1)
    nearest = (scaled.abs()[..., None] - levels).abs().argmin(-1)
    nibbles = (nearest | (scaled < 0).long() << 3).view(64, 128)
    codes = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).to(torch.uint8)
    return codes, (exponents + 127).to(torch.uint8)
