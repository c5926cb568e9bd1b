"""Files larger than memory, files that change while they are read, and headers that lie."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sdsa_quant.captures.keys import captured_keys, select_keys
from sdsa_quant.errors import InputError
from sdsa_quant.files import safetensors_reader
from sdsa_quant.files.cache_file import open_cache
from sdsa_quant.files.safetensors_reader import DTYPES, open_safetensors
from sdsa_quant.files.tensor_source import open_tensors
from support.caches import write_cache

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def save_header(path: Path, header: object, size: int, *, extra: int = 0) -> Path:
    """A sparse file with a header, and `size` bytes of tensors."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text) + extra) + text)
        file.truncate(8 + len(text) + size)
    return path


@pytest.mark.parametrize("dtype", [name for name, (found, _) in DTYPES.items() if found])
def test_every_dtype_is_read_as_the_library_reads_it(tmp_path: Path, dtype: str) -> None:
    torch_dtype = getattr(torch, DTYPES[dtype][0] or "", None)
    if torch_dtype is None:
        pytest.skip("not in this torch")
    values = torch.arange(1, 17, dtype=torch.uint8).view(torch_dtype)
    if dtype == "BOOL":
        values = torch.tensor([True, False] * 8)
    width = values.numel() // 2
    entry = {"dtype": dtype, "shape": [2, width], "data_offsets": [0, 16]}
    path = save_header(tmp_path / "x.safetensors", {"a": entry}, 0)
    with path.open("ab") as file:
        file.write(bytes(values.view(torch.uint8).tolist()))
    opened, wanted = open_safetensors(path), values.view(2, width)
    for found, part in (
        (opened.get_tensor("a"), wanted),
        (opened.read_rows("a", 1, 2, width), wanted[1:]),
    ):
        assert found.dtype == torch_dtype
        assert torch.equal(found.view(torch.uint8), part.view(torch.uint8))


@pytest.mark.parametrize("gigabytes", [25, 100], ids=str)
def test_a_file_larger_than_memory_opens(tmp_path: Path, gigabytes: int) -> None:
    keys = gigabytes * 10**9 // 256
    entry = {"dtype": "BF16", "shape": [keys, 128], "data_offsets": [0, keys * 256]}
    path = save_header(tmp_path / "x.safetensors", {"keys": entry}, keys * 256)
    source = open_tensors(path)
    (tensor,) = select_keys(source)
    captured = captured_keys(source, tensor)
    assert captured.read(0, keys - 3, keys).count_nonzero() == 0
    mapped = source.read("keys")
    assert mapped.shape == (keys, 128)
    assert mapped[-1].count_nonzero() == 0


def test_a_mapped_tensor_can_be_written_without_changing_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_reader, "MAPPED_BYTES", 1)
    save_file({"a": torch.ones(4)}, tmp_path / "x.safetensors")
    source = open_tensors(tmp_path / "x.safetensors")
    source.read("a").zero_()
    assert torch.equal(open_tensors(tmp_path / "x.safetensors").read("a"), torch.ones(4))


@pytest.mark.parametrize("change", ["shorter", "replaced", "gone"])
def test_a_file_that_changes_is_named(tmp_path: Path, change: str) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"keys": torch.ones(5000, 128)}, path)
    source = open_tensors(path)
    captured = captured_keys(source, source["keys"])
    assert source.read("keys").shape == (5000, 128)
    if change == "shorter":
        os.truncate(path, 1 << 20)
    else:
        path.unlink()
    if change == "replaced":
        save_file({"keys": torch.zeros(5000, 128)}, path)
    words = "cannot be read: No such file" if change == "gone" else "has changed while it was read"
    with pytest.raises(InputError, match=rf"x\.safetensors: {words}"):
        captured.read(0, 4000, 5000)
    if change != "gone":  # what is mapped stays where a file is gone
        with pytest.raises(InputError, match=r"x\.safetensors: has changed while it was read"):
            source.read("keys")


def test_a_cache_that_gets_shorter_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    write_cache(path, torch.ones(40_000, 128), [40_000])
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(InputError, match=r"c\.safetensors: is not a whole safetensors file"):
        open_cache(path)


