"""Every wrong argument of `indexer_scores` is refused before any launch, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from sdsa_kernels import indexer_scores
from sdsa_kernels.checks import check_scores_call
from sdsa_kernels.problem import ScoreCall
from sdsa_quant.errors import DtypeError, InputError, UnsupportedError
from support.problems import UNTOUCHED, Problem, make_problem


@pytest.fixture
def problem(generator: torch.Generator) -> Problem:
    """Two NVFP4 groups of three rows."""
    return make_problem([100, 64], generator=generator, rows_per_group=3)


def bf16_problem(generator: torch.Generator) -> Problem:
    return make_problem([100, 64], generator=generator, kind="bf16", rows_per_group=3)


def refuse(problem: Problem, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        problem.run()
    assert (problem.scores == UNTOUCHED).all()


@pytest.mark.parametrize(
    ("name", "change", "kind", "message"),
    [
        ("key_cache", lambda t: t.int(), DtypeError, r"key_cache must be bfloat16 .* got int32"),
        (
            "key_cache",
            lambda t: t[:, :, :32],
            InputError,
            r"key_cache must be uint8 \[pages, 64, 64\], got uint8 \[\d+, 64, 32\]",
        ),
        ("key_cache", lambda t: t[0], InputError, r"key_cache must be .* got uint8 \[64, 64\]"),
        (
            "key_cache",
            lambda t: t.transpose(1, 2),
            InputError,
            r"key_cache must be contiguous inside a page: strides \(free, 64, 1\), got",
        ),
        (
            "key_scales",
            lambda t: None,
            InputError,
            "key_scales must be .* for NVFP4 keys, got None",
        ),
        (
            "key_scales",
            lambda t: t.float(),
            DtypeError,
            r"key_scales must be float8_e4m3fn or uint8 .* got float32",
        ),
        ("key_scales", lambda t: t[:-1], InputError, "key_scales must be .* got"),
        (
            "key_scales",
            lambda t: t.reshape(-1)[:-1],
            InputError,
            r"key_scales must be \[\d+\] for \d+ pages in 128x4 order, got",
        ),
        (
            "key_scales",
            lambda t: torch.zeros(512 * len(t) * 2 + 2048, dtype=torch.uint8)[
                8 : 8 + (len(t) + 1) // 2 * 1024
            ],
            InputError,
            "key_scales must start at a multiple of 16 bytes, got an address that is 8 bytes past",
        ),
        (
            "key_scales",
            lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
            InputError,
            "key_scales must be contiguous inside a page",
        ),
        (
            "query",
            lambda t: t.float(),
            DtypeError,
            r"query must be bfloat16 \[rows, 128\] or uint8 \[rows, 64\], got float32",
        ),
        (
            "query",
            lambda t: t.repeat(1, 2),
            InputError,
            r"query must be uint8 \[rows, 64\], got uint8 \[6, 128\]",
        ),
        (
            "query",
            lambda t: t[:, :32].contiguous(),
            InputError,
            r"query must be uint8 \[rows, 64\], got uint8 \[6, 32\]",
        ),
        (
            "query",
            lambda t: t.t().contiguous().t(),
            InputError,
            "query must have a last stride of 1",
        ),
        ("query", lambda t: t[:5], InputError, r"query_scales must be .*\[5, 8\]"),
        (
            "query_scales",
            lambda t: None,
            InputError,
            "query_scales must be .* for an NVFP4 query, got None",
        ),
        ("query_scales", lambda t: t[:, :4], InputError, "query_scales must be"),
        (
            "block_table",
            lambda t: t.long(),
            DtypeError,
            r"block_table must be int32 \[requests, blocks\], got int64",
        ),
        ("block_table", lambda t: t[0], InputError, "block_table must be int32"),
        (
            "block_table",
            lambda t: t.t().contiguous().t(),
            InputError,
            "block_table must have a last stride of 1",
        ),
        (
            "context_lengths",
            lambda t: t.long(),
            DtypeError,
            r"context_lengths must be int32 \[groups\]",
        ),
        ("context_lengths", lambda t: t.view(1, 2), InputError, "context_lengths must be int32"),
        ("context_lengths", lambda t: t.repeat(2), InputError, r"requests must be int32 \[4\]"),
        ("requests", lambda t: t.long(), DtypeError, "requests must be int32"),
        (
            "requests",
            lambda t: torch.cat((t, t[:1])),
            InputError,
            r"requests must be int32 \[2\], one entry for each context length, got int32 \[3\]",
        ),
        (
            "scores",
            lambda t: t.half(),
            DtypeError,
            r"scores must be float32 \[6, max_context\], got float16",
        ),
        (
            "scores",
            lambda t: t[:5],
            InputError,
            r"scores must be float32 \[6, max_context\], got float32 \[5, ",
        ),
        (
            "scores",
            lambda t: t.t().contiguous().t(),
            InputError,
            "scores must have a last stride of 1",
        ),
        (
            "scores",
            lambda t: t[:1].expand(6, -1),
            InputError,
            "scores must have rows that do not overlap",
        ),
        ("query", lambda t: t.tolist(), DtypeError, "query must be a .* tensor, got list"),
    ],
)
def test_wrong_arguments(
    problem: Problem,
    name: str,
    change: Callable[[torch.Tensor], object],
    kind: type[Exception],
    message: str,
) -> None:
    refuse(problem.replace(**{name: change(getattr(problem, name))}), kind, message)


def test_more_keys_than_kernels_can_count(problem: Problem) -> None:
    wide = torch.empty(problem.scores.shape[0], 2**31 - 127, device="meta")
    with pytest.raises(InputError, match=r"at most 2147483520 columns.*got 2147483521"):
        problem.replace(scores=wide).run()


def test_rows_must_divide_into_groups(generator: torch.Generator) -> None:
    problem = make_problem([5, 5, 5, 5], generator=generator, kind="bf16")
    three = problem.replace(
        context_lengths=problem.context_lengths[:3], requests=problem.requests[:3]
    )
    refuse(three, InputError, "1 to 8 rows for each of the 3 groups .* got 4 rows")
    nine = make_problem([5], generator=generator, kind="bf16", rows_per_group=9)
    refuse(nine, InputError, "1 to 8 rows for each of the 1 groups .* got 9 rows")
    none = problem.replace(query=problem.query[:0], scores=problem.scores[:0])
    refuse(none, InputError, "1 to 8 rows .* got 0 rows")


def test_scales_where_none_belong(generator: torch.Generator, problem: Problem) -> None:
    bf16 = bf16_problem(generator)
    refuse(
        bf16.replace(key_scales=problem.key_scales), InputError, "key_scales must be None for BF16"
    )
    refuse(bf16.replace(query_scales=problem.query_scales), InputError, "query_scales must be None")
    nvfp4_query = bf16.replace(query=problem.query, query_scales=problem.query_scales)
    refuse(nvfp4_query, DtypeError, "query must be bfloat16 .* for BF16 keys, got uint8")


def test_alignment_of_pages(generator: torch.Generator) -> None:
    flat = torch.zeros(3 * 4096 + 64, dtype=torch.uint8)
    problem = make_problem([100], generator=generator)
    scales = torch.zeros(3, 64, 8, dtype=torch.uint8)
    offset = flat[8 : 8 + 3 * 4096].view(3, 64, 64)
    refuse(
        problem.replace(key_cache=offset, key_scales=scales),
        InputError,
        "key_cache must start at a multiple of 16 bytes, got an address that is 8 bytes past",
    )
    pitch = flat.as_strided((2, 64, 64), (4104, 64, 1))
    refuse(
        problem.replace(key_cache=pitch, key_scales=scales[:2]),
        InputError,
        "key_cache must have a first stride that is a multiple of 16 bytes, got 4104 bytes",
    )


def test_devices_must_agree(problem: Problem) -> None:
    elsewhere = problem.replace(requests=problem.requests.to("meta"))
    refuse(elsewhere, InputError, "requests must be on cpu, the device of scores, got meta")


def test_tensors_with_no_pages_or_groups(generator: torch.Generator) -> None:
    empty = make_problem([], generator=generator, kind="bf16", spare_pages=0)
    assert empty.run().numel() == 0
    rows = empty.replace(query=torch.zeros(2, 128, dtype=torch.bfloat16), scores=torch.zeros(2, 4))
    with pytest.raises(InputError, match="query must have 0 rows where context_lengths is empty"):
        rows.run()


def test_the_checked_problem(problem: Problem) -> None:
    checked = check_scores_call(ScoreCall(**vars(problem)))
    assert (checked.rows, checked.groups, checked.rows_per_group) == (6, 2, 3)
    assert (checked.query_format, checked.key_format) == ("nvfp4", "nvfp4")
    assert checked.max_context == problem.scores.shape[1]
    assert checked.key_cache is problem.key_cache
    with pytest.raises(dataclasses.FrozenInstanceError):
        checked.rows = 7  # type: ignore[misc]


def test_unknown_backends(problem: Problem) -> None:
    with pytest.raises(
        InputError, match=r"backend must be one of \['auto', .*'torch'.*\], got 'x'"
    ):
        problem.run("x")


def test_no_backend_for_a_device(problem: Problem) -> None:
    with pytest.raises(UnsupportedError, match="torch: tensors must be on a CPU or CUDA device"):
        problem.to("meta").run()


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("context_lengths", (0,), -1, "context_lengths must not be negative, got -1 for group 0"),
        ("requests", (1,), 2, "requests must be rows of block_table, 0 to 1, got 2 for group 1"),
        ("block_table", (0, 1), -1, "got -1 at request 0, block 1"),
        ("block_table", (1, 0), 999, "got 999 at request 1, block 0"),
    ],
)
def test_checked_mode_reads_the_values(
    problem: Problem,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    index: tuple[int, ...],
    value: int,
    message: str,
) -> None:
    tensor = getattr(problem, name).clone()
    tensor[index] = value
    monkeypatch.setenv("SDSA_CHECK", "1")
    refuse(problem.replace(**{name: tensor}), InputError, message)


def test_checked_mode_accepts_what_is_right(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDSA_CHECK", "1")
    problem = make_problem([100, 0, 7], generator=generator, garbage=-(2**31))
    problem.requests[1] = 12345  # any value where the length is 0
    problem.run()
    long = make_problem([64], generator=generator, max_context=1000)
    long.context_lengths[0] = 500
    refuse(long, InputError, "block_table must have 8 columns for length 500 of group 0, got 2")


def test_lengths_are_clamped_to_the_width(generator: torch.Generator) -> None:
    problem = make_problem([200], generator=generator, max_context=70)
    full = make_problem([200], generator=torch.Generator().manual_seed(20261130), max_context=200)
    assert torch.equal(problem.run(), full.run()[:, :70])
    assert (problem.guards() == UNTOUCHED).all()


def test_backend_argument_is_keyword_only(problem: Problem) -> None:
    with pytest.raises(TypeError):
        indexer_scores(  # type: ignore[call-arg]
            problem.query,
            problem.key_cache,
            problem.block_table,
            problem.context_lengths,
            problem.requests,
            problem.scores,
        )


@pytest.mark.parametrize("name", ["query", "key_cache", "key_scales", "context_lengths"])
@pytest.mark.parametrize("start", [4, 8], ids=["first", "inside"])
def test_scores_may_not_lie_over_an_input(problem: Problem, name: str, start: int) -> None:
    memory = torch.zeros(1 << 16)
    scores = memory[4 : 4 + problem.scores.numel()].view(problem.scores.shape)
    tensor = getattr(problem, name)
    over = memory[start:].view(tensor.dtype)[: tensor.numel()].view(tensor.shape)
    over.view(torch.uint8).copy_(tensor.view(torch.uint8))
    call = dataclasses.replace(problem, scores=scores, **{name: over})
    with pytest.raises(InputError, match=f"scores must not overlap {name} in memory"):
        call.run()
    behind = memory[30_000 : 30_000 + scores.numel()].view(scores.shape)
    dataclasses.replace(call, scores=behind).run()
