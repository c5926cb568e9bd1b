"""A PTX kernel for tests of tcgen05.mma: load images of operands, multiply, store D.

The images come ready made, as bulk copies; which bytes they hold is the tests' business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from emulator.machine.launch import Report
from emulator.machine.memory import Region
from emulator.tcgen05.canonical_layouts import encode_descriptor

from .ptx_kernels import expect, initialize, kernel, run, wait

THREADS = 128
A_AT, B_AT, SCALES_AT, SHARED = 0, 16384, 49152, 57344  # offsets into shared memory
D_COLUMNS = 256
A_COLUMN, SCALE_A_COLUMN, SCALE_B_COLUMN = 256, 300, 320  # from the start of the allocation

ALLOCATE = """
    setp.eq.u32 %p1, %r1, 0;
    @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 512;
    @%p1 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    bar.sync 0;
    ld.shared.b32 %r20, [slot];
    shl.b32 %r21, %r1, 21;
    add.u32 %r21, %r21, %r20;
"""
DEALLOCATE = """
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 512;
"""
COMMIT = "    @%p0 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [empty];\n"
AFTER = "    tcgen05.fence::after_thread_sync;\n"


def descriptor_register(name: str, at: int, word: int) -> str:
    """A register with the descriptor of a matrix `at` bytes into `smem`."""
    return f"""
    mov.u32 %r30, smem+{at};
    shr.u32 %r30, %r30, 4;
    mov.b64 {name}, {{%r30, 0}};
    add.s64 {name}, {name}, {word};
"""


def read_back(columns: int) -> str:
    """Every thread stores its lane of D, `columns` words from the start of the allocation."""
    text = ""
    for first in range(0, columns, 8):
        registers = ", ".join(f"%r{100 + i}" for i in range(8))
        text += f"""
    add.u32 %r22, %r21, {first};
    tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{registers}}}, [%r22];
    tcgen05.wait::ld.sync.aligned;
    st.global.v4.b32 [%rd6+{first * 4}], {{%r100, %r101, %r102, %r103}};
    st.global.v4.b32 [%rd6+{first * 4 + 16}], {{%r104, %r105, %r106, %r107}};
"""
    return text


@dataclass
class MmaCase:
    """One test of `tcgen05.mma`.

    Attributes
    ----------
    kind : str
        Qualifiers from `kind::` on.
    descriptor : int
        Instruction descriptor.
    a_image, b_image : np.ndarray
        Bytes of shared memory.
    a_word, b_word : int
        Their descriptors, with start address 0.
    columns : int
        N.
    d_initial : np.ndarray or None
        uint32 `[128, N]`: what D holds before.
    scales : np.ndarray or None
        uint8 `[2, 512]`: scale factors of A and of B, as `.32x128b.warpx4` copies them.
    a_in_tensor_memory : bool
        Whether A is copied to tensor memory first, from 128 rows of 32 bytes.
    before_d, after_d : str
        Operands between descriptor and accumulation, and after it.
    steps : sequence of (int, int)
        Bytes by which the descriptors of A and B move, for each MMA in turn.
    """

    kind: str
    descriptor: int
    a_image: np.ndarray
    b_image: np.ndarray
    a_word: int
    b_word: int
    columns: int
    d_initial: np.ndarray | None = None
    scales: np.ndarray | None = None
    a_in_tensor_memory: bool = False
    before_d: str = ""
    after_d: str = ""
    steps: Sequence[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])

    def body(self) -> str:
        """Instructions of the kernel."""
        text = ALLOCATE + initialize("full", "empty") + self._loads() + self._prologue()
        text += descriptor_register("%rd10", A_AT, self.a_word)
        text += descriptor_register("%rd11", B_AT, self.b_word)
        text += f"    mov.u32 %r31, {self.descriptor};\n"
        text += f"    setp.ne.u32 %p2, %r31, {self.descriptor if self.d_initial is None else 0};\n"
        for a_step, b_step in self.steps:
            text += f"    add.s64 %rd12, %rd10, {a_step >> 4};\n"
            text += f"    add.s64 %rd13, %rd11, {b_step >> 4};\n"
            text += self._mma() + "    setp.ne.u32 %p2, %r31, 0;\n"
        return text + COMMIT + wait("empty", 0, "done") + AFTER + self._epilogue() + DEALLOCATE

    def _loads(self) -> str:
        """Bulk copies of the images."""
        places = [(A_AT, self.a_image), (B_AT, self.b_image)]
        if self.scales is not None:
            places.append((SCALES_AT, self.scales))
        text = expect("full", sum(image.size for _, image in places))
        for index, (at, image) in enumerate(places):
            text += (
                "    @%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                f"[smem+{at}], [%rd{index}], {image.size}, [full];\n"
            )
        return text + wait("full", 0, "loaded")

    def _prologue(self) -> str:
        """Bring scale factors, A and D to tensor memory."""
        text = ""
        if self.scales is not None:
            word = encode_descriptor(0, 16, 128, 0)
            for index, column in enumerate((SCALE_A_COLUMN, SCALE_B_COLUMN)):
                text += descriptor_register("%rd10", SCALES_AT + 512 * index, word)
                text += f"    add.u32 %r32, %r20, {column};\n"
                text += "    @%p0 tcgen05.cp.cta_group::1.32x128b.warpx4 [%r32], %rd10;\n"
        if self.a_in_tensor_memory:
            text += descriptor_register("%rd10", A_AT, encode_descriptor(0, 128, 256, 0))
            text += f"    add.u32 %r32, %r20, {A_COLUMN};\n"
            text += "    @%p0 tcgen05.cp.cta_group::1.128x256b [%r32], %rd10;\n"
        if self.d_initial is not None:
            text += """
    shl.b32 %r33, %r0, 10;
    mov.b64 %rd7, {%r33, 0};
    add.s64 %rd7, %rd7, %rd3;
