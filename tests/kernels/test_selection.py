"""`select_top_k` and `indexer_top_k`: what they choose, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.selection_contract import EDGES, check_hard_rows, check_selection, padded
from sdsa_kernels import indexer_top_k, select_top_k
from sdsa_kernels.selection.torch_select import order_keys
from sdsa_kernels.testing.selection import reference_top_k
from sdsa_quant import top_k_indices
from sdsa_quant.errors import DtypeError, InputError, UnsupportedError
from support.problems import KINDS, make_problem


@pytest.mark.parametrize(("lengths", "k"), EDGES, ids=lambda value: str(value))
def test_lengths_around_k(generator: torch.Generator, lengths: list[int], k: int) -> None:
    rows = [torch.randn(length, generator=generator) for length in lengths]
    check_selection(padded(rows, max(lengths)), lengths, k, backend="torch")


@pytest.mark.parametrize(("length", "k"), [(1, 1), (65, 1), (200, 64), (1000, 999)], ids=str)
def test_hard_rows(generator: torch.Generator, length: int, k: int) -> None:
    check_hard_rows(length, k, generator, backend="torch")


def test_rows_of_a_group_share_its_length(generator: torch.Generator) -> None:
    scores = torch.randn(6, 90, generator=generator)
    check_selection(scores, [90, 40], 16, backend="torch", rows_per_group=3)


def test_lengths_are_clamped(generator: torch.Generator) -> None:
    scores = torch.randn(2, 90, generator=generator)
    check_selection(scores, [-3, 2**31 - 1], 16, backend="torch")


def test_the_order_is_that_of_the_studies(generator: torch.Generator) -> None:
    scores = torch.randint(-3, 4, (5, 200), generator=generator).float()
    keys = torch.empty(5, 50, dtype=torch.int32)
    select_top_k(scores, torch.full((5,), 200, dtype=torch.int32), top_keys=keys)
    assert torch.equal(keys.long(), top_k_indices(scores, 50).sort(1).values)


def test_order_keys_of_zeros_nan_and_infinities() -> None:
    low_to_high = torch.tensor(
        [torch.nan, -torch.inf, -3e38, -1.0, -1e-45, 0.0, 1e-45, 1.0, 3e38, torch.inf]
    )
    keys = order_keys(low_to_high)
    assert (keys[1:] > keys[:-1]).all()
    assert order_keys(torch.tensor([-0.0])).item() == order_keys(torch.tensor([0.0])).item()
    negative_nan = torch.tensor([-1], dtype=torch.int32).view(torch.float32)
    assert order_keys(negative_nan).item() == keys[0].item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [False, True], ids=["keys", "slots"])
def test_the_keys_of_an_indexer(generator: torch.Generator, kind: str, slots: bool) -> None:
    lengths, k = [0, 1, 200, 700], 96
    problem = make_problem(
        lengths, generator=generator, kind=kind, rows_per_group=2, page_pitch=16_384 + 64
    )
    keys = torch.full((8, k), -77, dtype=torch.int32)
    values = torch.full((8, k), -77.0)
    indexer_top_k(
        problem.query,
        problem.key_cache,
        problem.block_table,
        problem.context_lengths,
        requests=problem.requests,
        top_keys=keys,
        top_scores=values,
        query_scales=problem.query_scales,
        key_scales=problem.key_scales,
        slots=slots,
    )
    scores = problem.run()
    tables = problem.block_table if slots else None
    expected = reference_top_k(scores, lengths, k, rows_per_group=2, tables=tables)
    assert torch.equal(keys, expected)
    in_order = reference_top_k(scores, lengths, k, rows_per_group=2).long()
    chosen = scores.gather(1, in_order.clamp(min=0)).masked_fill(in_order < 0, -torch.inf)
    assert torch.equal(values, chosen)


def test_no_rows_and_no_columns() -> None:
    lengths, keys = torch.zeros(0, dtype=torch.int32), torch.zeros(0, 4, dtype=torch.int32)
    select_top_k(torch.zeros(0, 9), lengths, top_keys=keys)
    keys = torch.zeros(2, 4, dtype=torch.int32)
    select_top_k(torch.zeros(2, 0), torch.tensor([3, 0], dtype=torch.int32), top_keys=keys)
    assert (keys == -1).all()


SCORES = torch.zeros(4, 100)
LENGTHS = torch.zeros(2, dtype=torch.int32)
KEYS = torch.zeros(4, 8, dtype=torch.int32)

REFUSED: dict[str, tuple[dict[str, object], type[Exception], str]] = {
    "scores of half precision": ({"scores": SCORES.half()}, DtypeError, "scores must be float32"),
    "scores by columns": (
        {"scores": torch.zeros(100, 4).T},
        InputError,
        "scores must have a last stride of 1",
    ),
    "rows that no groups share": (
        {"scores": SCORES[:3], "top_keys": KEYS[:3]},
        InputError,
        "scores must have the same number of rows for each of the 2 groups",
    ),
    "long lengths": ({"context_lengths": LENGTHS.long()}, DtypeError, "context_lengths must be"),
    "keys of int64": ({"top_keys": KEYS.long()}, DtypeError, "top_keys must be int32"),
    "too few rows of keys": ({"top_keys": KEYS[:3]}, InputError, r"top_keys must be int32 \[4, k"),
    "no keys wanted": ({"top_keys": KEYS[:, :0]}, InputError, "top_keys must have 1 to 65535"),
    "too many keys wanted": (
        {"top_keys": torch.zeros(4, 65_536, dtype=torch.int32)},
        InputError,
        "top_keys must have 1 to 65535",
    ),
    "rows of keys that overlap": (
        {"top_keys": KEYS.as_strided((4, 8), (4, 1))},
        InputError,
        "top_keys must have rows that do not overlap",
    ),
    "fewer scores than keys": (
        {"top_scores": torch.zeros(4, 7)},
        InputError,
        r"top_scores must be float32 \[4, 8\]",
    ),
    "slots without a table": ({"slots": True}, InputError, "block_table must be given"),
    "slots without requests": (
        {"slots": True, "block_table": torch.zeros(2, 2, dtype=torch.int32)},
        InputError,
        "requests must be given",
    ),
    "requests of another size": (
        {
            "slots": True,
            "block_table": torch.zeros(2, 2, dtype=torch.int32),
            "requests": torch.zeros(3, dtype=torch.int32),
        },
        InputError,
        r"requests must be int32 \[2\]",
    ),
    "an unknown backend": ({"backend": "best"}, InputError, "backend must be one of"),
    "another device": (
        {"top_keys": KEYS.to("meta")},
        InputError,
        "top_keys must be on cpu, the device of scores",
    ),
}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    REFUSED.values(),
    ids=[name.replace(" ", "-") for name in REFUSED],
)
def test_what_is_refused(change: dict[str, object], error: type[Exception], message: str) -> None:
    arguments = {"scores": SCORES, "context_lengths": LENGTHS, "top_keys": KEYS, **change}
    with pytest.raises(error, match=message):
        select_top_k(arguments.pop("scores"), arguments.pop("context_lengths"), **arguments)


def test_no_backend_for_a_device() -> None:
    there: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor.to("meta")  # noqa: E731
    with pytest.raises(UnsupportedError, match="no backend can select here: torch: tensors must"):
        select_top_k(there(SCORES), there(LENGTHS), top_keys=there(KEYS), backend="torch")


def test_slots_that_int32_cannot_count() -> None:
    problem = make_problem([64], generator=torch.Generator().manual_seed(1))
    pages = 2**25 + 1
    cache = problem.key_cache[:1].expand(pages, 64, 64)
    with pytest.raises(InputError, match="key_cache must have at most 33554432 pages"):
        indexer_top_k(
            problem.query,
            cache,
            problem.block_table,
            problem.context_lengths,
            requests=problem.requests,
            top_keys=torch.zeros(1, 4, dtype=torch.int32),
            query_scales=problem.query_scales,
            key_scales=problem.key_scales,
            slots=True,
        )


@pytest.mark.parametrize(
    ("lengths", "requests", "table", "message"),
    [
        ([-5, 50], [0, 1], [[0, 1], [2, 3]], "context_lengths must not be negative, got -5"),
        ([90, 50], [0, 9], [[0, 1], [2, 3]], "requests must be rows of block_table, 0 to 1, got 9"),
        ([90, 50], [0, -1], [[0, 1], [2, 3]], "requests must be rows of block_table"),
        ([90, 50], [0, 1], [[0], [2]], "block_table must have 2 columns for length 90"),
        ([90, 50], [0, 1], [[0, -1], [2, 3]], "block_table must hold pages below .* got -1"),
    ],
    ids=["length", "request", "negative", "columns", "page"],
)
def test_the_checked_mode_reads_what_a_selection_is_given(
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    requests: list[int],
    table: list[list[int]],
    message: str,
) -> None:
    monkeypatch.setenv("SDSA_CHECK", "1")

    def select(lengths: list[int], requests: list[int], table: list[list[int]]) -> None:
        numbers = [torch.tensor(each, dtype=torch.int32) for each in (lengths, requests, table)]
        select_top_k(
            torch.zeros(2, 100),
            numbers[0],
            top_keys=torch.zeros(2, 7, dtype=torch.int32),
            block_table=numbers[2],
            requests=numbers[1],
            slots=True,
        )

    with pytest.raises(InputError, match=message):
        select(lengths, requests, table)
    select([90, 0], [0, 7], [[0, 1], [2, 3]])
