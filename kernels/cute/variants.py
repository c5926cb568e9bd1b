"""Which kernel variant serves a call, and for which architectures there are kernels.

Names are short and stable: they are part of the cache key of a compiled kernel and of its symbol.
This module imports no CuTe DSL.
"""

from __future__ import annotations

import torch

from sdsa_kernels.problem import ScoreProblem
from sdsa_quant.layout import BF16, NVFP4, PAGE

ARCHITECTURES: dict[tuple[int, int], str] = {
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (12, 0): "sm_120a",
}

# Suffix of the variants for short lists, where two warps share a page, and the most pages of such a
# list for every multiprocessor: two for each team, so that all are on their way at once.
SHORT = "_short"
SHORT_PAGES_OF_SM = 16

# Rows per group up to which scales are applied to partial dots instead of to values, where int8
# MMAs run at full speed.
BLOCK_COLUMN_ROWS = {"sm_90a": 2}

# Architectures with an instruction that converts E2M1 to FP16.
CONVERTING = ("sm_100a", "sm_103a", "sm_120a")

# Architectures with tcgen05, tensor cores of the whole SM, and the variants for it.
TENSOR_CORE = ("sm_100a", "sm_103a")
TILED_SCALES_VARIANT = "tcgen05_nvfp4_128x4"
TENSOR_CORE_VARIANTS = ("tcgen05_bf16", "tcgen05_nvfp4", TILED_SCALES_VARIANT)
# The kernels of `select_top_k`, which need nothing that any of the architectures lacks.
MARK_VARIANT, FINISH_VARIANT = "select_mark", "select_finish"
SELECTING_VARIANTS = (MARK_VARIANT, FINISH_VARIANT)

_TENSOR_MAP_STRIDES = range(16, 2**40, 16)  # bytes
_TENSOR_MAP_SIZES = range(1, 2**32 + 1)


def ctas_per_sm(architecture: str) -> int:
    """CTAs of a warp-level kernel on an SM at a time; SM120 has shared memory for one."""
    return 1 if architecture == "sm_120a" else 2


def variants_of(architecture: str) -> list[str]:
    """Every variant of the scoring kernels that can be asked for on an architecture."""
    blocks = [f"blocks{rows + 1}" for rows in range(BLOCK_COLUMN_ROWS.get(architecture, 0))]
    nvfp4 = ["mixed", _dot_products(architecture), *blocks]
    tensor_core = TENSOR_CORE_VARIANTS if architecture in TENSOR_CORE else ()
    return ["bf16", *nvfp4, *(name + SHORT for name in nvfp4), *tensor_core]


def split_variant(variant: str) -> tuple[str, bool]:
    """A variant's name without `SHORT`, and whether it had it."""
    return variant.removesuffix(SHORT), variant.endswith(SHORT)


def loaded_together(variant: str, architecture: str) -> list[str]:
    """The variants that serve calls which differ from one's in nothing but sizes.

    They are loaded with it, so that no size compiles late.
    """
    if variant in SELECTING_VARIANTS:
        return list(SELECTING_VARIANTS)
    name, _ = split_variant(variant)
    return [each for each in (name, name + SHORT) if each in variants_of(architecture)]


def _dot_products(architecture: str) -> str:
    return "nvfp4_cvt" if architecture in CONVERTING else "nvfp4"


def tensor_core_variant(problem: ScoreProblem, architecture: str) -> str | None:
    """The tcgen05 variant that can serve a call, if any."""
    if architecture not in TENSOR_CORE or problem.query_format != problem.key_format:
        return None
    if not (_fits_tensor_map(problem.query) and _fits_tensor_map(problem.key_cache)):
        return None
    return TILED_SCALES_VARIANT if problem.tiled_scales else f"tcgen05_{problem.key_format}"


def _fits_tensor_map(tensor: torch.Tensor) -> bool:
    """Whether a tensor map can describe the rows or pages of a checked call.

    Strides below the size of what they separate are left out: what the driver makes of rows that
    overlap is not documented.
    """
    count = tensor.shape[0]
    if count == 1:
        return True
    stride = tensor.stride(0) * tensor.element_size()
    size = tensor[0].numel() * tensor.element_size() if count else 0
    return count in _TENSOR_MAP_SIZES and stride in _TENSOR_MAP_STRIDES and stride >= size


def warp_variant(problem: ScoreProblem, architecture: str, sms: int) -> str:
    """The warp-level variant that serves a call, if its scales are linear, on `sms` SMs."""
    if problem.key_format == BF16:
        return "bf16"
    capacity = problem.groups * -(-problem.max_context // PAGE)
    short = capacity <= SHORT_PAGES_OF_SM * sms
    if problem.query_format != NVFP4:
        name = "mixed"
    elif problem.rows_per_group <= BLOCK_COLUMN_ROWS.get(architecture, 0):
        name = f"blocks{problem.rows_per_group}"
    else:
        name = _dot_products(architecture)
    return name + SHORT if short else name
