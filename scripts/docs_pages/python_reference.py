"""The reference of the Python packages, from the public names' signatures and docstrings."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

from .markdown import table
from .numpy_docstrings import as_markdown, first_line

# Modules whose `__all__` is public.
MODULES = ("sdsa_kernels", "sdsa_quant", "sdsa_quant.study")
_WIDTH = 96


def python_reference() -> str:
    """A section for each public module: a list of its names, then each of them."""
    return "\n\n".join("\n\n".join(_module(name)) for name in MODULES)


def signature_text(name: str, function: Any) -> str:
    """``name(parameters) -> result``, a parameter a line where one line is too long."""
    signature = inspect.signature(function)
    parameters = [one for one in signature.parameters.values() if one.name not in ("self", "cls")]
    signature = signature.replace(parameters=parameters)
    text = f"{name}{_cleaned(str(signature))}"
    if len(text) <= _WIDTH:
        return text
    words = []
    keyword_only = False
    for one in parameters:
        if one.kind is one.KEYWORD_ONLY and not keyword_only:
            words.append("*")
            keyword_only = True
        words.append(_cleaned(str(one)))
    result = "" if signature.return_annotation is signature.empty else _result(signature)
    return "\n".join([f"{name}(", *(f"    {word}," for word in words), f"){result}"])


def _result(signature: inspect.Signature) -> str:
    return _cleaned(f" -> {inspect.formatannotation(signature.return_annotation)}")


def _cleaned(text: str) -> str:
    """A signature without the quotes around its annotations, and functions by their names."""
    text = re.sub(r"<function (\w+) at 0x[0-9a-f]+>", r"\1", text)
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)


def _module(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    names = sorted(module.__all__)
    yield f"## `{name}`"
    yield table(
        ["name", "what"],
        [[f"[`{one}`](#{one.lower()})", first_line(getattr(module, one).__doc__)] for one in names],
    )
    for one in names:
        yield from _public(one, getattr(module, one))


def _public(name: str, value: Any) -> Iterator[str]:
    yield f"### {name}"
    if not inspect.isclass(value):
        yield f"```python\n{signature_text(name, value)}\n```"
        yield as_markdown(inspect.getdoc(value) or "")
        return
    if dataclasses.is_dataclass(value) or "__init__" in vars(value):
        yield f"```python\n{signature_text(name, value)}\n```"
    yield as_markdown(inspect.getdoc(value) or "")
    members = list(_members(value))
    if members:
        yield table(["member", "what"], members)


def _members(value: type) -> Iterator[list[str]]:
    for name, member in vars(value).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            yield [f"`{name}`", first_line(member.__doc__)]
        elif isinstance(member, classmethod | staticmethod) or inspect.isfunction(member):
            text = " ".join(signature_text(name, getattr(value, name)).split())
            yield [f"`{text.replace('( ', '(').replace(', )', ')')}`", first_line(member.__doc__)]
