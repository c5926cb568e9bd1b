"""Every module that registers instructions."""

from __future__ import annotations

import importlib

MODULES = [
    "async_copies",
    "warp_instructions",
    "atomic_instructions",
    "matrix_loads",
    "matrix_multiplications",
    "barriers",
    "bulk_copies",
    "bulk_groups",
    "control_instructions",
    "integer_instructions",
    "arithmetic_instructions",
    "bit_instructions",
    "comparison_instructions",
    "conversion_instructions",
    "mbarriers",
    "memory_instructions",
    "move_instructions",
    "tcgen05_allocation",
    "tcgen05_copies",
    "tcgen05_mma",
    "tcgen05_synchronization",
    "tcgen05_transfers",
    "tensor_copies",
]


def load_all() -> None:
    """Import them, which registers their instructions."""
    for name in MODULES:
        importlib.import_module(f".{name}", __package__)
