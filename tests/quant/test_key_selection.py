"""Which tensors are keys, and how lengths divide them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sdsa_quant.captures.keys import (
    CapturedKeys,
    are_queries,
    can_be_keys,
    can_be_lengths,
    captured_keys,
    lengths_candidates,
    lengths_for,
    lengths_hint,
    select_keys,
)
from sdsa_quant.errors import DtypeError, InputError
from sdsa_quant.files.tensor_source import TensorSource, open_tensors

BF16 = torch.bfloat16


def keys(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape or (10, 128), dtype=dtype)


def source_of(
    tmp_path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> TensorSource:
    save_file(tensors, tmp_path / "x.safetensors", metadata)
    return open_tensors(tmp_path / "x.safetensors")


def names(source: TensorSource, pattern: str | None = None) -> list[str]:
    return [tensor.name for tensor in select_keys(source, pattern)]


def test_the_tensor_named_keys_is_the_default(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"keys": keys(), "queries": keys(8, 128)})
    assert names(source) == ["keys"]


def test_the_only_float_tensor_of_128_columns_is_the_default(tmp_path: Path) -> None:
    source = source_of(
        tmp_path, {"k": keys(), "values": keys(10, 64), "lengths": torch.ones(1, dtype=torch.int32)}
    )
    assert names(source) == ["k"]


def test_an_unclear_default_lists_what_is_there(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"a": keys(), "b": keys()})
    with pytest.raises(
        InputError, match=r"got 2 of .*found a \(BF16.*, b \(BF16.*; give key_names"
    ):
        select_keys(source)
    source = source_of(tmp_path, {"a": keys(10, 64)})
    with pytest.raises(InputError, match=r"got none; .*found a \(BF16 \[10, 64\]\)"):
        select_keys(source)


def test_patterns_select_in_numeric_order(tmp_path: Path) -> None:
    tensors = {f"layers.{layer}.keys": keys() for layer in (10, 0, 2, 1)}
    source = source_of(tmp_path, {**tensors, "layers.0.queries": keys()})
    wanted = [f"layers.{layer}.keys" for layer in (0, 1, 2, 10)]
    assert names(source, "layers.*.keys") == wanted
    assert names(source, "layers.?.keys") == wanted[:3]
    assert names(source, "layers.10.keys") == wanted[3:]
    with pytest.raises(InputError, match=r"no tensor matches Layers\.\*; found layers\.0\.keys"):
        select_keys(source, "Layers.*")


def test_a_name_comes_before_a_pattern(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"keys[0]": keys(), "keys0": keys(), "keys": keys()})
    assert names(source, "keys[0]") == ["keys[0]"]


@pytest.mark.parametrize("width", [64, 127, 129, 256])
@pytest.mark.parametrize("pattern", [None, "keys"])
def test_keys_have_128_dimensions(tmp_path: Path, width: int, pattern: str | None) -> None:
    source = source_of(tmp_path, {"keys": keys(10, width)})
    message = rf"x\.safetensors: tensor keys must be \[tokens, 128\].* got \[10, {width}\]"
    with pytest.raises(InputError, match=message):
        select_keys(source, pattern)


@pytest.mark.parametrize("shape", [(128,), (2, 3, 4, 128)], ids=str)
def test_keys_have_two_or_three_dimensions(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="tensor keys must be"):
        select_keys(source_of(tmp_path, {"keys": keys(*shape)}))


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (torch.uint8, "U8"),
        (torch.int8, "I8"),
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.float8_e5m2, "F8_E5M2"),
        (torch.float64, "F64"),
        (torch.int32, "I32"),
    ],
    ids=str,
)
def test_other_dtypes_are_refused(tmp_path: Path, dtype: torch.dtype, stored: str) -> None:
    source = source_of(tmp_path, {"keys": keys(10, 128, dtype=dtype)})
    message = rf"keys must hold unquantized keys in BF16, F16, F32, got {stored} \[10, 128\]"
    with pytest.raises(DtypeError, match=message):
        select_keys(source)


def test_four_bit_floats_are_refused(tmp_path: Path) -> None:
    # Written by hand: no library call makes a file of F4 tensors everywhere.
    header = b'{"keys":{"dtype":"F4","shape":[2,128],"data_offsets":[0,128]}}'
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(128))
    with pytest.raises((DtypeError, InputError), match=r"x\.safetensors"):
        select_keys(open_tensors(path))


@pytest.mark.parametrize(
    "companion",
    ["keys_global_scale", "other_scale_2", "keys_scale", "keys.scales", "keys_scale_inv"],
)
def test_scales_beside_the_keys_mean_quantized_keys(tmp_path: Path, companion: str) -> None:
    source = source_of(tmp_path, {"keys": keys(), companion: torch.ones(1)})
    message = f"must be unquantized keys, but tensor {companion} holds the scales"
    with pytest.raises(InputError, match=message):
        select_keys(source)


def test_other_tensors_with_scale_in_their_name_do_not_matter(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"keys": keys(), "softmax_scale": torch.ones(1)})
    assert names(source) == ["keys"]


def test_dimensions_of_1_can_be_squeezed(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"keys": keys(2, 1, 40, 128)})
    with pytest.raises(
        InputError, match=r"got \[2, 1, 40, 128\]; or squeeze it to \[2, 40, 128\]$"
    ):
        select_keys(source)
    source = source_of(tmp_path, {"keys": keys(1, 40, 128), "lengths": torch.tensor([40])})
    with pytest.raises(
        InputError, match=r"; give lengths='lengths' for .*lengths; or squeeze it to \[40, 128\]$"
    ):
        captured_keys(source, source["keys"])


def test_caches_and_empty_files_are_refused(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"keys": keys(1, 64, 128)}, {"format": "sdsa-cache"})
    with pytest.raises(InputError, match="is a cache already"):
        select_keys(source)
    for pattern in (None, "keys"):
        with pytest.raises(InputError, match="there are no tensors"):
            select_keys(source_of(tmp_path, {}), pattern)


def divide(
    tmp_path: Path, shape: tuple[int, ...], lengths: list[int], dtype: torch.dtype = torch.int32
) -> CapturedKeys:
    values = torch.arange(shape[0] * (shape[1] if len(shape) == 3 else 1)).view(*shape[:-1], 1)
    tensors = {"keys": values.expand(shape).float().contiguous()}
    source = source_of(tmp_path, {**tensors, "n": torch.tensor(lengths, dtype=dtype)})
    return captured_keys(source, source["keys"], "n")


def first_values(captured: CapturedKeys) -> list[list[int]]:
    """Each request's keys, by the number that fills each key."""
    requests = range(len(captured.context_lengths))
    return [captured.read(request)[:, 0].int().tolist() for request in requests]


