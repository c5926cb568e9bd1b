"""How tensor cores add: products and accumulator, aligned to the largest and truncated.

The ISA says only that sums of matrix multiplications have at least single precision, in any order.
Published measurements of GPUs find one scheme (Khattak and Mikaitis, "Accurate Models of NVIDIA
Tensor Cores", arXiv:2512.07004; Fasi et al., "Numerical behavior of NVIDIA tensor cores"): a block
of products, exact, and the accumulator are aligned to the largest exponent among them, where a
product's exponent is the sum of its factors' exponents; each is cut off some bits below, toward
zero; the sum of these is exact, and is cut off to FP32, toward zero. Blocks follow each other in
order of k. Sums recorded on an H200 decide on the numbers for SM90: the rules below give every one
of them, rules of one bit more or less or of half the block do not (`test_tensor_core_sums`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SumRule:
    """The scheme of one format on one architecture.

    Attributes
    ----------
    block : int
        Products that are added at a time.
    fraction_bits : int
        Bits that are kept below the largest exponent.
    """

    block: int
    fraction_bits: int


# Of SM90, by the name of the operands' format.
HOPPER = {
    "f16": SumRule(16, 25),
    "bf16": SumRule(16, 25),
    "tf32": SumRule(8, 25),
    # `mma.sync` multiplies FP8 as FP16.
    "e4m3": SumRule(16, 25),
    "e5m2": SumRule(16, 25),
}

_LOWEST_EXPONENT = -10000


def exponents(values: np.ndarray, minimum: int) -> np.ndarray:
    """Exponents of the leading bits of float64 values; of subnormal numbers the smallest normal's.

    Zeros have an exponent far below all.
    """
    _, exponent = np.frexp(values)
    return np.where(values == 0, _LOWEST_EXPONENT, np.maximum(exponent - 1, minimum))


def accumulate(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, minimum: int, rule: SumRule
) -> np.ndarray:
    """`a @ b + c` as a tensor core adds.

    Parameters
    ----------
    a : float64 [m, k]
    b : float64 [k, n]
    c : float64 [m, n]
        FP32 values.
    minimum : int
        Exponent of the operands' smallest normal number.
    rule : SumRule

    Returns
    -------
    float64 [m, n]
        FP32 values.
    """
    total = c
    a_exponents, b_exponents = exponents(a, minimum), exponents(b, minimum)
    for start in range(0, a.shape[1], rule.block):
        part = slice(start, start + rule.block)
        products = a[:, part, None] * b[None, part, :]
        powers = a_exponents[:, part, None] + b_exponents[None, part, :]
        total = _add_block(products, powers, total, rule)
    return total


def _add_block(
    products: np.ndarray, powers: np.ndarray, c: np.ndarray, rule: SumRule
) -> np.ndarray:
    """One block: products [m, k, n] with their exponents, and the accumulator [m, n]."""
    special = ~np.isfinite(products).all(1) | ~np.isfinite(c)
    finite = np.where(np.isfinite(products), products, 0.0)
    accumulator = np.where(np.isfinite(c), c, 0.0)
    largest = np.maximum(powers.max(1), exponents(accumulator, -126))
    scale = np.where(largest <= _LOWEST_EXPONENT // 2, 0, rule.fraction_bits - largest)
    terms = np.trunc(np.ldexp(finite, scale[:, None, :])).sum(1)
    terms += np.trunc(np.ldexp(accumulator, scale))
    result = truncate(np.ldexp(terms, -scale))
    if special.any():
        result = np.where(special, products.sum(1) + c, result)
    return result


def truncate(values: np.ndarray) -> np.ndarray:
    """float64 values cut off to FP32."""
    _, exponent = np.frexp(values)
    quantum = np.maximum(exponent - 1, -126) - 23
    return np.ldexp(np.trunc(np.ldexp(values, -quantum)), quantum)
