"""Captures as NumPy and torch save them; what cannot be read is named with what converts it."""

from __future__ import annotations

import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from sdsa_quant.captures.keys import captured_keys, lengths_for, select_keys
from sdsa_quant.errors import InputError
from sdsa_quant.files.tensor_source import open_tensors


def save_npy(path: Path, tensor: torch.Tensor, descr: str, *, order: bool = False) -> Path:
    """A ``.npy`` file of version 1, written by hand: NumPy need not be here."""
    header = f"{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {tuple(tensor.shape)}, }}"
    header += " " * (-(11 + len(header)) % 64) + "\n"
    data = bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())
    start = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()
    path.write_bytes(start + data)
    return path


@pytest.mark.parametrize(
    ("dtype", "descr"),
    [(torch.float32, "<f4"), (torch.float16, "<f2"), (torch.int64, "<i8"), (torch.uint8, "|u1")],
    ids=str,
)
def test_an_array_has_the_name_of_its_file(tmp_path: Path, dtype: torch.dtype, descr: str) -> None:
    values = torch.arange(5 * 128).view(5, 128).to(dtype)
    source = open_tensors(save_npy(tmp_path / "keys.npy", values, descr))
    assert [tensor.name for tensor in source] == ["keys"]
    assert torch.equal(source.read("keys"), values)
    assert torch.equal(source.read_rows("keys", 1, 3, 128), values[1:3])


def test_a_folder_of_arrays_is_a_capture(tmp_path: Path) -> None:
    save_npy(tmp_path / "keys.npy", torch.ones(10, 128), "<f4")
    save_npy(tmp_path / "lengths.npy", torch.tensor([6, 4]), "<i8")
    source = open_tensors(tmp_path)
    (tensor,) = select_keys(source)
    keys = captured_keys(source, tensor, lengths_for(source, tensor, None, None))
    assert keys.context_lengths == (6, 4)


@pytest.mark.parametrize("old", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", [None, "layers.3.keys"], ids=["tensor", "dict"])
def test_what_torch_saves_is_read(tmp_path: Path, name: str | None, old: bool) -> None:
    values = torch.randn(6, 128).bfloat16()
    content: Any = values if name is None else {name: values, "step": 3}
    torch.save(content, tmp_path / "keys.pt", _use_new_zipfile_serialization=not old)
    source = open_tensors(tmp_path / "keys.pt")
    (tensor,) = select_keys(source)
    assert tensor.name == (name or "keys")
    assert (tensor.dtype, tensor.shape) == ("BF16", (6, 128))
    assert torch.equal(captured_keys(source, tensor).read(0, 2, 5), values[2:5])


class Payload:
    """Runs a command where it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch executed",)


def test_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"keys": torch.ones(2, 128), "x": Payload()}, tmp_path / "keys.pt")
    with pytest.raises(InputError, match=r"keys\.pt: holds other things than tensors"):
        open_tensors(tmp_path / "keys.pt")
    assert not (tmp_path / "executed").exists()


def test_other_files_are_named_with_what_converts_them(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "c.npz", "w") as archive:
        archive.writestr("keys.npy", b"")
    with pytest.raises(InputError, match=r"c\.npz: is a NumPy archive.*import numpy; from safe"):
        open_tensors(tmp_path / "c.npz")
    (tmp_path / "c.bin").write_bytes(bytes(2560))
    with pytest.raises(InputError, match=r"c\.bin: has no header.*import torch; from safetensors"):
        open_tensors(tmp_path / "c.bin")


@pytest.mark.parametrize(
    ("start", "what"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "is a Git LFS pointer"),
        (b"GGUF\3\0\0\0", "is a GGUF file"),
        (b"\x89HDF\r\n\x1a\n", "is an HDF5 file"),
        (b"\x1f\x8b\x08\0", "is compressed by gzip"),
    ],
    ids=["lfs", "gguf", "hdf5", "gzip"],
)
def test_files_of_other_kinds_are_named(tmp_path: Path, start: bytes, what: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(start + bytes(100))
    with pytest.raises(InputError, match=rf"x\.safetensors: {what}"):
        open_tensors(tmp_path / "x.safetensors")


def test_damaged_files_are_named(tmp_path: Path) -> None:
    whole = save_npy(tmp_path / "a.npy", torch.ones(4, 128), "<f4").read_bytes()
    for number, content in enumerate((whole[:-1], whole + b"x", whole[:30], whole[:9])):
        path = tmp_path / f"b{number}.npy"
        path.write_bytes(content)
        with pytest.raises(InputError, match=rf"b{number}\.npy: is not a whole \.npy file"):
            open_tensors(path)
    torch.save(torch.ones(400, 128), tmp_path / "c.pt")
    (tmp_path / "d.pt").write_bytes((tmp_path / "c.pt").read_bytes()[:-5000])
    with pytest.raises(InputError, match=r"d\.pt: is not a whole \.pt file"):
        open_tensors(tmp_path / "d.pt")
    torch.save([torch.ones(3)], tmp_path / "e.pt")
    with pytest.raises(InputError, match=r"e\.pt: must hold a tensor, or tensors by name"):
        open_tensors(tmp_path / "e.pt")


@pytest.mark.parametrize(("descr", "order"), [("<c8", False), (">f4", False), ("<f4", True)])
def test_arrays_of_other_kinds_are_refused(tmp_path: Path, descr: str, order: bool) -> None:
    path = save_npy(tmp_path / "a.npy", torch.ones(4, 128), descr, order=order)
    with pytest.raises(InputError, match=r"a\.npy: holds dtype .*are read"):
        open_tensors(path)
