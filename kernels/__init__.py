"""Scoring kernels for NVFP4 and BF16 sparse-attention indexers."""

from .backends import backend_names
from .quantize_write import quantize_write_nvfp4
from .scores import indexer_scores
from .selection.indexer import indexer_top_k
from .selection.select import select_top_k

__all__ = [
    "backend_names",
    "indexer_scores",
    "indexer_top_k",
    "quantize_write_nvfp4",
    "select_top_k",
]
