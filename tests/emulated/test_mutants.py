"""A sample of mutants of two kernels: no lower a share is caught than when this was measured."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from emulator.host.standin import reason_unavailable

from .mutants import shares

COUNT, SEED = 60, 7
# Least that are caught of each kind; what survives was read through (see `mutants`).
LEAST = {
    "sm100": {"without": 15, "unwaited": 7, "with": 16},
    "sm90": {"without": 9, "unwaited": 1, "with": 28},
}


@pytest.mark.large
@pytest.mark.skipif(reason_unavailable() is not None, reason=str(reason_unavailable()))
@pytest.mark.parametrize("name", LEAST)
def test_mutants_are_caught(name: str) -> None:
    found = shares(name, COUNT, SEED)
    assert sum(total for _, total in found.values()) == COUNT
    for kind, least in LEAST[name].items():
        assert found[kind][0] >= least, (kind, found)
