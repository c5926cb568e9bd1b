"""Layouts of tensor memory against CuTe's: registers of loads, rows of A and of D."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from emulator.tcgen05.matrix_operands import data_path_lanes
from emulator.tcgen05.tensor_memory_shapes import SHAPES, register_cells

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl"
)
LANE = 1 << 16  # of a tensor-memory address
ELEMENTS_OF_CELL = {"f16": 2, "e4m3": 4, "tf32": 1}


@pytest.fixture(scope="module")
def layouts() -> dict[str, np.ndarray]:
    """CuTe's layouts, from a process that compiles for SM100."""
    tests = Path(__file__).parents[2]
    environment = {**os.environ, "CUTE_DSL_ARCH": "sm_100a", "PYTHONPATH": str(tests)}
    command = [sys.executable, "-m", "emulator.host.cute_layouts"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: np.array(table) for name, table in found.items()}


@pytest.mark.parametrize("repeats", [1, 2, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_registers_of_loads(layouts: dict[str, np.ndarray], shape: str, repeats: int) -> None:
    halves = shape == "16x32bx2"
    cells = register_cells(shape, repeats, repeats if halves else 0, packed=False)
    width = SHAPES[shape][1] * repeats * (2 if halves else 1)
    ours = cells.lanes[..., 0] * width + cells.columns[..., 0]
    np.testing.assert_array_equal(ours, layouts[f"{shape}.x{repeats}"])


@pytest.mark.parametrize("rows", [128, 64])
@pytest.mark.parametrize("name", ELEMENTS_OF_CELL)
def test_rows_of_matrices(layouts: dict[str, np.ndarray], name: str, rows: int) -> None:
    lanes = data_path_lanes(rows, 0)[:, None]
    d = layouts[f"D.{name}.{rows}"]
    np.testing.assert_array_equal(d, lanes * LANE + np.arange(d.shape[1]))
    a = layouts[f"A.{name}.{rows}"]
    expected = lanes * LANE * ELEMENTS_OF_CELL[name] + np.arange(a.shape[1])
    np.testing.assert_array_equal(a, expected)
