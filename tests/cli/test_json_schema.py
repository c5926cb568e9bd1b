"""Every document of every command has a JSON Schema, and what the command prints obeys it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from safetensors.torch import save_file

from sdsa_cli.app import app
from sdsa_cli.json_schema import DOCUMENTS, all_schemas
from sdsa_quant.files.typed_json import from_json
from support.command_line import Run
from support.score_files import Files

SCHEMAS = all_schemas()
QUICK_STUDY = ("--formats", "nvfp4", "--top-k", "4", "--workers", "1", "--no-plots")


def described(schema: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and description of every object of a schema and of every field."""
    for name, part in {"": schema, **schema["$defs"]}.items():
        yield name, part.get("description", "")
        for field, form in part["properties"].items():
            yield f"{name}.{field}", form.get("description", "")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_schema_is_one_and_says_what_every_field_is(name: str) -> None:
    Draft202012Validator.check_schema(SCHEMAS[name])
    assert SCHEMAS[name]["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    undescribed = [field for field, text in described(SCHEMAS[name]) if not text]
    assert undescribed == []


def test_every_command_with_json_has_a_document() -> None:
    commands = {
        command.name
        for command in app.registered_commands
        if "json" in (command.callback.__annotations__ if command.callback else {})
    }
    assert commands == {schema["properties"]["command"]["const"] for schema in SCHEMAS.values()}


def test_documents_begin_with_their_schema_and_command() -> None:
    versions = {"bench": 2, "score": 2, "study": 5}
    for name, schema in SCHEMAS.items():
        command = schema["properties"]["command"]["const"]
        assert name.startswith(command)
        assert (
            schema["properties"]["schema"]["const"] == f"sdsa.{command}/{versions.get(command, 1)}"
        )


@pytest.fixture
def documents(sdsa: Run, files: Files, save_keys: Callable[..., Path], tmp_path: Path) -> Any:
    """A function that runs a command with ``--json``, and reads what it prints."""

    def run(*words: object) -> Any:
        outcome = sdsa(*map(str, words), "--json")
        outcome.is_clean()
        return outcome.document

    return run


def check(name: str, document: Any) -> None:
    """Assert that a document obeys its schema, and reads back as its dataclass."""
    from sdsa_cli.json_schema import document_class

    Draft202012Validator(SCHEMAS[name]).validate(document)
    read: Any = from_json(document_class(name), document, source=name)
    assert type(read).__name__ == SCHEMAS[name]["title"]
    assert list(document)[:2] == ["schema", "command"], "what a reader looks for comes first"


Documents = Callable[..., Any]


def test_quantize_cache(documents: Documents, save_keys: Callable[..., Path]) -> None:
    keys = save_keys(count=100)
    for options in ((), ("--format", "bf16"), ("--gain", "auto", "--center", "channel")):
        output = ("-o", keys.with_name("new.safetensors"), "--force")
        check("quantize-cache", documents("quantize-cache", keys, *output, *options))
    save_file({"keys": torch.zeros(0, 128)}, keys)
    check("quantize-cache", documents("quantize-cache", keys, *output))


def test_score(documents: Documents, files: Files) -> None:
    call = ("score", files.cache, "--queries", files.queries, "--device", "cpu")
    check("score", documents(*call))
    check("score", documents(*call, "--baseline", files.keys, "--graph-replay", 2))
    check("score", documents(*call, "--select", 9))
    check("score", documents(*call, "--select", 9, "--graph-replay", 2))


def test_inspect(documents: Documents, files: Files) -> None:
    scores = files.folder / "scores.st"
    files.score("-o", scores).is_clean()
    folder = files.folder / "caches"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(files.cache.read_bytes())
    check("inspect-tensors", documents("inspect", files.keys))
    check("inspect-cache", documents("inspect", files.cache))
    check("inspect-caches", documents("inspect", folder))
    check("inspect-page", documents("inspect", files.cache, "--page", 0))
    check("inspect-page", documents("inspect", files.cache, "--page", 0, "--key", 3))
    check("inspect-scores", documents("inspect", scores))


def test_inspect_of_a_damaged_cache(sdsa: Run, files: Files) -> None:
    files.cache.write_bytes(files.cache.read_bytes()[:-100])
    outcome = sdsa("inspect", files.cache, "--json")
    assert outcome.exit_code == 1
    check("inspect-cache", outcome.document)
    assert outcome.document["pages"] is None


def test_bench_and_doctor(documents: Documents) -> None:
    check("bench", documents("bench", "--shape", "2,2,70", "--repeats", 2, "--device", "cpu"))
    check("doctor", documents("doctor"))
    check("doctor", documents("doctor", "--self-test"))


def test_study_and_compare(documents: Documents, sdsa: Run, files: Files) -> None:
    one, other = files.folder / "one", files.folder / "other"
    check("study", documents("study", files.keys, files.queries, "-o", one, *QUICK_STUDY))
    documents("study", files.keys, files.queries, "-o", other, *QUICK_STUDY)
    check("compare", documents("compare", one, other))
    edited = json.loads((other / "report.json").read_text())
    edited["results"][0]["accuracy"]["top_k"][0]["mass"]["mean"] -= 0.125
    (other / "report.json").write_text(json.dumps(edited))
    check("compare", documents("compare", one, other, "--tolerance", 0.2))
    before = (one / "report.json").read_bytes()
    refused = sdsa("compare", one, other, "--report", one / "report.json", "--force")
    refused.fails_with(2, "is the input")
    assert (one / "report.json").read_bytes() == before


@pytest.mark.parametrize("command", ["inspect", "doctor", "quantize-cache"])
def test_a_report_file_is_the_document(sdsa: Run, files: Files, command: str) -> None:
    report = files.folder / "new" / "report.json"
    words = {
        "inspect": (files.cache,),
        "doctor": (),
        "quantize-cache": (files.keys, "-o", files.folder / "c.safetensors"),
    }[command]
    sdsa(command, *words, "--report", report).is_clean()
    assert json.loads(report.read_text())["command"] == command
    refused = sdsa(command, *words, "--report", report)
    assert refused.exit_code == 2
    assert "exists already; give --force to replace it" in refused.stderr
    sdsa(command, *words, "--report", report, "--force").is_clean()


def test_json_swallows_no_argument(sdsa: Run, files: Files) -> None:
    call = ("--queries", files.queries, "--device", "cpu")
    assert sdsa("score", "--json", files.cache, *call).document["command"] == "score"
