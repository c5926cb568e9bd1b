"""Every module that registers instructions."""

from __future__ import annotations

import importlib

MODULES = [
    "copies.async_copies",
    "instructions.warps",
    "instructions.atomics",
    "instructions.matrix_loads",
    "instructions.matrix_multiplications",
    "instructions.barriers",
    "copies.bulk_copies",
    "copies.bulk_groups",
    "instructions.control",
    "instructions.launch_control",
    "instructions.integers",
    "instructions.arithmetic",
    "instructions.bits",
    "instructions.comparisons",
    "instructions.conversions",
    "instructions.mbarriers",
    "instructions.memory_accesses",
    "instructions.moves",
    "tcgen05.allocation",
    "tcgen05.copies",
    "tcgen05.mma",
    "tcgen05.synchronization",
    "tcgen05.transfers",
    "copies.tensor_copies",
    "copies.tensor_map_changes",
    "copies.remote_stores",
]


def load_all() -> None:
    """Import them, which registers their instructions."""
    for name in MODULES:
        importlib.import_module(f"emulator.{name}")
