"""Scoring between kernels that write its inputs and read its outputs, in streams and graphs.

A backend may start its kernel before the one in front has ended (programmatic dependent launch);
nothing that a caller can see may depend on it.
"""

from __future__ import annotations

import pytest
import torch

from sdsa_kernels import backend_names
from sdsa_kernels.measure.timing import capture
from support.problems import KINDS, UNTOUCHED, Problem, assert_scores, make_problem

triton = pytest.importorskip("triton", reason="the kernels around are written in Triton")
import triton.language as tl  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("backend_runs_here"),
    pytest.mark.parametrize("backend", [name for name in backend_names() if name != "torch"]),
]

SIZES = {
    "short": [3000, 1, 640],  # 58 pages
    "long": [70_000, 0, 64, 150_000],  # 3,441 pages
    "40-groups": [2000, 70] * 20,
}


@triton.jit
def _copy_late(source_ptr, target_ptr, count, turns, block: tl.constexpr):
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
    """Everything that a kernel in front may write, but for the keys."""
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
