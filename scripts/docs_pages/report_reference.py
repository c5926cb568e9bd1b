"""The reference of the JSON documents, from their JSON Schemas: a table for each sort of object."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from .markdown import table
from .numpy_docstrings import code_marks

Schema = Mapping[str, Any]


def report_fields(schema: Schema) -> str:
    """Tables of the fields of a document: of the document itself, then of every object in it."""
    sections = [_fields(schema)]
    definitions = schema.get("$defs", {})
    for name in _in_order(schema):
        inner = definitions[name]
        heading = f"### {name}"
        about = code_marks(inner.get("description", ""))
        sections.append("\n\n".join(part for part in (heading, about, _fields(inner)) if part))
    return "\n\n".join(section for section in sections if section)


def schema_text(schema: Schema) -> str:
    """A JSON Schema as a file."""
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def type_text(schema: Schema) -> str:
    """The type of a value in words, with links to the objects that it may hold."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})"
    if "const" in schema:
        return _literal(schema["const"])
    if "enum" in schema:
        return ", ".join(map(_literal, schema["enum"]))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(map(type_text, schema[key])))
    kind = schema.get("type")
    if isinstance(kind, list):
        return " or ".join(type_text({**schema, "type": one}) for one in kind)
    if kind == "array":
        return _array_text(schema)
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"object of {type_text(values)}" if isinstance(values, Mapping) else "object"
    return str(kind) if kind else "any"


def _array_text(schema: Schema) -> str:
    items = schema.get("prefixItems")
    if items:
        return f"[{', '.join(map(type_text, items))}]"
    if not schema.get("items"):
        return "list"
    text = type_text(schema["items"])
    return f"list of ({text})" if " or " in text else f"list of {text}"


def _literal(value: Any) -> str:
    return "null" if value is None else f"`{value!r}`".replace("'", '"')


def _fields(schema: Schema) -> str:
    properties = schema.get("properties", {})
    if not properties:
        return ""
    rows = [
        [f"`{name}`", type_text(field), code_marks(field.get("description", ""))]
        for name, field in properties.items()
    ]
    return table(["field", "type", "what"], rows)


def _in_order(schema: Schema) -> list[str]:
    """Names of the definitions in the order in which a reader meets them."""
    definitions = schema.get("$defs", {})
    found: list[str] = []
    waiting = list(_references(schema.get("properties", {})))
    while waiting:
        name = waiting.pop(0)
        if name not in found and name in definitions:
            found.append(name)
            waiting += _references(definitions[name])
    return found


def _references(part: Any) -> Iterator[str]:
    if isinstance(part, Mapping):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"].rsplit("/", 1)[-1]
        for name, value in part.items():
            if name != "$defs":
                yield from _references(value)
    elif isinstance(part, list):
        for value in part:
            yield from _references(value)
