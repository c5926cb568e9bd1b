"""The disk cache of compiled CuTe DSL kernels; no GPU, and no CuTe DSL either."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sdsa_kernels.cute import disk_cache as cache
from sdsa_kernels.cute.compiled import CompiledKernel, LaunchConfig

KERNEL = CompiledKernel(
    image=bytes(range(256)) + b"\n\n",  # newlines in it must not end the header
    symbol="kernel_0",
    config=LaunchConfig(
        threads=256,
        shared_bytes=4096,
        ctas_per_sm=2,
        teams=8,
        late_least_pages=12,
        two_late_pages=48,
    ),
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "new" / "folder"))
    return tmp_path / "new" / "folder"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Replaces the compiler; holds what it was asked for."""
    asked: list[tuple[str, str]] = []

    def compile_variant(architecture: str, variant: str) -> CompiledKernel:
        asked.append((architecture, variant))
        return replace(KERNEL, symbol=f"{architecture}-{variant}")

    compiler = SimpleNamespace(compile_variant=compile_variant)
    monkeypatch.setitem(sys.modules, "sdsa_kernels.cute.compile", compiler)
    return asked


def test_second_process_does_not_compile(folder: Path, compilations: list[tuple[str, str]]) -> None:
    first = cache.compiled_kernel("sm_90a", "bf16")
    assert cache.compiled_kernel("sm_90a", "bf16") == first
    assert compilations == [("sm_90a", "bf16")]
    assert [path.suffix for path in folder.iterdir()] == [".bin"], "a temporary file was left"


def test_architectures_and_variants_are_apart(compilations: list[tuple[str, str]]) -> None:
    asked = [("sm_90a", "bf16"), ("sm_100a", "bf16"), ("sm_90a", "mixed")]
    for architecture, variant in asked * 2:
        kernel = cache.compiled_kernel(architecture, variant)
        assert kernel.symbol == f"{architecture}-{variant}"
    assert compilations == asked


@pytest.mark.parametrize("changed", ["version", "source"])
def test_another_version_or_source_is_another_entry(
    monkeypatch: pytest.MonkeyPatch, compilations: list[tuple[str, str]], changed: str
) -> None:
    cache.compiled_kernel("sm_90a", "bf16")
    if changed == "version":
        monkeypatch.setattr(cache, "package_version", lambda name: "99.0")
    else:
        monkeypatch.setattr(cache, "_source_hash", lambda: "another")
    cache.compiled_kernel("sm_90a", "bf16")
    assert len(compilations) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: entry[:-1],
        lambda entry: entry + b"x",
        lambda entry: entry[:-1] + bytes([entry[-1] ^ 1]),
        lambda entry: b"",
        lambda entry: b"not json\n" + entry,
        lambda entry: b"[]\n" + entry,
        lambda entry: entry.replace(b'"threads"', b'"strands"'),
    ],
    ids=["cut", "longer", "flipped", "empty", "no-json", "no-object", "other-field"],
)
def test_damaged_entry_counts_as_missing(
    compilations: list[tuple[str, str]], damage: object
) -> None:
    kernel = cache.compiled_kernel("sm_90a", "bf16")
    path = cache.entry_path("sm_90a", "bf16")
    path.write_bytes(damage(path.read_bytes()))
    assert cache.read_entry(path) is None
    assert cache.compiled_kernel("sm_90a", "bf16") == kernel
    assert len(compilations) == 2
    assert cache.read_entry(path) == kernel, "the entry was not repaired"


def test_folder_that_vanishes_is_made_again(
    folder: Path, compilations: list[tuple[str, str]]
) -> None:
    cache.compiled_kernel("sm_90a", "bf16")
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    cache.compiled_kernel("sm_90a", "bf16")
    assert len(compilations) == 2
    assert len(list(folder.iterdir())) == 1


def test_folder_that_cannot_be_written_costs_a_warning(
    folder: Path, compilations: list[tuple[str, str]]
) -> None:
    folder.parent.write_text("a file where a folder should be")
    with pytest.warns(UserWarning, match=cache.CACHE_VARIABLE):
        kernel = cache.compiled_kernel("sm_90a", "bf16")
    assert kernel.image == KERNEL.image


def test_default_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cache.CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/where")
    assert cache.cache_folder() == Path("/some/where/sdsa")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_folder() == Path.home() / ".cache" / "sdsa"


@pytest.mark.parametrize("home", ["none", "other-user"])
def test_no_home_folder_costs_a_warning(
    monkeypatch: pytest.MonkeyPatch, compilations: list[tuple[str, str]], home: str
) -> None:
    monkeypatch.delenv(cache.CACHE_VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    cache._warn_of_no_folder.cache_clear()
    assert cache.entry_path("sm_90a", home) is None
    with pytest.warns(UserWarning, match=cache.CACHE_VARIABLE):
        kernel = cache.compiled_kernel("sm_90a", home)
    assert kernel.image == KERNEL.image
    cache.compiled_kernel("sm_90a", home)  # and says so once


def test_every_flipped_bit_is_noticed(compilations: list[tuple[str, str]]) -> None:
    kernel = cache.compiled_kernel("sm_90a", "bf16")
    path = cache.entry_path("sm_90a", "bf16")
    entry = path.read_bytes()
    for bit in range(8 * len(entry)):
        flipped = bytearray(entry)
        flipped[bit // 8] ^= 1 << bit % 8
        assert cache._decode(bytes(flipped)) in (None, kernel), bit
    assert cache._decode(b"[" * 100_000) is None


def test_an_entry_of_another_user_is_not_executed(
    monkeypatch: pytest.MonkeyPatch, compilations: list[tuple[str, str]]
) -> None:
    cache.compiled_kernel("sm_90a", "bf16")
    path = cache.entry_path("sm_90a", "bf16")
    own = path.stat()
    stranger = SimpleNamespace(st_uid=own.st_uid + 4321)
    monkeypatch.setattr(Path, "stat", lambda self, **options: stranger)
    assert cache.read_entry(path) is None
