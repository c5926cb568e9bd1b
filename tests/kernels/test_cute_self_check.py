"""Trust in the tensor-core kernels: asked once per device, by results; no GPU needed."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

from sdsa_kernels import torch_scores
from sdsa_kernels.cute import backend as cute_scores
from sdsa_kernels.cute import trust as cute_self_check
from sdsa_kernels.cute.trust import is_trusted, known_reason_against
from sdsa_kernels.cute.variants import TILED_SCALES_VARIANT
from sdsa_kernels.plans import Plan
from sdsa_kernels.problem import ScoreProblem
from sdsa_kernels.testing import self_test
from sdsa_kernels.testing.compare import UNTOUCHED
from sdsa_kernels.testing.problems import _query_scales, exact_problem
from sdsa_kernels.testing.reference import reference_scores
from sdsa_quant.errors import DeviceLostError, UnsupportedError
from sdsa_quant.layout import FORMAT_PAIRS, PAGE

VARIANT, WARP_LEVEL = "tcgen05_nvfp4", "nvfp4_cvt_short"
Breakage = Callable[[ScoreProblem], None]


class _Event:
    """An event of a device on which all is done."""

    def record(self, stream: object) -> None: ...

    def query(self) -> bool:
        return True


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The variants that were run, by the torch backend on the CPU."""
    ran: list[str] = []

    def plan_for(problem: ScoreProblem, variant: str) -> Plan:
        def plan(*addresses: int) -> None:
            ran.append(variant)
            torch_scores.launch(problem)

        return plan

    def small(values: str, device: torch.device, lengths: object, **options: int) -> ScoreProblem:
        return exact_problem(values, torch.device("cpu"), (1, 0, 65, 129), **options)

    monkeypatch.setattr(cute_self_check, "plan_for", plan_for)
    monkeypatch.setattr(cute_self_check, "exact_problem", small)
    monkeypatch.setattr(cute_self_check, "_verdicts", {})
    monkeypatch.setattr(cute_self_check, "_lost", {})
    monkeypatch.setattr(cute_self_check, "capability", lambda device: (10, 0))
    monkeypatch.setattr(cute_self_check, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(cute_self_check, "refuse_capture_before_warmup", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.delenv(cute_self_check.TCGEN05, raising=False)
    return ran


def break_plans(monkeypatch: pytest.MonkeyPatch, breakage: Breakage) -> None:
    """Let something happen to what the tensor cores computed."""
    whole = cute_self_check.plan_for

    def plan_for(problem: ScoreProblem, variant: str) -> Plan:
        plan = whole(problem, variant)

        def broken(*addresses: int) -> None:
            plan(*addresses)
            if variant == VARIANT:
                breakage(problem)

        return broken

    monkeypatch.setattr(cute_self_check, "plan_for", plan_for)


def test_equal_scores_are_trusted_and_compared_once_for_each_device(runs: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for device in (0, 0, 1, 0, 1):
            assert is_trusted(device, VARIANT)
    assert runs == [WARP_LEVEL, VARIANT] * 2
    assert known_reason_against(0, VARIANT) is None


def _write_past_a_length(problem: ScoreProblem) -> None:
    problem.scores[0, 1] = 0.0


def _flip_the_last_bit(problem: ScoreProblem) -> None:
    problem.scores[-1, 128].view(1).view(torch.int32).bitwise_xor_(1)


def _nothing_written(problem: ScoreProblem) -> None:
    problem.scores.fill_(UNTOUCHED)


def _not_a_number(problem: ScoreProblem) -> None:
    problem.scores[6, 64] = torch.nan


@pytest.mark.parametrize(
    "breakage", [_write_past_a_length, _flip_the_last_bit, _nothing_written, _not_a_number]
)
def test_a_difference_is_said_once_and_remembered(
    runs: list[str], monkeypatch: pytest.MonkeyPatch, breakage: Breakage
) -> None:
    break_plans(monkeypatch, breakage)
    with pytest.warns(UserWarning, match="tcgen05_nvfp4 is not used on cuda:0: its self-check"):
        assert not is_trusted(0, VARIANT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not is_trusted(0, VARIANT)
    assert runs == [WARP_LEVEL, VARIANT]
    assert "is right" in str(known_reason_against(0, VARIANT))


def test_the_built_in_problem_fills_the_rings_and_has_late_ctas() -> None:
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    from sdsa_kernels.cute.tcgen05.kernel import LATE_LEAST_TILE_PAGES
    from sdsa_kernels.cute.tcgen05.tiles import FORMATS as TILES
    from sdsa_kernels.cute.tcgen05.tiles import TILE_PAGES

    pages = sum(-(-length // PAGE) for length in cute_self_check._LENGTHS)
    for tile in TILES.values():
        of_cta = pages / (160 * tile.ctas_per_sm)
        assert of_cta >= LATE_LEAST_TILE_PAGES
        assert of_cta / TILE_PAGES >= 4 * tile.stages


def test_a_difference_is_remembered_where_warnings_are_errors(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_plans(monkeypatch, _nothing_written)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="is not used on cuda:0"):
            is_trusted(0, VARIANT)
        assert not is_trusted(0, VARIANT)
    assert runs == [WARP_LEVEL, VARIANT]


def test_the_scales_of_the_variant_for_tiled_ones_are_tiled(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[int] = []
    whole = cute_self_check.plan_for

    def plan_for(problem: ScoreProblem, variant: str) -> Plan:
        shapes.append(problem.key_scales.dim())
        return whole(problem, variant)

    monkeypatch.setattr(cute_self_check, "plan_for", plan_for)
    assert is_trusted(0, TILED_SCALES_VARIANT)
    assert shapes == [3, 1]


def test_a_launch_that_fails_is_not_trusted(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(problem: ScoreProblem) -> None:
        raise UnsupportedError("the CUDA driver failed to launch a kernel")

    break_plans(monkeypatch, fail)
    with pytest.warns(UserWarning, match="failed to run: the CUDA driver failed to launch"):
        assert not is_trusted(0, VARIANT)


def test_a_kernel_that_hangs_is_an_error_that_says_what_to_do(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Event, "query", lambda self: VARIANT not in runs)
    monkeypatch.setattr(cute_self_check, "_PATIENCE_SECONDS", 0.01)
    for variant in (VARIANT, VARIANT, TILED_SCALES_VARIANT):
        with pytest.raises(DeviceLostError, match=r"tcgen05_nvfp4 has not ended .*SDSA_TCGEN05=0"):
            is_trusted(0, variant)
    assert runs == [WARP_LEVEL, VARIANT]  # whatever came after it would have to wait for it
    monkeypatch.setattr(_Event, "query", lambda self: True)
    assert is_trusted(1, VARIANT)


def test_no_memory_for_the_check_is_no_reason_to_fail(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> ScoreProblem:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(cute_self_check, "exact_problem", full)
        with pytest.warns(UserWarning, match="could not be made: CUDA out of memory"):
            assert not is_trusted(0, VARIANT)
    assert known_reason_against(0, VARIANT) is None, "a check that did not run is not a verdict"
    assert is_trusted(0, VARIANT)


def test_a_check_under_another_default_dtype_is_made(runs: list[str]) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert is_trusted(0, VARIANT)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_compiler_that_cannot_make_it_is_no_reason_to_fail(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(problem: ScoreProblem) -> None:
        raise ImportError("no module tensor_map")

    break_plans(monkeypatch, fail)
    with pytest.warns(UserWarning, match="failed to run: no module tensor_map"):
        assert not is_trusted(0, VARIANT)


def test_the_switch_says_no_without_asking(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cute_self_check.TCGEN05, "0")
    assert not is_trusted(0, VARIANT)
    assert runs == []


def test_nothing_is_compared_during_a_capture(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(device: int, function: str) -> None:
        raise UnsupportedError(f"run {function} once before capture")

    monkeypatch.setattr(cute_self_check, "refuse_capture_before_warmup", refuse)
    with pytest.raises(UnsupportedError, match="run indexer_scores once before capture"):
        is_trusted(0, VARIANT)
    assert runs == []


@pytest.mark.parametrize("trusted", [True, False])
def test_the_verdict_decides_what_is_launched(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    problem = exact_problem("nvfp4", torch.device("cpu"), (70,), rows_per_group=2)
    planned: list[str] = []
    monkeypatch.setattr(cute_scores, "device_index", lambda device: 0)
    monkeypatch.setattr(cute_scores, "capability", lambda index: (10, 0))
    monkeypatch.setattr(cute_scores, "multiprocessors", lambda index: 1)
    monkeypatch.setattr(cute_scores, "is_trusted", lambda *_: trusted)
    monkeypatch.setattr(
        cute_scores,
        "plan_for",
        lambda problem, variant: planned.append(variant) or (lambda *addresses: None),
    )
    cute_scores.launch(problem)
    assert planned == [VARIANT if trusted else WARP_LEVEL]


@pytest.mark.parametrize("values", FORMAT_PAIRS)
def test_the_built_in_problem_is_exact_in_float32(values: str) -> None:
    problem = exact_problem(values, torch.device("cpu"), (1, 0, 65, 300), rows_per_group=3)
    torch_scores.launch(problem)
    right = reference_scores(problem.call())
    past = right.isnan()
    assert torch.equal(problem.scores.double()[~past], right[~past])
    assert (problem.scores[past] == UNTOUCHED).all()
    # Partial sums, in any order: of 128 products of codes in halves, of two scales each of 4
    # digits and, for eight blocks, 0.5, 1 or 2 and one of three neighbouring exponents.
    eight_blocks = 128 * (12 * 12) * 4 * (15 * 4)
    one_block = 16 * (12 * 12) * 15 * (15 * 4)
    assert max(eight_blocks, one_block) < 2**24


WRONG_DECODERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "no-mantissa": lambda code, table: table[(code & 0xF8).long()],
    "no-subnormals": lambda code, table: table[code.long()].masked_fill(code < 8, 0.0),
    "halved-from-2": lambda code, table: table[code.long()] / (1 + (code >= 0x40).float()),
    "largest": lambda code, table: table[code.long()].masked_fill(code == 0x7E, 416.0),
    "smallest": lambda code, table: table[code.long()].masked_fill(code == 1, 0.0),
}


@pytest.mark.parametrize("wrong", WRONG_DECODERS.values(), ids=WRONG_DECODERS.keys())
def test_a_wrong_scale_is_seen_by_both_checks(
    wrong: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()

    def decode(scales: torch.Tensor, *, unit: float = 1.0) -> torch.Tensor:
        return wrong(scales.view(torch.uint8), table) * unit

    def scores() -> torch.Tensor:
        lengths = (1, 64, 65, 300, *range(1000, 1040))
        problem = exact_problem("nvfp4", torch.device("cpu"), lengths, rows_per_group=3)
        torch_scores.launch(problem)
        return problem.scores

    right = scores()
    assert not any(test.failure for test in self_test.self_tests("cpu"))
    monkeypatch.setattr(torch_scores.e4m3, "decode", decode)
    assert not torch.equal(scores(), right)
    assert any(test.failure for test in self_test.self_tests("cpu"))


@pytest.mark.parametrize("lengths", [(64 * 61 * 3,), self_test._SHAPE.lengths], ids=["all", "self"])
def test_scales_of_every_byte_in_every_block_are_read(lengths: tuple[int, ...]) -> None:
    pages = 61 if len(lengths) == 1 else self_test._PAGES
    made = exact_problem("nvfp4", torch.device("cpu"), lengths, rows_per_group=3, pages=pages)
    read = made.block_table[:, : -(-max(lengths) // PAGE)].unique()
    assert made.key_scales is not None
    scales = made.key_scales[read].view(-1, 8)
    counts = made.key_cache[read].view(-1, 8, 8).ne(0).any(-1)
    assert set(range(0x7F)) - set(scales[counts].tolist()) == set()
    for block in range(8):
        bytes_met = scales[counts[:, block], block].unique()
        assert len(bytes_met) > 30, (block, bytes_met)


def test_query_rows_of_the_checks_have_scales_of_every_byte() -> None:
    rows = len(cute_self_check._LENGTHS) * cute_self_check._ROWS
    made = _query_scales(rows, torch.Generator().manual_seed(0)).view(torch.uint8)
    assert made.unique().tolist() == list(range(0x7F))
    problem = self_test._problem("nvfp4", "cpu", tiled=True)
    assert problem.query_scales is not None
    assert len(problem.query_scales.unique()) > 120
