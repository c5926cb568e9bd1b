"""Query rows: which tensor, how many rows make a group, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sdsa_quant.captures.queries import read_queries, read_requests
from sdsa_quant.errors import DtypeError, InputError

ROWS = torch.arange(4 * 128).view(4, 128).bfloat16()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test puts its queries."""
    return tmp_path / "queries.safetensors"


@pytest.mark.parametrize("name", ["queries", "query", "q"])
def test_finds_a_usual_name_among_others(path: Path, name: str) -> None:
    save_file({name: ROWS, "keys": torch.zeros(9, 128)}, path)
    queries = read_queries(path)
    assert queries.tensor.name == name
    assert torch.equal(queries.values, ROWS)
    assert queries.rows_per_group is None


def test_takes_the_only_tensor_whatever_its_name(path: Path) -> None:
    save_file({"layers.3.q_indexer": ROWS}, path)
    assert read_queries(path).tensor.name == "layers.3.q_indexer"


def test_rows_per_group_come_from_the_shape_before_the_metadata(path: Path) -> None:
    save_file({"queries": ROWS}, path, {"rows_per_group": "4"})
    assert read_queries(path).rows_per_group == 4
    save_file({"queries": ROWS.view(2, 2, 128)}, path, {"rows_per_group": "4"})
    queries = read_queries(path)
    assert queries.rows_per_group == 2
    assert torch.equal(queries.values, ROWS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_floats_are_rounded_to_bf16(path: Path, dtype: torch.dtype) -> None:
    values = torch.full((1, 128), 1.00390625 + 2**-9, dtype=dtype)  # between two BF16 values
    save_file({"queries": values}, path)
    assert torch.equal(read_queries(path).values, values.bfloat16())


@pytest.mark.parametrize(
    ("tensor", "error", "message"),
    [
        (torch.zeros(4, 64), InputError, r"must be \[rows, 128\] or .*, got \[4, 64\]"),
        (torch.zeros(4, 129), InputError, r"got \[4, 129\]"),
        (torch.zeros(128), InputError, r"got \[128\]"),
        (torch.zeros(4, 128, dtype=torch.uint8), DtypeError, r"got U8 \[4, 128\]"),
        (torch.zeros(4, 32, dtype=torch.uint8), DtypeError, r"unquantized .*, got U8 \[4, 32\]"),
        (torch.zeros(4, 128, dtype=torch.float64), DtypeError, r"got F64 \[4, 128\]"),
    ],
    ids=["64", "129", "one-dimensional", "uint8-128", "uint8-32", "float64"],
)
def test_refuses_what_is_no_query(
    path: Path, tensor: torch.Tensor, error: type[Exception], message: str
) -> None:
    save_file({"queries": tensor}, path)
    with pytest.raises(error, match=message) as raised:
        read_queries(path)
    assert f"{path}: tensor queries" in str(raised.value)


def test_integers_beside_the_only_rows_are_not_rows(path: Path) -> None:
    save_file({"index_q": torch.zeros(4, 128), "requests": torch.zeros(2).long()}, path)
    assert read_queries(path).tensor.name == "index_q"


def test_refuses_to_guess(path: Path) -> None:
    save_file({"a": ROWS, "b": ROWS.clone()}, path)
    with pytest.raises(InputError, match=r"found a \(BF16 \[4, 128\]\), b .*; give query_name"):
        read_queries(path)
    with pytest.raises(InputError, match="no tensor is named c; found a"):
        read_queries(path, "c")


@pytest.mark.parametrize("text", ["0", "9", "two", "-1", "", "\u00b2", "9" * 5000])
def test_refuses_metadata_that_is_no_group_size(path: Path, text: str) -> None:
    save_file({"queries": ROWS}, path, {"rows_per_group": text})
    with pytest.raises(InputError, match=r"header field rows_per_group must be 1 to 8, got '"):
        read_queries(path)


def test_reads_requests_beside_the_rows(path: Path) -> None:
    requests = torch.tensor([3, 0, 0, 1])
    save_file({"queries": ROWS, "of_group": requests, "wide": requests.view(2, 2).clone()}, path)
    queries = read_queries(path)
    assert read_requests(queries, "of_group") == [3, 0, 0, 1]
    with pytest.raises(InputError, match="no tensor is named other"):
        read_requests(queries, "other")
    with pytest.raises(InputError, match=r"tensor wide must be \[groups\], got \[2, 2\]"):
        read_requests(queries, "wide")
    with pytest.raises(DtypeError, match="tensor queries must hold integers"):
        read_requests(queries, "queries")


def test_the_header_of_another_file_says_nothing(tmp_path: Path) -> None:
    for name, rows in (("a", "4"), ("b", None), ("c", "2")):
        metadata = None if rows is None else {"rows_per_group": rows}
        save_file({f"{name}.q": torch.ones(8, 128)}, tmp_path / f"{name}.safetensors", metadata)
    found = [read_queries(tmp_path, f"{name}.q").rows_per_group for name in "abc"]
    assert found == [4, None, 2]
