"""Scoring kernels for NVFP4 and BF16 sparse-attention indexers."""

from .backends import backend_names
from .quantize_write import quantize_write_nvfp4
from .scores import indexer_scores

__all__ = ["backend_names", "indexer_scores", "quantize_write_nvfp4"]
