"""What only the `cute` backend has: its ring of stages, its variants; see also test_scores_cuda."""

from __future__ import annotations

import pytest
import torch

from sdsa_kernels.cute import plans as cute_plans
from sdsa_quant.layout import PAGE
from support.problems import KINDS, UNTOUCHED, assert_scores, make_problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("backend_runs_here"),
    pytest.mark.parametrize("backend", ["cute"]),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows_per_group", [1, 2, 8])
def test_long_lists_of_pages_that_arrive_at_once(
    generator: torch.Generator, backend: str, kind: str, rows_per_group: int
) -> None:
    # 16 pages, in the L2 cache, over and over: copies are as fast as they can be, and must still
    # not overtake the loads from the memory that they overwrite. The list is long enough for late
    # CTAs, with BF16 keys for two waves of them; its last page is partial.
    length = 2_000_001
    small = make_problem(
        [16 * PAGE], generator=generator, kind=kind, rows_per_group=rows_per_group, integers=True
    ).to("cuda")
    by_page = small.run(backend)[:, : 16 * PAGE].unflatten(1, (16, PAGE)).clone()
    assert_scores(small, exact=True)
    blocks = torch.randint(0, 16, (-(-length // PAGE),), generator=generator).to("cuda")
    big = small.replace(
        block_table=small.block_table[0, blocks][None].contiguous(),
        context_lengths=torch.tensor([length], dtype=torch.int32, device="cuda"),
        scores=torch.empty((rows_per_group, length + 63), device="cuda"),
    )
    expected = by_page[:, blocks].flatten(1)[:, :length]
    for _ in range(10):
        big.scores.fill_(UNTOUCHED)
        big.run(backend)
        assert torch.equal(big.scores[:, :length], expected)
        assert (big.scores[:, length:] == UNTOUCHED).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows_per_group", [1, 2, 8])
@pytest.mark.parametrize(("groups", "longest"), [(1, 25_601), (20, 6400), (33, 4000)])
def test_variants_for_short_and_long_lists_agree(
    generator: torch.Generator,
    backend: str,
    kind: str,
    rows_per_group: int,
    groups: int,
    longest: int,
) -> None:
    # Up to 2,079 pages in all, as a list that can only be short and in scores for a long one.
    lengths = torch.randint(0, longest, (groups,), generator=generator).tolist()
    lengths[0] = longest
    narrow = make_problem(
        lengths,
        generator=generator,
        kind=kind,
        rows_per_group=rows_per_group,
        max_context=longest,
    ).to("cuda")
    width = 4_000_000 // groups
    wide = torch.full((groups * rows_per_group, width), UNTOUCHED, device="cuda")
    narrow.replace(scores=wide).run(backend)
    assert torch.equal(wide[:, :longest], narrow.run(backend))
    assert (wide[:, longest:] == UNTOUCHED).all()
    assert_scores(narrow, exact=False)


def test_lengths_tables_pitches_and_batches_compile_nothing_new(
    generator: torch.Generator, backend: str
) -> None:
    make_problem([70], generator=generator).to("cuda").run(backend)
    known = set(cute_plans.loaded())
    for lengths, pitch in (([5] * 3, 4608), ([0] * 17, 4624), ([4096], 9216)):
        make_problem(lengths, generator=generator, page_pitch=pitch).to("cuda").run(backend)
    wide = torch.empty((1, 4_000_000), device="cuda")
    make_problem([70], generator=generator).to("cuda").replace(scores=wide).run(backend)
    assert set(cute_plans.loaded()) == known
