"""Who goes next: warps, fragments and asynchronous operations, as a seed decides.

Policies cycle with the seed. Each is legal; together they are meant to bring out what a kernel
wrongly takes for granted: that copies are done because they mostly are by then, that warps advance
together, that operations finish in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from emulator.errors import Deadlock

from .async_operation import AsyncOperation
from .execution import Cta, Fragment, Launch, Warp

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Policy:
    """How to choose.

    Attributes
    ----------
    copies : str
        When asynchronous operations proceed: ``late`` (only when nothing else can), ``early`` (at
        once), ``random``, or ``newest`` (random times, newest first).
    warps : str
        Which warp runs: ``random``, ``rotate``, or ``leader`` (one as far ahead as it can get).
    run_length : int
        Most instructions of a warp at a time.
    lowest_first : bool
        Whether diverged lanes run at the lowest instruction first; else any of them.
    spurious_failures : float
        Share of `mbarrier.try_wait` that fail early, as the ISA lets them.
    resident : int
        CTAs that run at a time.
    """

    copies: str
    warps: str
    run_length: int
    lowest_first: bool
    spurious_failures: float
    resident: int


POLICIES = (
    Policy("late", "random", 400, True, 0.0, 1),
    Policy("early", "rotate", 200, True, 0.0, 2),
    Policy("random", "random", 40, True, 0.3, 2),
    Policy("newest", "leader", 1000, True, 0.1, 1),
    Policy("late", "leader", 1000, True, 0.1, 2),
    Policy("random", "rotate", 8, False, 0.5, 3),
    Policy("newest", "random", 100, True, 0.0, 4),
    Policy("late", "rotate", 50, False, 0.2, 1),
)

# Turns in a row in which everybody polled in vain before that counts as a deadlock.
_IDLE_TURNS = 2000


class Scheduler:
    """Runs a launch to its end.

    Parameters
    ----------
    launch : Launch
    policy : Policy
    instruction_limit : int
        Warp instructions after which the kernel counts as hanging.
    """

    def __init__(self, launch: Launch, policy: Policy, instruction_limit: int) -> None:
        self.launch = launch
        self.policy = policy
        self.instruction_limit = instruction_limit
        self.generator = launch.generator
        self.resident: list[Cta] = []
        indices = list(self._cta_indices())
        self.waiting = [indices[i] for i in self.generator.permutation(len(indices))]
        launch.waiting = self.waiting
        self._leader: Warp | None = None
        self._turn = 0
        self._idle_turns = 0
        self._events_seen = 0
        self._draws: list[float] = []

    def _cta_indices(self) -> Iterator[tuple[int, int, int]]:
        width, height, depth = self.launch.grid
        for z in range(depth):
            for y in range(height):
                for x in range(width):
                    yield x, y, z

    def run(self) -> None:
        """Run every CTA.

        Raises
        ------
        EmulationError
            The first fault.
        """
        while self.resident or self.waiting:
            while self.waiting and len(self.resident) < self.policy.resident:
                self._admit()
            self._take_turn()
            if self.launch.instructions > self.instruction_limit:
                raise Deadlock(f"no end after {self.instruction_limit} warp instructions")

    def _admit(self) -> None:
        generator = self.generator.spawn(1)[0]
        self.resident.append(Cta(self.launch, self.waiting.pop(), generator))

    def _draw(self) -> float:
        """A random number in [0, 1); drawn in batches, which is faster."""
        if not self._draws:
            self._draws = self.generator.random(512).tolist()
        return self._draws.pop()

    def _take_turn(self) -> None:
        busy: list[tuple[Warp, list[Fragment]]] = []
        idle: list[tuple[Warp, list[Fragment]]] = []
        events = self.launch.events
        pending = False
        if events != self._events_seen:
            self._events_seen, self._idle_turns = events, 0
        for cta in self.resident:
            pending = pending or bool(cta.pending)
            for warp in cta.warps:
                if not warp.fragments:
                    continue
                ready = warp.ready_fragments()
                active = [f for f in ready if f.polled_at != events]
                if active:
                    busy.append((warp, active))
                elif ready:
                    idle.append((warp, ready))
        if pending and self._copies_first(bool(busy)):
            self._advance_copy()
        elif busy:
            self._run_warp(busy)
        elif self.waiting:
            self._admit()
        elif idle:
            self._poll_again(idle)
        elif not self._expire_waits():
            raise Deadlock(self._stuck())

    def _copies_first(self, warps_can_run: bool) -> bool:
        if not warps_can_run or self.policy.copies == "early":
            return True
        return self.policy.copies in ("random", "newest") and self._draw() < 0.3

    def _advance_copy(self) -> None:
        choices: list[tuple[Cta, AsyncOperation]] = [
            (cta, operation) for cta in self.resident for operation in cta.eligible()
        ]
        last = len(choices) - 1
        if self.policy.copies == "newest":
            chosen = last
        elif self.policy.copies == "early":
            chosen = 0
        else:
            chosen = int(self._draw() * len(choices))
        cta, operation = choices[chosen]
        cta.advance(operation, int(self._draw() * 1024))

    def _poll_again(self, idle: list[tuple[Warp, list[Fragment]]]) -> None:
        self._idle_turns += 1
        if self._idle_turns > _IDLE_TURNS:
            raise Deadlock(f"everybody polls in vain: {self._stuck()}")
        # Any of them, whatever the policy: one may be about to do what the others poll for.
        warp, fragments = idle[int(self._draw() * len(idle))]
        self._run(warp, fragments[int(self._draw() * len(fragments))], lowest_first=False)

    def _expire_waits(self) -> bool:
        """Nothing can run: end the waits that may end early, if there are any."""
        fragments = [f for cta in self.resident for warp in cta.warps for f in warp.fragments]
        self._idle_turns += 1
        if self._idle_turns > _IDLE_TURNS:
            return False
        expired = [f.expire() for f in fragments]
        return any(expired)

    def _run_warp(self, choices: list[tuple[Warp, list[Fragment]]]) -> None:
        warp, fragments = self._choose_warp(choices)
        lowest_first = self.policy.lowest_first
        if len(fragments) == 1:
            fragment = fragments[0]
        elif lowest_first:
            fragment = min(fragments, key=lambda f: f.pc)
        else:
            fragment = fragments[int(self._draw() * len(fragments))]
        self._run(warp, fragment, lowest_first)

    def _run(self, warp: Warp, fragment: Fragment, lowest_first: bool) -> None:
        limit = 1 + int(self._draw() * self.policy.run_length)
        warp.run(fragment, limit, lowest_first)
        if not warp.fragments and warp.cta.ended:
            warp.cta.finish()
            self.resident.remove(warp.cta)

    def _choose_warp(
        self, choices: list[tuple[Warp, list[Fragment]]]
    ) -> tuple[Warp, list[Fragment]]:
        self._turn += 1
        if self.policy.warps == "rotate":
            return choices[self._turn % len(choices)]
        if self.policy.warps == "leader":
            for choice in choices:
                if choice[0] is self._leader:
                    return choice
            if self._leader is None or not self._leader.fragments or self._draw() < 0.05:
                self._leader = choices[int(self._draw() * len(choices))][0]
        return choices[int(self._draw() * len(choices))]

    def _stuck(self) -> str:
        """Where everybody is."""
        places = []
        for cta in self.resident:
            for warp in cta.warps:
                for fragment in warp.fragments:
                    why = fragment.last_wait or "polls"
                    places.append(f"{warp.place(fragment.pc, fragment.mask)}: {why}")
        return "; ".join(places[:12])


def policy_of(seed: int) -> Policy:
    """The policy of a seed."""
    return POLICIES[seed % len(POLICIES)]
