"""Cache files: written in any order of pages, read zero-copy, and refused when they are wrong."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sdsa_quant.errors import CacheFormatError, CheckFailedError, InputError
from sdsa_quant.files import safetensors_reader
from sdsa_quant.files.cache_file import (
    CacheFile,
    CacheWriter,
    open_cache,
    sequential_block_table,
    validate_cache,
)
from sdsa_quant.files.cache_header import CacheHeader
from sdsa_quant.formats.nvfp4 import quantize_nvfp4

HEADERS = [
    CacheHeader("nvfp4", source="keys.safetensors"),
    CacheHeader("nvfp4", "separate"),
    CacheHeader("nvfp4", "separate", "128x4"),
    CacheHeader("bf16"),
    CacheHeader("bf16", "separate"),
]
HEADER_IDS = [f"{h.format}-{h.layout}-{h.scale_order}" for h in HEADERS]
LENGTHS = [100, 0, 64, 65, 1]  # 2 + 0 + 1 + 2 + 1 pages


def page_tensors(
    header: CacheHeader, pages: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None]:
    keys = torch.randn(pages * 64, 128, generator=generator).bfloat16()
    if header.format == "bf16":
        return keys.view(-1, 64, 128), None
    codes, scales = quantize_nvfp4(keys)
    return codes.view(-1, 64, 64), scales.view(-1, 64, 8)


def write(
    path: Path,
    header: CacheHeader,
    generator: torch.Generator,
    parts: tuple[tuple[int, int], ...] = ((0, 6),),
    *,
    force: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    keys, scales = page_tensors(header, 6, generator)
    with CacheWriter(path, header, LENGTHS, force=force) as writer:
        for first, end in parts:
            writer.write_pages(
                first, keys[first:end], None if scales is None else scales[first:end]
            )
    assert path.stat().st_size == writer.file_bytes
    return keys, scales


@pytest.mark.parametrize("header", HEADERS, ids=HEADER_IDS)
@pytest.mark.parametrize(
    "parts",
    [((0, 6),), ((3, 6), (0, 1), (1, 3)), tuple((page, page + 1) for page in (5, 0, 4, 1, 3, 2))],
    ids=["whole", "three-parts", "single-pages"],
)
def test_round_trip(
    tmp_path: Path,
    generator: torch.Generator,
    header: CacheHeader,
    parts: tuple[tuple[int, int], ...],
) -> None:
    keys, scales = write(tmp_path / "cache.safetensors", header, generator, parts)
    cache = open_cache(tmp_path / "cache.safetensors")
    validate_cache(cache)
    assert cache.header == header
    assert cache.pages == 6
    paged = cache.paged_keys()
    assert torch.equal(paged.key_cache, keys)
    if scales is None:
        assert paged.key_scales is None
        assert cache.cache_bytes == 6 * 16384
    else:
        assert paged.key_scales is not None
        assert torch.equal(paged.key_scales.view(torch.uint8), scales.view(torch.uint8))
        assert cache.cache_bytes == 6 * 4608
    assert paged.context_lengths.tolist() == LENGTHS
    assert paged.block_table.tolist() == [[0, 1], [-1, -1], [2, -1], [3, 4], [5, -1]]
    assert [entry.name for entry in tmp_path.iterdir()] == ["cache.safetensors"]


def test_odd_page_count_pads_128x4_with_zeros(tmp_path: Path, generator: torch.Generator) -> None:
    header = CacheHeader("nvfp4", "separate", "128x4")
    keys, scales = page_tensors(header, 3, generator)
    with CacheWriter(tmp_path / "c.safetensors", header, [192]) as writer:
        writer.write_pages(0, keys, scales)
    stored = load_file(tmp_path / "c.safetensors")["scales"]
    assert stored.shape == (2048,)
    # In the second tile, the second half of its 128 rows is padding.
    assert not stored[1024:].view(2, 32, 4, 4)[:, :, 2:].any()
    paged = open_cache(tmp_path / "c.safetensors").paged_keys()
    assert scales is not None
    assert paged.key_scales is not None
    assert torch.equal(paged.key_scales.view(torch.uint8), scales.view(torch.uint8))


def test_tiled_scales_can_stay_as_they_are_stored(
    tmp_path: Path, generator: torch.Generator
) -> None:
    header = CacheHeader("nvfp4", "separate", "128x4")
    write(tmp_path / "c.safetensors", header, generator)
    scales = open_cache(tmp_path / "c.safetensors").paged_keys(tiled_scales=True).key_scales
    assert scales is not None
    stored = load_file(tmp_path / "c.safetensors")["scales"]
    assert torch.equal(scales.view(torch.uint8), stored)


def test_keys_are_mapped_not_copied(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_reader, "MAPPED_BYTES", 1)
    path = tmp_path / "cache.safetensors"
    write(path, CacheHeader("nvfp4"), generator)
    paged = open_cache(path).paged_keys()
    assert paged.key_scales is not None
    mapped = [
        [int(end, 16) for end in line.split()[0].split("-")]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(path))
    ]
    for tensor in (paged.key_cache, paged.key_scales):
        assert any(begin <= tensor.data_ptr() < end for begin, end in mapped)
    assert paged.key_cache.data_ptr() % 64 == 0


def test_any_reader_opens_it(tmp_path: Path, generator: torch.Generator) -> None:
    keys, _ = write(tmp_path / "cache.safetensors", HEADERS[0], generator)
    with safe_open(tmp_path / "cache.safetensors", "pt") as file:
        metadata = file.metadata()
        pages = file.get_tensor("pages")
    assert metadata == {
        "format": "sdsa-cache",
        "version": "1",
        "values": "nvfp4",
        "layout": "interleaved",
        "scale_order": "linear",
        "nibble_order": "low-first",
        "page_size": "64",
        "dim": "128",
        "rule": "amax/6",
        "source": "keys.safetensors",
    }
    assert torch.equal(pages[:, :4096].reshape(6, 64, 64), keys)


def test_a_cache_saved_by_the_library_opens(tmp_path: Path, generator: torch.Generator) -> None:
    keys, _ = write(tmp_path / "a.safetensors", HEADERS[0], generator)
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        metadata = file.metadata()
    save_file(load_file(tmp_path / "a.safetensors"), tmp_path / "b.safetensors", metadata)
    paged = open_cache(tmp_path / "b.safetensors").paged_keys()
    assert torch.equal(paged.key_cache, keys)
    assert paged.key_cache.data_ptr() % 16 == 0


def test_no_keys_at_all(tmp_path: Path) -> None:
    for lengths in ([], [0, 0]):
        with CacheWriter(tmp_path / "c.safetensors", HEADERS[0], lengths, force=True):
            pass
        cache = open_cache(tmp_path / "c.safetensors")
        validate_cache(cache)
        assert cache.pages == 0
        assert cache.context_lengths.tolist() == lengths


def test_missing_pages_leave_no_file(tmp_path: Path, generator: torch.Generator) -> None:
    with pytest.raises(InputError, match="6 pages must be written, got 2"):
        write(tmp_path / "cache.safetensors", HEADERS[0], generator, ((0, 2),))
    assert list(tmp_path.iterdir()) == []


def test_wrong_pages_are_refused(tmp_path: Path, generator: torch.Generator) -> None:
    keys, scales = page_tensors(HEADERS[0], 6, generator)
    with CacheWriter(tmp_path / "c.safetensors", HEADERS[0], LENGTHS) as writer:
        with pytest.raises(InputError, match="pages must lie within 0 to 6, got 1 to 7"):
            writer.write_pages(1, keys, scales)
        with pytest.raises(InputError, match=r"key_scales must be \[6, 64, 8\], got None"):
            writer.write_pages(0, keys, None)
        with pytest.raises(InputError, match=r"key_cache must be torch.uint8 \[6, 64, 64\]"):
            writer.write_pages(0, keys[:, :, :32], scales)
        writer.write_pages(0, keys, scales)


@pytest.mark.parametrize("length", [-1, 2**31])
def test_wrong_lengths_are_refused(tmp_path: Path, length: int) -> None:
    with pytest.raises(InputError, match=f"got {length} for request 1"):
        CacheWriter(tmp_path / "c.safetensors", HEADERS[0], [5, length])


def test_headers_that_make_no_sense() -> None:
    with pytest.raises(InputError, match="128x4 needs layout separate"):
        CacheHeader("nvfp4", "interleaved", "128x4")
    with pytest.raises(InputError, match="128x4 needs layout separate and format nvfp4"):
        CacheHeader("bf16", "separate", "128x4")
    with pytest.raises(InputError, match="format must be one of nvfp4, bf16, got 'fp8'"):
        CacheHeader("fp8")


def edit_header(path: Path, change: dict[str, str] | None, **entries: object) -> None:
    """Rewrite a file's header: metadata fields of `change`, whole entries by name."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"].update(change or {})
    header.update(entries)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "other"),
        ("version", "99"),
        ("values", "fp8"),
        ("layout", "diagonal"),
        ("scale_order", "random"),
        ("nibble_order", "high-first"),
        ("page_size", "32"),
        ("dim", "64"),
        ("rule", "amax/4"),
    ],
)
def test_unknown_header_fields_are_named(
    tmp_path: Path, generator: torch.Generator, field: str, value: str
) -> None:
    path = tmp_path / "cache.safetensors"
    write(path, HEADERS[0], generator)
    edit_header(path, {field: value})
    with pytest.raises(CacheFormatError, match=f"header field {field} must be .* got '{value}'"):
        open_cache(path)


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    save_file({"pages": torch.zeros(1, 4608, dtype=torch.uint8)}, tmp_path / "c.safetensors")
    with pytest.raises(CacheFormatError, match="header field format is missing"):
        open_cache(tmp_path / "c.safetensors")


