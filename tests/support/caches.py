"""Small cache files for tests, made from given keys without the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from sdsa_quant.files.cache_file import CacheFile, CacheWriter, open_cache
from sdsa_quant.files.cache_header import CacheHeader
from sdsa_quant.formats.nvfp4 import quantize_nvfp4
from sdsa_quant.layout import DIM, PACKED_DIM, PAGE, SCALES_PER_KEY


def write_cache(
    path: Path, keys: torch.Tensor, lengths: Sequence[int], values: str = "nvfp4"
) -> CacheFile:
    """Write bfloat16 keys ``[sum of lengths, 128]`` as a cache file, and open it."""
    header = CacheHeader(values, source="keys.safetensors")
    page = 0
    with CacheWriter(path, header, lengths, force=True) as writer:
        for of_request in keys.split(list(lengths)):
            blocks = -(-of_request.shape[0] // PAGE)
            padded = torch.zeros(blocks * PAGE, DIM, dtype=torch.bfloat16)
            padded[: of_request.shape[0]] = of_request
            if values == "nvfp4":
                codes, scales = quantize_nvfp4(padded)
                writer.write_pages(
                    page, codes.view(-1, PAGE, PACKED_DIM), scales.view(-1, PAGE, SCALES_PER_KEY)
                )
            else:
                writer.write_pages(page, padded.view(-1, PAGE, DIM), None)
            page += blocks
    return open_cache(path)


def save_sparse_keys(path: Path, count: int) -> Path:
    """A file of `count` zero keys that takes no space on the disk."""
    tensor = {"dtype": "BF16", "shape": [count, 128], "data_offsets": [0, count * 256]}
    header = json.dumps({"keys": tensor}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + count * 256)
    return path
