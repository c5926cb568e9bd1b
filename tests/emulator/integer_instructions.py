"""Integer arithmetic ("Integer Arithmetic Instructions", PTX ISA 9.7.1)."""

from __future__ import annotations

import numpy as np

from .elementwise import apply_ufunc
from .ptx_types import integer_type
from .registry import Closure, Decoder, instruction


def compile_binary(op: Decoder, ufunc: np.ufunc, type_name: str) -> Closure:
    """`d = ufunc(a, b)` on integers of a type."""
    op.expect_operands(3)
    dtype = integer_type(type_name)
    return apply_ufunc(ufunc, op.destination(0, dtype), op.source(1, dtype), op.source(2, dtype))


@instruction("add")
def compile_add(op: Decoder) -> Closure:
    return compile_binary(op, np.add, op.type())
