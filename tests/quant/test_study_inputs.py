"""Layers matched by the numbers in their names, rows matched to requests, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sdsa_quant.errors import DtypeError, InputError
from sdsa_quant.study.inputs import StudyInputs
from sdsa_quant.study.layers import open_layers
from support.studies import LENGTHS, layer_inputs, save_layers

Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """``save(name=shape or tensor, ...)``: a file of such tensors, bfloat16 zeros for a shape."""

    def write(file: str = "file.safetensors", **tensors: object) -> Path:
        made = {
            name.replace("__", "."): value
            if isinstance(value, torch.Tensor)
            else torch.zeros(*value, dtype=torch.bfloat16)  # type: ignore[misc]
            for name, value in tensors.items()
        }
        save_file(made, tmp_path / file)
        return tmp_path / file

    return write


def test_layers_come_in_natural_order(tmp_path: Path, generator: torch.Generator) -> None:
    # CASES 70.
    path = save_layers(tmp_path / "layers.safetensors", generator, layers=(10, 2, 0, 1))
    layers = open_layers(layer_inputs(path))
    assert [layer.name for layer in layers] == [f"layers.{n}.keys" for n in (0, 1, 2, 10)]
    assert [layer.query_name for layer in layers] == [f"layers.{n}.queries" for n in (0, 1, 2, 10)]
    layer = layers[0]
    assert layer.keys.context_lengths == LENGTHS
    assert layer.row_requests == (0, 0, 1, 1, 2, 2, 3, 3)
    assert layer.row_lengths == tuple(n for n in LENGTHS for _ in range(2))
    assert layer.request_rows == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_keys_and_queries_may_be_in_different_places(
    tmp_path: Path, generator: torch.Generator
) -> None:
    path = save_layers(tmp_path / "layers.safetensors", generator)
    together = open_layers(layer_inputs(path))
    folder = tmp_path / "shards"
    folder.mkdir()
    tensors = load_file(path)
    for layer in (0, 2, 10):
        save_file(
            {name: t for name, t in tensors.items() if name.startswith(f"layers.{layer}.")},
            folder / f"{layer}.safetensors",
        )
    apart = open_layers(StudyInputs(folder, path, lengths="*.lengths"))
    for a, b in zip(together, apart, strict=True):
        assert torch.equal(a.read_keys(2, 5, 60), b.read_keys(2, 5, 60))
        assert torch.equal(a.read_query([3]), b.read_query([3]))


def test_one_pair_needs_no_numbers(save: Save) -> None:
    path = save(k5=(4, 128), other=(2, 128))
    (layer,) = open_layers(StudyInputs(path, path, keys_pattern="k5", queries_pattern="other"))
    assert (layer.name, layer.query_name, layer.row_lengths) == ("k5", "other", (4, 4))


def test_the_fixture(fixtures: Path) -> None:
    path = fixtures / "smollm2-layer12.safetensors"
    (layer,) = open_layers(StudyInputs(path, path, lengths="lengths", causal=True))
    assert layer.row_lengths == (4095, 4096, 2499, 2500, 776, 777, 63, 64)


def test_requests_by_list_and_by_tensor(save: Save) -> None:
    path = save(
        keys=(9, 128),
        queries=(4, 128),
        lengths=torch.tensor([4, 5]),
        owners=torch.tensor([1, 0, 1, 1]),
    )
    by_list = open_layers(StudyInputs(path, path, lengths="lengths", requests=(1, 0, 1, 1)))[0]
    by_name = open_layers(StudyInputs(path, path, lengths="lengths", requests="owners"))[0]
    assert by_list.row_requests == by_name.row_requests == (1, 0, 1, 1)
    assert by_list.row_lengths == (5, 4, 5, 5)
    causal = StudyInputs(path, path, lengths="lengths", requests="owners", causal=True)
    assert open_layers(causal)[0].row_lengths == (3, 4, 4, 5)


def test_positions(save: Save) -> None:
    path = save(keys=(9, 128), queries=(3, 128), at=torch.tensor([8, 0, 3]))
    layer = open_layers(StudyInputs(path, path, positions="at"))[0]
    assert layer.row_lengths == (9, 1, 4)


def test_groups_may_have_more_than_8_rows(save: Save) -> None:
    path = save(keys=(40, 128), queries=(2, 20, 128), lengths=torch.tensor([20, 20]))
    layer = open_layers(StudyInputs(path, path, lengths="lengths", causal=True, rows_per_group=20))[
        0
    ]
    assert layer.row_lengths == (*range(1, 21), *range(1, 21))


REFUSED = {
    "no queries": (
        {"keys": (4, 128)},
        {},
        "no tensor is named queries",
    ),
    "query shape": ({"keys": (4, 128), "queries": (4, 64)}, {}, r"must be unquantized .*\[4, 64\]"),
    "query missing": (
        {"keys": (4, 128)},
        {"queries_pattern": "q"},
        r"no tensor is named q; found keys",
    ),
    "layer without queries": (
        {"l__1__keys": (4, 128), "l__2__keys": (4, 128), "l__1__queries": (4, 128)},
        {},
        r"no query tensor goes with l\.2\.keys",
    ),
    "queries without keys": (
        {"l__1__keys": (4, 128), "l__2__queries": (4, 128), "l__1__queries": (4, 128)},
        {},
        r"no key tensor goes with l\.2\.queries",
    ),
    "same numbers": (
        {"a1__keys": (4, 128), "b1__keys": (4, 128), "a1__queries": (4, 128)},
        {},
        r"a1\.keys and b1\.keys have the same numbers",
    ),
    "uneven groups": (
        {"keys": (4, 128), "queries": (3, 128), "lengths": torch.tensor([2, 2])},
        {"lengths": "lengths"},
        "3 groups cannot be spread evenly",
    ),
    "rows per group": (
        {"keys": (4, 128), "queries": (3, 128)},
        {"rows_per_group": 2},
        "whole groups of 2",
    ),
    "too few requests": (
        {"keys": (4, 128), "queries": (3, 128)},
        {"requests": (0,)},
        "request of each of the 3 groups of queries, got 1",
    ),
    "unknown request": (
        {"keys": (4, 128), "queries": (1, 128)},
        {"requests": (1,)},
        "requests must be 0 to 0",
    ),
    "float requests": (
        {"keys": (4, 128), "queries": (1, 128), "owners": torch.zeros(1)},
        {"requests": "owners"},
        "tensor owners must hold integers, got F32",
    ),
    "more rows than keys": (
        {"keys": (2, 128), "queries": (3, 128)},
        {"causal": True},
        "more rows for request 0 than its 2 keys",
    ),
    "position beyond": (
        {"keys": (2, 128), "queries": (1, 128), "at": torch.tensor([2])},
        {"positions": "at"},
        "tensor at must be 0 to 1 for row 0, a position in request 0, got 2",
    ),
    "positions count": (
        {"keys": (2, 128), "queries": (1, 128), "at": torch.tensor([0, 1])},
        {"positions": "at"},
        "the position of each of the 1 query rows",
    ),
    "lengths of another layer": (
        {
            "l__1__keys": (4, 128),
            "l__1__queries": (4, 128),
            "l__2__lengths": torch.tensor([4]),
        },
        {"lengths": "*.lengths"},
        r"lengths \*\.lengths must match one tensor that goes with l\.1\.keys, got none of the 1",
    ),
    "lengths missing": (
        {"keys": (4, 128), "queries": (4, 128)},
        {"lengths": "n"},
        "no tensor is named n",
    ),
}


@pytest.mark.parametrize(("tensors", "options", "words"), REFUSED.values(), ids=REFUSED)
def test_refuses(
    tensors: dict[str, object], options: dict[str, object], words: str, save: Save
) -> None:
    path = save(**tensors)
    with pytest.raises(InputError, match=words):
        open_layers(StudyInputs(path, path, **options))


def test_refuses_quantized_keys(save: Save) -> None:
    # CASES 34.
    path = save(keys=torch.zeros(4, 128, dtype=torch.uint8), queries=(1, 128))
    with pytest.raises(DtypeError, match="unquantized keys"):
        open_layers(StudyInputs(path, path))


@pytest.mark.parametrize("heads", [9, 32, 64])
def test_heads_are_not_rows(save: Save, heads: int) -> None:
    path = save(keys=torch.zeros(100, 128), queries=torch.zeros(4, heads, 128))
    for causal in (False, True):
        with pytest.raises(InputError, match="heads are not rows; give score='relu-sum'"):
            open_layers(StudyInputs(path, path, causal=causal))


@pytest.mark.parametrize(
    ("name", "numbers", "lengths"),
    [
        ("lengths", [60, 40], (60, 40)),
        ("cu_seqlens", [0, 60, 100], (60, 40)),
        ("context_lengths", [20, 30, 50], (20, 30, 50)),
        ("cu_seq_lens_k", [0, 99, 100], (99, 1)),
        ("seq_lens", [0, 0, 100], (0, 0, 100)),
        ("kv_lens", [50, 50], (50, 50)),
    ],
)
def test_lengths_beside_the_keys_are_used(
    save: Save, name: str, numbers: list[int], lengths: tuple[int, ...]
) -> None:
    path = save(keys=(100, 128), queries=(6, 128), **{name: torch.tensor(numbers)})
    assert open_layers(StudyInputs(path, path))[0].keys.context_lengths == lengths
    alone = save("keys.safetensors", keys=(100, 128))
    assert open_layers(StudyInputs(alone, path))[0].keys.context_lengths == lengths
    (layer,) = open_layers(StudyInputs(path, path, lengths="none"))
    assert layer.keys.context_lengths == (100,)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"lengths": torch.tensor([7, 8])}, "lengths must sum to the 100 keys .*lengths='none'"),
        ({"seq_lens": torch.tensor([50.0, 50.0])}, "seq_lens must hold integer .*lengths='none'"),
        ({"lens": torch.tensor([[50], [50]])}, "tensor lens must be .requests. .*lengths='none'"),
        (
            {"lengths": torch.tensor([60, 40]), "kv_lens": torch.tensor([50, 50])},
            "tensors kv_lens and lengths divide keys differently",
        ),
    ],
    ids=["sum", "float", "2-D", "different"],
)
def test_lengths_that_do_not_fit_the_keys_are_not_passed_over(
    save: Save, tensors: dict[str, torch.Tensor], message: str
) -> None:
    path = save(keys=(100, 128), queries=(6, 128), **tensors)
    with pytest.raises((InputError, DtypeError), match=message):
        open_layers(StudyInputs(path, path))
    assert len(open_layers(StudyInputs(path, path, lengths="none"))) == 1


@pytest.mark.parametrize(
    "files",
    [
        {"l_{}": {"keys": 0, "queries": 1, "lengths": 2}},
        {"l_{}": {"k": 0, "q": 1, "cu_seq_lens": 3}},
        {"l_{}": {"layers.{}.key": 0, "layers.{}.query": 1, "seq_lens": 2}},
        {"l_{}_keys": {"keys": 0, "lengths": 2}, "l_{}_queries": {"queries": 1}},
        {"l_{}": {"keys": 0, "queries": 1}, "lengths": {"lengths": 2}},
        {"l_{}": {"layers.{}.keys": 0, "layers.{}.queries": 1}, "n": {"kv_lens": 2}},
        {"all": {"a.b{}.k": 0, "a.b{}.q": 1, "a.b{}.cu_seqlens_k": 3}},
        {"all": {"layers.{}.keys": 0, "layers.{}.queries": 1, "lengths_0{}": 2}},
    ],
    ids=["plain", "short", "numbers", "apart", "shared", "shared-dots", "one-file", "at-end"],
)
def test_folders_need_no_patterns(
    save: Save, tmp_path: Path, files: dict[str, dict[str, int]]
) -> None:
    made = (torch.zeros(100, 128), torch.ones(4, 128), torch.tensor([60, 40]))
    values = (*made, torch.tensor([0, 60, 100]))
    (tmp_path / "capture").mkdir()
    written: dict[str, dict[str, torch.Tensor]] = {}
    for number in (2, 10):
        for file, tensors in files.items():
            parts = written.setdefault(file.format(number), {})
            parts |= {name.format(number): values[i].clone() for name, i in tensors.items()}
    for file, parts in written.items():
        save_file(parts, tmp_path / "capture" / f"{file}.safetensors")
    layers = open_layers(StudyInputs(tmp_path / "capture", tmp_path / "capture"))
    assert len(layers) == 2
    for layer, text in zip(layers, ("2", "10"), strict=True):
        assert text in layer.name
        assert text in layer.query_name
        assert layer.keys.context_lengths == (60, 40)


@pytest.mark.parametrize("owners", [[0, 0, 0, 1], [1, 1, 0, 0], [1, 0, 1, 0]], ids=str)
def test_requests_beside_the_rows_are_not_passed_over(save: Save, owners: list[int]) -> None:
    tensors = {"keys": (9, 128), "queries": (4, 128), "lengths": torch.tensor([4, 5])}
    path = save(**tensors, requests=torch.tensor(owners))
    with pytest.raises(InputError, match=r"requests says which .*give requests='requests'"):
        open_layers(StudyInputs(path, path))
    (layer,) = open_layers(StudyInputs(path, path, requests="requests"))
    assert layer.row_requests == tuple(owners)
    same = save(**tensors, requests=torch.tensor([0, 0, 1, 1]))
    assert open_layers(StudyInputs(same, same))[0].row_requests == (0, 0, 1, 1)
