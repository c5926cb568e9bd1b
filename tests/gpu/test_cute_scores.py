"""The `cute` backend on a GPU: against the reference, in graphs, on streams and devices."""

from __future__ import annotations

import pytest
import torch

from problems import (
    GARBAGE_ENTRIES,
    KINDS,
    UNTOUCHED,
    Problem,
    assert_scores,
    integer_nvfp4,
    integer_values,
    make_problem,
)
from sdsa_kernels import cute_loading
from sdsa_kernels.cute_variants import ARCHITECTURES
from sdsa_quant.layout import NVFP4_RECORD_BYTES, PAGE
from sdsa_quant.paging import page_views

pytestmark = pytest.mark.gpu

LENGTHS = {
    "empty": [0, 0, 0],
    "around-a-page": [0, 1, 63, 64, 65, 127, 128, 129],
    "around-a-quarter": [15, 16, 17, 31, 33, 47, 49],
    "one-long": [5, 5003, 0, 64],
    "33-groups": [3, 64, 200] * 11,  # more than a warp sums alone
}


@pytest.fixture(autouse=True)
def _needs_cute() -> None:
    if torch.cuda.get_device_capability() not in ARCHITECTURES:
        pytest.skip("the cute backend has no kernel for this GPU")
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")


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
    ).to("cuda")
    problem.run("cute")
    assert_scores(problem, exact=integers)


@pytest.mark.parametrize("kind", ["nvfp4", "mixed"])
@pytest.mark.parametrize(
    "layout",
    [
        {"separate": True},
        {"page_pitch": 2 * NVFP4_RECORD_BYTES},
        {"page_pitch": NVFP4_RECORD_BYTES + 16},
        {"page_pitch": 1_435_968, "spare_pages": 0},
    ],
    ids=["separate", "every-other-record", "padded", "far-apart"],
)
@pytest.mark.parametrize("rows_per_group", [1, 2, 8])
def test_page_layouts(
    generator: torch.Generator, kind: str, layout: dict[str, int], rows_per_group: int
) -> None:
    problem = make_problem(
        [200, 65], generator=generator, kind=kind, rows_per_group=rows_per_group, **layout
    ).to("cuda")
    problem.run("cute")
    assert_scores(problem, exact=False)


