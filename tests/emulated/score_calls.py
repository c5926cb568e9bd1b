"""Small calls of `indexer_scores` with random real data, the same on every machine.

Everything is made of random integers, so that no library's floating-point functions matter.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from support.problems import Problem, make_problem

_POISON = 0xFF  # of bytes of keys and scales that are in no page


@dataclass(frozen=True)
class ScoreCall:
    """What a problem is made of, and the kernel variant that serves it on SM90."""

    variant: str
    kind: str
    rows: int
    lengths: tuple[int, ...]
    separate: bool = False

    @property
    def name(self) -> str:
        layout = "separate" if self.separate else "interleaved"
        return f"{self.variant}, {self.rows} rows, {layout}"


CALLS = (
    ScoreCall("bf16", "bf16", 1, (1, 0, 70, 129)),
    ScoreCall("bf16", "bf16", 3, (64, 17)),
    ScoreCall("bf16", "bf16", 8, (130,)),
    ScoreCall("mixed", "mixed", 1, (1, 70, 64)),
    ScoreCall("mixed", "mixed", 8, (129, 0, 3), separate=True),
    ScoreCall("nvfp4", "nvfp4", 3, (65, 0, 128)),
    ScoreCall("nvfp4", "nvfp4", 8, (1, 200), separate=True),
    ScoreCall("blocks1", "nvfp4", 1, (1, 0, 70, 129)),
    ScoreCall("blocks1", "nvfp4", 1, (300, 5), separate=True),
    ScoreCall("blocks2", "nvfp4", 2, (63, 129, 0)),
)


def _random_bytes(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, tensor.shape, generator=generator).to(torch.uint8)


def _fill_bf16(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Random signs and mantissas, exponents from -6 to 6, wherever there is no poison."""
    bits = tensor.view(torch.int16)
    mantissas = torch.randint(0, 128, tensor.shape, generator=generator)
    exponents = torch.randint(121, 134, tensor.shape, generator=generator)
    signs = torch.randint(0, 2, tensor.shape, generator=generator)
    fresh = ((signs * -32768) + exponents * 128 + mantissas).to(torch.int16)
    bits.copy_(torch.where(bits == -1, bits, fresh))


def _fill_scales(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Random positive E4M3 from 2^-3 to 2^3, wherever there is no poison."""
    scales = tensor.view(torch.uint8)
    fresh = torch.randint(0x20, 0x50, tensor.shape, generator=generator).to(torch.uint8)
    scales.copy_(torch.where(scales == _POISON, scales, fresh))


def make_call(call: ScoreCall) -> Problem:
    """The problem of a call."""
    seed = int.from_bytes(hashlib.sha256(call.name.encode()).digest()[:6], "little")
    generator = torch.Generator().manual_seed(seed)
    problem = make_problem(
        call.lengths,
        generator=generator,
        kind=call.kind,
        rows_per_group=call.rows,
        integers=True,
        separate=call.separate,
        spare_pages=1,
    )
    if problem.query_scales is not None:
        _fill_scales(problem.query_scales, generator)
    else:
        _fill_bf16(problem.query, generator)
    if problem.key_scales is not None:
        _fill_scales(problem.key_scales, generator)
    else:
        _fill_bf16(problem.key_cache, generator)
    return problem


def digest(problem: Problem) -> str:
    """Of every tensor's values."""
    hashed = hashlib.sha256()
    for tensor in vars(problem).values():
        if tensor is not None:
            hashed.update(tensor.contiguous().view(torch.uint8).numpy().tobytes() + b"\0")
    return hashed.hexdigest()[:16]
