"""Scoring kernels for NVFP4 and BF16 sparse-attention indexers."""

from .backends import backend_names
from .prefill.candidates import top_k_from_candidates
from .prefill.sample import gather_key_sample, thresholds_from_sample
from .prefill.select import indexer_threshold_select
from .quantize_write import quantize_write_index_qk_nvfp4, quantize_write_nvfp4
from .scores import indexer_scores
from .selection.indexer import indexer_top_k
from .selection.rescore import rescore_top_k
from .selection.select import select_top_k

__all__ = [
    "backend_names",
    "gather_key_sample",
    "indexer_scores",
    "indexer_threshold_select",
    "indexer_top_k",
    "quantize_write_index_qk_nvfp4",
    "quantize_write_nvfp4",
    "rescore_top_k",
    "select_top_k",
    "thresholds_from_sample",
    "top_k_from_candidates",
]