def test_scale_pages_need_only_8_bytes_of_alignment(generator: torch.Generator) -> None:
    problem = make_problem([300], generator=generator, separate=True).to("cuda")
    scales = problem.key_scales
    buffer = torch.full((scales.shape[0], 520), 0xFF, dtype=torch.uint8, device="cuda")
    moved = buffer[:, 8:].view(torch.float8_e4m3fn).unflatten(1, (PAGE, 8))
    moved.copy_(scales)
    assert moved.data_ptr() % 16 == 8
    moved_problem = problem.replace(key_scales=moved)
    moved_problem.run("cute")
    assert_scores(moved_problem, exact=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("garbage", GARBAGE_ENTRIES)
def test_table_entries_past_a_length_are_not_read(
    generator: torch.Generator, kind: str, garbage: int
) -> None:
    problem = make_problem([65, 0, 700], generator=generator, kind=kind, garbage=garbage)
    problem = problem.to("cuda")
    problem.requests[1] = garbage
    problem.run("cute")
    torch.cuda.synchronize()
    assert (problem.scores[1] == UNTOUCHED).all()


@pytest.mark.parametrize("kind", KINDS)
def test_offset_slices_of_every_tensor(generator: torch.Generator, kind: str) -> None:
    problem = make_problem([100, 257], generator=generator, kind=kind).to("cuda")

    def shifted(tensor: torch.Tensor, elements: int) -> torch.Tensor:
        """A copy whose last dimension starts `elements` after a well aligned address."""
        shape = (*tensor.shape[:-1], tensor.shape[-1] + elements)
        buffer = torch.full(shape, -1, dtype=tensor.dtype, device=tensor.device)
        return buffer[..., elements:].copy_(tensor)

    changed = problem.replace(
        context_lengths=shifted(problem.context_lengths, 1),
        requests=shifted(problem.requests, 3),
        block_table=shifted(problem.block_table, 1),
    )
    changed.run("cute")
    assert_scores(changed, exact=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows_per_group", [1, 2, 8])
def test_lengths_are_clamped_to_the_width(
    generator: torch.Generator, kind: str, rows_per_group: int
) -> None:
    problem = make_problem(
        [500, 64, 300],
        generator=generator,
        kind=kind,
        rows_per_group=rows_per_group,
        max_context=257,
    ).to("cuda")
    problem.run("cute")
    assert_scores(problem, exact=False)


def _one_page_groups(groups: int, kind: str, generator: torch.Generator) -> Problem:
    """Many groups of 64 keys that share four requests, in integers."""
    problem = make_problem([PAGE] * 4, generator=generator, kind=kind, integers=True)
    query, query_scales = (
        integer_nvfp4((groups, 128), generator)
        if kind == "nvfp4"
        else (integer_values((groups, 128), generator), None)
    )
    return problem.replace(
        query=query,
        query_scales=query_scales,
        context_lengths=torch.full((groups,), PAGE, dtype=torch.int32),
        requests=torch.arange(groups, dtype=torch.int32) % 4,
        scores=torch.full((groups, PAGE), UNTOUCHED),
    ).to("cuda")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups", [131, 132, 133, 512, 1000, 70_000])
def test_many_groups(generator: torch.Generator, kind: str, groups: int) -> None:
    problem = _one_page_groups(groups, kind, generator)
    problem.run("cute")
    problem_on_torch = problem.replace(scores=torch.full_like(problem.scores, UNTOUCHED))
    problem_on_torch.run("torch")
    assert torch.equal(problem.scores, problem_on_torch.scores)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows_per_group", [1, 2, 8])
def test_long_lists_of_pages_that_arrive_at_once(
    generator: torch.Generator, kind: str, rows_per_group: int
) -> None:
    # 16 pages, in the L2 cache, over and over: copies are as fast as they can be, and must still
    # not overtake the loads from the memory that they overwrite. The list is long enough for the
    # second wave of CTAs; its last page is partial.
    length = 2_000_001
    small = make_problem(
        [16 * PAGE], generator=generator, kind=kind, rows_per_group=rows_per_group, integers=True
    ).to("cuda")
    by_page = small.run("cute")[:, : 16 * PAGE].unflatten(1, (16, PAGE)).clone()
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
        big.run("cute")
        assert torch.equal(big.scores[:, :length], expected)
        assert (big.scores[:, length:] == UNTOUCHED).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows_per_group", [1, 2, 8])
def test_pages_beyond_2_gigabytes(
    generator: torch.Generator, kind: str, rows_per_group: int
) -> None:
    small = make_problem(
        [150], generator=generator, kind=kind, rows_per_group=rows_per_group, integers=True
    ).to("cuda")
    record = small.key_cache.stride(0) * small.key_cache.element_size()
    pages = 2**31 // record + 8
    buffer = torch.zeros((pages, record), dtype=torch.uint8, device="cuda")
    keys, scales = page_views(buffer, "bf16" if kind == "bf16" else "nvfp4")
    table = small.block_table.clone()
    for column, page in enumerate((pages - 7, pages - 6, pages - 1)):
        source = int(small.block_table[0, column])
        keys[page] = small.key_cache[source]
        if scales is not None:
            scales[page].view(torch.uint8).copy_(small.key_scales[source].view(torch.uint8))
        table[0, column] = page
    big = small.replace(key_cache=keys, key_scales=scales, block_table=table)
    assert torch.equal(big.run("cute").clone(), small.run("cute"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_follows_its_inputs(generator: torch.Generator, kind: str) -> None:
    problem = make_problem(
        [2000, 2000], generator=generator, kind=kind, rows_per_group=2, integers=True
    ).to("cuda")
    problem.run("cute")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        problem.run("cute")
    for lengths in ([2000, 1], [0, 0], [65, 64], [1, 2000]):
        problem.context_lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        problem.requests.copy_(problem.requests.flip(0))
        problem.scores.fill_(UNTOUCHED)
        graph.replay()
        replayed = problem.scores.clone()
        problem.scores.fill_(UNTOUCHED)
        problem.run("cute")
        assert torch.equal(replayed, problem.scores)
        assert_scores(problem, exact=True)


@pytest.mark.parametrize("kind", KINDS)
def test_repeats_are_bitwise_equal_and_leave_the_cache_alone(
    generator: torch.Generator, kind: str
) -> None:
    problem = make_problem([3000] * 3, generator=generator, kind=kind, rows_per_group=4)
    problem = problem.to("cuda")
    keys = problem.key_cache.clone()
    first = problem.run("cute").clone()
    for _ in range(20):
        problem.scores.fill_(UNTOUCHED)
        assert torch.equal(problem.run("cute"), first)
    assert torch.equal(problem.key_cache.view(torch.uint8), keys.view(torch.uint8))


def test_first_call_in_a_capture_says_to_warm_up(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cute_loading, "_kernels", {})
    problem = make_problem([100], generator=generator).to("cuda")
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match=r"call indexer_scores once .* before the capture"),
        torch.cuda.graph(graph),
    ):
        problem.scores.fill_(UNTOUCHED)  # a graph without anything in it is a warning of its own
        problem.run("cute")
    problem.run("cute")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        problem.run("cute")
    problem.scores.fill_(UNTOUCHED)
    graph.replay()
    assert_scores(problem, exact=False)


def test_lengths_tables_pitches_and_batches_compile_nothing_new(
    generator: torch.Generator,
) -> None:
    make_problem([70], generator=generator).to("cuda").run("cute")
    known = set(cute_loading._kernels)
    for lengths, pitch in (([5] * 3, 4608), ([0] * 17, 4624), ([4096], 9216)):
        make_problem(lengths, generator=generator, page_pitch=pitch).to("cuda").run("cute")
    assert set(cute_loading._kernels) == known


def test_work_is_ordered_on_the_current_stream(generator: torch.Generator) -> None:
    problem = make_problem([500], generator=generator, kind="bf16", integers=True).to("cuda")
    problem.run("cute")
    new_keys = problem.key_cache * 2
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        problem.key_cache.copy_(new_keys)
        problem.run("cute")
    stream.synchronize()
    assert_scores(problem, exact=True)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_than_the_current_device(generator: torch.Generator) -> None:
    problem = make_problem([500], generator=generator).to("cuda:1")
    problem.run("cute")
    assert torch.cuda.current_device() == 0
    assert_scores(problem, exact=False)
