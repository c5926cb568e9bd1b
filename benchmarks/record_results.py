"""Keep what `sdsa bench` measured: one result a line, in `benchmarks/results/FOLDER/NAME.jsonl`.

    sdsa bench ... --report report.json
    python benchmarks/record_results.py report.json benchmarks/results/2026-11-30-h200/backends

Each line is one result with the lengths of its shape as run lengths: `[[65536, 32]]` is 32 groups
of 65,536 keys. What all of them share (inputs, environment) goes into `NAME.run.json` beside it.
`scripts/docs` makes the tables and pictures of the pages from these files.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any


def run_lengths(lengths: list[int]) -> list[list[int]]:
    """``[value, how often in a row]`` for each run of equal lengths."""
    return [[value, len(list(same))] for value, same in itertools.groupby(lengths)]


def split_report(report: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a run's results share, and the results, each with its shape's run lengths."""
    lengths = {shape["name"]: run_lengths(shape["lengths"]) for shape in report["inputs"]["shapes"]}
    inputs = {name: value for name, value in report["inputs"].items() if name != "shapes"}
    run = {**report, "inputs": inputs}
    results = run.pop("results")
    for result in results:
        result["shape"]["lengths"] = lengths[result["shape"]["name"]]
    return run, results


def main() -> None:
    """Split the report named first into the two files whose common name is given second."""
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    report, target = Path(sys.argv[1]), Path(sys.argv[2])
    run, results = split_report(json.loads(report.read_text(encoding="utf-8")))
    target.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{target}.run.json").write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    lines = [json.dumps(result) + "\n" for result in results]
    Path(f"{target}.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"{target}.jsonl: {len(lines)} results")


if __name__ == "__main__":
    main()
