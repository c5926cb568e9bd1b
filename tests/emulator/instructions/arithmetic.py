"""Names that integers and floats share: the type decides."""

from __future__ import annotations

import numpy as np

from . import floats as float_instructions
from . import integers as integer_instructions
from .registry import Closure, Decoder, instruction


@instruction("add", "sub")
def compile_add_sub(op: Decoder) -> Closure:
    ufunc = np.add if op.instruction.parts[0] == "add" else np.subtract
    if float_instructions.is_float(op):
        return float_instructions.compile_add_sub(op, ufunc)
    return integer_instructions.compile_add_sub(op, op.type(), ufunc)


@instruction("mul")
def compile_mul(op: Decoder) -> Closure:
    if float_instructions.is_float(op):
        return float_instructions.compile_mul(op)
    return integer_instructions.compile_mul(op, op.type())


@instruction("mad")
def compile_mad(op: Decoder) -> Closure:
    if float_instructions.is_float(op):
        return float_instructions.compile_mad(op)
    return integer_instructions.compile_mad(op, op.type())


@instruction("div")
def compile_div(op: Decoder) -> Closure:
    if float_instructions.is_float(op):
        return float_instructions.compile_div(op)
    return integer_instructions.compile_div(op, op.type())


@instruction("min", "max")
def compile_min_max(op: Decoder) -> Closure:
    name = op.instruction.parts[0]
    if float_instructions.is_float(op):
        return float_instructions.compile_min_max(op, name)
    ufunc = np.minimum if name == "min" else np.maximum
    return integer_instructions.compile_min_max(op, op.type(), ufunc)


@instruction("abs", "neg")
def compile_abs_neg(op: Decoder) -> Closure:
    name = op.instruction.parts[0]
    if float_instructions.is_float(op):
        return float_instructions.compile_sign(op, name)
    ufunc = np.absolute if name == "abs" else np.negative
    return integer_instructions.compile_elementwise(op, ufunc, op.type(), 2)