TWICE = b'{"a": %s, "a": %s}' % ((json.dumps(ENTRY).encode(),) * 2)
META_TWICE = b'{"__metadata__":{"format":"x","format":"y"},"a":%s}' % json.dumps(ENTRY).encode()
BROKEN: dict[str, tuple[Any, str]] = {
    "twice": (TWICE, "the name a stands twice"),
    "metadata-twice": (META_TWICE, "the name format stands twice"),
    "metadata-number": ({"__metadata__": {"values": 5}, "a": ENTRY}, "must be strings by name"),
    "metadata-list": ({"__metadata__": [], "a": ENTRY}, "must be strings by name"),
    "dtype": ({"a": {**ENTRY, "dtype": "F33"}}, "tensor a has no known dtype"),
    "shape": ({"a": {**ENTRY, "shape": [2.0]}}, "tensor a has no shape"),
    "true": ({"a": {**ENTRY, "shape": [True, 2]}}, "tensor a has no shape"),
    "negative": ({"a": {**ENTRY, "shape": [-2, -1]}}, "tensor a has no shape"),
    "offsets": ({"a": {**ENTRY, "data_offsets": [0]}}, "tensor a has no data_offsets"),
    "backwards": ({"a": {**ENTRY, "data_offsets": [8, 0]}}, "tensor a has no data_offsets"),
    "size": ({"a": {**ENTRY, "shape": [3]}}, r"tensor a F32 \[3\] does not have 8 bytes"),
    "gap": ({"a": {**ENTRY, "data_offsets": [8, 16]}}, "does not begin where another ends"),
    "overlap": ({"a": ENTRY, "b": ENTRY}, "tensor b does not begin where another ends"),
    "list": ([], "its header is not a JSON object"),
    "words": (b"{not json", "its header is not usable JSON"),
    "deep": (b"[" * 100_000, "its header is not usable JSON"),
    "bytes": (b'{"\xff": 1}', "its header is not usable JSON"),
    "surrogate": (b'{"\\ud800": 1}', "its header is not usable JSON"),
    "entry": ({"a": 5}, "tensor a has no known dtype"),
}


@pytest.mark.parametrize(("header", "message"), BROKEN.values(), ids=list(BROKEN))
def test_headers_that_lie_are_refused(tmp_path: Path, header: Any, message: str) -> None:
    path = save_header(tmp_path / "x.safetensors", header, 8)
    with pytest.raises(InputError, match=rf"x\.safetensors: is not a whole .*{message}"):
        open_safetensors(path)


@pytest.mark.parametrize(
    ("size", "extra"), [(7, 0), (9, 0), (8, 100)], ids=["short", "long", "header"]
)
def test_files_that_are_not_whole(tmp_path: Path, size: int, extra: int) -> None:
    path = save_header(tmp_path / "x.safetensors", {"a": ENTRY}, size, extra=extra)
    with pytest.raises(InputError, match=r"x\.safetensors: is not a whole safetensors file"):
        open_safetensors(path)


def test_headers_are_bounded(tmp_path: Path) -> None:
    many = {f"t{i}": {**ENTRY, "shape": [0], "data_offsets": [0, 0]} for i in range(100_001)}
    path = save_header(tmp_path / "x.safetensors", many, 0)
    with pytest.raises(InputError, match=r"x\.safetensors: has 100,001 tensors, more than 100,000"):
        open_safetensors(path)
    path = save_header(tmp_path / "y.safetensors", b" " * (20 << 20), 0)
    with pytest.raises(InputError, match=r"y\.safetensors: has a header of 20,971,520 bytes, more"):
        open_safetensors(path)


def test_tensors_without_values_and_without_dimensions(tmp_path: Path) -> None:
    save_file({"a": torch.tensor(3.0), "b": torch.zeros(0, 128)}, tmp_path / "x.safetensors")
    file = open_safetensors(tmp_path / "x.safetensors")
    assert float(file.get_tensor("a")) == 3.0
    assert file.get_tensor("b").shape == (0, 128)


@pytest.mark.parametrize("device", ["meta"])
def test_the_default_device_does_not_matter(tmp_path: Path, device: str) -> None:
    save_file({"a": torch.ones(1 << 19), "b": torch.ones(3)}, tmp_path / "x.safetensors")
    with torch.device(device):
        source = open_tensors(tmp_path / "x.safetensors")
        assert source.read("a").device.type == source.read("b").device.type == "cpu"
        assert source.read_rows("a", 0, 1, 128).device.type == "cpu"
