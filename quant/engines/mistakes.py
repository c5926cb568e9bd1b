"""What engines get wrong in an indexer, each as a change of what was captured.

Each mistake turns the keys of a request, its query rows or its weights into what an engine that
makes it would have. What comes nearest to what the engine has is then the mistake it makes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from sdsa_quant.capturing.indexers import GATHERED, HALVES
from sdsa_quant.formats.fp8 import quantize_fp8
from sdsa_quant.formats.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from sdsa_quant.formats.scale_order import linear_from_128x4, linear_to_128x4
from sdsa_quant.formats.transforms import hadamard
from sdsa_quant.layout import BLOCK, DIM, PAGE, SCALES_PER_KEY

from .layouts import ENGINE_LAYOUTS, decode_pages


@dataclass(frozen=True, slots=True)
class Captured:
    """Keys and query rows of one request of a layer, all float32 on the CPU."""

    keys: torch.Tensor  # [keys, 128]
    query: torch.Tensor  # [rows, heads, 128]
    weights: torch.Tensor | None  # [rows, heads]
    positions: torch.Tensor  # int64 [rows]
    pool: int
    has_relu: bool = True
    rope: torch.Tensor | None = None  # [n], radians a position
    rope_style: str = HALVES
    rope_start: int = 0
    norms: torch.Tensor | None = None  # [keys, 2], mean and deviation
    norm: torch.Tensor | None = None  # [2, 128], weight and bias

    def key_positions(self) -> torch.Tensor:
        return torch.arange(self.keys.shape[0], dtype=torch.int64, device="cpu")


Change = Callable[[Captured], "Captured | None"]


@dataclass(frozen=True, slots=True)
class Mistake:
    """One thing that engines get wrong."""

    name: str
    """Such as ``weights-dropped``."""
    text: str
    """What the engine does, as a sentence goes on after "the engine"."""
    change: Change
    """What it makes of what was captured; None where that does not apply."""
    of_keys: bool = True
    """Whether a cache of keys shows it."""


def _hadamard(captured: Captured) -> Captured:
    return replace(captured, keys=hadamard(captured.keys))


def _turned(
    values: torch.Tensor, positions: torch.Tensor, rope: torch.Tensor, style: str, start: int
) -> torch.Tensor:
    """RoPE of float32 ``[n, ..., 128]`` at n positions."""
    count = 2 * rope.numel()
    part = values[..., start : start + count]
    shape = [-1, *[1] * (values.dim() - 2), rope.numel()]
    angles = (positions[:, None].double() * rope.double()).view(shape)
    cos, sin = angles.cos().float(), angles.sin().float()
    if style == HALVES:
        first, second = part.chunk(2, -1)
    else:
        first, second = part[..., 0::2], part[..., 1::2]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([values[..., :start], turned, values[..., start + count :]], -1)


def _unturned(
    values: torch.Tensor, positions: torch.Tensor, rope: torch.Tensor, style: str, start: int
) -> torch.Tensor:
    """What `_turned` made these of."""
    back = _turned(values, -positions, rope, HALVES, start)
    if style == HALVES:
        return back
    count = 2 * rope.numel()
    first, second = back[..., start : start + count].chunk(2, -1)
    pairs = torch.stack([first, second], -1).flatten(-2)
    return torch.cat([values[..., :start], pairs, values[..., start + count :]], -1)


def _roped(style: str | None, start: int | None) -> Callable[[Captured], Captured | None]:
    """Keys and query rows with another RoPE; the style or start that is None stays."""

    def change(captured: Captured) -> Captured | None:
        rope = captured.rope
        if rope is None:
            return None
        own = captured.rope_style, captured.rope_start
        new_style = _OTHER_STYLE[own[0]] if style == "other" else own[0]
        new_start = DIM - 2 * rope.numel() - own[1] if start == -1 else own[1]
        if (new_style, new_start) == own and style is not None:
            return None
        both = []
        for values, positions in (
            (captured.keys, captured.key_positions()),
            (captured.query, captured.positions),
        ):
            plain = _unturned(values, positions, rope, *own)
            if style is not None:
                plain = _turned(plain, positions, rope, new_style, new_start)
            both.append(plain)
        return replace(captured, keys=both[0], query=both[1])

    return change


_OTHER_STYLE = {HALVES: GATHERED, GATHERED: HALVES}


def _neighbours(shift: int, size: int) -> Callable[[Captured], Captured]:
    """Each block of `size` values with the scale of that of a neighbouring key."""

    def change(captured: Captured) -> Captured:
        blocks = captured.keys.unflatten(-1, (-1, size))
        largest = blocks.abs().amax(-1, keepdim=True)
        factor = largest.roll(shift, 0) / largest.clamp(min=1e-30)
        return replace(captured, keys=(blocks * factor).flatten(-2))

    return change


def _tiled(read_as_tiled: bool) -> Callable[[Captured], Captured]:
    """NVFP4 keys whose scales are in one order and are read in the other, pages in order."""

    def change(captured: Captured) -> Captured:
        count = captured.keys.shape[0]
        padded = -(-count // (2 * PAGE)) * 2 * PAGE
        codes, scales = quantize_nvfp4(captured.keys)
        plane = torch.zeros(padded, SCALES_PER_KEY, dtype=torch.uint8, device="cpu")
        plane[:count] = scales.view(torch.uint8)
        if read_as_tiled:
            wrong = linear_from_128x4(plane.flatten(), padded, SCALES_PER_KEY)
        else:
            wrong = linear_to_128x4(plane).view(padded, SCALES_PER_KEY)
        return replace(captured, keys=dequantize_nvfp4(codes, wrong[:count].contiguous()))

    return change


def _shifted(keys: int) -> Callable[[Captured], Captured | None]:
    def change(captured: Captured) -> Captured | None:
        if captured.keys.shape[0] <= PAGE:
            return None
        return replace(captured, keys=captured.keys.roll(keys, 0))

    return change


def _wrong_layout(written: str, read: str) -> Callable[[Captured], Captured]:
    """FP8 keys that are written in one page layout and read in another; NaN is read as 0."""

    def change(captured: Captured) -> Captured:
        count = captured.keys.shape[0]
        padded = torch.zeros(-(-count // PAGE) * PAGE, DIM, dtype=torch.float32, device="cpu")
        padded[:count] = captured.keys
        codes, scales = quantize_fp8(padded.view(-1, PAGE, DIM))
        parts = codes.view(torch.uint8), scales[..., None].view(torch.uint8)
        if written.endswith("rows"):
            pages = torch.cat(parts, -1).flatten(1)
        else:
            pages = torch.cat([part.flatten(1) for part in parts], -1)
        keys = decode_pages(pages, ENGINE_LAYOUTS[read]).view(-1, DIM)[:count]
        return replace(captured, keys=keys.nan_to_num(0, 0, 0))

    return change


def _without_norm(captured: Captured) -> Captured | None:
    if captured.norms is None or captured.norm is None:
        return None
    keys, positions, rope = captured.keys, captured.key_positions(), captured.rope
    own = captured.rope_style, captured.rope_start
    if rope is not None:
        keys = _unturned(keys, positions, rope, *own)
    weight, bias = captured.norm
    steady = torch.where(weight.abs() < 1e-6, torch.ones_like(weight), weight)
    keys = (keys - bias) / steady * captured.norms[:, 1:] + captured.norms[:, :1]
    if rope is not None:
        keys = _turned(keys, positions, rope, *own)
    return replace(captured, keys=keys)


def _without_weights(captured: Captured) -> Captured | None:
    return None if captured.weights is None else replace(captured, weights=None)


def _without_relu(captured: Captured) -> Captured | None:
    return replace(captured, has_relu=False) if captured.has_relu else None


HADAMARD = Mistake(
    "hadamard-on-one-side",
    "rotates keys or query rows by the Hadamard matrix, and not both",
    _hadamard,
)
MISTAKES = (
    HADAMARD,
    Mistake(
        "rope-pairs-swapped",
        "turns other pairs of values by RoPE: halves where the model takes neighbours, or the "
        "other way round",
        _roped("other", None),
    ),
    Mistake(
        "rope-on-the-other-end",
        "applies RoPE to the last values of a key where the model turns the first, or the other "
        "way round",
        _roped("same", -1),
    ),
    Mistake("rope-missing", "leaves RoPE out", _roped(None, None)),
    Mistake("key-norm-missing", "leaves the keys' normalization out", _without_norm),
    Mistake(
        "scales-of-neighbours",
        "reads the scale of the next key",
        _neighbours(-1, DIM),
    ),
    Mistake(
        "scales-of-neighbours",
        "reads the scale of the previous key",
        _neighbours(1, DIM),
    ),
    Mistake(
        "scales-of-neighbours",
        "reads the block scales of the next key",
        _neighbours(-1, BLOCK),
    ),
    Mistake(
        "scales-of-neighbours",
        "reads the block scales of the previous key",
        _neighbours(1, BLOCK),
    ),
    Mistake("scales-128x4-as-linear", "reads scales in the 128x4 order as linear", _tiled(False)),
    Mistake("scales-linear-as-128x4", "reads linear scales as in the 128x4 order", _tiled(True)),
    Mistake("pages-off-by-one", "reads each page where the next one is", _shifted(-PAGE)),
    Mistake("pages-off-by-one", "reads each page where the previous one is", _shifted(PAGE)),
    Mistake("keys-off-by-one", "reads each key where the next one is", _shifted(-1)),
    Mistake("keys-off-by-one", "reads each key where the previous one is", _shifted(1)),
    Mistake(
        "wrong-page-layout",
        "reads a page's keys before their scales where each key is followed by its scale",
        _wrong_layout("fp8-rows", "fp8-planes"),
    ),
    Mistake(
        "wrong-page-layout",
        "reads each key followed by its scale where a page's keys come before their scales",
        _wrong_layout("fp8-planes", "fp8-rows"),
    ),
    Mistake("weights-dropped", "leaves the weights of the heads out", _without_weights, False),
    Mistake("relu-missing", "leaves the ReLU out", _without_relu, False),
)
LAYERS_MIXED = "layers-mixed-up"
