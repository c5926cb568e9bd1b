"""What compiling a variant gives, and how the host launches it."""

from __future__ import annotations

from dataclasses import dataclass

from sdsa_quant.layout import PAGE


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """What the host must know of a kernel to launch it."""

    threads: int  # of a CTA
    shared_bytes: int  # dynamic, of a CTA
    ctas_per_sm: int  # that run at a time
    teams: int  # of a CTA, each with a share of its own
    late_least_pages: int  # for every team, from which on late CTAs pay
    two_late_pages: int  # for every team, from which on two waves of them pay; 0: never
    box_bytes: int = 0  # width of the boxes of its tensor maps; 0 where it takes none
    columns: int = 0  # of its MMAs, the query rows of a box

    def grid(self, sms: int, groups: int, max_context: int) -> tuple[int, int]:
        """CTAs of the first wave, and of all, on a device of `sms` multiprocessors.

        They depend on the capacity of a call, never on its lengths: the first wave fills the GPU,
        or has a page for every CTA; where lengths could give every team many, late CTAs follow.
        """
        capacity = groups * -(-max_context // PAGE)
        first = min(sms * self.ctas_per_sm, capacity)
        team_pages = capacity // (first * self.teams)
        waves = 1
        if team_pages >= self.late_least_pages:
            waves += 2 if 0 < self.two_late_pages <= team_pages else 1
        return first, first * waves


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A device binary and how to launch it."""

    image: bytes
    symbol: str
    config: LaunchConfig
