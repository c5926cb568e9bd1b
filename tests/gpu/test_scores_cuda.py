"""`indexer_scores` on a GPU: the scores contract, and what only a GPU has."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from kernels.contract import HIDES_NAN, ScoresContract, Where

from sdsa_kernels import backend_names, plans
from sdsa_kernels.cute import plans as cute_plans
from sdsa_kernels.triton import backend as triton_scores
from sdsa_quant.layout import BF16_RECORD_BYTES
from sdsa_quant.paging import page_views
from support.problems import KINDS, UNTOUCHED, Problem, assert_scores, make_problem

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class OnGpu(Where):
    """A backend on the current GPU."""

    backend: str = "torch"

    def run(self, problem: Problem) -> Problem:
        called = problem.to("cuda")
        called.run(self.backend)
        return called.to("cpu")


@dataclass(frozen=True)
class PortableOnGpu(OnGpu):
    """Triton's portable kernel, as if Triton had no Gluon."""

    compiled: ClassVar[dict[Any, None]] = {}

    def run(self, problem: Problem) -> Problem:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton_scores, "has_gluon", lambda: False)
            patch.setattr(triton_scores, "_compiled", self.compiled)
            plans.forget_all()
            called = super().run(problem)
            plans.forget_all()
        assert set(self.compiled.values()) <= {None}, "Gluon was used"
        return called


class TestScores(ScoresContract):
    wheres = (
        OnGpu("torch"),
        OnGpu("triton", backend="triton", declined={"test_a_nan_scale_is_not_hidden": HIDES_NAN}),
        PortableOnGpu(
            "portable", backend="triton", declined={"test_a_nan_scale_is_not_hidden": HIDES_NAN}
        ),
        OnGpu("cute", backend="cute"),
    )

    @pytest.fixture(autouse=True)
    def _runs_here(self, where: OnGpu, skip_unless_it_runs: Callable[[str, str], None]) -> None:
        skip_unless_it_runs(where.backend, "nvfp4")


def each_backend(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test with each backend of GPUs that runs here."""
    names = [name for name in backend_names() if name != "torch"]
    return pytest.mark.usefixtures("backend_runs_here")(
        pytest.mark.parametrize("backend", names)(test)
    )


@each_backend
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


@each_backend
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


@each_backend
def test_scores_past_32_bits(generator: torch.Generator, backend: str) -> None:
    # Row 3 begins past 2^31 entries.
    problem = make_problem([100] * 4, generator=generator, integers=True).to("cuda")
    width = 800_000_000
    room = torch.empty(4, width, device="cuda")
    narrow = problem.run(backend)[:, :100]
    problem.replace(scores=room).run(backend)
    assert torch.equal(room[:, :100], narrow)


@each_backend
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


@each_backend
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


@each_backend
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


@each_backend
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
