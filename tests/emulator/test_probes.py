"""Every probe gives the same bits in the emulator as on an H200."""

from __future__ import annotations

import numpy as np
import pytest

from emulator.emulated_probes import emulate
from emulator.h200_record import h200_record
from emulator.probes.families import all_probes
from emulator.probes.probe import Probe

PROBES = {probe.name: probe for probe in all_probes()}
SEEDS = (0, 1)  # of the schedule


def _differences(got: np.ndarray, expected: np.ndarray) -> str:
    words = [np.resize(each, -(-each.size // 4) * 4).view("<u4") for each in (got, expected)]
    places = np.flatnonzero(words[0] != words[1])
    shown = (f"word {at}: {words[0][at]:08x}, H200 {words[1][at]:08x}" for at in places[:6])
    return f"{len(places)} of {len(words[0])} words differ: " + "; ".join(shown)


def test_the_record_is_complete() -> None:
    record = h200_record()
    assert not record.failures
    assert {f"probe/{name}" for name in PROBES} <= set(record.outputs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("probe", PROBES.values(), ids=PROBES.keys())
def test_a_probe_gives_the_bits_of_an_h200(probe: Probe, seed: int) -> None:
    record = h200_record()
    assert probe.digest() == record.digests[probe.name], "the probe is not the one recorded"
    expected = record.outputs[f"probe/{probe.name}"]
    got = emulate(probe, seed)
    assert np.array_equal(got, expected), _differences(got, expected)
