"""The `torch` backend against the float64 reference, on the shapes that break things."""

from __future__ import annotations

import hashlib

import pytest
import torch

from sdsa_kernels import torch_scores
from sdsa_kernels.problem import ScoreCall
from sdsa_kernels.testing.reference import reference_scores
from sdsa_quant.formats.nvfp4 import quantize_nvfp4
from sdsa_quant.formats.scale_order import linear_to_128x4
from support.problems import (
    GARBAGE_ENTRIES,
    KINDS,
    UNTOUCHED,
    assert_scores,
    integer_values,
    make_problem,
)

LENGTHS = {
    "empty": [0, 0, 0],
    "around-a-page": [0, 1, 63, 64, 65, 127, 128, 129],
    "one-long": [5, 1030, 0, 64],
    "one-group": [300],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows_per_group", [1, 2, 3, 8])
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
    problem.run("torch")
    assert_scores(problem, exact=integers)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pages", [1, 2, 5])
def test_scores_do_not_depend_on_the_chunk(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, kind: str, pages: int
) -> None:
    problem = make_problem([700, 1, 0, 321], generator=generator, kind=kind, rows_per_group=4)
    whole = problem.run().clone()
    problem.scores.fill_(UNTOUCHED)
    monkeypatch.setattr(torch_scores, "_pages_per_chunk", lambda device: pages)
    assert torch.equal(problem.run(), whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("garbage", GARBAGE_ENTRIES)
def test_table_entries_past_a_length_are_not_read(
    generator: torch.Generator, kind: str, garbage: int
) -> None:
    problem = make_problem([130, 1, 64], generator=generator, kind=kind, garbage=garbage)
    problem.run()
    assert_scores(problem, exact=False)


@pytest.mark.parametrize("kind", ["bf16", "nvfp4"])
def test_page_pitch_does_not_matter(kind: str) -> None:
    pitches = (65536, 16384) if kind == "bf16" else (9216, 4624, 4608)
    results = []
    for pitch in pitches:
        problem = make_problem(
            [150, 70],
            generator=torch.Generator().manual_seed(5),
            kind=kind,
            page_pitch=pitch,
            rows_per_group=2,
        )
        results.append(problem.run().clone())
    assert all(torch.equal(result, results[0]) for result in results)


def test_separate_keys_and_scales() -> None:
    results = [
        make_problem([150], generator=torch.Generator().manual_seed(5), separate=separate).run()
        for separate in (False, True)
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize("lengths", [[150], [64], [0, 300, 65]], ids=["odd", "one", "several"])
def test_scales_in_the_128x4_order(generator: torch.Generator, lengths: list[int]) -> None:
    problem = make_problem(lengths, generator=generator, rows_per_group=2)
    linear = problem.run().clone()
    problem.scores.fill_(UNTOUCHED)
    scales = problem.key_scales.reshape(-1, 8)
    assert torch.equal(problem.replace(key_scales=linear_to_128x4(scales)).run(), linear)


def test_layers_of_one_buffer(generator: torch.Generator) -> None:
    buffer = torch.full((10, 4, 64, 128), float("nan"), dtype=torch.bfloat16)
    keys = integer_values((10, 64, 128), generator)
    buffer[:, 2] = keys
    problem = make_problem([300], generator=generator, kind="bf16", integers=True)
    problem = problem.replace(
        block_table=torch.tensor([[7, 2, 5, 0, 9]], dtype=torch.int32), key_cache=buffer[:, 2]
    )
    strided = problem.run().clone()
    assert torch.equal(problem.replace(key_cache=keys).run(), strided)
    assert_scores(problem, exact=True)


def test_sliced_tables_lengths_and_requests(generator: torch.Generator) -> None:
    problem = make_problem([100, 200], generator=generator)
    wide = torch.full((2, 9), -7, dtype=torch.int32)
    wide[:, 1 : 1 + problem.block_table.shape[1]] = problem.block_table
    lengths = torch.tensor([9999, 100, 200], dtype=torch.int32)
    requests = torch.tensor([9, 9, 9, 0, 1], dtype=torch.int32)
    sliced = problem.replace(
        block_table=wide[:, 1:], context_lengths=lengths[1:], requests=requests[3:]
    )
    sliced.run()
    assert_scores(sliced, exact=False)


def test_wide_scores_keep_their_other_entries(generator: torch.Generator) -> None:
    problem = make_problem([400] * 6, generator=generator, rows_per_group=2)
    big = torch.full((20, 500), UNTOUCHED)
    inside = problem.replace(scores=big[:12, :400])
    inside.run()
    assert (big[12:] == UNTOUCHED).all()
    assert (big[:, 400:] == UNTOUCHED).all()
    assert torch.equal(big[:12, :400], problem.run()[:, :400])


def test_every_key_is_where_the_table_says() -> None:
    keys = torch.zeros(6, 64, 128)
    table = [5, 0, 3, 1]
    for t in range(200):
        keys[table[t // 64], t % 64, t % 128] = 1 + t // 128
    query = torch.arange(1, 129).bfloat16().view(1, 128)
    scores = torch.full((1, 200), UNTOUCHED)
    guarded = torch.tensor([[*table, 999]], dtype=torch.int32)
    problem = make_problem([200], generator=torch.Generator(), kind="bf16").replace(
        query=query, key_cache=keys.bfloat16(), block_table=guarded[:, :4], scores=scores
    )
    assert problem.run()[0].tolist() == [(t % 128 + 1) * (1 + t // 128) for t in range(200)]


def test_groups_share_a_request(generator: torch.Generator) -> None:
    problem = make_problem([8], generator=generator, kind="bf16", rows_per_group=4, integers=True)
    together = problem.run().clone()
    alone = problem.replace(
        context_lengths=torch.tensor([5, 6, 7, 8], dtype=torch.int32),
        requests=torch.zeros(4, dtype=torch.int32),
        scores=torch.full_like(problem.scores, UNTOUCHED),
    )
    scores = alone.run()
    for row, length in enumerate((5, 6, 7, 8)):
        assert torch.equal(scores[row, :length], together[row, :length])
        assert (scores[row, length:] == UNTOUCHED).all()


def test_many_groups_of_few_requests(generator: torch.Generator) -> None:
    problem = make_problem([64] * 4, generator=generator, kind="bf16", integers=True)
    groups = 70_000
    many = problem.replace(
        query=problem.query[:1].expand(groups, 128).contiguous(),
        context_lengths=torch.full((groups,), 64, dtype=torch.int32),
        requests=(torch.arange(groups) % 4).int(),
        scores=torch.full((groups, 64), UNTOUCHED),
    )
    scores = many.run()
    expected = (
        many.replace(
            query=many.query[:4],
            context_lengths=many.context_lengths[:4],
            requests=many.requests[:4],
            scores=many.scores[:4],
        )
        .reference()
        .float()
    )
    assert torch.equal(scores.view(-1, 4, 64), expected.expand(groups // 4, 4, 64))


@pytest.mark.parametrize("length", [2047, 2049, 4097, 8193, 65_537])
def test_long_contexts_are_exact(generator: torch.Generator, length: int) -> None:
    problem = make_problem([length], generator=generator, rows_per_group=8, integers=True)
    problem.run()
    assert_scores(problem, exact=True)


def test_one_hot_rows_read_back_the_keys(generator: torch.Generator) -> None:
    problem = make_problem([64] * 16, generator=generator, kind="mixed", rows_per_group=8)
    rows = problem.replace(query=torch.eye(128).bfloat16(), requests=torch.zeros(16).int())
    scores = rows.run()[:, :64]
    expected = rows.reference()[:, :64].float()
    assert torch.equal(scores, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_repeats_agree_and_nothing_else_is_written(generator: torch.Generator, kind: str) -> None:
    problem = make_problem([130, 0, 77], generator=generator, kind=kind, rows_per_group=2)
    inputs = [t for name, t in vars(problem).items() if t is not None and name != "scores"]

    def digest() -> list[str]:
        return [hashlib.sha256(bytes(t.untyped_storage())).hexdigest() for t in inputs]

    before, first = digest(), problem.run().clone()
    for _ in range(5):
        assert torch.equal(problem.run(), first)
    assert digest() == before


@pytest.mark.parametrize("kind", ["nvfp4", "mixed"])
def test_keys_of_every_magnitude(generator: torch.Generator, kind: str) -> None:
    problem = make_problem([576], generator=generator, kind=kind, rows_per_group=2)
    keys = torch.randn(9 * 64, 128, generator=generator)
    keys *= torch.exp2((torch.arange(9 * 64) % 9 - 4).float())[:, None]
    codes, scales = quantize_nvfp4(keys)
    changed = problem.replace(
        key_cache=codes.view(9, 64, 64),
        key_scales=scales.view(9, 64, 8),
        block_table=torch.arange(9, dtype=torch.int32).view(1, 9),
    )
    changed.run()
    assert_scores(changed, exact=False)


def test_extreme_scales_are_exact() -> None:
    # Every finite scale byte, with codes 6 and 0.5, and BF16 query rows near both ends.
    count = 0x7F
    codes = torch.full((2, 64, 64), 0x17, dtype=torch.uint8)
    scales = torch.zeros(2, 64, 8, dtype=torch.uint8)
    scales.view(128, 8)[:count, 0] = torch.arange(count, dtype=torch.uint8)
    query = torch.zeros(2, 128).bfloat16()
    query[0, 0], query[1, 1] = 1e34, 2.0**-100
    problem = make_problem([count], generator=torch.Generator(), kind="mixed", rows_per_group=2)
    problem = problem.replace(
        query=query,
        key_cache=codes,
        key_scales=scales,
        block_table=torch.tensor([[0, 1]], dtype=torch.int32),
    )
    scores = problem.run()[:, :count]
    assert torch.equal(scores, problem.reference()[:, :count].float())
    assert scores[1, 1] == 0.5 * 2.0**-9 * 2.0**-100


def test_a_nan_scale_is_not_hidden() -> None:
    problem = make_problem([64], generator=torch.Generator().manual_seed(1), integers=True)
    assert problem.key_scales is not None
    page = int(problem.block_table[0, 0])
    for byte in (0x7F, 0xFF):
        problem.key_scales.view(torch.uint8)[page, 9, 3] = byte
        assert problem.run()[0].isnan().nonzero().flatten().tolist() == [9]


def test_reference_on_a_case_done_by_hand() -> None:
    key_cache = torch.zeros(1, 64, 64, dtype=torch.uint8)
    key_cache[0, 0, 0] = 0x2A  # values -1 (low nibble 10) and 1 (high nibble 2)
    key_cache[0, 1, 8] = 0x07  # value 16 is 6
    scales = torch.full((1, 64, 8), 0x38, dtype=torch.uint8)  # 1.0
    scales[0, 1, 1] = 0x44  # 3.0
    query = torch.zeros(1, 128).bfloat16()
    query[0, 0], query[0, 1], query[0, 16] = 2.0, 5.0, 0.5
    table = torch.zeros(1, 1, dtype=torch.int32)
    lengths = torch.tensor([3], dtype=torch.int32)
    requests = torch.zeros(1, dtype=torch.int32)
    call = ScoreCall(
        query, key_cache, table, lengths, requests, torch.empty(1, 4), key_scales=scales
    )
    scores = reference_scores(call)
    assert scores[0, :3].tolist() == [3.0, 9.0, 0.0]
    assert scores[0, 3].isnan()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows_per_group", range(1, 9))
def test_scores_depend_on_neither_neighbours_nor_threads(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, kind: str, rows_per_group: int
) -> None:
    problem = make_problem(
        [64, 64, 64], generator=generator, kind=kind, rows_per_group=rows_per_group
    )
    together = problem.run().clone()
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for pages in (1, 2):
                monkeypatch.setattr(torch_scores, "_pages_per_chunk", lambda device, n=pages: n)
                problem.scores.fill_(UNTOUCHED)
                assert torch.equal(problem.run(), together)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_and_autograd_stay_outside(generator: torch.Generator, kind: str) -> None:
    problem = make_problem([130], generator=generator, kind=kind, rows_per_group=2)
    expected = problem.run().clone()
    problem.scores.fill_(UNTOUCHED)
    if problem.query.is_floating_point():
        problem.query.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = problem.run()
    assert torch.equal(scores, expected)
    assert scores.grad_fn is None
    assert not scores.requires_grad
    with torch.inference_mode():
        inference = torch.full_like(scores, UNTOUCHED)
    assert torch.equal(problem.replace(scores=inference).run(), expected)
