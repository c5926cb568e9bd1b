"""How SM90 adds products: the rules fit every recorded sum of an H200, their neighbours do not."""

from __future__ import annotations

import numpy as np
import pytest

from emulator.instructions.matrix_multiplications import Multiplication, Shape
from emulator.probes.families import all_probes
from emulator.probes.h200_record import h200_record

from .number_formats import BF16, F16, TF32
from .tensor_core_sums import HOPPER, SumRule, accumulate

PROBES = {probe.name: probe for probe in all_probes()}
WARPS, LANES = 16, 32

# Type, shape, format and the exponent of its smallest normal number.
PRODUCTS = {
    "f16": (Shape(16, 8, 16, 16), F16, -14),
    "bf16": (Shape(16, 8, 16, 16), BF16, -126),
    "tf32": (Shape(16, 8, 8, 32), TF32, -126),
}


def _mismatches(kind: str, rule: SumRule) -> int:
    """Recorded sums of products of random numbers that a rule gives otherwise."""
    shape, number_format, minimum = PRODUCTS[kind]
    name = f"mma.sync.aligned.m16n8k{shape.k}.row.col.f32.{kind}.{kind}.f32, random"
    multiplication = Multiplication(shape, kind, kind)
    a, b, c = (each.view("<u4").reshape(WARPS, LANES, -1) for each in PROBES[name].inputs)
    recorded = h200_record().outputs[f"probe/{name}"].view("<u4").reshape(WARPS, LANES, -1)
    count = 0
    for warp in range(WARPS):
        left, right = multiplication.matrices(a[warp].T, b[warp].T)
        added = multiplication.collect(c[warp].T.copy().view("<f4").astype(np.float64))
        total = accumulate(
            number_format.decode(left), number_format.decode(right), added, minimum, rule
        )
        got = multiplication.spread(total).astype("<f4").view("<u4")
        count += int((recorded[warp] != got.T).sum())
    return count


@pytest.mark.parametrize("kind", PRODUCTS)
def test_the_rule_fits_every_sum(kind: str) -> None:
    assert _mismatches(kind, HOPPER[kind]) == 0


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("change", ["fewer-bits", "more-bits", "smaller-blocks", "exact"])
def test_neighbouring_rules_do_not_fit(kind: str, change: str) -> None:
    rule = HOPPER[kind]
    block, bits = rule.block, rule.fraction_bits
    others = {
        "fewer-bits": SumRule(block, bits - 1),
        "more-bits": SumRule(block, bits + 1),
        "smaller-blocks": SumRule(block // 2, bits),
        "exact": SumRule(block, 45),
    }
    assert _mismatches(kind, others[change]) > 20