def test_all_keys_are_one_request_by_default(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"keys": keys(10, 128)})
    captured = captured_keys(source, source["keys"])
    assert captured.context_lengths == (10,)
    assert captured.read(0).shape == (10, 128)
    assert captured.read(0, 3, 5).shape == (2, 128)
    with pytest.raises(InputError, match="keys must lie within 0 to 10, got 3 to 11"):
        captured.read(0, 3, 11)


@pytest.mark.parametrize(
    ("numbers", "lengths"),
    [
        ([6, 4], (6, 4)),
        ([0, 6, 10], (6, 4)),
        ([10], (10,)),
        ([4, 0, 6], (4, 0, 6)),
        ([0, 4, 6], (0, 4, 6)),
        ([0, 6, 6, 10, 10], (6, 0, 4, 0)),
    ],
    ids=str,
)
def test_lengths_and_offsets_of_flat_keys(
    tmp_path: Path, numbers: list[int], lengths: tuple[int, ...]
) -> None:
    captured = divide(tmp_path, (10, 128), numbers)
    assert captured.context_lengths == lengths
    together = [value for request in first_values(captured) for value in request]
    assert together == list(range(10))


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [([2, 0, 3], [[0, 1], [], [6, 7, 8]]), ([0, 1, 4, 5], [[0], [3, 4, 5], [6]])],
    ids=["lengths", "offsets"],
)
def test_padded_keys_leave_out_the_padding(
    tmp_path: Path, numbers: list[int], expected: list[list[int]]
) -> None:
    assert first_values(divide(tmp_path, (3, 3, 128), numbers)) == expected


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.uint8], ids=str)
def test_lengths_in_other_integers(tmp_path: Path, dtype: torch.dtype) -> None:
    assert divide(tmp_path, (10, 128), [6, 4], dtype).context_lengths == (6, 4)


