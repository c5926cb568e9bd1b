"""NVFP4 numerics, paged caches and accuracy metrics for sparse-attention indexers."""

from .cache_file import CacheFile, CacheHeader, CacheWriter, open_cache, validate_cache
from .nvfp4 import dequantize_nvfp4, quantize_nvfp4
from .paging import PagedKeys, gather_keys, page_views
from .scale_order import linear_from_128x4, linear_to_128x4

__all__ = [
    "CacheFile",
    "CacheHeader",
    "CacheWriter",
    "PagedKeys",
    "dequantize_nvfp4",
    "gather_keys",
    "linear_from_128x4",
    "linear_to_128x4",
    "open_cache",
    "page_views",
    "quantize_nvfp4",
    "validate_cache",
]
