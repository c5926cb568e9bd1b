"""JSON documents as frozen dataclasses: written, read back with every field checked, described.

Types of fields: str, int, float, bool, None, ``Path``, ``Literal``, ``Any``, other dataclasses,
tuples and lists, dicts with str keys, and unions of these. A whole document has a field
``schema: Literal["sdsa.study/1"]``, which is checked before all others.

JSON has no NaN and no infinity: both are written as null, so a field that can hold them is
``float | None``.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import math
import re
import sys
import textwrap
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from sdsa_quant.errors import InputError

SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"
SCHEMA_FIELD = "schema"

T = TypeVar("T")

_NAMES = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}
_SCHEMA_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", Path: "string"}
# What JSON allows in texts, but a terminal obeys, or UTF-8 cannot write.
_UNSAFE = re.compile(
    "[\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_LARGEST = sys.float_info.max
_MOST_QUOTED = 40  # characters of a wrong value


def to_json(value: Any) -> Any:
    """`value` as dicts, lists and plain values: what ``json.dumps`` takes, without NaN or infinity.

    Parameters
    ----------
    value : object
        Dataclasses, mappings, sequences, paths and plain values, nested as they like. Fields keep
        their names and their order.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    return value


def json_text(value: Any) -> str:
    r"""`value` as the text of a JSON document, indented, that any strict parser reads.

    Characters that JSON allows but a terminal obeys, or UTF-8 cannot write, are ``\uXXXX``.

    Raises
    ------
    TypeError
        The document holds a value that `to_json` does not know.
    """
    text = json.dumps(to_json(value), indent=2, allow_nan=False, ensure_ascii=False)
    return _UNSAFE.sub(lambda match: json.dumps(match[0])[1:-1], text)


def from_json(cls: type[T], data: Any, *, source: object) -> T:
    """A `cls` from what ``json.loads`` gave.

    Parameters
    ----------
    cls : type
        A dataclass whose fields have types of this module's list.
    data : object
        The JSON value. Every field must be there, and no other.
    source : object
        The file that it is from, for messages.

    Raises
    ------
    InputError
        A field is missing, unknown or of another type, or the schema is another one. The message
        names the file and the field: ``report.json: field results[2].accuracy.rows must be an
        integer, got "many"``.
    """
    result: T = _read(cls, data, "", source)
    return result


def field_docs(cls: type) -> dict[str, str]:
    """The docstring of each field of a dataclass: the string literal below it in the class body.

    Fields without one are left out.
    """
    docs: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if dataclasses.is_dataclass(owner):
            docs.update(_docs_of(owner))
    return {field.name: docs[field.name] for field in _fields(cls) if field.name in docs}


