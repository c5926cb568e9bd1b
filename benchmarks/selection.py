"""Top-k beside its scores and other ways to the same keys, in CUDA graphs on cold pages.

Every case is checked before it is timed: the keys are those of the torch backend, bit for bit. One
line of JSON a case, in microseconds (medians; p90 for ours):

    python benchmarks/selection.py [CASE ...]
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable

import torch

from sdsa_kernels import indexer_top_k, select_top_k
from sdsa_kernels.measure.measurement import scoring_call
from sdsa_kernels.measure.timing import Timing, rotations_for, time_graph
from sdsa_kernels.problem import ScoreProblem
from sdsa_kernels.testing.problems import Shape, synthetic_problems
from sdsa_kernels.testing.selection import hard_rows
from sdsa_quant.layout import NVFP4_RECORD_BYTES, PAGE

TOP_K = 2048
REPEATS = 300
CALLS = 8  # in a graph, one after another, as in `sdsa bench`
BACKENDS = ("cute", "triton")

# Groups, rows a group, keys of a group, columns of the captured block table in keys.
CASES: dict[str, tuple[int, int, int, int]] = {
    "1x8K": (1, 1, 8192, 8192),
    "1x128K": (1, 1, 1 << 17, 1 << 17),
    "1x1M": (1, 1, 1 << 20, 1 << 20),
    "8x128K": (8, 1, 1 << 17, 1 << 17),
    "32x64K": (32, 1, 1 << 16, 1 << 16),
    "128x16K": (128, 1, 1 << 14, 1 << 14),
    "256x64K": (32, 8, 1 << 16, 1 << 16),
    "32x4K": (32, 1, 4096, 4096),
    "32x4K-of-1M": (32, 1, 4096, 1 << 20),
}


def measure_case(name: str) -> dict[str, object]:
    """Times of one case.

    Raises
    ------
    SystemExit
        The keys are wrong.
    """
    groups, rows_per_group, length, captured = CASES[name]
    device = torch.device("cuda", torch.cuda.current_device())
    shape = Shape((length,) * groups, rows_per_group, captured)
    bytes_per_call = groups * length // PAGE * NVFP4_RECORD_BYTES
    rotations = rotations_for(bytes_per_call, device)
    problems = synthetic_problems(shape, "nvfp4", device, rotations=rotations, seed=7)
    columns = captured // PAGE
    tables = [
        torch.nn.functional.pad(p.block_table, (0, columns - p.block_table.shape[1]), value=-1)
        for p in problems
    ]
    rows = groups * rows_per_group
    keys = torch.empty((rows, TOP_K), dtype=torch.int32, device=device)

    def fused(problem: ScoreProblem, table: torch.Tensor) -> Callable[[], None]:
        return lambda: indexer_top_k(
            problem.query, problem.key_cache, table, problem.context_lengths,
            requests=problem.requests, top_keys=keys, query_scales=problem.query_scales,
            key_scales=problem.key_scales,
        )  # fmt: skip

    scoring = [scoring_call(problem, "auto") for problem in problems]
    calls = [fused(problem, table) for problem, table in zip(problems, tables, strict=True)]
    scores, lengths = problems[0].scores, problems[0].context_lengths
    expected = torch.empty_like(keys)
    scoring[0]()
    select_top_k(scores, lengths, top_keys=expected, backend="torch")
    for call in (calls[0], lambda: select_top_k(scores, lengths, top_keys=keys)):
        keys.fill_(-7)
        call()
        if not torch.equal(keys, expected):
            sys.exit(f"{name}: {int((keys != expected).any(1).sum())} rows have wrong keys")

    part = scores[:, :length]
    result: dict[str, object] = {"case": name, "rotations": rotations}
    both = time_graph(calls, REPEATS, calls_per_replay=CALLS)
    result |= {
        "scores": _us(time_graph(scoring, REPEATS, calls_per_replay=CALLS)),
        "scores_and_top_k": _us(both),
        "p90": round(both.p90_us, 1),
    }
    scoring[0]()  # rotations may share their scores
    for backend in BACKENDS:
        chosen = functools.partial(select_top_k, scores, lengths, top_keys=keys, backend=backend)
        keys.fill_(-7)
        chosen()
        if not torch.equal(keys, expected):
            sys.exit(f"{name}: {backend} selects wrong keys")
        result[f"select_{backend}"] = _us(time_graph([chosen], REPEATS, calls_per_replay=CALLS))
    result["torch_topk"] = _us(
        time_graph(
            [lambda: part.topk(min(TOP_K, length), sorted=False)], 100, calls_per_replay=CALLS
        )
    )
    return result


def measure_hard_rows() -> list[dict[str, object]]:
    """Times of `select_top_k` on 32 rows of 64K hard scores."""
    length = 1 << 16
    lengths = torch.full((32,), length, dtype=torch.int32, device="cuda")
    results = []
    for name, row in hard_rows(length, TOP_K, torch.Generator().manual_seed(3)).items():
        scores = row.cuda().repeat(32, 1)
        keys, expected = (torch.empty(32, TOP_K, dtype=torch.int32, device="cuda") for _ in "ab")
        select_top_k(scores, lengths, top_keys=expected, backend="torch")
        result: dict[str, object] = {"row": name}
        for backend in BACKENDS:
            call = functools.partial(select_top_k, scores, lengths, top_keys=keys, backend=backend)
            keys.fill_(-7)
            call()
            if not torch.equal(keys, expected):
                sys.exit(f"{name}: {backend} selects wrong keys")
            result[backend] = _us(time_graph([call], 100, calls_per_replay=CALLS))
        results.append(result)
    return results


def _us(timing: Timing) -> float:
    return round(timing.median_us, 1)


def main() -> None:
    """Print a line of JSON for each case named on the command line, or for all."""
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}))
    for name in sys.argv[1:] or CASES:
        print(json.dumps(measure_case(name)), flush=True)
    if not sys.argv[1:]:
        for result in measure_hard_rows():
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
