"""Calls that read what the call before wrote: launched early, but not ahead of their inputs."""

from __future__ import annotations

import functools

import pytest
import torch

from sdsa_kernels import quantize_write_nvfp4
from sdsa_kernels.measure.timing import capture
from sdsa_quant.paging import page_views
from support.problems import KINDS, UNTOUCHED, Problem, gaussian_values, make_problem

pytestmark = pytest.mark.gpu

LINKS = 12
REPLAYS = 300


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
def test_a_chain_of_calls(generator: torch.Generator, kind: str, captured: bool) -> None:
    rows, calls = chained(kind, generator)
    big = make_problem([3000] * 32, generator=generator, kind=kind).to("cuda")
    # A call that takes long stands between two links.
    steps = [
        lambda: calls[0].run("triton"),
        lambda: big.run("triton"),
        *(functools.partial(call.run, "triton") for call in calls[1:]),
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


def test_keys_written_just_before(generator: torch.Generator) -> None:
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
                "triton",
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