@pytest.mark.parametrize(
    ("shape", "numbers", "message"),
    [
        ((10, 128), [6, 5], r"n must sum to the 10 keys of keys.*sums to 11, from 6 to 5"),
        ((10, 128), [0, 6, 9], r"rise from 0 to 10.*from 0 to 9"),
        ((10, 128), [11, -1], r"n must not be negative, got -1 at 1"),
        ((10, 128), [], r"n must be \[requests\] lengths"),
        (
            (3, 3, 128),
            [2, 0, 4],
            r"not exceed the 3 tokens of keys \[3, 3, 128\], got 4 for req.* 2",
        ),
        ((3, 3, 128), [2, 0], r"n must be \[3\] lengths or \[4\] offsets from 0 .*got 2 numbers"),
        ((3, 3, 128), [1, 2, 3, 4], r"got 4 numbers from 1"),
    ],
    ids=["sum", "end", "negative", "none", "long", "few", "no-offsets"],
)
def test_lengths_that_do_not_fit(
    tmp_path: Path, shape: tuple[int, ...], numbers: list[int], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        divide(tmp_path, shape, numbers)


def test_lengths_are_integers(tmp_path: Path) -> None:
    with pytest.raises(DtypeError, match="n must hold integer lengths, got F32"):
        divide(tmp_path, (10, 128), [10], torch.float32)


def test_missing_lengths(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"keys": keys(2, 3, 128)})
    with pytest.raises(
        InputError,
        match=r"padded requests; found keys .*; give lengths for the tensor of",
    ):
        captured_keys(source, source["keys"])
    with pytest.raises(InputError, match=r"no tensor is named n; found keys"):
        captured_keys(source, source["keys"], "n")
    source = source_of(tmp_path, {"keys": keys(2, 3, 128), "a.lengths": torch.tensor([1, 2])})
    with pytest.raises(InputError, match=r"requests; give lengths='a\.lengths' for the tensor"):
        captured_keys(source, source["keys"])
    assert [tensor.name for tensor in lengths_candidates(source)] == ["a.lengths"]
    assert [can_be_keys(tensor) for tensor in source] == [False, True]
    assert [can_be_lengths(tensor) for tensor in source] == [True, False]
    assert lengths_hint(source) == "a.lengths"


def test_queries_are_told_by_their_name(tmp_path: Path) -> None:
    tensors = {"a.q": keys(), "k": keys(), "query": keys(10, 64)}
    assert [are_queries(tensor) for tensor in source_of(tmp_path, tensors)] == [True, False, False]


@pytest.mark.parametrize(
    ("numbers", "lengths", "starts"),
    [
        (None, (5,), (0,)),
        ([2, 3], (2, 3), (0, 2)),
        ([0, 2, 5], (2, 3), (0, 2)),
        ([1, 0, 1, 1, 0], (1, 0, 1, 1, 0), (0, 1, 2, 3, 4)),
    ],
    ids=["one-request", "lengths", "offsets", "padded"],
)
def test_one_head(
    tmp_path: Path,
    numbers: list[int] | None,
    lengths: tuple[int, ...],
    starts: tuple[int, ...],
) -> None:
    # 5 tokens of one head; only lengths of 5 requests, some of them empty, make them requests.
    tensors = {"keys": keys(5, 1, 128), "n": torch.tensor(numbers or [0])}
    source = source_of(tmp_path, tensors)
    captured = captured_keys(source, source["keys"], "n" if numbers else None)
    assert (captured.context_lengths, captured.starts) == (lengths, starts)
    assert captured.read(0).shape == (lengths[0], 128)