def test_sizes_that_disagree_with_the_header(tmp_path: Path, generator: torch.Generator) -> None:
    path = tmp_path / "cache.safetensors"
    write(path, HEADERS[0], generator)
    original = path.read_bytes()
    wrong = {"dtype": "U8", "shape": [5, 4608], "data_offsets": [0, 6 * 4608]}
    edit_header(path, None, pages=wrong)
    with pytest.raises(InputError, match="is not a whole safetensors file"):
        open_cache(path)
    path.write_bytes(original)
    wrong = {"dtype": "U8", "shape": [12, 2304], "data_offsets": [0, 6 * 4608]}
    edit_header(path, None, pages=wrong)
    with pytest.raises(
        CacheFormatError, match=r"pages must be U8 \[12, 4608\], got U8 \[12, 2304\]"
    ):
        open_cache(path)


def cut(data: bytes, how: str) -> bytes:
    return {"short": data[:-1], "long": data + b"x", "empty": b"", "eight": data[:8]}[how]


@pytest.mark.parametrize("how", ["short", "long", "empty", "eight"])
def test_damaged_files_are_refused(tmp_path: Path, generator: torch.Generator, how: str) -> None:
    path = tmp_path / "cache.safetensors"
    write(path, HEADERS[0], generator)
    path.write_bytes(cut(path.read_bytes(), how))
    with pytest.raises(InputError, match=r"cache\.safetensors: is not a whole safetensors file"):
        open_cache(path)


