"""What the ISA promises runs, what it does not promise is noted or refused, on every schedule."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from emulator.errors import UnfinishedAsync
from emulator.machine.launch import Report, run_kernel
from emulator.machine.memory import Region
from emulator.programs.isa_examples import COMMIT, EXAMPLES, Example, handover

SEEDS = range(16)  # two of each policy
PATTERN, BLOCK = 0x1111_1111, 77


def run_example(example: Example, seed: int, *, strict: bool) -> tuple[np.ndarray, Report]:
    """What its threads store, and the report."""
    out = Region("out", 0x1000_0000, np.full(4096, PATTERN, np.uint32))
    parameters = struct.pack("<Q", out.base)
    if example.has_block:
        parameters = parameters.ljust(64, b"\0") + struct.pack("<16I", *[BLOCK] * 16)
    report = run_kernel(
        example.ptx, "k", 1, example.threads, parameters, [out], seed=seed, strict=strict
    )
    return out.data.view(np.uint32)[: min(example.threads, 128)], report


# What threads store; 0, the product of zeros, where nothing is said.
STORED = {
    "padded-vector-load": 6,
    "param-address-of-32-bits": BLOCK,
    "whole-warp-init": 6,
    "bulk-copy-over-generic-write": PATTERN,
    "no-fence-after-mbarrier-init": PATTERN,
}


@pytest.mark.parametrize("strict", [False, True], ids=["default", "strict"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_the_isa(name: str, strict: bool) -> None:
    example = EXAMPLES[name]
    fault = example.strict_fault if strict else example.fault
    for seed in SEEDS:
        if fault is not None:
            with pytest.raises(fault):
                run_example(example, seed, strict=strict)
            continue
        stored, report = run_example(example, seed, strict=strict)
        np.testing.assert_array_equal(stored, STORED.get(name, 0))
        assert bool(report.notes) == (example.strict_fault is not None)


def test_a_commit_may_arrive_after_the_end_of_its_cta() -> None:
    """As the last ones of a pipeline in NVIDIA's kernels; that the MMA is done was waited for."""
    ptx = handover("").replace("END:\n", COMMIT + "END:\n")
    late = 0
    _, report = run_example(Example(ptx, 160), late, strict=False)
    assert report.notes == {"an arrival after the end of the CTA": 1}
    with pytest.raises(UnfinishedAsync, match="an arrival after the end of the CTA"):
        run_example(Example(ptx, 160), late, strict=True)
