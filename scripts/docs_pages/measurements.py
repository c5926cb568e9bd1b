"""The recorded measurements of `benchmarks/results`, and the tables that the pages show of them."""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .markdown import table

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
# The runs that the pages quote. A new run on the same kind of machine takes its place here.
BACKENDS = "2026-11-30-h200/backends"
TRITON = "2026-11-30-h200/triton"
FORMAT_PAIRS = ("bf16", "nvfp4", "mixed")
HEADLINE = (32, 1, 65536)  # groups, rows a group, keys of each


@dataclass(frozen=True)
class Result:
    """One line of a results file: a call of one backend, timed."""

    name: str
    groups: int
    rows: int
    keys: int
    longest: int
    max_context: int
    lengths: tuple[tuple[int, int], ...]
    format_pair: str
    backend: str
    median_us: float
    gather_us: float
    gather_share: float
    read_share: float
    read_gigabytes_per_second: float
    host_us: float

    @property
    def is_ragged(self) -> bool:
        """Whether the groups see different numbers of keys."""
        return len(self.lengths) > 1

    @property
    def is_wide(self) -> bool:
        """Whether the scores are wider than the longest group needs."""
        return self.max_context > self.longest

    @property
    def label(self) -> str:
        """The shape in words: ``32, 1, 64K`` is 32 groups of 1 row and 65,536 keys."""
        if self.is_ragged:
            (longest, _), (others, count) = self.lengths
            return f"{short(longest)} beside {count} of {short(others)}"
        words = [str(self.groups), str(self.rows), short(self.longest)]
        return ", ".join([*words, short(self.max_context)] if self.is_wide else words)


def short(number: int) -> str:
    """A power-of-two number of keys as people write it: 8192 is 8K, 1048576 is 1M."""
    for size, suffix in ((1 << 20, "M"), (1 << 10, "K")):
        if number % size == 0 and number >= size:
            return f"{number // size}{suffix}"
    return str(number)


def parse_result(line: str) -> Result:
    """One line of a results file."""
    fields: dict[str, Any] = json.loads(line)
    shape = fields["shape"]
    if not fields["checked"]:
        raise ValueError(f"{shape['name']}: the result was not compared with float64")
    return Result(
        name=shape["name"],
        groups=shape["groups"],
        rows=shape["rows_per_group"],
        keys=shape["keys"],
        longest=shape["longest"],
        max_context=shape["max_context"],
        lengths=tuple((value, count) for value, count in shape["lengths"]),
        format_pair=fields["format_pair"],
        backend=fields["backend"],
        median_us=fields["median_us"],
        gather_us=fields["gather_us"],
        gather_share=fields["gather_share"],
        read_share=fields["read_share"],
        read_gigabytes_per_second=fields["read_gigabytes_per_second"],
        host_us=fields["host_us"],
    )


@functools.cache
def results(run: str) -> tuple[Result, ...]:
    """The results of a run: by number of keys, then those of wide scores, then ragged ones."""
    text = (RESULTS / f"{run}.jsonl").read_text(encoding="utf-8")
    found = [parse_result(line) for line in text.splitlines()]
    return tuple(
        sorted(
            found, key=lambda one: (one.is_ragged, one.is_wide, one.keys, one.rows, one.max_context)
        )
    )


def find(found: Iterable[Result], **wanted: Any) -> Result:
    """The only result whose attributes are those wanted."""
    (one,) = (
        each
        for each in found
        if all(getattr(each, name) == value for name, value in wanted.items())
    )
    return one


def labels(found: Iterable[Result]) -> list[str]:
    """The shapes, each once."""
    return list(dict.fromkeys(each.label for each in found))


def headline(format_pair: str) -> Result:
    """What the README shows: the faster backend on 32 requests of 65,536 keys."""
    groups, rows, longest = HEADLINE
    return min(
        (
            each
            for each in results(BACKENDS)
            if (each.groups, each.rows, each.longest, each.is_ragged, each.format_pair)
            == (groups, rows, longest, False, format_pair)
        ),
        key=lambda each: each.median_us,
    )


def readme_table() -> str:
    """The README's table: time, and its share of both roofs."""
    rows = []
    for pair, name in (("bf16", "BF16"), ("nvfp4", "NVFP4")):
        best = headline(pair)
        rows.append(
            [name, f"{best.median_us:.1f}", f"{best.gather_share:.2f}", f"{best.read_share:.2f}"]
        )
    headings = [
        "NVIDIA H200, 32 requests of 65,536 keys, 1 query row each",
        "us",
        "share of the page-gather roof",
        "share of the read bandwidth",
    ]
    return table(headings, rows, left=1)


