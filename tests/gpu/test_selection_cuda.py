"""Selection on a GPU: the contract, captures, repeats, and replays on two streams at once."""

from __future__ import annotations

import functools

import pytest
import torch
from kernels.selection_contract import EDGES, check_hard_rows, check_selection, padded

from sdsa_kernels import indexer_top_k, select_top_k
from sdsa_kernels.measure.timing import capture
from sdsa_kernels.selection.checks import check_select_call
from sdsa_kernels.selection.select import BACKENDS
from sdsa_kernels.testing.selection import hard_rows
from support.problems import KINDS, make_problem

pytestmark = pytest.mark.gpu
pytest.importorskip("triton", reason="triton is not installed")

FAST = ["cute", "triton"]


@pytest.fixture(params=FAST)
def backend(request: pytest.FixtureRequest) -> str:
    """A backend that runs here."""
    problem = check_select_call(
        torch.zeros(1, 1, device="cuda"),
        torch.zeros(1, dtype=torch.int32, device="cuda"),
        torch.zeros(1, 1, dtype=torch.int32, device="cuda"),
        None, None, None, slots=False,
    )  # fmt: skip
    chosen = next(each for each in BACKENDS if each.name == request.param)
    reason = chosen.reason_unsupported(problem)
    if reason is not None:
        pytest.skip(reason)
    return str(request.param)


@pytest.mark.parametrize(("lengths", "k"), EDGES, ids=lambda value: str(value))
def test_torch_on_a_gpu(generator: torch.Generator, lengths: list[int], k: int) -> None:
    rows = [torch.randn(length, generator=generator) for length in lengths]
    check_selection(padded(rows, max(lengths)), lengths, k, backend="torch", device="cuda")


@pytest.mark.parametrize(("lengths", "k"), EDGES, ids=lambda value: str(value))
def test_lengths_around_k(
    generator: torch.Generator, lengths: list[int], k: int, backend: str
) -> None:
    rows = [torch.randn(length, generator=generator) for length in lengths]
    check_selection(padded(rows, max(lengths)), lengths, k, backend=backend, device="cuda")


@pytest.mark.parametrize(
    ("length", "k"),
    [(200, 64), (8192, 300), (8193, 1), (65_536, 2048), (100_001, 65_535), (300_000, 2048)],
    ids=str,
)
def test_hard_rows(generator: torch.Generator, length: int, k: int, backend: str) -> None:
    check_hard_rows(length, k, generator, backend=backend, device="cuda")


def test_many_ragged_rows(generator: torch.Generator, backend: str) -> None:
    lengths = torch.randint(0, 12_000, (1500,), generator=generator).tolist()
    lengths[700] = 200_000
    scores = torch.randn(
        1500, 200_000, generator=torch.Generator("cuda").manual_seed(1), device="cuda"
    )
    there = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    keys, expected = (torch.empty(1500, 512, dtype=torch.int32, device="cuda") for _ in "ab")
    select_top_k(scores, there, top_keys=keys, backend=backend)
    select_top_k(scores, there, top_keys=expected, backend="torch")
    assert torch.equal(keys, expected)


def test_a_thousand_replays_on_two_streams(generator: torch.Generator, backend: str) -> None:
    graphs, results = [], []
    lengths = torch.tensor([65_536] * 8, dtype=torch.int32, device="cuda")
    rows = list(hard_rows(65_536, 2048, generator).values())
    for first in (0, 4):
        scores = torch.stack((rows * 2)[first : first + 8]).cuda()
        keys = torch.empty(8, 2048, dtype=torch.int32, device="cuda")
        expected = torch.empty_like(keys)
        select_top_k(scores, lengths, top_keys=expected, backend="torch")
        call = functools.partial(select_top_k, scores, lengths, top_keys=keys, backend=backend)
        call()
        graphs.append(capture(call))
        results.append((keys, expected, scores))
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
    for _ in range(1000):
        for stream, graph, (keys, expected, _), count in zip(
            streams, graphs, results, wrong, strict=True
        ):
            with torch.cuda.stream(stream):
                keys.fill_(-7)
                graph.replay()
                count.add_((keys != expected).sum())
    torch.cuda.synchronize()
    assert [int(count) for count in wrong] == [0, 0]
    assert torch.cuda.memory_allocated() == allocated + 2 * 512


@pytest.mark.parametrize("kind", KINDS)
def test_an_indexer_in_a_graph_follows_new_lengths(generator: torch.Generator, kind: str) -> None:
    problem = make_problem(
        [20_000, 3000], generator=generator, kind=kind, rows_per_group=2, integers=True
    )
    here = problem.to("cuda")
    keys = torch.empty(4, 256, dtype=torch.int32, device="cuda")

    def call() -> None:
        indexer_top_k(
            here.query, here.key_cache, here.block_table, here.context_lengths,
            requests=here.requests, top_keys=keys, query_scales=here.query_scales,
            key_scales=here.key_scales, slots=True,
        )  # fmt: skip

    call()
    graph = capture(call)
    for lengths in ([20_000, 3000], [9000, 0], [100, 2999]):
        here.context_lengths.copy_(torch.tensor(lengths))
        graph.replay()
        expected = torch.empty(4, 256, dtype=torch.int32)
        indexer_top_k(
            problem.query, problem.key_cache, problem.block_table,
            torch.tensor(lengths, dtype=torch.int32), requests=problem.requests,
            top_keys=expected, query_scales=problem.query_scales,
            key_scales=problem.key_scales, slots=True,
        )  # fmt: skip
        assert torch.equal(keys.cpu(), expected)
