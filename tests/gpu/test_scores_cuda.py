"""`indexer_scores` on a GPU: every GPU backend against the float64 reference, where it breaks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sdsa_kernels import backend_names, plans
from sdsa_kernels.cute import plans as cute_plans
from sdsa_kernels.testing.reference import reference_decode
from sdsa_kernels.triton import backend as triton_scores
from sdsa_quant.errors import InputError
from sdsa_quant.formats.nvfp4 import quantize_nvfp4
from sdsa_quant.layout import BF16_RECORD_BYTES, NVFP4_RECORD_BYTES
from sdsa_quant.paging import page_views
from support.problems import (
    GARBAGE_ENTRIES,
    KINDS,
    UNTOUCHED,
    Problem,
    assert_scores,
    integer_values,
    make_problem,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("backend_runs_here"),
    pytest.mark.parametrize("backend", [name for name in backend_names() if name != "torch"]),
]


LENGTHS = {
    "empty": [0, 0, 0],
    "around-a-page": [0, 1, 63, 64, 65, 127, 128, 129],
    "around-a-quarter": [15, 16, 17, 31, 33, 47, 49],
    "one-long": [5, 1030, 0, 64],
    "one-group": [300],
    "empty-groups-at-the-ends": [0, 0, 70, 0, 200, 0],
    "33-groups": [3, 64, 200] * 11,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows_per_group", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("integers", [True, False], ids=["integers", "gaussian"])
def test_matches_the_reference(
    generator: torch.Generator,
    backend: str,
    kind: str,
    rows_per_group: int,
    lengths: list[int],
    integers: bool,
) -> None:
    problem = make_problem(
        lengths, generator=generator, kind=kind, rows_per_group=rows_per_group, integers=integers
    ).to("cuda")
    problem.run(backend)
    assert_scores(problem, exact=integers)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups", [1, 3, 32, 131, 132, 133, 256, 257, 1000])
def test_numbers_of_groups(
    generator: torch.Generator, backend: str, kind: str, groups: int
) -> None:
    # Around the number of multiprocessors, of programs, and of groups looked at in one scan.
    lengths = torch.randint(0, 131, (groups,), generator=generator).tolist()
    problem = make_problem(
        lengths, generator=generator, kind=kind, rows_per_group=4, integers=True
    ).to("cuda")
    problem.run(backend)
    assert_scores(problem, exact=True)


@pytest.mark.parametrize("groups", [1, 32, 132, 133, 1000, 5000])
@pytest.mark.parametrize("kind", KINDS)
def test_all_lengths_zero(generator: torch.Generator, backend: str, kind: str, groups: int) -> None:
    # Requests may hold anything where the length is 0.
    problem = make_problem([0] * groups, generator=generator, kind=kind, max_context=64)
    problem = problem.replace(requests=torch.full((groups,), -(2**31), dtype=torch.int32))
    scores = problem.to("cuda").run(backend)
    torch.cuda.synchronize()
    assert (scores == UNTOUCHED).all()


@pytest.mark.parametrize("length", [2047, 2048, 2049, 4095, 4097, 8193, 65_537])
@pytest.mark.parametrize("kind", ["bf16", "nvfp4"])
def test_long_contexts_are_exact(
    generator: torch.Generator, backend: str, kind: str, length: int
) -> None:
    problem = make_problem(
        [length], generator=generator, kind=kind, rows_per_group=8, integers=True
    ).to("cuda")
    problem.run(backend)
    assert_scores(problem, exact=True)


@pytest.mark.parametrize("long", [0, 300, 3000, 6999])
def test_one_long_request_among_thousands(
    generator: torch.Generator, backend: str, long: int
) -> None:
    # More groups than are skipped at a time, the long one in different places.
    lengths = [group % 2 for group in range(7000)]
    lengths[long] = 20_000
    problem = make_problem(lengths, generator=generator, integers=True, max_context=20_000).to(
        "cuda"
    )
    scores = problem.run(backend).clone()
    problem.scores.fill_(UNTOUCHED)
    assert torch.equal(problem.run("torch"), scores)


@pytest.mark.parametrize("kind", KINDS)
def test_many_groups_of_few_requests(generator: torch.Generator, backend: str, kind: str) -> None:
    problem = make_problem([64] * 4, generator=generator, kind=kind, integers=True)
    groups = 70_000
    scales = problem.query_scales
    many = problem.replace(
        query=problem.query[:1].repeat(groups, 1),
        query_scales=None if scales is None else scales.view(torch.uint8)[:1].repeat(groups, 1),
        context_lengths=torch.full((groups,), 64, dtype=torch.int32),
        requests=(torch.arange(groups) % 4).int(),
        scores=torch.full((groups, 64), UNTOUCHED),
    ).to("cuda")
    scores = many.run(backend)
    few = many.replace(
        query=many.query[:4],
        query_scales=None if many.query_scales is None else many.query_scales[:4],
        context_lengths=many.context_lengths[:4],
        requests=many.requests[:4],
        scores=many.scores[:4],
    )
    expected = few.to("cpu").reference().float().cuda()
    assert torch.equal(scores.view(-1, 4, 64), expected.expand(groups // 4, 4, 64))
    assert expected.unique(dim=0).shape[0] == 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("garbage", GARBAGE_ENTRIES)
def test_table_entries_past_a_length_are_not_read(
    generator: torch.Generator, backend: str, kind: str, garbage: int
) -> None:
    problem = make_problem([130, 1, 0, 64], generator=generator, kind=kind, garbage=garbage)
    problem.requests[2] = garbage
    problem = problem.to("cuda")
    problem.run(backend)
    assert_scores(problem, exact=False)


@pytest.mark.parametrize(
    ("kind", "pitches"),
    [
        ("bf16", (BF16_RECORD_BYTES, BF16_RECORD_BYTES + 16, 65_536)),
        ("nvfp4", (NVFP4_RECORD_BYTES, NVFP4_RECORD_BYTES + 16, 9216, 1_435_968)),
    ],
)
def test_page_pitch_does_not_matter(backend: str, kind: str, pitches: Sequence[int]) -> None:
    results = []
    for pitch in pitches:
        problem = make_problem(
            [150, 70],
            generator=torch.Generator().manual_seed(5),
            kind=kind,
            page_pitch=pitch,
            rows_per_group=2,
        )
        results.append(problem.to("cuda").run(backend))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("kind", ["nvfp4", "mixed"])
@pytest.mark.parametrize("rows_per_group", [1, 2, 8])
@pytest.mark.parametrize("width", [None, 500_000], ids=["narrow", "wide"])
def test_separate_keys_and_scales(
    backend: str, kind: str, rows_per_group: int, width: int | None
) -> None:
    results = [
        make_problem(
            [150],
            generator=torch.Generator().manual_seed(5),
            kind=kind,
            rows_per_group=rows_per_group,
            max_context=width,
            separate=separate,
        )
        .to("cuda")
        .run(backend)
        for separate in (False, True)
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize("width", [None, 500_000], ids=["narrow", "wide"])
def test_scales_at_an_odd_multiple_of_8_bytes(
    generator: torch.Generator, backend: str, width: int | None
) -> None:
    problem = make_problem(
        [150], generator=generator, separate=True, rows_per_group=2, max_context=width
    )
    assert problem.key_scales is not None
    pages = problem.key_scales.shape[0]
    room = torch.zeros(8 + pages * 520, dtype=torch.uint8)
    scales = room[8:].view(pages, 520)[:, :512].unflatten(1, (64, 8))
    scales.copy_(problem.key_scales.view(torch.uint8))
    problem = problem.replace(key_scales=scales).to("cuda")
    problem.run(backend)
    assert_scores(problem, exact=False)


def test_layers_of_one_buffer(generator: torch.Generator, backend: str) -> None:
    buffer = torch.full((10, 4, 64, 128), float("nan"), dtype=torch.bfloat16, device="cuda")
    buffer[:, 2] = integer_values((10, 64, 128), generator).cuda()
    problem = make_problem([300], generator=generator, kind="bf16", integers=True).to("cuda")
    table = torch.tensor([[7, 2, 5, 0, 9]], dtype=torch.int32, device="cuda")
    problem = problem.replace(block_table=table, key_cache=buffer[:, 2])
    strided = problem.run(backend).clone()
    assert_scores(problem, exact=True)
    assert torch.equal(problem.replace(key_cache=buffer[:, 2].contiguous()).run(backend), strided)


@pytest.mark.parametrize("kind", KINDS)
def test_sliced_tables_lengths_and_requests(
    generator: torch.Generator, backend: str, kind: str
) -> None:
    problem = make_problem([100, 200], generator=generator, kind=kind)
    wide = torch.full((2, 9), -7, dtype=torch.int32)
    wide[:, 1 : 1 + problem.block_table.shape[1]] = problem.block_table
    lengths = torch.tensor([9999, 100, 200], dtype=torch.int32)
    requests = torch.tensor([9, 9, 9, 0, 1], dtype=torch.int32)
    sliced = problem.replace(
        block_table=wide[:, 1:], context_lengths=lengths[1:], requests=requests[3:]
    ).to("cuda")
    sliced.run(backend)
    assert_scores(sliced, exact=False)


def test_unaligned_keys_are_refused(generator: torch.Generator, backend: str) -> None:
    problem = make_problem([100], generator=generator, separate=True).to("cuda")
    room = torch.zeros(problem.key_cache.numel() + 8, dtype=torch.uint8, device="cuda")
    shifted = room[8:].view(problem.key_cache.shape)
    with pytest.raises(InputError, match="key_cache must start at a multiple of 16 bytes"):
        problem.replace(key_cache=shifted).run(backend)
    with pytest.raises(InputError, match="key_cache must be contiguous inside a page"):
        problem.replace(key_cache=problem.key_cache.transpose(1, 2)).run(backend)


def test_wide_scores_keep_their_other_entries(generator: torch.Generator, backend: str) -> None:
    problem = make_problem([4000] * 48, generator=generator, rows_per_group=2).to("cuda")
    big = torch.full((100, 5000), UNTOUCHED, device="cuda")
    problem.replace(scores=big[:96, :4000]).run(backend)
    assert (big[96:] == UNTOUCHED).all()
    assert (big[:, 4000:] == UNTOUCHED).all()
    assert torch.equal(big[:96, :4000], problem.run(backend)[:, :4000])


@pytest.mark.parametrize("width", [257, 300, 513])
def test_scores_exactly_as_wide_as_the_length(
    generator: torch.Generator, backend: str, width: int
) -> None:
    problem = make_problem([width], generator=generator, rows_per_group=3, max_context=width).to(
        "cuda"
    )
    problem.run(backend)
    assert_scores(problem, exact=False)  # looks at the guards between rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows_per_group", [1, 8])
def test_lengths_past_max_context_are_clamped(
    generator: torch.Generator, backend: str, kind: str, rows_per_group: int
) -> None:
    problem = make_problem(
        [400, 100, 64],
        generator=generator,
        kind=kind,
        rows_per_group=rows_per_group,
        max_context=150,
    ).to("cuda")
    problem.run(backend)
    assert_scores(problem, exact=False)


def test_every_key_is_where_the_table_says(backend: str) -> None:
    keys = torch.zeros(6, 64, 128)
    table = [5, 0, 3, 1]
    for t in range(200):
        keys[table[t // 64], t % 64, t % 128] = 1 + t // 128
    problem = make_problem([200], generator=torch.Generator(), kind="bf16").replace(
        query=torch.arange(1, 129).bfloat16().view(1, 128),
        key_cache=keys.bfloat16(),
        block_table=torch.tensor([[*table, 999]], dtype=torch.int32)[:, :4],
        scores=torch.full((1, 200), UNTOUCHED),
    )
    scores = problem.to("cuda").run(backend)
    assert scores[0].tolist() == [(t % 128 + 1) * (1 + t // 128) for t in range(200)]


def test_groups_share_a_request(generator: torch.Generator, backend: str) -> None:
    problem = make_problem(
        [8], generator=generator, kind="bf16", rows_per_group=4, integers=True
    ).to("cuda")
    together = problem.run(backend).clone()
    alone = problem.replace(
        context_lengths=torch.tensor([5, 6, 7, 8], dtype=torch.int32, device="cuda"),
        requests=torch.zeros(4, dtype=torch.int32, device="cuda"),
        scores=torch.full_like(problem.scores, UNTOUCHED),
    )
    scores = alone.run(backend)
    for row, length in enumerate((5, 6, 7, 8)):
        assert torch.equal(scores[row, :length], together[row, :length])
        assert (scores[row, length:] == UNTOUCHED).all()


@pytest.mark.parametrize("kind", ["nvfp4", "mixed"])
def test_every_code_and_scale_byte_is_decoded(backend: str, kind: str) -> None:
    # One-hot rows read back the keys: all 256 code bytes under all 254 finite scale bytes, of both
    # signs, in every place of a key.
    scale_bytes = [byte for byte in range(256) if byte & 0x7F != 0x7F]
    page = torch.arange(256).view(4, 64).repeat(16, 1).to(torch.uint8)
    rolled = torch.stack([page.roll(shift, 1) for shift in range(4)])
    codes = rolled.repeat(len(scale_bytes), 1, 1)
    pages = codes.shape[0]
    scales = torch.tensor(scale_bytes, dtype=torch.uint8).repeat_interleave(4)
    scales = scales.view(-1, 1, 1).expand(pages, 64, 8).contiguous()
    one_hot = torch.eye(128).bfloat16()
    query, query_scales, factor = one_hot, None, 1.0
    if kind == "nvfp4":
        query, _ = quantize_nvfp4(one_hot)
        query_scales, factor = torch.full((128, 8), 0x38, dtype=torch.uint8), 6.0
    problem = Problem(
        query=query,
        query_scales=query_scales,
        key_cache=codes,
        key_scales=scales,
        block_table=torch.arange(pages, dtype=torch.int32).view(1, -1),
        context_lengths=torch.full((16,), pages * 64, dtype=torch.int32),
        requests=torch.zeros(16, dtype=torch.int32),
        scores=torch.full((128, pages * 64), UNTOUCHED),
    )
    scores = problem.to("cuda").run(backend).cpu()
    keys = reference_decode(codes, scales).reshape(-1, 128)
    assert torch.equal(scores, (factor * keys.T).float())


def test_extreme_scales_are_exact(backend: str) -> None:
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
    scores = problem.to("cuda").run(backend).cpu()[:, :count]
    assert torch.equal(scores, problem.reference()[:, :count].float())


@pytest.mark.parametrize("kind", KINDS)
def test_repeats_agree_and_nothing_else_is_written(
    generator: torch.Generator, backend: str, kind: str
) -> None:
    problem = make_problem([1300, 0, 77], generator=generator, kind=kind, rows_per_group=2)
    problem = problem.to("cuda")
    inputs = [t for name, t in vars(problem).items() if t is not None and name != "scores"]

    def digest() -> list[str]:
        return [hashlib.sha256(bytes(t.untyped_storage().cpu())).hexdigest() for t in inputs]

    before, first = digest(), problem.run(backend).clone()
    for _ in range(5):
        assert torch.equal(problem.run(backend), first)
    assert digest() == before


@pytest.mark.parametrize("kind", ["nvfp4", "mixed", "bf16"])
@pytest.mark.parametrize("rows_per_group", [1, 2, 8])
def test_offsets_past_32_bits(
    generator: torch.Generator, backend: str, kind: str, rows_per_group: int
) -> None:
    # The last pages start past 2^31 bytes in NVFP4, past 2^32 in BF16.
    values = "bf16" if kind == "bf16" else "nvfp4"
    record, pages = (BF16_RECORD_BYTES, 262_200) if kind == "bf16" else (4608, 466_040)
    small = make_problem(
        [190], generator=generator, kind=kind, rows_per_group=rows_per_group, integers=True
    )
    chosen = [pages - 7, pages - 6, pages - 1]
    buffer = torch.zeros(pages, record, dtype=torch.uint8, device="cuda")
    key_cache, key_scales = page_views(buffer, values)
    old = small.block_table[0, :3].long()
    key_cache[chosen] = small.key_cache[old].cuda()
    if key_scales is not None and small.key_scales is not None:
        key_scales.view(torch.uint8)[chosen] = small.key_scales.view(torch.uint8)[old].cuda()
    big = small.to("cuda").replace(
        key_cache=key_cache,
        key_scales=key_scales,
        block_table=torch.tensor([chosen], dtype=torch.int32, device="cuda"),
    )
    scores = big.run(backend)[:, :190].cpu()
    assert torch.equal(scores, small.reference()[:, :190].float())


def test_scores_past_32_bits(generator: torch.Generator, backend: str) -> None:
    # Row 3 begins past 2^31 entries.
    problem = make_problem([100] * 4, generator=generator, integers=True).to("cuda")
    width = 800_000_000
    room = torch.empty(4, width, device="cuda")
    narrow = problem.run(backend)[:, :100]
    problem.replace(scores=room).run(backend)
    assert torch.equal(room[:, :100], narrow)


@pytest.mark.parametrize("kind", KINDS)
def test_side_stream(generator: torch.Generator, backend: str, kind: str) -> None:
    # New keys are copied in behind a long wait, all on a side stream: their scores must come out.
    old = make_problem([500], generator=generator, kind=kind, integers=True).to("cuda")
    keys = old.key_cache.clone()
    problem = old.replace(key_cache=torch.zeros_like(old.key_cache))
    problem.run(backend)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        problem.key_cache.copy_(keys)
        problem.run(backend)
    assert torch.cuda.current_stream().query()
    stream.synchronize()
    assert_scores(problem, exact=True)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", KINDS)
def test_another_device_than_the_current_one(
    generator: torch.Generator, backend: str, kind: str
) -> None:
    torch.cuda.reset_peak_memory_stats(0)
    before = torch.cuda.max_memory_allocated(0)
    problem = make_problem([700, 65], generator=generator, kind=kind).to("cuda:1")
    problem.run(backend)
    assert torch.cuda.current_device() == 0
    assert torch.cuda.max_memory_allocated(0) == before
    assert_scores(problem, exact=False)


@pytest.mark.parametrize("kind", KINDS)
def test_under_a_concurrent_copy(generator: torch.Generator, backend: str, kind: str) -> None:
    problem = make_problem([5] * 5 + [0] * 3, generator=generator, kind=kind, max_context=131_072)
    problem = problem.to("cuda")
    load = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(stream):
            load.copy_(load.flip(0))
        problem.run(backend)
    torch.cuda.synchronize()
    assert_scores(problem, exact=False)


@pytest.mark.parametrize("warm", [True, False], ids=["called-before", "first-call"])
def test_a_thread_that_never_used_the_device(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, backend: str, warm: bool
) -> None:
    problem = make_problem([300, 70], generator=generator).to("cuda")
    monkeypatch.setattr(cute_plans, "_kernels", {})
    monkeypatch.setattr(triton_scores, "_compiled", {})
    plans.forget_all()
    if warm:
        problem.run(backend)
        problem.scores.fill_(UNTOUCHED)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(problem.run, backend).result()
    assert_scores(problem, exact=False)
