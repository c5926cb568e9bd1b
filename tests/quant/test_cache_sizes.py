"""Sizes of caches: what a table takes, what small files claim, and one page of a large one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sdsa_quant import build_cache
from sdsa_quant.errors import CacheFormatError
from sdsa_quant.files.cache_file import count_scales, open_cache, validate_cache
from support.caches import write_cache


def peak_of(call: str, *arguments: object) -> int:
    """Megabytes that a process takes at most for a call of ``sdsa_quant``."""
    code = (
        "import resource, sys; import sdsa_quant as q; from pathlib import Path; "
        "from sdsa_quant.files.cache_file import count_scales; import torch; "
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
        f"{call}; "
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    return int(answer.stdout)


def test_a_table_larger_than_the_keys_takes_little_memory(tmp_path: Path) -> None:
    lengths = torch.tensor([1] * 4000 + [300_000], dtype=torch.int32)
    keys = torch.zeros(int(lengths.sum()), 128, dtype=torch.bfloat16)
    save_file({"keys": keys, "lengths": lengths}, tmp_path / "keys.safetensors")
    path = tmp_path / "cache.safetensors"
    built = "q.build_cache(sys.argv[1], sys.argv[2])"
    assert peak_of(built, tmp_path / "keys.safetensors", path) < 300
    cache = open_cache(path)
    assert cache.block_table.nbytes == 4001 * 4688 * 4
    assert cache.block_table[4000, -1] == cache.pages - 1
    assert cache.block_table[3999].tolist() == [3999] + [-1] * 4687
    checked = "c = q.open_cache(sys.argv[1]); q.validate_cache(c); count_scales(c)"
    assert peak_of(checked, path) < 300


@pytest.mark.parametrize(
    ("requests", "columns"), [(1, 1 << 28), (1 << 28, 1), (1 << 21, 16)], ids=["wide", "long", "2M"]
)
def test_a_small_file_cannot_take_much_memory(tmp_path: Path, requests: int, columns: int) -> None:
    # Sparse files: what they claim costs nothing to write.
    path = tmp_path / "cache.safetensors"
    write_cache(path, torch.ones(3, 128), [3])
    metadata = open_cache(path).header.metadata()
    pages, table, lengths = 4608, requests * columns * 4, requests * 4
    entries = {
        "__metadata__": metadata,
        "pages": {"dtype": "U8", "shape": [1, 4608], "data_offsets": [0, pages]},
        "block_table": {
            "dtype": "I32", "shape": [requests, columns], "data_offsets": [pages, pages + table],
        },
        "context_lengths": {
            "dtype": "I32", "shape": [requests],
            "data_offsets": [pages + table, pages + table + lengths],
        },
    }  # fmt: skip
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 64)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + pages + table + lengths)
    if requests > 1 << 20:
        with pytest.raises(CacheFormatError, match="must have at most 1,048,576 requests"):
            open_cache(path)
        return
    cache = open_cache(path)
    validate_cache(cache)
    count = count_scales(cache)
    assert count is not None
    assert count.blocks == 0


@pytest.mark.parametrize("page", [0, 1, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"format": "bf16"},
        {"format": "nvfp4"},
        {"format": "nvfp4", "layout": "separate", "scale_order": "128x4"},
    ],
    ids=["bf16", "nvfp4", "128x4"],
)
def test_one_page_of_any_cache(
    tmp_path: Path, generator: torch.Generator, page: int, options: dict[str, str]
) -> None:
    save_file({"keys": torch.randn(300, 128, generator=generator)}, tmp_path / "k.safetensors")
    build_cache(tmp_path / "k.safetensors", tmp_path / "c.safetensors", **options)
    cache = open_cache(tmp_path / "c.safetensors")
    whole = cache.paged_keys()
    keys, scales = cache.page(page)
    assert torch.equal(keys, whole.key_cache[page])
    assert (scales is None) == (whole.key_scales is None)
    if whole.key_scales is not None and scales is not None:
        assert torch.equal(scales.view(torch.uint8), whole.key_scales[page].view(torch.uint8))
