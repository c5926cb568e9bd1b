"""Warps, CTAs and launches while they run.

A warp is a set of fragments: lanes at one instruction, with one call stack. Without divergence
there is one. Fragments that meet merge again; which of several runs next is the scheduler's choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from emulator.errors import EmulationError, UnfinishedAsync
from emulator.instructions.registry import Mask

from .address_spaces import LOCAL_WINDOW, SHARED_BASE, SHARED_WINDOW
from .async_operation import AsyncOperation
from .memory import OUTSIDE, AddressSpace, Region
from .outcomes import EXIT, RETURN, YIELD, Call, Scatter, Wait
from .program import Program
from .race_detector import RaceDetector
from .registers import PendingLoad, Undefined

Extension = TypeVar("Extension")


class Fragment:
    """Lanes of a warp that are at the same instruction.

    `mask` is None for all 32 lanes. `expired` says that a wait ended early. `polled_at` is the
    launch's event count when the lanes last polled in vain, -1 if they did not.
    """

    __slots__ = ("expired", "last_wait", "mask", "pc", "polled_at", "stack", "wait")

    def __init__(self, pc: int, mask: Mask, stack: tuple[int, ...] = ()) -> None:
        self.pc = pc
        self.mask = mask
        self.stack = stack
        self.wait: Wait | None = None
        self.last_wait = ""
        self.expired = False
        self.polled_at = -1

    def expire(self) -> bool:
        """End a wait that may end early; whether it was one."""
        if self.wait is None or not self.wait.may_expire:
            return False
        self.wait = None
        self.expired = True
        return True


class Warp:
    """32 lanes of a CTA.

    Attributes
    ----------
    slots : list of numpy arrays
        What the program's slot numbers stand for.
    live : bool [32]
        Lanes that have not ended.
    fragment : Fragment
        The one that is running, while a closure runs.
    """

    def __init__(self, cta: Cta, index: int, generator: np.random.Generator) -> None:
        self.cta: Cta = cta
        self.index: int = index
        width, height, depth = cta.launch.block
        threads = np.arange(index * 32, index * 32 + 32)
        self.thread_indices = (
            threads % width,
            threads // width % height,
            threads // (width * height),
        )
        self.live = threads < width * height * depth
        program = cta.launch.program
        self.local_stride = -(-program.local_bytes // 32) * 32
        self.local = Region(f"local memory of warp {index}", 0, self.local_stride * 32)
        self.slots = program.slots.create(self, generator)
        first = Fragment(0, None if self.live.all() else self.live.copy())
        self.fragments = [first]
        self.fragment = first
        self.guarded: Mask = None  # the lanes that a guard lets execute, where not all
        self.instructions = 0
        self.meetings: dict[int, Any] = {}  # of bar.warp.sync, by member mask
        self.undefined: Undefined = {}
        self.loaded_undefined = ""  # the last instruction that loaded such registers
        self.loads: dict[str, PendingLoad] = {}  # that nobody has waited for, by register

    def executing_lanes(self) -> np.ndarray:
        """The lanes that execute the current instruction, bool [32]."""
        return self.lanes(self.fragment.mask if self.guarded is None else self.guarded)

    def lanes(self, mask: Mask) -> np.ndarray:
        """A mask as bool [32]."""
        return _ALL_LANES if mask is None else mask

    def ready_fragments(self) -> list[Fragment]:
        """Fragments that can run now; those whose wait is over stop waiting."""
        ready = []
        for fragment in self.fragments:
            wait = fragment.wait
            if wait is not None:
                if not wait.ready():
                    continue
                fragment.wait = None
                if not wait.retry:
                    fragment.pc += 1
                    if wait.finish is not None:
                        wait.finish()
            ready.append(fragment)
        if len(ready) > 1:
            self._merge()
            ready = [f for f in ready if f in self.fragments]
        return ready

    def _merge(self) -> None:
        """Join fragments that are at the same place, or that wait there to try again."""
        places: dict[tuple, Fragment] = {}
        for fragment in list(self.fragments):
            if fragment.wait is not None and not fragment.wait.retry:
                continue
            place = (fragment.pc, fragment.stack)
            first = places.setdefault(place, fragment)
            if first is not fragment:
                first.mask = _as_mask(self.lanes(first.mask) | self.lanes(fragment.mask))
                first.wait = None
                first.polled_at = -1
                self.fragments.remove(fragment)

    def run(self, fragment: Fragment, limit: int, lowest_first: bool) -> None:
        """Run a ready fragment for at most `limit` instructions.

        It stops early where it waits, polls in vain, ends or meets another fragment, and with
        `lowest_first` where it passes another ready one.
        """
        launch = self.cta.launch
        code, counts, names = launch.program.code, launch.counts, launch.program.names
        undefined, loads = self.undefined, self.loads
        stops, ceiling = self._limits(fragment, lowest_first)
        self.fragment = fragment
        fragment.polled_at = -1
        pc, mask = fragment.pc, fragment.mask
        left = limit
        try:
            while left:
                left -= 1
                counts[pc] += 1
                if (undefined and not names[pc].isdisjoint(undefined)) or (
                    loads and not names[pc].isdisjoint(loads)
                ):
                    outcome = launch.program.uses[pc].run(code[pc], self, mask)
                else:
                    outcome = code[pc](self, mask)
                if outcome is None:
                    pc += 1
                elif type(outcome) is int:
                    pc = outcome
                else:
                    fragment.pc = pc
                    self._apply(fragment, outcome)
                    break
                if pc in stops or pc > ceiling:
                    fragment.pc = pc
                    break
            else:
                fragment.pc = pc
        except EmulationError as error:
            error.locate(self.place(pc, mask if self.guarded is None else self.guarded))
            raise
        self.instructions += limit - left
        launch.instructions += limit - left
        if len(self.fragments) > 1:
            self._merge()

    def _limits(self, fragment: Fragment, lowest_first: bool) -> tuple[frozenset[int], float]:
        """Where to stop for other fragments: the places where they are, and the lowest of these."""
        if len(self.fragments) == 1:
            return _NOWHERE, _NEVER
        others = [f for f in self.fragments if f is not fragment]
        free = [f.pc for f in others if f.wait is None and f.polled_at < 0]
        ceiling = min(free) if lowest_first and free else _NEVER
        if fragment.pc > ceiling:
            ceiling = _NEVER
        return frozenset(f.pc for f in others), ceiling

    def _apply(self, fragment: Fragment, outcome: Any) -> None:
        """Do to a fragment what a closure asked for."""
        if outcome is None:
            fragment.pc += 1
        elif type(outcome) is int:
            fragment.pc = outcome
        elif outcome is YIELD:
            fragment.pc += 1
            fragment.polled_at = self.cta.launch.events
        elif isinstance(outcome, Wait):
            fragment.wait = outcome
            fragment.last_wait = outcome.why
        elif isinstance(outcome, Call):
            fragment.stack = (*fragment.stack, fragment.pc + 1)
            fragment.pc = outcome.target
        elif outcome is RETURN and fragment.stack:
            fragment.pc = fragment.stack[-1]
            fragment.stack = fragment.stack[:-1]
        elif outcome is RETURN or outcome is EXIT:
            self._end(fragment)
        elif isinstance(outcome, Scatter):
            self._scatter(fragment, outcome)
        else:
            raise TypeError(f"a closure returned {outcome!r}")

    def _scatter(self, fragment: Fragment, outcome: Scatter) -> None:
        self.fragments.remove(fragment)
        for lanes, part in outcome.parts:
            if not lanes.any():
                continue
            piece = Fragment(fragment.pc, lanes, fragment.stack)
            self.fragments.append(piece)
            self._apply(piece, part)

    def _end(self, fragment: Fragment) -> None:
        self.live = self.live & ~self.lanes(fragment.mask)
        self.fragments.remove(fragment)
        self.cta.launch.events += 1
        self.cta.lanes_ended(self)

    def place(self, pc: int, mask: Mask) -> str:
        """Where some lanes are, for messages."""
        program = self.cta.launch.program
        parsed = program.sources[pc]
        lanes = "all lanes" if mask is None else f"lanes {np.flatnonzero(mask).tolist()}"
        return (
            f"{program.kernel.name}, line {parsed.line}: {parsed.text} CTA {self.cta.index},"
            f" warp {self.index}, {lanes}"
        )


_ALL_LANES = np.ones(32, bool)
_ALL_LANES.flags.writeable = False
_ALL_BYTES = _ALL_LANES.tobytes()
_NOWHERE: frozenset[int] = frozenset()
_NEVER = float("inf")


def _as_mask(lanes: np.ndarray) -> Mask:
    return None if lanes.tobytes() == _ALL_BYTES else lanes


class Cta:
    """A cooperative thread array.

    Attributes
    ----------
    shared : Region
        Its shared memory, addressed by offsets into the shared window.
    races : RaceDetector
        Of its threads, for shared memory.
    clocks : Clocks
        What its threads know of each other.
    pending : list of AsyncOperation
        In the order of submission.
    at_end : list of functions
        Called when its last lane has ended, before its asynchronous work is checked.
    """

    def __init__(
        self, launch: Launch, index: tuple[int, int, int], generator: np.random.Generator
    ) -> None:
        self.launch: Launch = launch
        self.index: tuple[int, int, int] = index
        self.generator = generator
        self.processor: int = int(generator.integers(launch.processors))
        size = launch.program.shared_bytes + launch.dynamic_shared_bytes
        self.shared: Region = Region(f"shared memory of CTA {index}", 0, size)
        self.shared.shadow[:SHARED_BASE] = OUTSIDE  # the system has it
        self.races = RaceDetector(self)
        self.clocks = self.races.clocks
        self.pending: list[AsyncOperation] = []
        self.at_end: list[Callable[[], None]] = []
        self._extensions: dict[type, Any] = {}
        threads = int(np.prod(launch.block))
        self.warps: list[Warp] = []
        for warp in range(-(-threads // 32)):
            self.warps.append(Warp(self, warp, generator))

    def extension(self, kind: type[Extension]) -> Extension:
        """State that a group of instructions keeps per CTA: `kind(cta)`, made at first use."""
        found = self._extensions.get(kind)
        if found is None:
            found = self._extensions[kind] = kind(self)
        return found

    def submit(self, operation: AsyncOperation, warp: Warp | None = None) -> None:
        """Start an asynchronous operation, of the running lanes of a warp.

        Raises
        ------
        InFlightRead, InFlightWrite, MissingProxyFence, UnwrittenRead, DataRace
            Its bytes are not free for it.
        """
        if warp is not None:
            operation.place = f"started by warp {warp.index}"
            operation.clock = self.clocks.of(warp, warp.executing_lanes())
        operation.begin(self.launch)
        if warp is not None:
            self._note_accesses(operation, warp)
        self.pending.append(operation)

    def _note_accesses(self, operation: AsyncOperation, warp: Warp) -> None:
        """Tell the race detector what an operation does to shared memory.

        What the generic proxy does, lane by lane, its instructions tell themselves.
        """
        if not operation.async_proxy:
            return
        lanes = warp.executing_lanes()
        for where in operation.reads:
            if where.region is self.shared:
                self.races.begin_async_read(warp, where.where, lanes)
        for where in operation.writes:
            if where.region is self.shared:
                self.races.begin_async_write(warp, where.where, lanes)

    def eligible(self) -> list[AsyncOperation]:
        """Pending operations that may take a step."""
        seen: set[Hashable] = set()
        result = []
        for operation in self.pending:
            if operation.queue is not None:
                if operation.queue in seen:
                    continue
                seen.add(operation.queue)
            if all(earlier.done for earlier in operation.after):
                result.append(operation)
        return result

    def advance(self, operation: AsyncOperation, choice: int) -> None:
        """Let an operation take a step."""
        if operation.step(choice, self.races):
            self.pending.remove(operation)
            self.launch.events += 1

    def lanes_ended(self, warp: Warp) -> None:
        """Tell barriers that lanes have ended."""
        for extension in self._extensions.values():
            ended = getattr(extension, "lanes_ended", None)
            if ended is not None:
                ended(warp)

    @property
    def ended(self) -> bool:
        return all(not warp.fragments for warp in self.warps)

    def finish(self) -> None:
        """Check what must hold when the last lane has ended, and note what its warps did.

        Raises
        ------
        UnfinishedAsync
        """
        self.launch.warp_instructions[self.index] = [warp.instructions for warp in self.warps]
        for check in self.at_end:
            check()
        for operation in self.pending:
            if not operation.must_finish:
                continue
            what = f"CTA {self.index} ended and nobody waited for {operation.name}"
            if operation.writes:
                raise UnfinishedAsync(what)
            # It only reads, or only signals: NVIDIA's kernels leave their last ones be.
            note = "a copy that still reads" if operation.reads else "an arrival"
            self.launch.note(f"{note} after the end of the CTA", UnfinishedAsync, f": {what}")
        while self.pending:
            self.advance(self.eligible()[0], 0)


@dataclass(eq=False)
class Launch:
    """One run of a kernel.

    Attributes
    ----------
    memory : AddressSpace
        Global memory, with module variables and constants.
    parameters : Region
        Kernel parameters, at their generic address.
    counts : list of int
        How often each closure of the program ran, by warps.
    waiting : list of (int, int, int)
        CTAs that have not begun.
    events : int
        Counts what could end somebody's polling.
    notes : Counter
        What the kernel relies on and the ISA does not promise, though it works.
    strict : bool
        Whether that is an error.
    """

    program: Program
    memory: AddressSpace
    parameters: Region
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_shared_bytes: int
    generator: np.random.Generator
    spurious_failures: float = 0.0
    processors: int = 132
    strict: bool = False
    notes: Counter[str] = field(default_factory=Counter)
    warp_instructions: dict[tuple[int, int, int], list[int]] = field(default_factory=dict)
    counts: list[int] = field(default_factory=list)
    waiting: list[tuple[int, int, int]] = field(default_factory=list)
    events: int = 0
    instructions: int = 0
    _clock: int = 0

    def note(self, what: str, kind: type[EmulationError], detail: str = "") -> None:
        """Count something that works but that the ISA does not promise; refuse it where strict."""
        if self.strict:
            raise kind(f"{what}{detail}")
        self.notes[what] += 1

    def clock(self) -> int:
        """A clock that always advances."""
        self._clock += 1
        return self.instructions + self._clock

    def region_of(self, cta: Cta, address: int) -> tuple[Region, int]:
        """The region of a generic address and the address within it.

        Raises
        ------
        OutOfBounds
        """
        if address >= SHARED_WINDOW:
            return cta.shared, address - SHARED_WINDOW
        if self.parameters.base <= address < self.parameters.end:
            return self.parameters, address
        if address >= LOCAL_WINDOW:
            raise EmulationError(f"a local address, {address:#x}, where lanes share memory")
        return self.memory.find(address), address

    def instruction_counts(self) -> Counter[str]:
        """Warp instructions by opcode."""
        result: Counter[str] = Counter()
        for parsed, count in zip(self.program.sources, self.counts, strict=True):
            if count:
                result[parsed.opcode] += count
        return result
