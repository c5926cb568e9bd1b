"""FP64 arithmetic rounded once, in every mode, by exact rational arithmetic lane by lane."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from emulator.instructions.elementwise import apply_function
from emulator.instructions.registry import Closure, Decoder

from .float_rounding import F64

Exact = Callable[..., Any]


def compile_double(
    op: Decoder, mode: str, exact: Exact, native: np.ufunc | None, operands: int
) -> Closure:
    """An FP64 operation.

    Parameters
    ----------
    mode : str
        ``rn``, ``rz``, ``rm`` or ``rp``.
    exact : function
        The operation, of Fractions and of float64 arrays.
    native : numpy ufunc or None
        The operation to nearest even, where numpy has it.
    operands : int
        Of the instruction.
    """
    op.expect_operands(operands)

    def function(*columns: np.ndarray) -> np.ndarray:
        if mode == "rn" and native is not None:
            results = native(*columns)
        else:
            rows = zip(*(c.tolist() for c in (*columns, exact(*columns))), strict=True)
            results = np.array([_round_one(exact, mode, row[:-1], row[-1]) for row in rows])
        for column in columns if native is not np.divide else columns[::-1]:
            # The last NaN among the operands is the result, the first of a division.
            quiet = (column.view(np.uint64) | np.uint64(1 << 51)).view(np.float64)
            results = np.where(np.isnan(column), quiet, results)
        return results

    sources = [op.source(index, np.float64) for index in range(1, operands)]
    return apply_function(function, op.destination(0, np.float64), *sources)


def _round_one(exact: Exact, mode: str, operands: tuple[float, ...], rounded: float) -> float:
    """The result of one lane; `rounded` is it where it is not finite or zero."""
    if not all(map(math.isfinite, operands)):
        return rounded
    try:
        value = exact(*map(Fraction, operands))
    except ZeroDivisionError:
        return rounded
    if value != 0:
        return round_fraction(value, mode)
    # Numbers that are not zero cancel to -0 when rounded down.
    return -0.0 if mode == "rm" and all(operands) else rounded


def round_fraction(value: Fraction, mode: str) -> float:
    """A number that is not zero, rounded to FP64."""
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, F64.minimum_exponent) - F64.mantissa_bits)
    below, remainder = divmod(magnitude, quantum)
    outward = {
        "rn": remainder * 2 > quantum or (remainder * 2 == quantum and below % 2 == 1),
        "rz": False,
        "rm": value < 0 and remainder > 0,
        "rp": value > 0 and remainder > 0,
    }[mode]
    rounded = (below + outward) * quantum
    if rounded > Fraction(F64.maximum):
        reaches = mode == "rn" or ((mode == "rp") == (value > 0) and mode != "rz")
        rounded_float = math.inf if reaches else F64.maximum
    else:
        rounded_float = float(rounded)
    return -rounded_float if value < 0 else rounded_float
