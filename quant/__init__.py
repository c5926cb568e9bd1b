"""NVFP4 numerics, paged caches and accuracy metrics for sparse-attention indexers.

The names below are loaded when they are first used: `sdsa_quant.errors` and `sdsa_quant.layout`
need no torch, and the command line must be able to import them without paying for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .accuracy.metrics import RowAccuracy, row_accuracy
    from .accuracy.summary import Accuracy, summarize_accuracy
    from .accuracy.top_k import top_k_indices
    from .caches import BuiltCaches, build_cache
    from .capturing.capture import sdsa_capture
    from .files.cache_file import CacheFile, CacheWriter, open_cache, validate_cache
    from .files.cache_header import CacheHeader
    from .files.scores_file import ScoresFile, ScoresWriter, open_scores
    from .formats.fp8 import dequantize_fp8, quantize_fp8
    from .formats.mxfp4 import dequantize_mxfp4, quantize_mxfp4
    from .formats.nvfp4 import dequantize_nvfp4, quantize_nvfp4
    from .formats.scale_order import linear_from_128x4, linear_to_128x4
    from .formats.transforms import hadamard
    from .paging import PagedKeys, gather_keys, page_views
    from .quantize_cache import QuantizedCache
    from .selection.scores import (
        block_max_scores,
        mean_pooled_keys,
        relu_sum_scores,
        select_blocks,
    )

__version__ = "0.1.0"

# Every public name, and the module that has it.
_MODULES = {
    "Accuracy": "accuracy.summary",
    "BuiltCaches": "caches",
    "CacheFile": "files.cache_file",
    "CacheHeader": "files.cache_header",
    "CacheWriter": "files.cache_file",
    "PagedKeys": "paging",
    "QuantizedCache": "quantize_cache",
    "RowAccuracy": "accuracy.metrics",
    "ScoresFile": "files.scores_file",
    "ScoresWriter": "files.scores_file",
    "block_max_scores": "selection.scores",
    "build_cache": "caches",
    "dequantize_fp8": "formats.fp8",
    "dequantize_mxfp4": "formats.mxfp4",
    "dequantize_nvfp4": "formats.nvfp4",
    "gather_keys": "paging",
    "hadamard": "formats.transforms",
    "linear_from_128x4": "formats.scale_order",
    "linear_to_128x4": "formats.scale_order",
    "mean_pooled_keys": "selection.scores",
    "open_cache": "files.cache_file",
    "open_scores": "files.scores_file",
    "page_views": "paging",
    "quantize_fp8": "formats.fp8",
    "quantize_mxfp4": "formats.mxfp4",
    "quantize_nvfp4": "formats.nvfp4",
    "relu_sum_scores": "selection.scores",
    "row_accuracy": "accuracy.metrics",
    "sdsa_capture": "capturing.capture",
    "select_blocks": "selection.scores",
    "summarize_accuracy": "accuracy.summary",
    "top_k_indices": "accuracy.top_k",
    "validate_cache": "files.cache_file",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
