"""What captured tensors are called, of what dtype they are, and which of them belong together.

The one rule of belonging: a tensor goes with another if its name has the same text in place of the
wildcards of the pattern that chose it, or else the same numbers. ``early.lengths`` of ``*.lengths``
goes with ``early.keys`` of ``*.keys``, and ``lengths_03`` with ``layers.3.keys``.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

from sdsa_quant.errors import InputError
from sdsa_quant.files.names import common_ends
from sdsa_quant.files.tensor_source import StoredTensor, TensorSource
from sdsa_quant.files.text import numbers_in

FLOAT_DTYPES = ("BF16", "F16", "F32")  # of keys and query rows
INTEGER_DTYPES = ("I32", "I64", "U32", "I16", "U16", "I8", "U8")  # of lengths, requests, positions

# Usual names, alone or after the last dot or colon; the first that is there is taken.
KEY_NAMES = ("keys", "key", "k")
QUERY_NAMES = ("queries", "query", "q")
# Of lengths and offsets, in lower case without what separates words: ``cu_seq_lens`` too.
_LENGTHS_NAME = re.compile(
    r"(context|kv|key|keys|k|seq|sequence|request|prompt|token)?(lengths?|lens?)(k|kv|key|keys)?"
    r"|(cu|cumulative)(seq|sequence|kv|k)?(lengths?|lens?)(k|kv|key|keys)?"
    r"|(kv|k|key|request|seq)?(offsets|indptr)(k|kv)?"
)
_NUMBER_AT_END = re.compile(r"[._-]?\d+$")

_WILDCARDS = re.compile(r"\*|\?|\[!?\]?[^\]]*\]")  # of a pattern, as fnmatch takes them


def matching_tensors(source: TensorSource, pattern: str) -> list[StoredTensor]:
    """The tensor of that name, or those that a pattern with ``*``, ``?``, ``[..]`` matches.

    Raises
    ------
    ValueError
        Nothing has that name or matches; the message lists what there is.
    """
    if pattern in source:
        return [source[pattern]]
    matches = [tensor for tensor in source if fnmatch.fnmatchcase(tensor.name, pattern)]
    if not matches and _WILDCARDS.search(pattern):
        raise InputError(f"{source.path}: no tensor matches {pattern}; {source.describe_names()}")
    return matches or [source[pattern]]  # which raises, and lists what there is


def usual_name(source: TensorSource, names: Sequence[str]) -> str | None:
    """The first usual name that a tensor has, not a number; None where none has."""
    return next((name for name in names if name in source and source[name].shape), None)


def usual_pattern(source: TensorSource, names: Sequence[str]) -> str | None:
    """The pattern of the first usual name that tensors end with; None where none do.

    It is ``*.name``, or ``*:name`` where every such tensor is told from others by its file alone.
    """
    for name in names:
        ends = {
            tensor.name[-len(name) - 1]
            for tensor in source
            if tensor.name.endswith((f".{name}", f":{name}")) and tensor.shape
        }
        if ends:
            return f"*{ends.pop() if len(ends) == 1 else '[.:]'}{name}"
    return None


def last_name(tensor: StoredTensor) -> str:
    """The last part of a dotted name."""
    return tensor.name_in_file.rpartition(".")[2]


def are_named_lengths(tensor: StoredTensor) -> bool:
    """Whether a tensor has a usual name of lengths or offsets of keys, with or without a number."""
    name = _NUMBER_AT_END.sub("", tensor.name_in_file).rpartition(".")[2]
    return _LENGTHS_NAME.fullmatch(name.lower().replace("_", "").replace("-", "")) is not None


def beside(tensor: StoredTensor, candidates: Sequence[StoredTensor]) -> list[StoredTensor]:
    """Those of tensors with usual names that lie nearest to another by their names.

    Nearest are those that differ in the last part of the name only, then those with the same
    numbers, then those of the same file whose names have one part, then such ones of any file.
    """
    numbers = numbers_in(tensor.name)
    alone = [each for each in candidates if not numbers_in(each.name_in_file) and _is_alone(each)]
    nearer = (
        [each for each in candidates if _stem(each) == _stem(tensor)],
        [each for each in candidates if numbers and numbers_in(each.name) == numbers],
        [each for each in alone if each.path == tensor.path],
        [each for each in alone if not numbers_in(each.prefix)],
    )
    return next((found for found in nearer if found), [])


def _stem(tensor: StoredTensor) -> str:
    """A name without its last part."""
    return tensor.name[: len(tensor.name) - len(last_name(tensor))]


def _is_alone(tensor: StoredTensor) -> bool:
    """Whether a name has one part in its file."""
    return "." not in tensor.name_in_file


def common_pattern(names: Sequence[str]) -> str:
    """A pattern for several names, empty where they have nothing in common."""
    begin, end = common_ends(names) if len(names) > 1 else ("", "")
    return f"{begin}*{end}" if begin or end else ""


def partners(
    tensor: StoredTensor,
    pattern: str | None,
    candidates: Sequence[StoredTensor],
    candidates_pattern: str | None,
) -> list[StoredTensor]:
    """Those of `candidates` that go with `tensor` by the module's rule.

    Parameters
    ----------
    tensor : StoredTensor
        One tensor.
    pattern : str or None
        The pattern that chose it.
    candidates : sequence of StoredTensor
        Others.
    candidates_pattern : str or None
        The pattern that chose those.
    """
    texts, numbers = _wildcard_texts(pattern, tensor.name), numbers_in(tensor.name)
    found: list[StoredTensor] = []
    if texts:
        found = [
            each for each in candidates if _wildcard_texts(candidates_pattern, each.name) == texts
        ]
    if numbers and not found:
        found = [each for each in candidates if numbers_in(each.name) == numbers]
    return found


def companion(
    source: TensorSource,
    name: str,
    tensor: StoredTensor,
    pattern: str | None,
    *,
    argument: str,
) -> str:
    """The name of the tensor that `name` means for a tensor of keys or query rows.

    Parameters
    ----------
    source : TensorSource
        Where to look.
    name : str
        A tensor's name, good for all, or a pattern. Of what a pattern matches, the tensor is taken
        that goes with `tensor` by the module's rule.
    tensor : StoredTensor
        Keys or query rows.
    pattern : str or None
        The pattern that chose `tensor`.
    argument : str
        The Python parameter that `name` was given for, for the message.

    Raises
    ------
    ValueError
        No tensor matches the pattern, or none or several of those that do go with `tensor`.
    """
    if name in source or not _WILDCARDS.search(name):
        return source[name].name
    matches = matching_tensors(source, name)
    found = partners(tensor, pattern, matches, name)
    if len(found) != 1:
        names = ", ".join(each.name for each in found) or "none"
        raise InputError(
            f"{name} must match one tensor that goes with {tensor.name}, got {names} of the "
            f"{len(matches)} that it matches",
            argument=argument,
            source=source.path,
        )
    return found[0].name


def _wildcard_texts(pattern: str | None, name: str) -> tuple[str, ...]:
    """What stands in a name for the wildcards of a pattern that it matches."""
    if pattern is None:
        return ()
    expression, end = "", 0
    for wildcard in _WILDCARDS.finditer(pattern):
        literal = re.escape(pattern[end : wildcard.start()])
        one = {"*": ".*", "?": "."}.get(wildcard[0], wildcard[0].replace("[!", "[^"))
        expression, end = f"{expression}{literal}({one})", wildcard.end()
    found = re.fullmatch(expression + re.escape(pattern[end:]), name, re.DOTALL)
    return found.groups() if found else ()