"""
            for first in range(0, self.columns, 4):
                registers = "{%r100, %r101, %r102, %r103}"
                text += f"""
    ld.global.v4.b32 {registers}, [%rd7+{first * 4}];
    add.u32 %r34, %r21, {first};
    tcgen05.st.sync.aligned.32x32b.x4.b32 [%r34], {registers};
    tcgen05.wait::st.sync.aligned;
"""
            text += "    tcgen05.fence::before_thread_sync;\n    bar.sync 0;\n" + AFTER
        return text

    def _mma(self) -> str:
        """One MMA of thread 0."""
        a = "%rd12"
        scales = ""
        prepare = ""
        if self.a_in_tensor_memory:
            prepare += f"    add.u32 %r35, %r20, {A_COLUMN};\n"
            a = "[%r35]"
        if self.scales is not None:
            prepare += f"    add.u32 %r36, %r20, {SCALE_A_COLUMN};\n"
            prepare += f"    add.u32 %r37, %r20, {SCALE_B_COLUMN};\n"
            scales = "[%r36], [%r37], "
        return (
            f"{prepare}    @%p0 tcgen05.mma.cta_group::1.{self.kind} [%r20], {a}, %rd13, %r31, "
            f"{scales}{self.before_d}%p2{self.after_d};\n"
        )

    def _epilogue(self) -> str:
        """Store D."""
        place = """
    shl.b32 %r33, %r0, 10;
    mov.b64 %rd6, {%r33, 0};
    add.s64 %rd6, %rd6, %rd4;
"""
        return place + read_back(self.columns)

    def result(self, seed: int = 0, body: str | None = None) -> np.ndarray:
        """Run it; uint32 `[128 lanes, N]`."""
        return self._run(body or self.body(), seed, strict=True)[0]

    def report(self, body: str) -> Report:
        """Run another body, with orders that the ISA does not promise only noted."""
        return self._run(body, 0, strict=False)[1]

    def _run(self, body: str, seed: int, *, strict: bool) -> tuple[np.ndarray, Report]:
        """D and the report of a run."""
        initial = np.zeros((128, 256), np.uint32)
        if self.d_initial is not None:
            initial[:, : self.columns] = self.d_initial
        scales = np.zeros(1024, np.uint8) if self.scales is None else self.scales
        out = Region("d", 0x5000_0000, 128 * 1024)
        memory = [
            Region("a", 0x1000_0000, self.a_image),
            Region("b", 0x2000_0000, self.b_image),
            Region("scales", 0x3000_0000, scales),
            Region("initial", 0x4000_0000, initial),
            out,
        ]
        ptx = kernel(body, 5, SHARED)
        report = run(ptx, memory, block=THREADS, seed=seed, strict=strict)
        return out.data.view(np.uint32).reshape(128, 256)[:, : self.columns], report
