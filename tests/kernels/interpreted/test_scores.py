"""The portable scoring kernel under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from sdsa_kernels.backends import choose_backend
from sdsa_kernels.checks import check_scores_call
from sdsa_kernels.problem import ScoreCall
from sdsa_kernels.triton import backend as triton_scores
from support.problems import (
    GARBAGE_ENTRIES,
    KINDS,
    UNTOUCHED,
    assert_scores,
    integer_values,
    make_problem,
)

LENGTHS = {
    "empty": [0, 0],
    "around-a-page": [1, 63, 0, 64, 65],
    "one-group": [200],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows_per_group", [1, 3, 8])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("integers", [True, False], ids=["integers", "gaussian"])
def test_matches_the_reference(
    generator: torch.Generator,
    kind: str,
    rows_per_group: int,
    lengths: list[int],
    integers: bool,
) -> None:
    problem = make_problem(
        lengths, generator=generator, kind=kind, rows_per_group=rows_per_group, integers=integers
    )
    problem.run("triton")
    assert_scores(problem, exact=integers)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("programs", [1, 2, 7, 40])
def test_scores_do_not_depend_on_the_programs(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, kind: str, programs: int
) -> None:
    # From one program for everything to more programs than pages.
    problem = make_problem(
        [130, 1, 0, 321], generator=generator, kind=kind, rows_per_group=2, integers=True
    )
    monkeypatch.setattr(triton_scores, "_INTERPRETED_PROGRAMS", programs)
    problem.run("triton")
    assert_scores(problem, exact=True)


@pytest.mark.parametrize(
    "long", [0, 255, 256, 300, 2047, 2048, 2400], ids=lambda group: f"group-{group}"
)
def test_finding_a_share_among_many_groups(generator: torch.Generator, long: int) -> None:
    # Around the block that is looked at closely and the one that is skipped.
    lengths = [0] * 2500
    lengths[long], lengths[7], lengths[2499] = 130, 1, 2
    problem = make_problem(lengths, generator=generator, kind="bf16", integers=True)
    problem.run("triton")
    assert_scores(problem, exact=True)


@pytest.mark.parametrize("garbage", GARBAGE_ENTRIES)
def test_table_entries_past_a_length_are_not_read(generator: torch.Generator, garbage: int) -> None:
    problem = make_problem([130, 1], generator=generator, garbage=garbage)
    problem.run("triton")
    assert_scores(problem, exact=False)


@pytest.mark.parametrize(("kind", "pitch"), [("nvfp4", 4624), ("nvfp4", 9216), ("bf16", 65_536)])
def test_page_pitch(generator: torch.Generator, kind: str, pitch: int) -> None:
    problem = make_problem([150], generator=generator, kind=kind, page_pitch=pitch)
    problem.run("triton")
    assert_scores(problem, exact=False)


def test_layers_of_one_buffer(generator: torch.Generator) -> None:
    buffer = torch.full((10, 4, 64, 128), float("nan"), dtype=torch.bfloat16)
    buffer[:, 2] = integer_values((10, 64, 128), generator)
    problem = make_problem([300], generator=generator, kind="bf16", integers=True)
    table = torch.tensor([[7, 2, 5, 0, 9]], dtype=torch.int32)
    problem = problem.replace(block_table=table, key_cache=buffer[:, 2])
    problem.run("triton")
    assert_scores(problem, exact=True)


@pytest.mark.parametrize("width", [64, 150, 257])
def test_widths_and_clamped_lengths(generator: torch.Generator, width: int) -> None:
    problem = make_problem([257, 64], generator=generator, rows_per_group=3, max_context=width)
    problem.run("triton")
    assert_scores(problem, exact=False)


def test_any_request_where_the_length_is_zero(generator: torch.Generator) -> None:
    problem = make_problem([0, 70, 0], generator=generator, integers=True)
    problem = problem.replace(requests=torch.tensor([2**31 - 1, 1, -(2**31)], dtype=torch.int32))
    problem.run("triton")
    assert_scores(problem.replace(requests=torch.tensor([0, 1, 2])), exact=True)


def test_every_finite_scale_byte_is_decoded() -> None:
    scale_bytes = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8)
    codes = torch.full((4, 64, 64), 0xD7, dtype=torch.uint8)  # values 6 and -3
    scales = torch.zeros(4, 64, 8, dtype=torch.uint8)
    scales.view(-1, 8)[: scale_bytes.numel(), 5] = scale_bytes
    query = torch.zeros(2, 128)
    query[0, 80], query[1, 95] = 1.0, 2.0**-60
    problem = make_problem(
        [scale_bytes.numel()], generator=torch.Generator(), kind="mixed", rows_per_group=2
    ).replace(
        query=query.bfloat16(),
        key_cache=codes,
        key_scales=scales,
        block_table=torch.arange(4, dtype=torch.int32).view(1, 4),
    )
    problem.run("triton")
    assert_scores(problem, exact=True)


def test_empty_calls(generator: torch.Generator) -> None:
    problem = make_problem([0], generator=generator, max_context=0)
    assert problem.run("triton").shape == (1, 0)
    problem = make_problem([], generator=generator, max_context=10)
    assert problem.run("triton").shape == (0, 10)


def test_the_interpreter_takes_cpu_tensors(generator: torch.Generator) -> None:
    problem = make_problem([5], generator=generator)
    assert choose_backend(check_scores_call(ScoreCall(**vars(problem)))).name == "triton"
    assert (problem.scores == UNTOUCHED).all()
