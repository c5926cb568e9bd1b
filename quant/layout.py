"""Sizes that every part of the project shares: one key, one page, one NVFP4 block; and defaults.

A key is 128 values. NVFP4 packs it into 64 bytes of E2M1 codes (value ``2i`` in the low nibble of
byte ``i``) and 8 E4M3 scale bytes, one per block of 16 values. A page is 64 keys; a record is one
page's bytes in an interleaved cache, keys first and scales after them.

This module imports nothing, so that the command line can read it at no cost.
"""

NVFP4 = "nvfp4"
BF16 = "bf16"
FORMATS = (NVFP4, BF16)  # what a cache holds

# Format of query rows and format of keys by the name of the pair.
FORMAT_PAIRS = {"bf16": (BF16, BF16), "nvfp4": (NVFP4, NVFP4), "mixed": (BF16, NVFP4)}

PAGE = 64  # keys in a page
DIM = 128  # values in a key or a query row
BLOCK = 16  # values that share one scale
SCALES_PER_KEY = 8  # DIM / BLOCK
PACKED_DIM = 64  # bytes of codes in a key, DIM / 2
MAX_ROWS = 8  # query rows in a group, at most
MAX_TOP_K = 65_535  # keys that a call selects in a row, at most

E2M1_MAX = 6.0  # largest magnitude of a code
E4M3_MAX = 448.0  # largest magnitude of a scale
E4M3_MIN_NORMAL = 2.0**-6  # scales below are subnormal: fewer than 4 significant bits
E4M3_MIN = 2.0**-9  # smallest scale that is not 0
E4M3_LAST_SUBNORMAL = 7  # its byte; bytes 1 to 7 are the subnormal scales
NVFP4_MAX = 2688.0  # E2M1_MAX * E4M3_MAX, magnitudes above saturate

CODE_PAGE_BYTES = 4096  # PAGE * PACKED_DIM
SCALE_PAGE_BYTES = 512  # PAGE * SCALES_PER_KEY
NVFP4_RECORD_BYTES = 4608  # CODE_PAGE_BYTES + SCALE_PAGE_BYTES
BF16_RECORD_BYTES = 16384  # PAGE * DIM * 2

KEY_ALIGNMENT_BYTES = 16  # page starts and page strides of key_cache
SCALE_ALIGNMENT_BYTES = 8  # page starts and page strides of key_scales

DEFAULT_TOP_K = (64, 256, 2048)  # numbers of keys an indexer selects
DEFAULT_SOFTMAX_SCALE = DIM**-0.5  # multiplies a score before the softmax of mass@k
# Relative L2 error from which on a stored query row is of no use; NVFP4 of normally distributed
# rows has 0.095.
HIGH_QUERY_ERROR = 0.25

MAX_REQUESTS = 1 << 20  # of a capture or a cache; what is known of each is kept in memory

INT32_MAX = 2**31 - 1  # largest length, and largest number of a page or a request


def record_bytes(key_format: str) -> int:
    """Bytes of one page's record: 4,608 for NVFP4, 16,384 for BF16."""
    return NVFP4_RECORD_BYTES if key_format == NVFP4 else BF16_RECORD_BYTES


def ratio_to_bf16(pages: int, cache_bytes: int) -> float | None:
    """How many times smaller than BF16 a cache is, 3.56 for NVFP4; None without pages."""
    return pages * BF16_RECORD_BYTES / cache_bytes if pages else None
