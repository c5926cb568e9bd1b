"""Write the made parts of the docs; with `--check` only say what differs, and exit with 1."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import registry
from .pages import make

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Exit code: 0 where everything is as it is made, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="scripts/docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    made = make(ROOT, registry.pages(ROOT), registry.PARTS, registry.FILES)
    faults = list(made.faults)
    if check:
        faults += made.differences()
    else:
        for path in made.write():
            print(f"wrote {path.relative_to(ROOT)}")
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults and check:
        print("Run scripts/docs, read what it changed, and commit it.", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
