"""Scoring between kernels that write its inputs and read its outputs, in streams and graphs.

A backend may start its kernel before the one in front has ended (programmatic dependent launch);
nothing that a caller can see may depend on it.
"""

from __future__ import annotations

import functools

import pytest
import torch

from sdsa_kernels import backend_names, quantize_write_nvfp4
from sdsa_kernels.measure.timing import capture
from sdsa_quant.paging import page_views
from support.problems import (
    KINDS,
    UNTOUCHED,
    Problem,
    assert_scores,
    gaussian_values,
    make_problem,
)

triton = pytest.importorskip("triton", reason="the kernels around are written in Triton")
import triton.language as tl  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("backend_runs_here"),
    pytest.mark.parametrize("backend", [name for name in backend_names() if name != "torch"]),
]

LINKS = 12
REPLAYS = 300
SIZES = {
    "short": [3000, 1, 640],  # 58 pages
    "long": [70_000, 0, 64, 150_000],  # 3,441 pages
    "40-groups": [2000, 70] * 20,
}


@triton.jit
def _copy_late(source_ptr, target_ptr, count, turns, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy bytes, but first let the next kernel of the stream start, and be slow."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    state = tl.program_id(0)
    for _ in range(turns):
        state = state * 1664525 + 1013904223
    index = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(source_ptr + index, mask=index < count)
    value = tl.where(state == 0x5EED1E55, value + 1, value)  # so that nobody leaves out the turns
    tl.store(target_ptr + index, value, mask=index < count)


def copy_late(target: torch.Tensor, source: torch.Tensor, *, turns: int = 2000) -> None:
    """``target.copy_(source)``, of contiguous tensors, by a kernel that is slow to end."""
    to, of = target.view(-1).view(torch.uint8), source.view(-1).view(torch.uint8)
    grid = (-(-of.numel() // 1024),)
    _copy_late[grid](of, to, of.numel(), turns, block=1024, launch_pdl=True)


def scored_call(lengths: list[int], kind: str, backend: str, generator: torch.Generator) -> Problem:
    """A call that has run, with the right scores, which have no gaps between their rows."""
    problem = make_problem(
        lengths,
        generator=generator,
        kind=kind,
        rows_per_group=2,
        integers=True,
        max_context=max(lengths),
    ).to("cuda")
    problem.run(backend)
    assert_scores(problem, exact=True)
    return problem.replace(scores=problem.scores.contiguous())


def inputs(problem: Problem) -> dict[str, torch.Tensor]:
    """Everything that a kernel in front may write, except for the keys."""
    names = ("query", "query_scales", "block_table", "context_lengths", "requests")
    return {name: getattr(problem, name) for name in names if getattr(problem, name) is not None}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", SIZES.values(), ids=SIZES.keys())
def test_inputs_written_just_before_and_scores_read_just_after(
    generator: torch.Generator, backend: str, kind: str, lengths: list[int]
) -> None:
    calls = [scored_call(each, kind, backend, generator) for each in (lengths, lengths[::-1])]
    expected = [call.scores.clone() for call in calls]
    # One problem, whose inputs are those of the two calls by turns, keys included.
    live = calls[0].replace(**{n: t.clone() for n, t in inputs(calls[0]).items()})
    storages = [call.key_cache.untyped_storage() for call in calls]
    keys = [torch.empty(0, dtype=torch.uint8, device="cuda").set_(each) for each in storages]
    kept = [each.clone() for each in keys]
    blank = torch.full_like(live.scores, UNTOUCHED)
    results = [torch.empty_like(live.scores) for _ in range(6)]

    def chain() -> None:
        for step, result in enumerate(results):
            copy_late(keys[0], kept[step % 2][: keys[0].numel()])
            for name, tensor in inputs(calls[step % 2]).items():
                copy_late(inputs(live)[name], tensor)
            copy_late(live.scores, blank, turns=20_000)
            live.run(backend)
            copy_late(result, live.scores)

    chain()
    graph = capture(chain)
    for _ in range(30):
        for result in results:
            result.zero_()
        graph.replay()
        for step, result in enumerate(results):
            assert torch.equal(result, expected[step % 2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", SIZES.values(), ids=SIZES.keys())
def test_calls_in_a_row_write_the_same_scores(
    generator: torch.Generator, backend: str, kind: str, lengths: list[int]
) -> None:
    problem = make_problem(
        lengths, generator=generator, kind=kind, integers=True, max_context=max(lengths)
    ).to("cuda")
    shorter = problem.replace(context_lengths=problem.context_lengths // 3)
    other = problem.replace(query=problem.query.flip(0))
    problem.scores.fill_(UNTOUCHED)
    for call in (other, problem, shorter):
        call.run(backend)
        torch.cuda.synchronize()
    expected = problem.scores.clone()

    def chain() -> None:
        problem.scores.fill_(UNTOUCHED)
        for _ in range(4):
            for call in (other, problem, shorter):
                call.run(backend)

    chain()
    assert torch.equal(problem.scores, expected)
    graph = capture(chain)
    for _ in range(50):
        graph.replay()
        assert torch.equal(problem.scores, expected)


def permuting_keys(
    kind: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Cache and scales of 64 one-hot keys, which copy the odd values of a query row, shuffled.

    A score below 256 is a float32 whose upper half is a bfloat16 and whose lower half is 0: a row
    of 64 scores is a query row of 128 values of which the odd ones count.
    """
    copied = torch.randperm(64, generator=generator)
    if kind == "bf16":
        keys = torch.zeros(1, 64, 128, dtype=torch.bfloat16)
        keys[0, torch.arange(64), 2 * copied + 1] = 1.0
        return keys, None
    codes = torch.zeros(1, 64, 64, dtype=torch.uint8)
    codes[0, torch.arange(64), copied] = 0x20  # 1 in the upper nibble
    return codes, torch.full((1, 64, 8), 0x38, dtype=torch.uint8)  # scales of 1


def chained(kind: str, generator: torch.Generator) -> tuple[torch.Tensor, list[Problem]]:
    """Rows of scores and calls that make one from the one before: [LINKS + 1, 64] float32."""
    rows = torch.zeros(LINKS + 1, 64, device="cuda")
    first = make_problem([64], generator=generator, kind=kind, max_context=64).to("cuda")
    calls = []
    for link in range(LINKS):
        row = rows[link].view(torch.uint8)
        call = first.replace(scores=rows[link + 1].view(1, 64))
        if kind == "nvfp4":  # any bytes are codes
            call = call.replace(query=row[:64].view(1, 64))
        else:
            cache, scales = permuting_keys(kind, generator)
            call = call.replace(
                query=row.view(torch.bfloat16).view(1, 128),
                key_cache=cache.cuda(),
                key_scales=None if scales is None else scales.cuda(),
                block_table=torch.zeros(1, 1, dtype=torch.int32, device="cuda"),
            )
        calls.append(call)
    return rows, calls


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
def test_a_chain_of_calls(
    generator: torch.Generator, backend: str, kind: str, captured: bool
) -> None:
    """Calls read what the call before wrote: launched early, but not ahead of their inputs."""
    rows, calls = chained(kind, generator)
    big = make_problem([3000] * 32, generator=generator, kind=kind).to("cuda")
    # A call that takes long stands between two links.
    steps = [
        lambda: calls[0].run(backend),
        lambda: big.run(backend),
        *(functools.partial(call.run, backend) for call in calls[1:]),
    ]

    def run_steps() -> None:
        for step in steps:
            step()

    run_steps()
    run = capture(*steps).replay if captured else run_steps
    inputs = torch.randint(-99, 100, (REPLAYS, 64), generator=generator).float().cuda()
    results = []
    for values in inputs:
        rows[0] = values
        run()
        results.append(rows[LINKS].clone())
    torch.cuda.synchronize()
    for values, result in zip(inputs, results, strict=True):
        rows[0] = values
        for step in steps:
            step()
            torch.cuda.synchronize()
        assert torch.equal(rows[LINKS].view(torch.int32), result.view(torch.int32))
    if kind != "nvfp4":
        assert torch.equal(inputs.sort(1).values, torch.stack(results).sort(1).values)


def test_keys_written_just_before(generator: torch.Generator, backend: str) -> None:
    # Into pages that the call before the last still reads: neither may overtake the other.
    problem = make_problem([3000] * 16, generator=generator).to("cuda")
    pages = problem.key_cache.shape[0]
    key_cache, key_scales = page_views(
        torch.zeros(pages, 4608, dtype=torch.uint8, device="cuda"), "nvfp4"
    )
    assert key_scales is not None
    slots = torch.arange(64 * pages, device="cuda")
    written = [gaussian_values((64 * pages, 128), generator).cuda() for _ in range(2)]
    rows = [problem.scores.clone() for _ in written]
    calls = [
        call
        for keys, scores in zip(written, rows, strict=True)
        for call in (
            lambda keys=keys: quantize_write_nvfp4(
                keys, slots, key_cache=key_cache, key_scales=key_scales
            ),
            functools.partial(
                problem.replace(key_cache=key_cache, key_scales=key_scales, scores=scores).run,
                backend,
            ),
        )
    ]
    for call in calls:
        call()
        torch.cuda.synchronize()
    expected = [scores.clone() for scores in rows]
    assert not torch.equal(*expected)
    graph = capture(*calls)
    for _ in range(REPLAYS):
        for scores in rows:
            scores.fill_(0.0)
        graph.replay()
        for scores, right in zip(rows, expected, strict=True):
            valid = right != UNTOUCHED
            assert torch.equal(scores[valid], right[valid])
