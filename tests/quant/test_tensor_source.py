"""Tensors found in files, folders and indices; damage is told by the name of the file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sdsa_quant.errors import InputError
from sdsa_quant.files.names import common_ends, natural_order, without_common_ends
from sdsa_quant.files.safetensors_reader import header_metadata
from sdsa_quant.files.tensor_source import (
    StoredTensor,
    open_tensors,
    source_files,
)


def tensor(value: float, size: int = 4) -> torch.Tensor:
    return torch.full((size,), float(value))


def save_index(path: Path, places: object) -> Path:
    path.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


def test_one_file(tmp_path: Path) -> None:
    save_file({"b": tensor(2), "a": tensor(1)}, tmp_path / "x.safetensors", {"who": "me"})
    source = open_tensors(tmp_path / "x.safetensors")
    assert [stored.name for stored in source] == ["a", "b"]
    assert source["a"] == StoredTensor("a", "F32", (4,), tmp_path / "x.safetensors")
    assert source.metadata == {"who": "me"}
    assert torch.equal(source.read("b"), tensor(2))
    assert len(source) == 2
    assert "c" not in source
    with pytest.raises(InputError, match=r"no tensor is named c; found a \(F32 \[4\]\), b"):
        source["c"]


def test_names_are_in_natural_order(tmp_path: Path) -> None:
    names = [f"layers.{layer}.keys" for layer in (10, 2, 0, 1)] + ["layers.2.a", "keys"]
    save_file({name: tensor(0) for name in names}, tmp_path / "x.safetensors")
    assert [stored.name for stored in open_tensors(tmp_path / "x.safetensors")] == [
        "keys",
        "layers.0.keys",
        "layers.1.keys",
        "layers.2.a",
        "layers.2.keys",
        "layers.10.keys",
    ]
    assert natural_order("a2") < natural_order("a10") < natural_order("b1")


def test_reading_copies_nothing(tmp_path: Path) -> None:
    save_file({"a": tensor(1, 1 << 20)}, tmp_path / "x.safetensors")
    source = open_tensors(tmp_path / "x.safetensors")
    assert source.read("a").data_ptr() == source.read("a").data_ptr()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, 8), (torch.float8_e4m3fn, 4), (torch.int64, 32), (torch.bool, 4)],
    ids=str,
)
def test_bytes(tmp_path: Path, dtype: torch.dtype, expected: int) -> None:
    save_file({"a": tensor(1).to(dtype)}, tmp_path / "x.safetensors")
    assert open_tensors(tmp_path / "x.safetensors")["a"].bytes == expected


def test_an_index_is_the_authority(tmp_path: Path) -> None:
    # Two listed shards, each with a tensor that the index gives to the other, and a stray shard.
    save_file({"a": tensor(1), "b": tensor(-1)}, tmp_path / "m-1-of-2.safetensors")
    save_file({"b": tensor(2), "a": tensor(-1)}, tmp_path / "m-2-of-2.safetensors")
    save_file({"a": tensor(9), "z": tensor(9)}, tmp_path / "stray.safetensors")
    places = {"a": "m-1-of-2.safetensors", "b": "m-2-of-2.safetensors"}
    index = save_index(tmp_path / "m.safetensors.index.json", places)
    for path in (tmp_path, index):
        source = open_tensors(path)
        assert [stored.name for stored in source] == ["a", "b"]
        assert torch.equal(source.read("a"), tensor(1))
        assert torch.equal(source.read("b"), tensor(2))
        assert [file.name for file in source.files] == list(places.values())


def test_a_folder_without_an_index_merges_its_files(tmp_path: Path) -> None:
    save_file({"a": tensor(1)}, tmp_path / "x.safetensors")
    save_file({"b": tensor(2)}, tmp_path / "y.safetensors")
    (tmp_path / "notes.txt").write_text("not a tensor")
    assert [stored.name for stored in open_tensors(tmp_path)] == ["a", "b"]


def test_names_that_files_without_an_index_share_are_preceded_by_the_file(tmp_path: Path) -> None:
    for layer in (10, 2):
        file = tmp_path / f"layer_{layer}.safetensors"
        save_file({"keys": tensor(layer), f"only{layer}": tensor(0)}, file)
    source = open_tensors(tmp_path)
    names = ["layer_2:keys", "layer_2:only2", "layer_10:keys", "layer_10:only10"]
    assert [stored.name for stored in source] == names
    assert source["layer_10:keys"].name_in_file == "keys"
    assert torch.equal(source.read("layer_2:keys"), tensor(2))
    with pytest.raises(InputError, match=r"no tensor is named keys; found layer_2:keys"):
        source["keys"]


@pytest.mark.parametrize(
    ("names", "ends"),
    [
        (["layers.1.keys", "layers.10.keys"], ("layers.", ".keys")),
        (["a.keys", "ab.keys"], ("", ".keys")),
        (["k1", "k1"], ("k1", "")),
        (["x.x", "x.x.x"], ("x.x", "")),
        (["one"], ("one", "")),
        (["a", "b"], ("", "")),
    ],
    ids=["numbers", "words", "same", "overlap", "one", "nothing"],
)
def test_what_names_have_in_common(names: list[str], ends: tuple[str, str]) -> None:
    assert common_ends(names) == ends


def test_what_tells_names_apart() -> None:
    assert without_common_ends(["l.1.k", "l.10.k"]) == ("l.*.k", ["1", "10"])
    assert without_common_ends(["l.1.k"]) == ("*", ["l.1.k"])
    assert without_common_ends(["a", "b"]) == ("*", ["a", "b"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "must have a weight_map"),
        ('{"weight_map": {"a": 3}}', "must have a weight_map"),
        ('{"weight_map": {"a": "../x.safetensors"}}', r"beside the index, got '\.\./x"),
        ('{"weight_map": {"a": "gone.safetensors"}}', r"gone\.safetensors: cannot be read"),
        ('{"weight_map": {"q": "x.safetensors"}}', r"puts tensor q into x\.safetensors, which"),
    ],
    ids=["cut", "list", "number", "outside", "gone-shard", "gone-tensor"],
)
def test_bad_indices(tmp_path: Path, content: str, message: str) -> None:
    save_file({"a": tensor(1)}, tmp_path / "x.safetensors")
    (tmp_path / "m.safetensors.index.json").write_text(content)
    with pytest.raises(InputError, match=message):
        open_tensors(tmp_path)


def test_several_indices_have_to_be_chosen_from(tmp_path: Path) -> None:
    for name in ("m", "n"):
        save_index(tmp_path / f"{name}.safetensors.index.json", {})
    with pytest.raises(InputError, match=r"several indices \(m\.safe.*, n\.safe"):
        open_tensors(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the folder has no \*\.safetensors file"):
        open_tensors(tmp_path)
    with pytest.raises(InputError, match=r"gone\.safetensors: cannot be read: No such file"):
        open_tensors(tmp_path / "gone.safetensors")
    with pytest.raises(InputError, match=r"gone\.index\.json: cannot be read: No such file"):
        open_tensors(tmp_path / "gone.index.json")


def test_a_file_without_tensors(tmp_path: Path) -> None:
    save_file({}, tmp_path / "x.safetensors")
    source = open_tensors(tmp_path / "x.safetensors")
    assert len(source) == 0
    assert source.describe_names() == "there are no tensors"


@pytest.mark.parametrize("damage", ["cut", "longer", "empty", "header-size", "garbage"])
def test_damaged_files_are_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": tensor(1)}, path)
    whole = path.read_bytes()
    path.write_bytes(
        {
            "cut": whole[:-1],
            "longer": whole + b"\0",
            "empty": b"",
            "header-size": whole[:8],
            "garbage": b"\xff" * 100,
        }[damage]
    )
    with pytest.raises(InputError, match=r"x\.safetensors: is not a whole safetensors file"):
        open_tensors(path)
    with pytest.raises(InputError, match=r"x\.safetensors: is not a whole safetensors file"):
        open_tensors(tmp_path)


def test_long_lists_of_names_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({f"t{index}": tensor(0) for index in range(30)}, tmp_path / "x.safetensors")
    names = open_tensors("x.safetensors").describe_names()
    assert names.endswith("t2 (F32 [4]) and 27 more")


def test_metadata_is_read_from_damaged_files_too(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": tensor(1)}, path, {"format": "odd"})
    whole = path.read_bytes()
    for data in (whole, whole[:-1], whole + b"\0"):
        path.write_bytes(data)
        assert header_metadata(path) == {"format": "odd"}
    for data in (b"", whole[:8], whole[:20], b"\xff" * 100, (2).to_bytes(8, "little") + b"[]"):
        path.write_bytes(data)
        assert header_metadata(path) == {}
    assert header_metadata(tmp_path) == header_metadata(tmp_path / "gone") == {}


def test_natural_order_takes_any_digits() -> None:
    names = ["a1\u00b2", "a" + "9" * 5000, "a10", "a2", "a02", "a\u0663", "a"]
    assert sorted(names, key=natural_order) == [
        *("a", "a1\u00b2", "a02", "a2", "a10", "a" + "9" * 5000, "a\u0663")
    ]


def test_source_files_are_all_that_are_read(tmp_path: Path) -> None:
    for name in ("x", "y"):
        save_file({name: tensor(0)}, tmp_path / f"{name}.safetensors")
    x, y = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    assert source_files(x) == [x]
    assert source_files(tmp_path) == [x, y]
    index = save_index(tmp_path / "m.safetensors.index.json", {"x": "x.safetensors"})
    assert source_files(tmp_path) == source_files(index) == [index, x]


def test_an_index_that_is_a_pipe_or_nested_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(InputError, match=r"pipe\.json: must be a regular file"):
        open_tensors(tmp_path / "pipe.json")
    (tmp_path / "deep.json").write_text("[" * 200_000)
    with pytest.raises(
        InputError, match=r"deep\.json: is not usable JSON: it is nested too deeply"
    ):
        open_tensors(tmp_path / "deep.json")
    assert header_metadata(tmp_path / "pipe.json") == {}


def test_an_index_may_not_name_a_file_with_a_null(tmp_path: Path) -> None:
    index = save_index(tmp_path / "m.safetensors.index.json", {"x": "x\0y"})
    with pytest.raises(InputError, match="must lie in a file beside the index"):
        open_tensors(index)


def test_what_one_file_says_is_said_of_that_file(tmp_path: Path) -> None:
    for layer in (2, 10):
        said = {"layer": str(layer), "model": "m"}
        save_file({"keys": tensor(layer)}, tmp_path / f"l{layer}.safetensors", said)
    save_file({"other": tensor(0)}, tmp_path / "plain.safetensors")
    assert open_tensors(tmp_path).metadata == {
        "l2:layer": "2",
        "l2:model": "m",
        "l10:layer": "10",
        "l10:model": "m",
    }
    assert open_tensors(tmp_path / "l2.safetensors").metadata == {"layer": "2", "model": "m"}
