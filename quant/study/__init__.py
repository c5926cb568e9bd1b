"""Studies of accuracy: every layer and request of a capture, every format and transform.

    from sdsa_quant import study

    report = study.run("keys.safetensors", "queries.safetensors", "folder", lengths="lengths")

The names below are loaded when they are first used: a report can be read without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .report import StudyReport as StudyReport
    from .verdict import Goal as Goal
    from .whole_study import run as run

_MODULES = {"Goal": "verdict", "StudyReport": "report", "run": "whole_study"}

__all__ = ["Goal", "StudyReport", "run"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
