"""`sdsa quantize-cache`: inputs, outputs, the report, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sdsa_quant import open_cache, validate_cache
from support.command_line import Run

SaveKeys = Callable[..., Path]


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_real_keys(sdsa: Run, fixtures: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache.safetensors"
    answer = sdsa(
        "quantize-cache",
        fixtures / "smollm2-layer12.safetensors",
        "-o",
        cache,
        "--lengths",
        "lengths",
    )
    answer.is_clean()
    for text in (
        "keys, BF16 [7437, 128]",
        "118",
        "543,744",
        "3.56x smaller",
        "0.092",
        "7,437 keys",
    ):
        assert text in answer.stdout
    opened = open_cache(cache)
    validate_cache(opened)
    assert opened.context_lengths.tolist() == [4096, 2500, 777, 64]
    assert opened.header.source == "smollm2-layer12.safetensors"
    assert names(tmp_path) == ["cache.safetensors"]


def test_lengths_beside_the_keys_are_used_and_named(
    sdsa: Run, save_keys: SaveKeys, tmp_path: Path
) -> None:
    cache = tmp_path / "c.safetensors"
    arguments = ("quantize-cache", save_keys(count=10, lengths=[4, 6]), "-o", cache)
    answer = sdsa(*arguments)
    answer.is_clean()
    assert "2 by lengths" in answer.stdout
    assert open_cache(cache).context_lengths.tolist() == [4, 6]
    sdsa(*arguments, "--lengths", "none", "--force").is_clean()
    assert open_cache(cache).context_lengths.tolist() == [10]


def test_the_document(sdsa: Run, save_keys: SaveKeys, tmp_path: Path) -> None:
    path, cache = save_keys(count=1000, lengths=[600, 400]), tmp_path / "c.safetensors"
    answer = sdsa("quantize-cache", path, "-o", cache, "--lengths", "lengths", "--json")
    answer.is_clean()
    document = answer.document
    assert list(document)[:2] == ["schema", "command"]
    assert document["schema"] == "sdsa.quantize-cache/1"
    assert document["command"] == "quantize-cache"
    assert document["input"] == str(path)
    assert document["environment"]["packages"]["torch"] == torch.__version__
    (record,) = document["caches"]
    error = record.pop("relative_error")
    assert 0.08 < error < 0.11
    assert record.pop("ratio_to_bf16") == pytest.approx(32 / 9)
    assert record.pop("file_bytes") == cache.stat().st_size
    assert record == {
        "path": str(cache),
        "tensor": "keys",
        "values": "nvfp4",
        "layout": "interleaved",
        "scale_order": "linear",
        "requests": 2,
        "keys": 1000,
        "pages": 17,
        "cache_bytes": 17 * 4608,
        "bf16_bytes": 17 * 16384,
        "rule": "amax/6",
        "calibration": None,
        "rotate": "none",
        "gain": 1.0,
        "center": "none",
        "blocks": {
            "count": 8000,
            "flushed": 0,
            "flushed_share": 0.0,
            "subnormal": 0,
            "subnormal_share": 0.0,
            "saturated": 0,
            "saturated_share": 0.0,
        },
        "nonfinite_values": 0,
    }


def test_what_is_undefined_is_null(sdsa: Run, tmp_path: Path) -> None:
    name = "NaN.Infinity"
    save_file({name: torch.zeros(0, 128)}, tmp_path / "k.safetensors")
    answer = sdsa(
        "quantize-cache", tmp_path / "k.safetensors", "-o", tmp_path / "c.safetensors", "--json"
    )
    answer.is_clean()
    (record,) = answer.document["caches"]
    assert record["tensor"] == name
    assert record["ratio_to_bf16"] is None
    assert record["relative_error"] is None
    assert record["blocks"]["flushed_share"] is None
    # The report for a reader has dashes there.
    save_file({"a.k": torch.zeros(0, 128), "b.k": torch.ones(1, 128)}, tmp_path / "k.safetensors")
    for output, pattern in (("c.safetensors", "a.k"), ("several/", "*.k")):
        arguments = ("-o", f"{tmp_path}/{output}", "--keys", pattern, "--force")
        answer = sdsa("quantize-cache", tmp_path / "k.safetensors", *arguments)
        answer.is_clean()
        assert "nan" not in answer.stdout
        assert "-" in answer.stdout.split()


@pytest.mark.parametrize("values", ["nvfp4", "bf16"])
@pytest.mark.parametrize("layout", ["interleaved", "separate"])
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_every_format_and_layout(
    sdsa: Run, save_keys: SaveKeys, tmp_path: Path, values: str, layout: str, device: str
) -> None:
    cache = tmp_path / "c.safetensors"
    choices = ("--format", values, "--layout", layout, "--device", device)
    sdsa("quantize-cache", save_keys(), "-o", cache, *choices).is_clean()
    header = open_cache(cache).header
    assert (header.format, header.layout) == (values, layout)


def test_tiled_scales(sdsa: Run, save_keys: SaveKeys, tmp_path: Path) -> None:
    cache = tmp_path / "c.safetensors"
    arguments = ("quantize-cache", save_keys(), "-o", cache, "--scale-order", "128x4")
    sdsa(*arguments).fails_with(2, "--scale-order 128x4 needs layout separate", "interleaved")
    assert not cache.exists()
    sdsa(*arguments, "--layout", "separate").is_clean()
    assert open_cache(cache).header.scale_order == "128x4"


@pytest.fixture
def layers(tmp_path: Path, generator: torch.Generator) -> Path:
    """Keys of layers 0, 1, 2 and 10, in numbers that tell them apart."""
    tensors = {
        f"layers.{layer}.keys": torch.randn(64 * (layer + 1), 128, generator=generator)
        for layer in (10, 2, 0, 1)
    }
    save_file(tensors | {"layers.0.queries": torch.ones(2, 128)}, tmp_path / "layers.safetensors")
    return tmp_path / "layers.safetensors"


LAYER_NAMES = [f"layers.{layer}.keys" for layer in (0, 1, 2, 10)]


@pytest.mark.parametrize(
    ("output", "file_name"),
    [("caches/", "{}.safetensors"), ("new/c-{name}.st", "c-{}.st")],
    ids=["folder", "placeholder"],
)
def test_several_tensors_become_several_caches_in_numeric_order(
    sdsa: Run, layers: Path, tmp_path: Path, output: str, file_name: str
) -> None:
    arguments = ("quantize-cache", layers, "--keys", "layers.*.keys", "-o", f"{tmp_path}/{output}")
    answer = sdsa(*arguments)
    answer.is_clean()
    lines = answer.stdout.splitlines()
    assert lines[0].startswith("4 nvfp4 caches")
    assert lines[1] == "keys    layers.*.keys"
    assert lines[2].endswith(file_name.format("layers.*.keys"))
    assert [line.split()[:2] for line in lines[6:10]] == [
        ["0", "1"],
        ["1", "2"],
        ["2", "3"],
        ["10", "11"],
    ]
    document = sdsa(*arguments, "--force", "--json").document
    assert [record["tensor"] for record in document["caches"]] == LAYER_NAMES
    assert [record["pages"] for record in document["caches"]] == [1, 2, 3, 11]
    for record in document["caches"]:
        assert Path(record["path"]).name == file_name.format(record["tensor"])
        assert open_cache(record["path"]).pages == record["pages"]


def test_one_tensor_into_an_existing_folder(sdsa: Run, save_keys: SaveKeys, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    sdsa("quantize-cache", save_keys(), "-o", tmp_path / "there").is_clean()
    assert names(tmp_path / "there") == ["keys.safetensors"]


def test_several_tensors_do_not_fit_one_file(sdsa: Run, layers: Path, tmp_path: Path) -> None:
    output = tmp_path / "c.safetensors"
    answer = sdsa("quantize-cache", layers, "--keys", "layers.*.keys", "-o", output)
    answer.fails_with(2, "4 key tensors need a folder", "{name}")
    assert not output.exists()


def test_names_that_collide_as_files(sdsa: Run, tmp_path: Path) -> None:
    save_file({name: torch.ones(1, 128) for name in ("a/k", "a_k")}, tmp_path / "k.safetensors")
    answer = sdsa(
        "quantize-cache", tmp_path / "k.safetensors", "--keys", "a*", "-o", f"{tmp_path}/o/"
    )
    answer.fails_with(2, "tensors a/k and a_k would both be written to")


def test_all_outputs_are_looked_at_before_any_is_written(
    sdsa: Run, layers: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "caches"
    folder.mkdir()
    (folder / "layers.10.keys.safetensors").write_text("old")
    answer = sdsa("quantize-cache", layers, "--keys", "layers.*.keys", "-o", folder)
    answer.fails_with(2, "layers.10.keys.safetensors: exists already; give --force")
    assert names(folder) == ["layers.10.keys.safetensors"]


def test_a_file_for_each_layer(sdsa: Run, tmp_path: Path) -> None:
    (tmp_path / "capture").mkdir()
    for layer in (2, 10):
        tensors = {"keys": torch.ones(layer, 128), "lengths": torch.tensor([layer - 1, 1])}
        save_file(tensors, tmp_path / "capture" / f"layer_{layer}.safetensors")
    arguments = ("quantize-cache", tmp_path / "capture", "-o", f"{tmp_path}/caches/")
    sdsa(*arguments).fails_with(2, "give --keys 'layer_*:keys' for one cache each")
    answer = sdsa(*arguments, "--keys", "layer_*:keys")
    answer.is_clean()
    assert open_cache(tmp_path / "caches" / "layer_2_keys.safetensors").context_lengths[1] == 1
    chosen = ("--keys", "*:keys", "--lengths", "*:lengths", "--force", "--json")
    records = sdsa(*arguments, *chosen).document["caches"]
    assert [record["tensor"] for record in records] == ["layer_2:keys", "layer_10:keys"]
    assert names(tmp_path / "caches") == ["layer_10_keys.safetensors", "layer_2_keys.safetensors"]
    for record, layer in zip(records, (2, 10), strict=True):
        cache = open_cache(record["path"])
        assert cache.context_lengths.tolist() == [layer - 1, 1]
        assert cache.header.source == f"layer_{layer}.safetensors"


def test_lengths_of_each_layer(sdsa: Run, tmp_path: Path) -> None:
    tensors = {}
    for layer in (0, 1, 10):
        tensors[f"layers.{layer}.keys"] = torch.ones(layer + 1, 128)
        tensors[f"layers.{layer}.lengths"] = torch.tensor([1, layer])
    save_file(tensors, tmp_path / "multi.safetensors")
    chosen = ("--keys", "layers.*.keys", "--lengths", "layers.*.lengths", "-o", f"{tmp_path}/c/")
    sdsa("quantize-cache", tmp_path / "multi.safetensors", *chosen).is_clean()
    for layer in (0, 1, 10):
        cache = open_cache(tmp_path / "c" / f"layers.{layer}.keys.safetensors")
        assert cache.context_lengths.tolist() == [1, layer]
        assert cache.header.source == f"multi.safetensors:layers.{layer}.keys"


@pytest.mark.parametrize(
    ("size", "options", "words"),
    [
        (1e-4, (), ["100 % of blocks flushed to zero", "try --gain auto or --format bf16"]),
        (1e6, (), ["100 % saturated", "try --gain auto or --format bf16"]),
        (1e6, ("--nonfinite", "saturate"), ["saturated (noted above 0.25, 10 %); try --format"]),
        (1e6, ("--gain", "2"), ["try --rotate hadamard or"]),
        (1e6, ("--gain", "2", "--rotate", "hadamard"), ["try --center channel or"]),
    ],
    ids=["flushed", "saturated", "nonfinite", "gain", "rotated"],
)
def test_a_useless_cache_is_remarked_on(
    sdsa: Run,
    tmp_path: Path,
    generator: torch.Generator,
    size: float,
    options: tuple[str, ...],
    words: list[str],
) -> None:
    keys = torch.randn(100, 128, generator=generator)
    save_file({"a.k": keys * size, "b.k": keys}, tmp_path / "k.st")
    arguments = ("quantize-cache", tmp_path / "k.st", *options)
    answer = sdsa(*arguments, "--keys", "a.k", "-o", tmp_path / "c.st")
    assert answer.exit_code == 0
    assert answer.stderr.startswith(f"note: {tmp_path}/c.st: relative error ")
    assert answer.stderr.count("\n") == 1
    for word in words:
        assert word in answer.stderr
    answer = sdsa(*arguments, "--keys", "*.k", "-o", f"{tmp_path}/caches/", "--json")
    assert answer.document["caches"][0]["relative_error"] > 0.9
    assert "1 of 2 caches lose much; the worst is" in answer.stderr
    sdsa(*arguments, "--keys", "b.k", "-o", tmp_path / "good.st").is_clean()


@pytest.mark.slow
@pytest.mark.parametrize("columns", ["80", "120"])
def test_many_layers_of_long_names(sdsa_process: Run, tmp_path: Path, columns: str) -> None:
    name = "model.layers.{}.self_attn.indexer.k_cache_captured"
    save_file(
        {name.format(layer): torch.ones(1, 128) for layer in range(61)}, tmp_path / "k.safetensors"
    )
    chosen = ("--keys", "model.*", "-o", "caches/")
    answer = sdsa_process("quantize-cache", "k.safetensors", *chosen, COLUMNS=columns)
    answer.is_clean()
    lines = answer.stdout.splitlines()
    assert max(map(len, lines)) <= int(columns)
    assert lines[1:3] == [
        f"keys    {name.format('*')}",
        f"caches  caches/{name.format('*')}.safetensors",
    ]
    assert [line.split()[0] for line in lines[6:67]] == [str(layer) for layer in range(61)]


def test_files_that_are_named_otherwise_than_tensors_have_a_column(
    sdsa: Run, tmp_path: Path
) -> None:
    save_file({name: torch.ones(1, 128) for name in ("a/b", "c/d")}, tmp_path / "k.st")
    answer = sdsa("quantize-cache", tmp_path / "k.st", "--keys", "*", "-o", f"{tmp_path}/caches/")
    answer.is_clean()
    assert f"caches  {tmp_path}/caches/*.safetensors" in answer.stdout
    rows = [line.split() for line in answer.stdout.splitlines()]
    assert [(row[0], row[-1]) for row in rows if row[1:2] == ["1"]] == [
        ("a/b", "a_b"),
        ("c/d", "c_d"),
    ]


def test_an_index_and_a_folder(sdsa: Run, tmp_path: Path) -> None:
    folder = tmp_path / "capture"
    folder.mkdir()
    for number in (1, 2):
        tensors = {f"layers.{number}.keys": torch.full((64, 128), float(number))}
        save_file(tensors, folder / f"{number}.safetensors")
    save_file({"layers.1.keys": torch.full((64, 128), 9.0)}, folder / "stray.safetensors")
    answer = sdsa("quantize-cache", folder, "--keys", "layers.1.keys", "-o", tmp_path / "c")
    answer.fails_with(2, "named layers.1.keys", "found 1:layers.1.keys", "stray:layers.1.keys")
    places = {f"layers.{number}.keys": f"{number}.safetensors" for number in (1, 2)}
    index = folder / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    written = set()
    for source in (folder, index):
        arguments = ("--keys", "layers.1.keys", "-o", tmp_path / "c", "--force")
        sdsa("quantize-cache", source, *arguments).is_clean()
        written.add(load_file(tmp_path / "c")["pages"].numpy().tobytes())
    # Every value is 1: code 6 of scale 1/6 rounded to 0.171875, which is byte 0x23.
    assert written == {b"\x77" * 4096 + b"\x23" * 512}


@pytest.mark.parametrize(
    ("tensors", "arguments", "words"),
    [
        ({}, [], ["no tensors"]),
        ({"a": (9, 128)}, ["--keys", "b"], ["no tensor is named b", "a (F32 [9, 128])"]),
        ({"a": (9, 128)}, ["--keys", "b.*"], ["no tensor matches b.*", "a (F32 [9, 128])"]),
        ({"keys": (9, 64)}, [], ["tensor keys", "128", "[9, 64]"]),
        ({"keys": (9, 127)}, ["--keys", "keys"], ["tensor keys", "128", "[9, 127]"]),
        ({"keys": (9, 129)}, [], ["tensor keys", "128", "[9, 129]"]),
        ({"keys": (9, 256)}, [], ["tensor keys", "128", "[9, 256]"]),
        ({"keys": (9, 128), "keys_scale_2": (1,)}, [], ["unquantized keys", "keys_scale_2"]),
        ({"keys": (9, 128)}, ["--lengths", "n"], ["no tensor is named n"]),
        ({"keys": (3, 3, 128)}, [], ["tensor keys", "--lengths"]),
        ({"keys": (9, 128)}, ["--device", "tpu"], ["--device must be auto, cpu, cuda", "'tpu'"]),
    ],
    ids=[
        "no-tensors",
        "no-such-name",
        "no-match",
        "64",
        "127",
        "129",
        "256",
        "quantized",
        "no-such-lengths",
        "padded",
        "device",
    ],
)
def test_bad_input_is_one_line_and_no_output(
    sdsa: Run,
    tmp_path: Path,
    tensors: dict[str, tuple[int, ...]],
    arguments: list[str],
    words: list[str],
) -> None:
    save_file({name: torch.ones(shape) for name, shape in tensors.items()}, tmp_path / "k.st")
    answer = sdsa("quantize-cache", tmp_path / "k.st", "-o", tmp_path / "c.st", *arguments)
    answer.fails_with(2, *words)
    assert answer.stdout == ""
    assert names(tmp_path) == ["k.st"]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64, torch.float8_e4m3fn], ids=str)
def test_other_dtypes(sdsa: Run, tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"keys": torch.ones(9, 128).to(dtype)}, tmp_path / "k.st")
    answer = sdsa("quantize-cache", tmp_path / "k.st", "-o", tmp_path / "c.st")
    answer.fails_with(2, "tensor keys must hold unquantized keys in BF16, F16, F32", "[9, 128]")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_gpu_that_is_not_there(sdsa: Run, save_keys: SaveKeys, tmp_path: Path) -> None:
    answer = sdsa("quantize-cache", save_keys(), "-o", tmp_path / "c.st", "--device", "cuda")
    answer.fails_with(3, "--device cuda", "0 CUDA devices")
    assert not (tmp_path / "c.st").exists()


@pytest.mark.parametrize("damage", ["cut", "longer", "empty", "header-size", "absent"])
def test_damaged_files(sdsa: Run, save_keys: SaveKeys, tmp_path: Path, damage: str) -> None:
    path = save_keys()
    whole = path.read_bytes()
    cuts = {"cut": whole[:-1], "longer": whole + b"\0", "empty": b"", "header-size": whole[:8]}
    path.unlink() if damage == "absent" else path.write_bytes(cuts[damage])
    sdsa("quantize-cache", path, "-o", tmp_path / "c.st").fails_with(2, "keys.safetensors: ")
    assert not (tmp_path / "c.st").exists()


def test_nonfinite_keys(sdsa: Run, tmp_path: Path) -> None:
    keys = torch.ones(300, 128)
    keys[200, 5] = float("nan")
    save_file({"keys": keys}, tmp_path / "k.st")
    arguments = ("quantize-cache", tmp_path / "k.st", "-o", tmp_path / "c.st")
    sdsa(*arguments).fails_with(2, "k.st: tensor keys", "nan in key 200 of request 0")
    assert names(tmp_path) == ["k.st"]
    answer = sdsa(*arguments, "--nonfinite", "saturate")
    answer.is_clean()
    assert "1 converted, not in the error" in answer.stdout


def test_existing_outputs_need_force(sdsa: Run, save_keys: SaveKeys, tmp_path: Path) -> None:
    keys, cache = save_keys(), tmp_path / "c.st"
    cache.write_text("old")
    sdsa("quantize-cache", keys, "-o", cache).fails_with(2, "c.st: exists already; give --force")
    assert cache.read_text() == "old"
    sdsa("quantize-cache", keys, "-o", cache, "--force").is_clean()
    assert open_cache(cache).pages == 16


def test_the_input_is_never_the_output(sdsa: Run, save_keys: SaveKeys, tmp_path: Path) -> None:
    keys = save_keys()
    before = keys.read_bytes()
    (tmp_path / "link").symlink_to(keys)
    for output in (keys, tmp_path / "link"):
        answer = sdsa("quantize-cache", keys, "-o", output, "--force")
        answer.fails_with(2, "is the input and cannot be the output too")
    assert keys.read_bytes() == before


def test_a_missing_output_folder_is_made(sdsa: Run, save_keys: SaveKeys, tmp_path: Path) -> None:
    output = tmp_path / "a" / "b" / "c.st"
    sdsa("quantize-cache", save_keys(), "-o", output).is_clean()
    assert output.is_file()


def test_a_cache_of_zeros_is_quiet(sdsa: Run, tmp_path: Path) -> None:
    save_file({"keys": torch.zeros(130, 128)}, tmp_path / "k.st")
    answer = sdsa("quantize-cache", tmp_path / "k.st", "-o", tmp_path / "c.st")
    answer.is_clean()
    with safe_open(tmp_path / "c.st", "pt") as file:
        assert not file.get_tensor("pages").any()


@pytest.mark.parametrize("columns", ["80", "120"])
def test_the_report_fits_the_terminal(
    sdsa_process: Run, layers: Path, tmp_path: Path, columns: str
) -> None:
    # Also the real program's way: a pipe gets neither colours nor a progress bar.
    pattern = ("--keys", "layers.*.keys", "-o", f"{tmp_path}/caches/")
    answer = sdsa_process("quantize-cache", layers, *pattern, COLUMNS=columns)
    answer.is_clean()
    lines = answer.stdout.splitlines()
    # The folder's path stays whole, in a line of its own where it needs one.
    assert max(len(line) for line in lines if not line.startswith("/")) <= int(columns)
    assert "\x1b" not in answer.stdout


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ([1] * 300, ["LARGER than the keys in BF16, 76,800", "fill up pages of 64 keys"]),
        ([1] * 300 + [64_000], ["smaller than the keys in BF16", "are the block table"]),
        ([640], ["smaller than the keys in BF16, 163,840"]),
    ],
    ids=["padding", "table", "neither"],
)
def test_the_size_of_the_file_is_told(
    sdsa: Run, save_keys: SaveKeys, tmp_path: Path, lengths: list[int], words: list[str]
) -> None:
    path = save_keys(count=sum(lengths), lengths=lengths)
    cache = tmp_path / "c.safetensors"
    text = " ".join(sdsa("quantize-cache", path, "-o", cache).stdout.split())
    assert f"file {cache.stat().st_size:,} bytes" in text
    for each in words:
        assert each in text
    assert ("fill up" in text) == (len(lengths) > 1)
    assert ("block table" in text) == (len(lengths) == 301)
