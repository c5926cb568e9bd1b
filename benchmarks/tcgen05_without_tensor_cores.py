"""How fast the tensor-core kernels could run if their tensor cores took no time, on an SM90.

All that an SM90 has of them is kept as it is: the shares, the tensor maps, every copy, every
barrier, the walk of each role, the score writes. Only the `tcgen05` instructions are replaced: MMAs
by nothing, their completion by an arrival, scores by zeros. What is left is what must keep up with
memory. Two steps, since the machine with the GPU needs no CuTe DSL:

    python benchmarks/tcgen05_without_tensor_cores.py compile FOLDER
    python benchmarks/tcgen05_without_tensor_cores.py run FOLDER

The second compares with the page-gather roof on cold pages, and times pages that stay in the L2
cache, where the copies themselves are the limit. Every run's scores are checked first: zeros below
each length, nothing written past it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sdsa_kernels.cute.compiled import CompiledKernel
from sdsa_kernels.cute.disk_cache import read_entry, write_entry
from sdsa_kernels.cute.plans import install, plan_for
from sdsa_kernels.measure.roofs import time_page_gather
from sdsa_kernels.measure.timing import l2_bytes, rotations_for, time_graph
from sdsa_kernels.measure.traffic import shape_traffic
from sdsa_kernels.plans import addresses_of
from sdsa_kernels.problem import ScoreProblem
from sdsa_kernels.testing.compare import UNTOUCHED
from sdsa_kernels.testing.problems import Shape, synthetic_problems
from sdsa_quant.errors import CheckFailedError

VARIANTS = {"nvfp4": "tcgen05_nvfp4", "bf16": "tcgen05_bf16"}
GROUPS_ROWS_KEYS = [(32, 1, 65536), (32, 8, 65536), (8, 1, 131072), (1, 1, 131072), (256, 2, 4096)]
HOT_GROUPS_ROWS_KEYS = {"nvfp4": (132, 1, 2560), "bf16": (132, 1, 768)}  # 24 to 26 MB
REPEATS = 60
CALLS_PER_REPLAY = 8


def compile_all(folder: Path) -> None:
    """Compile each variant for SM90 with its tensor-core instructions replaced."""
    from cutlass import Float32, Int32

    from sdsa_kernels.cute.compile import compile_variant
    from sdsa_kernels.cute.tcgen05 import kernel

    def nothing(*arguments: Any) -> None: ...

    replacements: dict[str, Callable[..., Any]] = {
        "allocate_tensor_memory": lambda slot, columns: kernel.store_shared_int(slot, Int32(0)),
        "free_tensor_memory": nothing,
        "fence_before_thread_sync": nothing,
        "fence_after_thread_sync": nothing,
        "copy_both_halves": nothing,
        "start_tile": nothing,
        "commit_to_barrier": kernel.barrier_arrive,
        "load_tensor_columns": lambda address, columns: (Float32(0.0),) * columns,
    }
    for name, replacement in replacements.items():
        setattr(kernel, name, replacement)
    for variant in VARIANTS.values():
        write_entry(_entry(folder, variant), compile_variant("sm_90a", variant))


def _entry(folder: Path, variant: str) -> Path:
    return folder / f"{variant}-sm_90a.bin"


def _load(folder: Path, variant: str) -> CompiledKernel:
    """Let plans of `variant` launch what was compiled into `folder`."""
    from sdsa_kernels.cute.launch import LoadedKernel

    compiled = read_entry(_entry(folder, variant))
    if compiled is None:
        sys.exit(f"{_entry(folder, variant)}: no compiled kernel")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    kernel = LoadedKernel(compiled.image, compiled.symbol, compiled.config, 0, sms)
    install(0, variant, kernel)
    return compiled


def _check(problem: ScoreProblem, call: Callable[[], None]) -> None:
    problem.scores.fill_(UNTOUCHED)
    call()
    torch.cuda.synchronize()
    columns = torch.arange(problem.max_context, device=problem.device)
    lengths = problem.context_lengths.repeat_interleave(problem.rows_per_group)
    wanted = torch.where(columns < lengths[:, None], 0.0, UNTOUCHED)
    if not torch.equal(problem.scores, wanted):
        raise CheckFailedError("scores are not zeros below each length and untouched past it")


def _calls(problems: list[ScoreProblem], variant: str) -> list[Callable[[], None]]:
    plans = [(plan_for(problem, variant), addresses_of(problem)) for problem in problems]
    return [lambda plan=plan, addresses=addresses: plan(*addresses) for plan, addresses in plans]


def _problems(values: str, groups: int, rows: int, keys: int, hot: bool) -> list[ScoreProblem]:
    device = torch.device("cuda", 0)
    shape = Shape((keys,) * groups, rows, keys)
    rotations = 1 if hot else rotations_for(shape_traffic(shape, values).key_bytes, device)
    return synthetic_problems(shape, values, device, rotations=rotations, seed=1)


def check_ragged(values: str, variant: str) -> None:
    """Lengths that end everywhere in a tile, and more groups than a warp has lanes."""
    lengths = (1, 0, 63, 64, 65, 127, 128, 129, 5000, *range(900, 960))
    for rows in range(1, 9):
        shape = Shape(lengths, rows, 5003)
        problem = synthetic_problems(shape, values, torch.device("cuda", 0), rotations=1, seed=2)[0]
        _check(problem, _calls([problem], variant)[0])


def run_all(folder: Path) -> None:
    """Time every shape and print a table."""
    print(f"{torch.cuda.get_device_name(0)}, L2 {l2_bytes(torch.device('cuda', 0)):,} bytes")
    print("| values | groups, rows, keys | pages | us | GB/s | page-gather roof us | share |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: |")
    for values, variant in VARIANTS.items():
        _load(folder, variant)
        check_ragged(values, variant)
        shapes = [(*shape, False) for shape in GROUPS_ROWS_KEYS]
        for groups, rows, keys, hot in [*shapes, (*HOT_GROUPS_ROWS_KEYS[values], True)]:
            problems = _problems(values, groups, rows, keys, hot)
            calls = _calls(problems, variant)
            _check(problems[0], calls[0])
            timing = time_graph(calls, REPEATS, calls_per_replay=CALLS_PER_REPLAY)
            roof = time_page_gather(problems, REPEATS, calls_per_replay=CALLS_PER_REPLAY)
            traffic = shape_traffic(Shape((keys,) * groups, rows, keys), values)
            print(
                f"| {values} | {groups}, {rows}, {keys} | {'hot' if hot else 'cold'} | "
                f"{timing.median_us:.1f} | {traffic.gigabytes_per_second(timing.median_us):,.0f} | "
                f"{roof.median_us:.1f} | {roof.median_us / timing.median_us:.2f} |"
            )


if __name__ == "__main__":
    steps = {"compile": compile_all, "run": run_all}
    if len(sys.argv) != 3 or sys.argv[1] not in steps:
        sys.exit("usage: tcgen05_without_tensor_cores.py compile|run FOLDER")
    steps[sys.argv[1]](Path(sys.argv[2]))
