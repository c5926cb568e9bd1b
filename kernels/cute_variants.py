"""Which kernel variant serves a call, and for which architectures there are kernels.

Names are short and stable: they are part of the cache key of a compiled kernel and of its symbol.
This module imports no CuTe DSL.
"""

from __future__ import annotations

from sdsa_quant.layout import PAGE

from .checks import BF16, NVFP4, ScoreProblem

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


def ctas_per_sm(architecture: str) -> int:
    """CTAs that are meant to run on an SM at a time; SM120 has shared memory for one."""
    return 1 if architecture == "sm_120a" else 2


def variants_of(architecture: str) -> list[str]:
    """Every variant that can be asked for on an architecture."""
    blocks = [f"blocks{rows + 1}" for rows in range(BLOCK_COLUMN_ROWS.get(architecture, 0))]
    nvfp4 = ["mixed", _dot_products(architecture), *blocks]
    return ["bf16", *nvfp4, *(name + SHORT for name in nvfp4)]


def split_variant(variant: str) -> tuple[str, bool]:
    """A variant's name without `SHORT`, and whether it had it."""
    return variant.removesuffix(SHORT), variant.endswith(SHORT)


def _dot_products(architecture: str) -> str:
    return "nvfp4_cvt" if architecture in CONVERTING else "nvfp4"


def variant_of(problem: ScoreProblem, architecture: str, sms: int) -> str:
    """The variant that serves a call on a device of `sms` multiprocessors."""
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
