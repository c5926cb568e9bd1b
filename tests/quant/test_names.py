"""Which tensors belong together: one rule, for caches and for studies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sdsa_quant.captures.keys import captured_keys, lengths_for, select_keys
from sdsa_quant.captures.names import companion, partners, usual_pattern
from sdsa_quant.errors import InputError
from sdsa_quant.files.tensor_source import TensorSource, open_tensors
from sdsa_quant.study.layers import StudyInputs, open_layers

NUMBERS = {"early": [3, 4], "late": [5, 2]}


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """Two layers told apart by words: keys, queries, lengths, requests and positions of each."""
    tensors = {}
    for name, lengths in NUMBERS.items():
        tensors[f"{name}.keys"] = torch.zeros(7, 128, dtype=torch.bfloat16)
        tensors[f"{name}.queries"] = torch.zeros(2, 128, dtype=torch.bfloat16)
        tensors[f"{name}.lengths"] = torch.tensor(lengths)
        tensors[f"{name}.requests"] = torch.tensor([1, 0] if name == "late" else [0, 1])
        tensors[f"{name}.positions"] = torch.tensor([1, 2])
    save_file(tensors, tmp_path / "words.safetensors")
    return tmp_path / "words.safetensors"


def test_a_cache_and_a_study_pair_one_file_alike(words: Path) -> None:
    source = open_tensors(words)
    of_caches = {
        tensor.name: captured_keys(
            source, tensor, lengths_for(source, tensor, "*.keys", "*.lengths")
        ).context_lengths
        for tensor in select_keys(source, "*.keys")
    }
    inputs = StudyInputs(
        words, words, lengths="*.lengths", requests="*.requests", positions="*.positions"
    )
    layers = open_layers(inputs)
    assert of_caches == {layer.name: layer.keys.context_lengths for layer in layers}
    assert of_caches == {"early.keys": (3, 4), "late.keys": (5, 2)}
    assert [layer.query_name for layer in layers] == ["early.queries", "late.queries"]
    assert [layer.row_requests for layer in layers] == [(0, 1), (1, 0)]
    assert [layer.row_lengths for layer in layers] == [(2, 3), (2, 3)]


def test_a_cache_and_a_study_refuse_one_file_alike(words: Path) -> None:
    said = r"lengths \*y\.lengths must match one tensor .* late\.keys, got none of the 1"
    source = open_tensors(words)
    with pytest.raises(InputError, match=said):
        lengths_for(source, source["late.keys"], "*e.keys", "*y.lengths")
    inputs = StudyInputs(
        words, words, keys_pattern="*e.keys", queries_pattern="*e.queries", lengths="*y.lengths"
    )
    with pytest.raises(InputError, match=said):
        open_layers(inputs)


def source_of(folder: Path, *names: str) -> TensorSource:
    save_file({name: torch.zeros(1) for name in names}, folder / "names.safetensors")
    return open_tensors(folder / "names.safetensors")


@pytest.mark.parametrize(
    ("pattern", "others", "expected"),
    [
        ("*.keys", "*.n", ["a3.n"]),  # not b3.n, which has the numbers too
        ("*.keys", "?3.n", ["a3.n", "b3.n"]),  # texts a3 and a: the numbers decide, for both
        ("a3.keys", "*.n", ["a3.n", "b3.n"]),
        (None, "*.n", ["a3.n", "b3.n"]),
    ],
    ids=["text", "other-text", "name", "none"],
)
def test_text_comes_before_numbers(
    tmp_path: Path, pattern: str | None, others: str, expected: list[str]
) -> None:
    source = source_of(tmp_path, "a3.keys", "a3.n", "b3.n", "a4.n")
    candidates = [tensor for tensor in source if tensor.name.endswith(".n")]
    found = partners(source["a3.keys"], pattern, candidates, others)
    assert [tensor.name for tensor in found] == expected


def test_names_without_numbers_have_no_numbers_in_common(tmp_path: Path) -> None:
    source = source_of(tmp_path, "keys", "other")
    assert partners(source["keys"], None, [source["other"]], "o*") == []


def test_several_are_refused_and_named(tmp_path: Path) -> None:
    source = source_of(tmp_path, "a3.keys", "a3.n", "b3.n")
    with pytest.raises(InputError, match=r"names\.safetensors: at \*\.n must .*, got a3\.n, b3\.n"):
        companion(source, "*.n", source["a3.keys"], None, argument="at")


def test_the_first_usual_name_is_taken(tmp_path: Path) -> None:
    source = source_of(tmp_path, "a.q", "a.query", "b.q")
    assert usual_pattern(source, ("queries", "query", "q")) == "*.query"
    assert usual_pattern(source, ("keys",)) is None
