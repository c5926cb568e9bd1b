"""Every CuTe DSL kernel, compiled without a GPU for every architecture, and its machine code."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from sdsa_kernels.cute_compile import compile_variant
from sdsa_kernels.cute_compile_cache import CompiledKernel
from sdsa_kernels.cute_variants import ARCHITECTURES, ctas_per_sm, split_variant, variants_of

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
]


def _find_cuobjdump() -> str | None:
    """The disassembler on the path, else the one that Triton carries."""
    found = shutil.which("cuobjdump")
    if found is None:
        try:
            from triton.backends.nvidia import __file__ as backend
        except ImportError:
            return None
        carried = Path(backend).parent / "bin" / "cuobjdump"
        found = str(carried) if carried.exists() else None
    return found


@dataclass(frozen=True)
class MachineCode:
    """What a test wants to know of a compiled kernel."""

    kernel: CompiledKernel
    registers: int
    stack_bytes: int
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
def machine_code(architecture: str, variant: str, folder: Path) -> MachineCode:
    """Compile a kernel and disassemble it."""
    disassembler = _find_cuobjdump()
    if disassembler is None:
        pytest.skip("needs cuobjdump, on the path or in Triton's package")
    kernel = compile_variant(architecture, variant)
    binary = folder / f"{architecture}-{variant}.cubin"
    binary.write_bytes(kernel.image)

    def read(option: str) -> str:
        command = [disassembler, option, str(binary)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    usage = read("-res-usage")
    opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", read("-sass"))
    return MachineCode(
        kernel=kernel,
        registers=int(re.search(r"REG:(\d+)", usage)[1]),
        stack_bytes=int(re.search(r"STACK:(\d+)", usage)[1]),
        instructions=Counter(opcodes),
    )


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cute")


@pytest.mark.parametrize(("architecture", "variant"), CASES)
def test_every_variant_compiles_to_what_it_is_meant_to_be(
    folder: Path, architecture: str, variant: str
) -> None:
    code = machine_code(architecture, variant, folder)
    name, short = split_variant(variant)
    halves = 2 if short else 1  # two warps share a page
    mma, number = MMAS[name]
    assert code.count(mma) == number // halves
    # Nothing spills to local memory, and the CTAs that are meant to share an SM fit together.
    assert code.stack_bytes == 0
    assert code.count("LDL") == code.count("STL") == 0
    ctas = ctas_per_sm(architecture)
    config = code.kernel.config
    assert code.registers * config.threads * ctas <= REGISTERS_OF_SM
    needed = (config.shared_bytes + RESERVED_SHARED_BYTES) * ctas
    assert needed <= SHARED_BYTES_OF_SM[architecture]
    # Keys arrive by bulk copies and are read 16 bytes at a time, query rows likewise.
    assert code.count("UBLKCP") > 0
    assert code.count("LDS", "128") == 8 // halves
    assert code.count("LDG", "128") > 0


@pytest.mark.parametrize("architecture", ["sm_100a", "sm_103a", "sm_120a"])
def test_sm10x_converts_codes_in_hardware(folder: Path, architecture: str) -> None:
    code = machine_code(architecture, "nvfp4_cvt", folder)
    # 8 keys of 16 bytes a lane, 2 values an instruction; the query rows come on top.
    assert code.count("F2FP", "E2M1") >= 8 * 16


def test_compiling_twice_gives_the_same_binary(folder: Path) -> None:
    again = compile_variant("sm_90a", "blocks1")
    assert again == machine_code("sm_90a", "blocks1", folder).kernel


def test_a_second_process_takes_the_kernel_from_the_cache(tmp_path: Path) -> None:
    program = (
        "import time\n"
        "from sdsa_kernels.cute_compile_cache import compiled_kernel\n"
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