def backends_table() -> str:
    """Every shape, `cute` beside `triton`: median and share of the page-gather roof."""
    headings = ["groups, rows, keys[, columns]"]
    for pair in FORMAT_PAIRS:
        headings += [f"{_name(pair)} cute", "triton"]
    rows = []
    for label in labels(results(BACKENDS)):
        row = [label]
        for pair in FORMAT_PAIRS:
            both = [
                find(results(BACKENDS), label=label, format_pair=pair, backend=backend)
                for backend in ("cute", "triton")
            ]
            fastest = min(one.median_us for one in both)
            row += [_timed(one, bold=one.median_us == fastest) for one in both]
        rows.append(row)
    return table(headings, rows, left=1)


def backends_gains() -> str:
    """The time that `cute` saves over `triton`: its range over the shapes of each sort."""
    kinds = {
        "1 or 2 rows, 1M keys or more": lambda one: one.rows <= 2 and one.keys >= 1 << 20,
        "1 or 2 rows, fewer keys": lambda one: one.rows <= 2 and one.keys < 1 << 20,
        "4 or 8 rows": lambda one: one.rows > 2,
        "scores far wider than the lengths": lambda one: one.is_wide,
        "one long request among short ones": lambda one: one.is_ragged,
    }
    rows = []
    for number, (kind, belongs) in enumerate(kinds.items()):
        row = [kind]
        for pair in FORMAT_PAIRS:
            gains = []
            for one in results(BACKENDS):
                special = one.is_wide or one.is_ragged
                if (one.format_pair, one.backend) != (pair, "cute") or not belongs(one):
                    continue
                if special and number < 3:
                    continue
                other = find(results(BACKENDS), label=one.label, format_pair=pair, backend="triton")
                gains.append(1 - one.median_us / other.median_us)
            row.append(_percent_range(gains))
        rows.append(row)
    return table(["time that `cute` saves over `triton`", *map(_name, FORMAT_PAIRS)], rows, left=1)


def host_times() -> str:
    """The host's time for an eager call, by backend, over all shapes and pairs of formats."""
    rows = []
    for backend in ("cute", "triton"):
        times = [one.host_us for one in results(BACKENDS) if one.backend == backend]
        rows.append(
            [
                f"`{backend}`",
                f"{statistics.median(times):.1f}",
                f"{min(times):.1f}",
                f"{max(times):.1f}",
            ]
        )
    return table(["host time of an eager call, us", "median", "least", "most"], rows, left=1)


def triton_table() -> str:
    """Every shape of the Triton run, beside its roofs."""
    headings = ["groups, rows, keys[, columns]"]
    headings += ["BF16", "roof", "share", "NVFP4", "roof", "share", "mixed", "share"]
    rows = []
    for label in labels(results(TRITON)):
        row = [label]
        for pair in FORMAT_PAIRS:
            one = find(results(TRITON), label=label, format_pair=pair)
            roof = [] if pair == "mixed" else [f"{one.gather_us:.1f}"]
            row += [f"{one.median_us:.1f}", *roof, f"{one.gather_share:.2f}"]
        rows.append(row)
    return table(headings, rows, left=1)


def tcgen05_budget() -> str:
    """What a tile takes of an SM, from the stored budget of the kernel for NVFP4 x NVFP4."""
    text = (RESULTS / "tcgen05-budget.md").read_text(encoding="utf-8")
    section = text[text.index("## tcgen05_nvfp4\n") :]
    start = section.index("| of an SM |")
    return section[start : section.index("\n\n", start)]


def _name(pair: str) -> str:
    return {"bf16": "BF16", "nvfp4": "NVFP4"}.get(pair, pair)


def _timed(one: Result, *, bold: bool) -> str:
    text = f"{one.median_us:.1f} ({one.gather_share:.2f})"
    return f"**{text}**" if bold else text


def _percent_range(gains: list[float]) -> str:
    least, most = (f"{100 * gain:+.1f}".replace("-", "\u2212") for gain in (min(gains), max(gains)))
    return f"{least} %" if least == most else f"{least} to {most} %"
