"""NVFP4 numerics, paged caches and accuracy metrics for sparse-attention indexers."""