def json_schema(cls: type) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a dataclass, its docstrings as descriptions."""
    definitions: dict[str, Any] = {}
    schema = _object_schema(cls, definitions)
    return {"$schema": SCHEMA_DIALECT, "title": cls.__name__, **schema, "$defs": definitions}


def _fields(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)


def _docs_of(cls: type) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            docs[field.target.id] = inspect.cleandoc(below.value.value)
    return docs


def _read(form: Any, data: Any, path: str, source: object) -> Any:
    if form is Any or form is object:
        return data
    if not _fits(form, data):
        raise _wrong(form, data, path, source)
    if isinstance(form, type) and dataclasses.is_dataclass(form):
        return _read_dataclass(form, data, path, source)
    origin = get_origin(form)
    if origin in (Union, types.UnionType):
        return _read_union(form, data, path, source)
    if origin in (tuple, list, Sequence):
        return _read_items(form, data, path, source)
    if origin in (dict, Mapping):
        _, item = get_args(form)
        return {name: _read(item, each, _joined(path, name), source) for name, each in data.items()}
    return form(data) if form in (float, Path) else data


def _read_dataclass(cls: type, data: Any, path: str, source: object) -> Any:
    hints = get_type_hints(cls)
    names = [field.name for field in _fields(cls)]
    if SCHEMA_FIELD in names and not path:
        _check_schema(hints[SCHEMA_FIELD], data, source)
    for name in names:
        if name not in data:
            raise InputError(f"field {_joined(path, name)} is missing", source=source)
    for name in data:
        if name not in names:
            raise InputError(f"field {_joined(path, _short(name))} is unknown", source=source)
    values = {name: _read(hints[name], data[name], _joined(path, name), source) for name in names}
    return cls(**values)


def _check_schema(form: Any, data: Mapping[str, Any], source: object) -> None:
    wanted = " or ".join(get_args(form))
    if SCHEMA_FIELD not in data:
        raise InputError(
            f"must be an {wanted} document, but has no field {SCHEMA_FIELD}: it is something else, "
            f"or an earlier version wrote it and it has to be made again",
            source=source,
        )
    if data[SCHEMA_FIELD] not in get_args(form):
        raise InputError(
            f"must be an {wanted} document, got {SCHEMA_FIELD} {_quoted(data[SCHEMA_FIELD])}",
            source=source,
        )


def _read_union(form: Any, data: Any, path: str, source: object) -> Any:
    fitting = [each for each in get_args(form) if _fits(each, data)]
    for each in fitting[:-1]:
        try:
            return _read(each, data, path, source)
        except InputError:
            continue  # the next member may take it, and the last one says what is wrong
    return _read(fitting[-1], data, path, source)


def _read_items(form: Any, data: Any, path: str, source: object) -> Any:
    forms = get_args(form)
    if get_origin(form) is tuple and forms[-1] is not Ellipsis:
        if len(data) != len(forms):
            raise InputError(
                f"field {path} must have {len(forms)} items, got {len(data)}", source=source
            )
    else:
        forms = (forms[0],) * len(data)
    items = [
        _read(each, item, f"{path}[{index}]", source)
        for index, (each, item) in enumerate(zip(forms, data, strict=True))
    ]
    return items if get_origin(form) is list else tuple(items)


def _fits(form: Any, data: Any) -> bool:
    """Whether `data` is of the JSON type that `form` is written as, whatever it contains."""
    origin = get_origin(form)
    if origin in (Union, types.UnionType):
        return any(_fits(each, data) for each in get_args(form))
    if origin is Literal:
        return any(type(data) is type(each) and data == each for each in get_args(form))
    if origin in (tuple, list, Sequence):
        return isinstance(data, list)
    if origin in (dict, Mapping) or dataclasses.is_dataclass(form):
        return isinstance(data, dict)
    if form is float:
        number = isinstance(data, int | float) and not isinstance(data, bool)
        return number and abs(data) <= _LARGEST  # NaN is not, nor infinity
    if form is int:
        return isinstance(data, int) and not isinstance(data, bool)
    if form is type(None):
        return data is None
    return form in (Any, object) or isinstance(data, str if form is Path else form)


def _wrong(form: Any, data: Any, path: str, source: object) -> InputError:
    subject = f"field {path} " if path else ""
    return InputError(f"{subject}must be {_described(form)}, got {_quoted(data)}", source=source)


def _described(form: Any) -> str:
    origin = get_origin(form)
    if origin in (Union, types.UnionType):
        return " or ".join(_described(each) for each in get_args(form))
    if origin is Literal:
        return " or ".join(f'"{each}"' for each in get_args(form))
    if origin in (tuple, list, Sequence):
        return "a list"
    if form is type(None):
        return "null"
    return _NAMES.get(form, "a path" if form is Path else "an object")


def _quoted(data: Any) -> str:
    if isinstance(data, dict | list):
        return "an object" if isinstance(data, dict) else f"a list of {len(data)}"
    if data is None or isinstance(data, bool):
        return {None: "null", True: "true", False: "false"}[data]
    return f'"{_short(data)}"' if isinstance(data, str) else _short(str(data))


def _short(text: str) -> str:
    return text if len(text) <= _MOST_QUOTED else text[:_MOST_QUOTED] + "..."


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _object_schema(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    hints, docs = get_type_hints(cls), field_docs(cls)
    properties = {}
    for field in _fields(cls):
        schema = _schema_of(hints[field.name], definitions)
        if field.name in docs:
            schema = {"description": " ".join(docs[field.name].split()), **schema}
        properties[field.name] = schema
    about = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0]
    return {
        "description": " ".join(about.split()),
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _schema_of(form: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = get_origin(form), get_args(form)
    if isinstance(form, type) and dataclasses.is_dataclass(form):
        if form.__name__ not in definitions:
            definitions[form.__name__] = {}  # holds the name while the fields are gone through
            definitions[form.__name__] = _object_schema(form, definitions)
        return {"$ref": f"#/$defs/{form.__name__}"}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema_of(each, definitions) for each in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)} if len(arguments) > 1 else {"const": arguments[0]}
    if origin is tuple and arguments[-1] is not Ellipsis:
        items = [_schema_of(each, definitions) for each in arguments]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if origin in (tuple, list, Sequence):
        return {"type": "array", "items": _schema_of(arguments[0], definitions)}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _schema_of(arguments[1], definitions)}
    if form is type(None):
        return {"type": "null"}
    return {} if form in (Any, object) else {"type": _SCHEMA_TYPES[form]}
