"""Plans: what a repeated call may skip, and what it must never skip."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from sdsa_kernels import plans
from sdsa_kernels.problem import ScoreCall
from sdsa_quant.errors import InputError
from support.problems import Problem, make_problem


@pytest.fixture(autouse=True)
def no_plans() -> Iterator[None]:
    plans.forget_all()
    yield
    plans.forget_all()


def plan_of(problem: Problem, backend: str | None = None) -> list[tuple[int, ...]]:
    """Remember a plan that records the addresses it is given."""
    launches: list[tuple[int, ...]] = []
    plans.remember(
        plans.signature(ScoreCall(**vars(problem)), backend), lambda *them: launches.append(them)
    )
    return launches


def test_the_same_signature_is_launched_at_its_own_addresses(generator: torch.Generator) -> None:
    problem = make_problem([100, 7], generator=generator)
    launches = plan_of(problem)
    twin = make_problem([3, 100], generator=generator)
    twin.run()
    assert twin.query_scales is not None
    assert twin.key_scales is not None
    tensors = (
        twin.query, twin.query_scales, twin.key_cache, twin.key_scales, twin.block_table,
        twin.context_lengths, twin.requests, twin.scores,
    )  # fmt: skip
    assert launches == [tuple(tensor.data_ptr() for tensor in tensors)]


def test_absent_scales_have_address_0(generator: torch.Generator) -> None:
    problem = make_problem([100], generator=generator, kind="bf16")
    launches = plan_of(problem)
    problem.run()
    assert launches[0][1] == launches[0][3] == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.replace(query=p.query[:1], scores=p.scores[:1]),
        lambda p: p.replace(scores=p.scores[:, :50]),
        lambda p: p.replace(requests=p.requests.long()),
        lambda p: p.replace(query=p.query.repeat(1, 2)[:, :64]),
        lambda p: p.replace(key_scales=None),
        lambda p: p.replace(block_table=p.block_table.t()),
        lambda p: p.replace(query=None),
    ],
    ids=["rows", "width", "dtype", "stride", "scales", "transposed", "none"],
)
def test_any_difference_is_checked_in_full(generator: torch.Generator, change: object) -> None:
    problem = make_problem([100, 7], generator=generator)
    launches = plan_of(problem)
    changed = change(problem)
    with contextlib.suppress(ValueError, TypeError):  # what the checks say is tested elsewhere
        changed.run()
    assert launches == []


def test_another_backend_has_another_plan(generator: torch.Generator) -> None:
    problem = make_problem([100], generator=generator)
    launches = plan_of(problem, backend="triton")
    problem.run("torch")
    assert launches == []


def test_an_unaligned_address_is_still_refused(generator: torch.Generator) -> None:
    problem = make_problem([100], generator=generator, separate=True)
    launches = plan_of(problem)
    room = torch.zeros(problem.key_cache.numel() + 8, dtype=torch.uint8)
    shifted = problem.replace(key_cache=room[8:].view(problem.key_cache.shape))
    with pytest.raises(InputError, match="key_cache must start at a multiple of 16 bytes"):
        shifted.run()
    assert launches == []


def test_the_checked_mode_uses_no_plan(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = make_problem([100], generator=generator)
    launches = plan_of(problem)
    monkeypatch.setenv("SDSA_CHECK", "1")
    problem.run()
    assert launches == []


def test_plans_are_bounded(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_MOST_PLANS", 3)
    for i in range(10):
        plans.remember((i,), lambda *addresses: None)
        assert len(plans._plans) <= 3
