"""The questions that every backend answers, wherever it runs: one contract of `indexer_scores`.

A folder that can run some backend has a test class that inherits `ScoresContract` and lists its
`Where`s: torch on a CPU and on CUDA, Triton in its interpreter and on a GPU, CuTe DSL on a GPU and
in the emulator. A question that one of them cannot be asked is declined there, with the reason,
which pytest shows as a skip.

What only one of them has (streams, graphs, threads, chunks, schedules) is tested beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import ClassVar

import pytest
import torch

from sdsa_kernels.testing.reference import reference_decode
from sdsa_quant.errors import InputError, UnsupportedError
from sdsa_quant.formats.nvfp4 import quantize_nvfp4
from sdsa_quant.formats.scale_order import linear_to_128x4
from sdsa_quant.layout import BF16_RECORD_BYTES, DIM, NVFP4_RECORD_BYTES, PAGE
from support.problems import (
    GARBAGE_ENTRIES,
    KINDS,
    UNTOUCHED,
    Problem,
    assert_scores,
    integer_values,
    make_problem,
)

LENGTHS = {
    "around-a-page": [0, 1, 63, 64, 65, 127, 128, 129],
    "empty": [0, 0, 0],
    "around-a-quarter": [15, 16, 17, 31, 33, 47, 49],
    "one-group": [300],
    "empty-groups-at-the-ends": [0, 0, 70, 0, 200, 0],
    "one-long": [5, 1030, 0, 64],
    "33-groups": [3, 64, 200] * 11,
}
PITCHES = {
    "bf16": (BF16_RECORD_BYTES, BF16_RECORD_BYTES + 16, 65_536),
    "nvfp4": (NVFP4_RECORD_BYTES, NVFP4_RECORD_BYTES + 16, 9216, 1_435_968),
}
FINITE_SCALES = [byte for byte in range(256) if byte & 0x7F != 0x7F]
ONE = 0x38  # E4M3

LINEAR_SCALES_ONLY = "its key scales are in the 128x4 order, not pages of their own"
UNSIGNED_SCALES = "tensor cores take scales as unsigned, which those of a cache are"
HIDES_NAN = "decodes the bits of a NaN scale as 480; no cache that is checked holds one"


@dataclass(frozen=True)
class Where:
    """A backend and the machine that it runs on.

    Attributes
    ----------
    name : str
        For the tests' ids.
    kinds : tuple of str
        Pairs of formats that it is asked about.
    rows : tuple of int
        Rows a group that it is asked about.
    lengths : tuple of str
        The `LENGTHS` that it is asked about.
    most_scores : int
        How many scores a question may want of it; what wants more takes too long.
    repeats : int
        How often the same call is made again, to see that it gives the same scores.
    takes_128x4 : bool
        Whether it takes key scales in the 128x4 order; what does not must refuse them.
    declined : mapping
        By the name of a question, why it is not asked.
    """

    name: str
    kinds: tuple[str, ...] = KINDS
    rows: tuple[int, ...] = tuple(range(1, 9))
    lengths: tuple[str, ...] = tuple(LENGTHS)
    most_scores: int = 1 << 30
    repeats: int = 5
    takes_128x4: bool = False
    declined: Mapping[str, str] = field(default_factory=dict)

    def run(self, problem: Problem) -> Problem:
        """What a problem on the CPU is after the call: its scores, and its inputs as they are then.

        The call is made with a copy, so that `problem` itself stays as it is.
        """
        raise NotImplementedError

    def scores_of(self, problem: Problem) -> torch.Tensor:
        """The scores of a problem, which are compared with the reference first."""
        scored = self.run(problem)
        assert_scores(scored, exact=False)
        return scored.scores

    def decline_more_than(self, scores: int) -> None:
        """Skip a question that wants more scores than can be computed here in a few seconds."""
        if scores > self.most_scores:
            pytest.skip(f"{self.name}: {scores:,} scores would take long here")


def _values(where: Where, name: str) -> Sequence[tuple[object, str]]:
    """What a parameter goes through at a `Where`, with ids."""
    if name == "kind":
        return [(kind, kind) for kind in where.kinds]
    if name == "packed":
        return [(kind, kind) for kind in where.kinds if kind != "bf16"]
    if name == "mixed":
        return [(kind, kind) for kind in where.kinds if kind == "mixed"]
    if name == "rows_per_group":
        return [(rows, f"{rows}-rows") for rows in where.rows]
    return [(LENGTHS[lengths], lengths) for lengths in where.lengths]


class ScoresContract:
    """Questions about scores; a subclass lists in `wheres` who is asked.

    Parameters named `kind`, `packed` (a kind with NVFP4 keys), `mixed`, `rows_per_group` and
    `lengths` go through those that a `Where` lists.
    """

    wheres: ClassVar[Sequence[Where]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        names = ["kind", "packed", "mixed", "rows_per_group", "lengths"]
        names = [name for name in names if name in metafunc.fixturenames]
        cases = []
        for where in self.wheres:
            for case in product(*(_values(where, name) for name in names)):
                values = [value for value, _ in case]
                cases.append(
                    pytest.param(where, *values, id="-".join([where.name, *(i for _, i in case)]))
                )
        metafunc.parametrize(["where", *names], cases)

    @pytest.fixture(autouse=True)
    def _unless_declined(self, request: pytest.FixtureRequest, where: Where) -> None:
        unknown = [name for name in where.declined if not hasattr(self, name)]
        assert unknown == [], "declines what nobody asks"
        reason = where.declined.get(request.function.__name__)
        if reason is not None:
            pytest.skip(f"{where.name}: {reason}")

    # Lengths, groups and rows

    @pytest.mark.parametrize("integers", [True, False], ids=["integers", "gaussian"])
    def test_matches_the_reference(
        self,
        generator: torch.Generator,
        where: Where,
        kind: str,
        rows_per_group: int,
        lengths: list[int],
        integers: bool,
    ) -> None:
        problem = make_problem(
            lengths,
            generator=generator,
            kind=kind,
            rows_per_group=rows_per_group,
            integers=integers,
        )
        assert_scores(where.run(problem), exact=integers)

    @pytest.mark.parametrize("groups", [1, 3, 32, 131, 132, 133, 256, 257, 1000])
    def test_numbers_of_groups(
        self, generator: torch.Generator, where: Where, kind: str, groups: int
    ) -> None:
        # Around the number of multiprocessors, of programs, and of groups looked at in one scan.
        where.decline_more_than(groups * 65 * 4)
        lengths = torch.randint(0, 131, (groups,), generator=generator).tolist()
        problem = make_problem(
            lengths, generator=generator, kind=kind, rows_per_group=4, integers=True
        )
        assert_scores(where.run(problem), exact=True)

    @pytest.mark.parametrize("groups", [1, 32, 132, 133, 1000, 5000])
    def test_all_lengths_zero(
        self, generator: torch.Generator, where: Where, kind: str, groups: int
    ) -> None:
        # Requests may hold anything where the length is 0.
        where.decline_more_than(groups * PAGE)
        problem = make_problem([0] * groups, generator=generator, kind=kind, max_context=64)
        problem = problem.replace(requests=torch.full((groups,), -(2**31), dtype=torch.int32))
        assert (where.run(problem).scores == UNTOUCHED).all()

    def test_any_request_where_the_length_is_zero(
        self, generator: torch.Generator, where: Where, kind: str
    ) -> None:
        problem = make_problem([0, 70, 0], generator=generator, kind=kind, integers=True)
        requests = torch.tensor([2**31 - 1, 1, -(2**31)], dtype=torch.int32)
        scored = where.run(problem.replace(requests=requests))
        assert_scores(scored.replace(requests=problem.requests), exact=True)

    @pytest.mark.parametrize("groups", [5, 40])
    def test_a_negative_length_is_none(
        self, generator: torch.Generator, where: Where, kind: str, groups: int
    ) -> None:
        lengths = [130, 0, 70, 0, 1, *[0] * (groups - 6), 64][:groups]
        problem = make_problem(lengths, generator=generator, kind=kind, integers=True)
        negative = problem.context_lengths.clone()
        negative[1], negative[3] = -1, -(2**31)
        assert_scores(where.run(problem.replace(context_lengths=negative)), exact=True)

    @pytest.mark.parametrize("length", [2047, 2048, 2049, 4095, 4097, 8193, 65_537])
    def test_long_contexts_are_exact(
        self, generator: torch.Generator, where: Where, kind: str, length: int
    ) -> None:
        where.decline_more_than(8 * length)
        problem = make_problem(
            [length], generator=generator, kind=kind, rows_per_group=8, integers=True
        )
        assert_scores(where.run(problem), exact=True)

    @pytest.mark.parametrize(
        "long", [0, 255, 256, 300, 2047, 2048, 2400], ids=lambda group: f"group-{group}"
    )
    def test_finding_a_share_among_many_groups(
        self, generator: torch.Generator, where: Where, long: int
    ) -> None:
        # Around the block that Triton's kernels look at closely and the one that they skip.
        lengths = [0] * 2500
        lengths[long], lengths[7], lengths[2499] = 130, 1, 2
        problem = make_problem(lengths, generator=generator, kind="bf16", integers=True)
        assert_scores(where.run(problem), exact=True)

    def test_many_groups_of_few_requests(
        self, generator: torch.Generator, where: Where, kind: str
    ) -> None:
        groups = 70_000
        where.decline_more_than(groups * PAGE)
        problem = make_problem([PAGE] * 4, generator=generator, kind=kind, integers=True)
        scales = problem.query_scales
        many = problem.replace(
            query=problem.query[:1].repeat(groups, 1),
            query_scales=None if scales is None else scales.view(torch.uint8)[:1].repeat(groups, 1),
            context_lengths=torch.full((groups,), PAGE, dtype=torch.int32),
            requests=(torch.arange(groups) % 4).int(),
            scores=torch.full((groups, PAGE), UNTOUCHED),
        )
        few = many.replace(
            query=many.query[:4],
            query_scales=None if many.query_scales is None else many.query_scales[:4],
            context_lengths=many.context_lengths[:4],
            requests=many.requests[:4],
            scores=many.scores[:4],
        )
        expected = few.reference().float()
        assert expected.unique(dim=0).shape[0] == 4
        scores = where.run(many).scores
        assert torch.equal(scores.view(-1, 4, PAGE), expected.expand(groups // 4, 4, PAGE))

    def test_groups_share_a_request(
        self, generator: torch.Generator, where: Where, kind: str
    ) -> None:
        # As causal queries do: each sees a key more than the one before.
        problem = make_problem([8], generator=generator, kind=kind, rows_per_group=4, integers=True)
        alone = problem.replace(
            context_lengths=torch.tensor([5, 6, 7, 8], dtype=torch.int32),
            requests=torch.zeros(4, dtype=torch.int32),
            scores=torch.full_like(problem.scores, UNTOUCHED),
        )
        together, scores = where.run(problem).scores, where.run(alone).scores
        for row, length in enumerate((5, 6, 7, 8)):
            assert torch.equal(scores[row, :length], together[row, :length])
            assert (scores[row, length:] == UNTOUCHED).all()

    def test_empty_calls(self, generator: torch.Generator, where: Where) -> None:
        assert where.run(make_problem([0], generator=generator, max_context=0)).scores.shape[1] == 0
        assert where.run(make_problem([], generator=generator, max_context=10)).scores.numel() == 0

    # Tables, pages and strides

    @pytest.mark.parametrize("garbage", GARBAGE_ENTRIES)
    def test_table_entries_past_a_length_are_not_read(
        self, generator: torch.Generator, where: Where, kind: str, garbage: int
    ) -> None:
        problem = make_problem([130, 1, 0, 64], generator=generator, kind=kind, garbage=garbage)
        problem.requests[2] = garbage
        assert_scores(where.run(problem), exact=False)

    def test_page_pitch_does_not_matter(self, where: Where, kind: str) -> None:
        results = [
            where.scores_of(
                make_problem(
                    [150, 70],
                    generator=torch.Generator().manual_seed(5),
                    kind=kind,
                    page_pitch=pitch,
                    rows_per_group=2,
                )
            )
            for pitch in PITCHES["bf16" if kind == "bf16" else "nvfp4"]
        ]
        assert all(torch.equal(result, results[0]) for result in results)

    @pytest.mark.parametrize("rows", [1, 2, 8])
    @pytest.mark.parametrize("width", [None, 500_000], ids=["narrow", "wide"])
    def test_separate_keys_and_scales(
        self, where: Where, packed: str, rows: int, width: int | None
    ) -> None:
        where.decline_more_than(rows * (width or 150) // 8)  # few are computed, but all compared
        results = [
            where.scores_of(
                make_problem(
                    [150],
                    generator=torch.Generator().manual_seed(5),
                    kind=packed,
                    rows_per_group=rows,
                    max_context=width,
                    separate=separate,
                )
            )
            for separate in (False, True)
        ]
        assert torch.equal(*results)

    @pytest.mark.parametrize("width", [None, 500_000], ids=["narrow", "wide"])
    def test_scales_at_an_odd_multiple_of_8_bytes(
        self, generator: torch.Generator, where: Where, packed: str, width: int | None
    ) -> None:
        where.decline_more_than(2 * (width or 150) // 8)
        problem = make_problem(
            [150],
            generator=generator,
            kind=packed,
            separate=True,
            rows_per_group=2,
            max_context=width,
        )
        assert problem.key_scales is not None
        pages = problem.key_scales.shape[0]
        room = torch.zeros(8 + pages * 520, dtype=torch.uint8)
        scales = room[8:].view(pages, 520)[:, :512].unflatten(1, (PAGE, 8))
        scales.copy_(problem.key_scales.view(torch.uint8))
        where.scores_of(problem.replace(key_scales=scales))

    @pytest.mark.parametrize("lengths_", [[150], [64], [0, 300, 65]], ids=["odd", "one", "several"])
    def test_scales_in_the_128x4_order(
        self, generator: torch.Generator, where: Where, packed: str, lengths_: list[int]
    ) -> None:
        problem = make_problem(lengths_, generator=generator, kind=packed, rows_per_group=2)
        assert problem.key_scales is not None
        tiled = problem.replace(key_scales=linear_to_128x4(problem.key_scales.reshape(-1, 8)))
        if not where.takes_128x4:
            with pytest.raises(UnsupportedError, match="128x4"):
                where.run(tiled)
            return
        scored = where.run(tiled)
        assert_scores(problem.replace(scores=scored.scores), exact=False)
        assert torch.equal(where.run(problem).scores, scored.scores)

    def test_layers_of_one_buffer(self, generator: torch.Generator, where: Where) -> None:
        buffer = torch.full((10, 4, 64, 128), float("nan"), dtype=torch.bfloat16)
        buffer[:, 2] = integer_values((10, 64, 128), generator)
        table = torch.tensor([[7, 2, 5, 0, 9]], dtype=torch.int32)
        problem = make_problem([300], generator=generator, kind="bf16", integers=True)
        problem = problem.replace(block_table=table, key_cache=buffer[:, 2])
        strided = where.run(problem)
        assert_scores(strided, exact=True)
        compact = problem.replace(key_cache=buffer[:, 2].contiguous())
        assert torch.equal(where.run(compact).scores, strided.scores)

    def test_sliced_tables_lengths_and_requests(
        self, generator: torch.Generator, where: Where, kind: str
    ) -> None:
        problem = make_problem([100, 200], generator=generator, kind=kind)
        wide = torch.full((2, 9), -7, dtype=torch.int32)
        wide[:, 1 : 1 + problem.block_table.shape[1]] = problem.block_table
        lengths = torch.tensor([9999, 100, 200], dtype=torch.int32)
        requests = torch.tensor([9, 9, 9, 0, 1], dtype=torch.int32)
        sliced = problem.replace(
            block_table=wide[:, 1:], context_lengths=lengths[1:], requests=requests[3:]
        )
        assert_scores(where.run(sliced), exact=False)

    def test_strided_query_rows(self, generator: torch.Generator, where: Where, kind: str) -> None:
        # Query rows and their scales are columns of wider tensors.
        problem = make_problem(
            [200, 64, 130], generator=generator, kind=kind, rows_per_group=2, integers=True
        )
        query = torch.cat((problem.query, problem.query), dim=1)[:, : problem.query.shape[1]]
        scales = problem.query_scales
        if scales is not None:
            raw = scales.view(torch.uint8)
            scales = torch.cat((raw, raw), dim=1)[:, 8:].view(torch.float8_e4m3fn)
        assert_scores(where.run(problem.replace(query=query, query_scales=scales)), exact=True)

    def test_unaligned_keys_are_refused(self, generator: torch.Generator, where: Where) -> None:
        problem = make_problem([100], generator=generator, separate=True)
        room = torch.zeros(problem.key_cache.numel() + 8, dtype=torch.uint8)
        shifted = problem.replace(key_cache=room[8:].view(problem.key_cache.shape))
        with pytest.raises(InputError, match="key_cache must start at a multiple of 16 bytes"):
            where.run(shifted)
        transposed = problem.replace(key_cache=problem.key_cache.transpose(1, 2))
        with pytest.raises(InputError, match="key_cache must be contiguous inside a page"):
            where.run(transposed)
        assert (problem.scores == UNTOUCHED).all()

    def test_every_key_is_where_the_table_says(self, where: Where) -> None:
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
        scores = where.run(problem).scores
        assert scores[0].tolist() == [(t % 128 + 1) * (1 + t // 128) for t in range(200)]

    # What is written, and what is not

    @pytest.mark.parametrize(("groups", "length"), [(6, 400), (48, 4000)])
    def test_wide_scores_keep_their_other_entries(
        self, generator: torch.Generator, where: Where, groups: int, length: int
    ) -> None:
        rows = 2 * groups
        where.decline_more_than(rows * length)
        problem = make_problem([length] * groups, generator=generator, rows_per_group=2)
        big = torch.full((rows + 4, length + 1000), UNTOUCHED)
        inside = where.run(problem.replace(scores=big[:rows, :length])).scores
        written = inside.as_strided(big.shape, big.stride())
        assert (written[rows:] == UNTOUCHED).all()
        assert (written[:, length:] == UNTOUCHED).all()
        assert torch.equal(inside, where.run(problem).scores[:, :length])

    @pytest.mark.parametrize("width", [257, 300, 513])
    def test_scores_exactly_as_wide_as_the_length(
        self, generator: torch.Generator, where: Where, width: int
    ) -> None:
        # Guards stand between the rows.
        problem = make_problem([width], generator=generator, rows_per_group=3, max_context=width)
        assert_scores(where.run(problem), exact=False)

    @pytest.mark.parametrize(("rows", "width"), [(1, 150), (8, 150), (3, 64), (3, 257)])
    def test_lengths_past_max_context_are_clamped(
        self, generator: torch.Generator, where: Where, kind: str, rows: int, width: int
    ) -> None:
        problem = make_problem(
            [400, 100, 64, 257],
            generator=generator,
            kind=kind,
            rows_per_group=rows,
            max_context=width,
        )
        assert_scores(where.run(problem), exact=False)

    def test_repeats_agree_and_nothing_else_is_written(
        self, generator: torch.Generator, where: Where, kind: str
    ) -> None:
        problem = make_problem([1300, 0, 77], generator=generator, kind=kind, rows_per_group=2)
        first = where.run(problem)
        for name, before in vars(problem).items():
            if before is not None and name != "scores":
                assert torch.equal(_storage(getattr(first, name)), _storage(before)), name
        for _ in range(where.repeats):
            assert torch.equal(where.run(problem).scores, first.scores)

    # Every number

    def test_one_hot_rows_read_back_the_keys(
        self, generator: torch.Generator, where: Where, kind: str
    ) -> None:
        problem = make_problem([PAGE] * 16, generator=generator, kind=kind, rows_per_group=8)
        query, query_scales, factor = _one_hot_rows(kind)
        rows = problem.replace(
            query=query, query_scales=query_scales, requests=torch.zeros(16, dtype=torch.int32)
        )
        page = int(problem.block_table[0, 0])
        scales = None if problem.key_scales is None else problem.key_scales[page]
        keys = reference_decode(problem.key_cache[page], scales)
        assert torch.equal(where.run(rows).scores[:, :PAGE], (factor * keys.T).float())

    def test_every_code_and_scale_byte_is_decoded(self, where: Where, packed: str) -> None:
        # One-hot rows read back the keys: all 256 code bytes under all 254 finite scale bytes, of
        # both signs, at every position of a key.
        page = torch.arange(256).view(4, 64).repeat(16, 1).to(torch.uint8)
        rolled = torch.stack([page.roll(shift, 1) for shift in range(4)])
        codes = rolled.repeat(len(FINITE_SCALES), 1, 1)
        pages = codes.shape[0]
        where.decline_more_than(DIM * pages * PAGE)
        scales = torch.tensor(FINITE_SCALES, dtype=torch.uint8).repeat_interleave(4)
        scales = scales.view(-1, 1, 1).expand(pages, 64, 8).contiguous()
        query, query_scales, factor = _one_hot_rows(packed)
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
        keys = reference_decode(codes, scales).reshape(-1, 128)
        assert torch.equal(where.run(problem).scores, (factor * keys.T).float())

    def test_every_finite_scale_byte_is_decoded(self, where: Where, packed: str) -> None:
        scored = where.run(_a_scale_byte_a_key(packed, range(0x7F)))
        assert_scores(scored, exact=True)

    def test_negative_scale_bytes_are_decoded(self, where: Where, packed: str) -> None:
        # No quantizer writes one; a kernel that decodes bytes itself takes the sign for what it is.
        scored = where.run(_a_scale_byte_a_key(packed, range(0x80, 0xFF)))
        assert_scores(scored, exact=True)

    def test_extreme_scales_are_exact(self, where: Where, mixed: str) -> None:
        # Every positive scale byte, with codes 6 and 0.5, and BF16 query rows near both ends.
        count = 0x7F
        codes = torch.full((2, 64, 64), 0x17, dtype=torch.uint8)
        scales = torch.zeros(2, 64, 8, dtype=torch.uint8)
        scales.view(128, 8)[:count, 0] = torch.arange(count, dtype=torch.uint8)
        query = torch.zeros(2, 128).bfloat16()
        query[0, 0], query[1, 1] = 1e34, 2.0**-100
        problem = make_problem([count], generator=torch.Generator(), kind=mixed, rows_per_group=2)
        problem = problem.replace(
            query=query,
            key_cache=codes,
            key_scales=scales,
            block_table=torch.tensor([[0, 1]], dtype=torch.int32),
        )
        scores = where.run(problem).scores[:, :count]
        assert torch.equal(scores, problem.reference()[:, :count].float())
        assert scores[1, 1] == 0.5 * 2.0**-9 * 2.0**-100

    def test_keys_of_every_magnitude(
        self, generator: torch.Generator, where: Where, packed: str
    ) -> None:
        problem = make_problem([576], generator=generator, kind=packed, rows_per_group=2)
        keys = torch.randn(9 * 64, 128, generator=generator)
        keys *= torch.exp2((torch.arange(9 * 64) % 9 - 4).float())[:, None]
        codes, scales = quantize_nvfp4(keys)
        changed = problem.replace(
            key_cache=codes.view(9, 64, 64),
            key_scales=scales.view(9, 64, 8),
            block_table=torch.arange(9, dtype=torch.int32).view(1, 9),
        )
        assert_scores(where.run(changed), exact=False)

    @pytest.mark.parametrize("byte", [0x7F, 0xFF], ids=hex)
    def test_a_nan_scale_is_not_hidden(self, where: Where, packed: str, byte: int) -> None:
        generator = torch.Generator().manual_seed(1)
        problem = make_problem([64], generator=generator, kind=packed, integers=True)
        assert problem.key_scales is not None
        page = int(problem.block_table[0, 0])
        problem.key_scales.view(torch.uint8)[page, 9, 3] = byte
        assert where.run(problem).scores[0].isnan().nonzero().flatten().tolist() == [9]


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    """Every byte of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _one_hot_rows(kind: str) -> tuple[torch.Tensor, torch.Tensor | None, float]:
    """128 query rows with their scales, and what each has at its own index; 0 elsewhere."""
    one_hot = torch.eye(DIM).bfloat16()
    if kind != "nvfp4":
        return one_hot, None, 1.0
    codes, _ = quantize_nvfp4(one_hot)
    return codes, torch.full((DIM, 8), ONE, dtype=torch.uint8), 6.0


