"""Every CuTe DSL kernel, compiled without a GPU for every architecture, and its machine code."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from sdsa_kernels.cute import select
from sdsa_kernels.cute.compile import compile_variant, trace_variant
from sdsa_kernels.cute.compiled import CompiledKernel
from sdsa_kernels.cute.selection import finish, rows
from sdsa_kernels.cute.tcgen05.tiles import FORMATS as TILE_FORMATS
from sdsa_kernels.cute.variants import (
    ARCHITECTURES,
    SELECTING_VARIANTS,
    TENSOR_CORE,
    ctas_per_sm,
    split_variant,
    variants_of,
)
from sdsa_kernels.testing.machine_code import (
    disassemble,
    find_disassembler,
    innermost_loop,
    resource_usage,
)

REGISTERS_OF_SM = 65536
SHARED_BYTES_OF_SM = {"sm_90a": 233472, "sm_100a": 233472, "sm_103a": 233472, "sm_120a": 102400}
RESERVED_SHARED_BYTES = 1024  # of every CTA
# MMAs that a warp issues for a page, or a quarter of one in BF16: 16 keys x 8 columns each, k = 16
# (HMMA) or 32 (IMMA).
MMAS = {
    "bf16": ("HMMA", 8),
    "mixed": ("HMMA", 32),
    "nvfp4": ("HMMA", 32),
    "nvfp4_cvt": ("HMMA", 32),
    "blocks1": ("IMMA", 32),
    "blocks2": ("IMMA", 64),
}
CASES = [
    pytest.param(architecture, variant, id=f"{architecture}-{variant}")
    for architecture in ARCHITECTURES.values()
    for variant in variants_of(architecture)
    if not variant.startswith("tcgen05")
]
TENSOR_CORE_CASES = [
    pytest.param(architecture, variant, id=f"{architecture}-{variant}")
    for architecture in TENSOR_CORE
    for variant in TILE_FORMATS
]
SELECTING_CASES = [
    pytest.param(architecture, variant, id=f"{architecture}-{variant}")
    for architecture in ARCHITECTURES.values()
    for variant in SELECTING_VARIANTS
]
TENSOR_COLUMNS_OF_SM = 512
GLOBAL_ACCESSES = ("LDG", "STG", "LDGSTS", "UBLKCP", "UTMALDG", "ATOMG", "REDG")


@dataclass(frozen=True)
class MachineCode:
    """What a test wants to know of a compiled kernel."""

    kernel: CompiledKernel
    registers: int
    stack_bytes: int
    opcodes: tuple[str, ...]  # in the order of their addresses
    instructions: Counter[str]

    def count(self, *parts: str) -> int:
        """Instructions whose opcode has all of these dot-separated parts, the first one first."""
        total = 0
        for opcode, number in self.instructions.items():
            first, *rest = opcode.split(".")
            if first == parts[0] and set(parts[1:]) <= set(rest):
                total += number
        return total


@functools.cache
def machine_code(architecture: str, variant: str) -> MachineCode:
    """Compile a kernel and disassemble it."""
    disassembler = find_disassembler()
    if disassembler is None:
        pytest.skip("needs cuobjdump, on the path or in Triton's package")
    kernel = compile_variant(architecture, variant)
    usage = resource_usage(disassembler, kernel.image)
    opcodes = tuple(each.opcode for each in disassemble(disassembler, kernel.image))
    return MachineCode(
        kernel=kernel,
        registers=usage["REG"],
        stack_bytes=usage["STACK"],
        opcodes=opcodes,
        instructions=Counter(opcodes),
    )


@pytest.mark.parametrize(("architecture", "variant"), CASES)
def test_every_variant_compiles_to_what_it_is_meant_to_be(architecture: str, variant: str) -> None:
    code = machine_code(architecture, variant)
    name, short = split_variant(variant)
    halves = 2 if short else 1  # two warps share a page
    mma, number = MMAS[name]
    assert code.count(mma) == number // halves
    assert code.kernel.config.ctas_per_sm == ctas_per_sm(architecture)
    _assert_that_ctas_fit(code, architecture)
    # Keys arrive by bulk copies and are read 16 bytes at a time, query rows likewise.
    assert code.count("UBLKCP") > 0
    assert code.count("LDS", "128") == 8 // halves
    assert code.count("LDG", "128") > 0


@pytest.mark.parametrize(
    ("architecture", "variant"), [*CASES, *TENSOR_CORE_CASES, *SELECTING_CASES]
)
def test_global_memory_is_only_touched_after_the_wait(architecture: str, variant: str) -> None:
    # A launch overlaps the kernel before it, which may still write what this one reads.
    names = [opcode.split(".")[0] for opcode in machine_code(architecture, variant).opcodes]
    assert names.count("ACQBULK") == 1
    touched = [names.index(name) for name in GLOBAL_ACCESSES if name in names]
    assert names.index("ACQBULK") < min(touched)


def _assert_that_ctas_fit(code: MachineCode, architecture: str) -> None:
    """Nothing spills to local memory, and the CTAs that are meant to share an SM fit together."""
    assert code.stack_bytes == 0
    assert code.count("LDL") == code.count("STL") == 0
    config = code.kernel.config
    assert code.registers * config.threads * config.ctas_per_sm <= REGISTERS_OF_SM
    needed = (config.shared_bytes + RESERVED_SHARED_BYTES) * config.ctas_per_sm
    assert needed <= SHARED_BYTES_OF_SM[architecture]


@pytest.mark.parametrize(("architecture", "variant"), TENSOR_CORE_CASES)
def test_tensor_core_variants_compile_to_what_they_are_meant_to_be(
    architecture: str, variant: str
) -> None:
    code = machine_code(architecture, variant)
    tile = TILE_FORMATS[variant]
    _assert_that_ctas_fit(code, architecture)
    assert tile.tensor_columns * tile.ctas_per_sm <= TENSOR_COLUMNS_OF_SM
    # Each tile: two copies of pages for each part, and the MMAs; scores by one load for a key.
    if variant == "tcgen05_bf16":
        assert code.count("UTCHMMA") == 8  # K = 16 each
        assert code.count("UTCCP") == 0
    else:
        # K = 64 each, four E4M3 scales a row; the disassembler names this in two ways.
        blocks = "BLOCK16" if architecture == "sm_103a" else "4X"
        assert code.count("UTCOMMA", blocks) == code.count("UTCOMMA") == 2
        assert code.count("UTCCP") == 4  # of a tile and of a query, two halves each
        assert code.count("LDGSTS") == (4 if tile.tiled_scales else 8) + 1  # of a tile, of a query
    assert code.count("UTMALDG", "3D") == 2 * tile.parts
    assert code.count("UTMALDG", "2D") == tile.parts
    assert code.count("UBLKCP") == (1 if tile.tiled_scales else 0)
    assert code.count("LDTM", "x8") == 1
    assert code.count("STG") == 8  # one for each row
    assert code.count("UTCBAR") == 3  # stage, accumulator, query
    # No decoding in registers, and no MMA at warp level.
    assert code.count("HMMA") == code.count("F2FP") == code.count("PRMT") == 0


@pytest.mark.parametrize(("architecture", "variant"), SELECTING_CASES)
def test_selecting_kernels_fit(architecture: str, variant: str) -> None:
    code = machine_code(architecture, variant)
    _assert_that_ctas_fit(code, architecture)
    # No atomic decides a position: those that there are add ones to bins in shared memory.
    assert code.count("ATOMG") == code.count("REDG") == code.count("ATOM") == code.count("RED") == 0
    assert code.count("ATOMS") > 0


def test_the_host_knows_the_sizes_of_the_selecting_kernels() -> None:
    assert select.TILE == rows.MARK_TILE
    assert select.DIRECT == rows.DIRECT
    assert select.SHARED_BYTES >= finish.FINISH_SHARED_BYTES
    assert select.MOST_PROGRAMS < finish.MOST_SEGMENTS


@pytest.mark.parametrize("variant", TILE_FORMATS)
def test_a_tile_leaves_most_issue_slots_free(variant: str) -> None:
    # benchmarks/results/tcgen05-budget.md: a tile with 1 row takes as long,
    # at 8 TB/s for 148 SMs at 1.85 GHz.
    disassembler = find_disassembler()
    if disassembler is None:
        pytest.skip("needs cuobjdump, on the path or in Triton's package")
    code = disassemble(disassembler, compile_variant("sm_100a", variant).image)
    mma = "UTCHMMA" if variant == "tcgen05_bf16" else "UTCOMMA"
    copies, mmas, scores = (
        len(innermost_loop(code, opcode)) for opcode in ("UTMALDG.3D", mma, "LDTM")
    )
    cycles_at_the_roof = (TILE_FORMATS[variant].stage_bytes + 512) * 148 * 1.85e9 / 8e12
    assert (copies + mmas + 4 * scores) / 4 < 0.4 * cycles_at_the_roof
    # A loop that is too long would be a loop around more than one tile.
    assert max(copies, mmas, scores) < 110


@pytest.mark.parametrize("variant", TILE_FORMATS)
def test_tensor_maps_follow_the_addresses(variant: str) -> None:
    # As a plan packs them: 8 addresses, two maps of 128 bytes at multiples of 64, then the rest.
    traced, _ = trace_variant("sm_100a", variant)
    declared = re.findall(r"\.param (.*?) \w+_param_\d+(\[\d+\])?,?\n", traced.__ptx__)
    kinds = [kind + size for kind, size in declared]
    maps = [".align 64 .b8[128]"] * 2
    assert kinds == [".u64"] * 8 + maps + [".u64"] * 6 + [".u32"] * 6


@pytest.mark.parametrize("architecture", ["sm_100a", "sm_103a", "sm_120a"])
def test_sm10x_converts_codes_in_hardware(architecture: str) -> None:
    code = machine_code(architecture, "nvfp4_cvt")
    # 8 keys of 16 bytes a lane, 2 values an instruction; the query rows come on top.
    assert code.count("F2FP", "E2M1") >= 8 * 16


def test_compiling_twice_gives_the_same_binary() -> None:
    again = compile_variant("sm_90a", "blocks1")
    assert again == machine_code("sm_90a", "blocks1").kernel


def test_a_second_process_takes_the_kernel_from_the_cache(tmp_path: Path) -> None:
    program = (
        "import time\n"
        "from sdsa_kernels.cute.disk_cache import compiled_kernel\n"
        "start = time.perf_counter()\n"
        "compiled_kernel('sm_90a', 'blocks1')\n"
        "print(time.perf_counter() - start)\n"
    )
    environment = {**os.environ, "SDSA_CACHE_DIR": str(tmp_path)}
    first, second = (
        float(
            subprocess.run(
                [sys.executable, "-c", program],
                check=True,
                capture_output=True,
                text=True,
                env=environment,
            ).stdout
        )
        for _ in range(2)
    )
    assert second < 0.2 * first
