"""How the command line spells the arguments of the library: one table, and a rule for the rest.

The library names Python parameters in its errors; a reader of the command line needs the flag that
gives them.
"""

from __future__ import annotations

import shlex

# Parameters whose flag or word is not ``--`` and the name itself.
_SPELLINGS = {
    "key_name": "--keys",
    "key_names": "--keys",
    "output": "-o",
    "queries_pattern": "--query-name",
}


def flag_spelling(argument: str, value: object | None) -> str:
    """An argument as it is typed: ``--force``, ``--rows-per-group 2``, ``--keys``."""
    flag = _SPELLINGS.get(argument, "--" + argument.replace("_", "-"))
    return flag if value is None or value is True else f"{flag} {shlex.quote(str(value))}"