def complaint(path: Path) -> str | None:
    """What opening and validating a cache says against it."""
    try:
        validate_cache(open_cache(path))
    except (InputError, CheckFailedError) as error:
        return str(error)
    return None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(at=st.integers(0, 1200), byte=st.integers(0, 255))
def test_a_damaged_header_never_escapes_as_another_error(
    tmp_path: Path, at: int, byte: int
) -> None:
    path = tmp_path / "cache.safetensors"
    write(path, HEADERS[1], torch.Generator().manual_seed(0), force=True)
    data = bytearray(path.read_bytes())
    data[at] = byte
    path.write_bytes(data)
    message = complaint(path)
    assert message is None or ("cache.safetensors" in message and "\n" not in message)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.safetensors: cannot be read: No such file"):
        open_cache(tmp_path / "none.safetensors")
    with pytest.raises(InputError, match="but is a folder"):
        open_cache(tmp_path)


def changed(
    tmp_path: Path, generator: torch.Generator, name: str, index: tuple[int, ...], value: int
) -> CacheFile:
    """A cache saved with one number of one tensor changed."""
    path = tmp_path / "cache.safetensors"
    write(path, HEADERS[1], generator)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
    tensors[name][index] = value
    save_file(tensors, path, metadata)
    return open_cache(path)


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("context_lengths", (2,), -5, r"context_lengths\[2\] must not be negative, got -5"),
        ("context_lengths", (2,), 129, "must have 3 columns for the 129 keys of request 2, got 2"),
        ("block_table", (3, 1), 6, r"block_table\[3, 1\] must be a page, 0 to 5, got 6"),
        ("block_table", (3, 1), -1, r"block_table\[3, 1\] must be a page, 0 to 5, got -1"),
        ("scales", (4, 63, 7), 0x7F, "the scale of page 4, key 63, block 7 is NaN"),
        ("scales", (0, 0, 0), 0xFF, "the scale of page 0, key 0, block 0 is NaN"),
        ("scales", (0, 0, 0), 0x80, "the scale of page 0, key 0, block 0 is negative"),
        ("scales", (4, 63, 7), 0xFE, "the scale of page 4, key 63, block 7 is negative"),
        ("scales", (2, 1, 3), 0xB8, "the scale of page 2, key 1, block 3 is negative"),
    ],
)
def test_validation_names_what_is_wrong(
    tmp_path: Path,
    generator: torch.Generator,
    name: str,
    index: tuple[int, ...],
    value: int,
    message: str,
) -> None:
    cache = changed(tmp_path, generator, name, index, value)
    with pytest.raises(CheckFailedError, match=message):
        validate_cache(cache)


def test_unused_table_entries_may_hold_anything(tmp_path: Path, generator: torch.Generator) -> None:
    validate_cache(changed(tmp_path, generator, "block_table", (1, 0), 999))


def test_sequential_block_table() -> None:
    assert sequential_block_table([0, 65, 64]).tolist() == [[-1, -1], [0, 1], [2, -1]]
    assert sequential_block_table([]).shape == (0, 0)


def test_a_full_disk_at_the_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(InputError, match="No space left"):
        CacheWriter(tmp_path / "c.safetensors", HEADERS[0], LENGTHS)
    assert list(tmp_path.iterdir()) == []


def test_pipes_are_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe: must be a regular file"):
        open_cache(tmp_path / "pipe")


def test_a_table_of_absurd_width_is_not_walked(tmp_path: Path, generator: torch.Generator) -> None:
    path = tmp_path / "cache.safetensors"
    with CacheWriter(path, HEADERS[0], []):
        pass
    wide = {"dtype": "I32", "shape": [0, 2**45], "data_offsets": [0, 0]}
    edit_header(path, None, block_table=wide)
    validate_cache(open_cache(path))