@pytest.mark.parametrize(
    ("pattern", "lengths", "expected"),
    [
        ("layers.*.keys", "layers.*.lengths", "layers.10.lengths"),
        ("layers.?[0-9].keys", "layers.?[0-9].lengths", "layers.10.lengths"),
        ("*.keys", "*.lengths", "layers.10.lengths"),
        ("layers.10.keys", "layers.*.lengths", "layers.10.lengths"),
        ("layers.*.keys", "layers.1.lengths", "layers.1.lengths"),
        (None, "layers.*.lengths", "layers.10.lengths"),
        ("layers.*.keys", None, "layers.10.lengths"),
        ("layers.*.keys", "none", None),
    ],
    ids=["star", "others", "front", "exact-keys", "one-for-all", "default", "beside", "none"],
)
def test_lengths_that_go_with_keys(
    tmp_path: Path, pattern: str | None, lengths: str | None, expected: str | None
) -> None:
    numbers = torch.tensor([10])
    tensors = {f"layers.{layer}.lengths": numbers.clone() for layer in (1, 10)}
    source = source_of(tmp_path, {**tensors, "layers.10.keys": keys()})
    assert lengths_for(source, source["layers.10.keys"], pattern, lengths) == expected
    assert lengths_hint(source) == "layers.*.lengths"


def test_lengths_that_no_keys_go_with(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"l.1.keys": keys(), "l.2.n": torch.tensor([1])})
    with pytest.raises(
        InputError, match=r"lengths l\.\*\.n must match one .* l\.1\.keys, got none"
    ):
        lengths_for(source, source["l.1.keys"], "l.*.keys", "l.*.n")
    with pytest.raises(InputError, match=r"no tensor matches m\.\*"):
        lengths_for(source, source["l.1.keys"], "l.*.keys", "m.*")


def test_the_default_offers_a_pattern(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"l.1.k": keys(), "l.2.k": keys(), "l.1.q": keys()})
    with pytest.raises(InputError, match=r"; give key_names='l\.\*\.k' for one cache each$"):
        select_keys(source)


@pytest.mark.parametrize("name", ["queries", "query", "layers.3.q"])
def test_query_rows_are_not_taken_for_keys(tmp_path: Path, name: str) -> None:
    source = source_of(tmp_path, {name: keys(8, 128)})
    with pytest.raises(InputError, match="which is named as query rows are"):
        select_keys(source)


@pytest.mark.parametrize(
    "stored",
    [
        keys(400, 128).to(torch.float8_e4m3fn),
        torch.zeros(400, 128, dtype=torch.uint8),
        torch.zeros(5, 64, 64, dtype=torch.uint8),
        torch.zeros(400, 128, dtype=torch.int8),
    ],
    ids=["fp8", "bytes", "pages", "int8"],
)
def test_a_float_tensor_beside_stored_keys_may_be_query_rows(
    tmp_path: Path, stored: torch.Tensor
) -> None:
    source = source_of(tmp_path, {"k_dump": stored, "hidden": keys(8, 128)})
    with pytest.raises(InputError, match="got hidden, beside k_dump"):
        select_keys(source)
    assert names(source, "hidden") == ["hidden"]


@pytest.mark.parametrize("numbers", [[0, 10], [0, 0, 10], [0, 0, 0, 0, 10]])
def test_numbers_that_are_lengths_and_offsets_are_what_the_name_says(
    tmp_path: Path, numbers: list[int]
) -> None:
    given = {"keys": keys(10, 128), "requests": torch.tensor(numbers)}
    told = {name: torch.tensor(numbers) for name in ("cu_seqlens", "lengths", "seq_lens_k")}
    source = source_of(tmp_path, given | told)
    with pytest.raises(InputError, match="tensor requests could be lengths or offsets"):
        captured_keys(source, source["keys"], "requests")
    lengths = captured_keys(source, source["keys"], "cu_seqlens").context_lengths
    assert lengths == (*[0] * (len(numbers) - 2), 10)
    for name in ("lengths", "seq_lens_k"):
        named = captured_keys(source, source["keys"], name).context_lengths
        assert named == tuple(numbers)
