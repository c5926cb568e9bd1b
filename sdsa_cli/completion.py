"""What a shell completes after an option: the words of a list, and the tensors of a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_MOST_NAMES = 200  # tensors that a shell shows
# Parameters that name files with tensors, of every command.
_KEYS = ("keys", "source", "baseline", "path")
_QUERIES = ("queries",)


def words(*choices: str) -> Callable[[str], list[str]]:
    """Completion of a list of such words: the last one of those typed so far.

    A word that the list has already is not offered again.
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        typed = before.split(",") if comma else []
        return [
            f"{before}{comma}{choice}"
            for choice in choices
            if choice.startswith(last) and choice not in typed
        ]

    return complete


def tensors_of_keys(ctx: Any, incomplete: str) -> list[str]:
    """Completion of a tensor that lies in the files of keys."""
    return _tensors(ctx, incomplete, _KEYS)


def tensors_of_queries(ctx: Any, incomplete: str) -> list[str]:
    """Completion of a tensor that lies in the files of query rows."""
    return _tensors(ctx, incomplete, _QUERIES)


def _tensors(ctx: Any, incomplete: str, parameters: Sequence[str]) -> list[str]:
    """Names of tensors by their headers; none where no file is named yet, or it cannot be read."""
    from sdsa_quant.errors import SdsaError
    from sdsa_quant.files.tensor_source import open_tensors

    arguments = [each.name for each in ctx.command.params if each.param_type_name == "argument"]
    # Words beside an option that lacks its value yet are not given to their parameters.
    given = {**dict(zip(arguments, ctx.args, strict=False)), **_known(ctx.params)}
    names: list[str] = []
    for path in (given.get(name) for name in parameters):
        if path:
            try:
                names += [tensor.name for tensor in open_tensors(str(path))]
            except (SdsaError, OSError):
                continue  # the command itself will say what is wrong
    found = (name for name in dict.fromkeys(names) if name.startswith(incomplete))
    return [name for name in found if name.isprintable()][:_MOST_NAMES]


def _known(params: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if value is not None}