def _a_scale_byte_a_key(kind: str, scale_bytes: Sequence[int]) -> Problem:
    """Keys with codes of 6 and -3, each under another scale, and two query rows of small values."""
    codes = torch.full((2, 64, 64), 0xD7, dtype=torch.uint8)
    scales = torch.zeros(2, 64, 8, dtype=torch.uint8)
    scales.view(-1, 8)[: len(scale_bytes), 5] = torch.tensor(scale_bytes, dtype=torch.uint8)
    query_scales = None
    if kind == "nvfp4":
        query = torch.zeros(2, 64, dtype=torch.uint8)
        query[0, 40], query[1, 47] = 0x02, 0x10  # 1 at value 80, 0.5 at value 95
        query_scales = torch.zeros(2, 8, dtype=torch.uint8)
        query_scales[0, 5], query_scales[1, 5] = ONE, 1  # 1 and 2^-9
    else:
        query = torch.zeros(2, 128, dtype=torch.bfloat16)
        query[0, 80], query[1, 95] = 1.0, 2.0**-60
    problem = make_problem(
        [len(scale_bytes)], generator=torch.Generator(), kind=kind, rows_per_group=2
    )
    return problem.replace(
        query=query,
        query_scales=query_scales,
        key_cache=codes,
        key_scales=scales,
        block_table=torch.tensor([[0, 1]], dtype=torch.int32),
    )
