"""`sdsa inspect`: what files hold, whether caches are valid, pages decoded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sdsa_cli.text import describe_lengths
from sdsa_quant import dequantize_nvfp4, quantize_nvfp4
from sdsa_quant.files.scores_file import ScoresWriter
from support.command_line import Run

SaveKeys = Callable[..., Path]
LENGTHS = [100, 200, 64]  # 2 + 4 + 1 pages


@pytest.fixture
def keys(save_keys: SaveKeys) -> Path:
    return save_keys(count=sum(LENGTHS), lengths=LENGTHS)


@pytest.fixture
def make_cache(sdsa: Run, keys: Path, tmp_path: Path) -> Callable[..., Path]:
    """``make_cache(*options)``: a cache of three requests."""

    def make(*options: str) -> Path:
        path = tmp_path / "cache.safetensors"
        arguments = ("-o", path, "--lengths", "lengths", "--force", *options)
        sdsa("quantize-cache", keys, *arguments).is_clean()
        return path

    return make


def edit(path: Path, change: Callable[[dict[str, torch.Tensor], dict[str, str]], None]) -> None:
    """Rewrite a safetensors file with changed tensors and metadata."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors, metadata)
    save_file(tensors, path, metadata)


def test_a_cache(sdsa: Run, make_cache: Callable[..., Path]) -> None:
    path = make_cache()
    answer = sdsa("inspect", path)
    answer.is_clean()
    for text in ("nvfp4", "interleaved", "keys.safetensors", "100 · 200 · 64 (sum 364)", "32,256"):
        assert text in answer.stdout
    assert "3.56x smaller than BF16" in answer.stdout
    assert answer.stdout.split()[-2:] == ["valid", "yes"]
    document = sdsa("inspect", path, "--json").document
    header = document.pop("header")
    assert header["format"] == "sdsa-cache"
    assert header["source"] == "keys.safetensors"
    assert document.pop("ratio_to_bf16") == pytest.approx(32 / 9)
    assert document == {
        "schema": "sdsa.inspect/1",
        "command": "inspect",
        "kind": "cache",
        "path": str(path),
        "valid": True,
        "reason": None,
        "requests": 3,
        "keys": 364,
        "context_lengths": LENGTHS,
        "blocks": 4,
        "pages": 7,
        "cache_bytes": 7 * 4608,
        "file_bytes": path.stat().st_size,
        "bf16_bytes": 7 * 16384,
        "scales": {
            "count": 364 * 8,
            "zero": 0,
            "zero_share": 0.0,
            "subnormal": 0,
            "subnormal_share": 0.0,
            "largest": 0,
            "largest_share": 0.0,
        },
    }


@pytest.mark.parametrize("layout", [(), ("--layout", "separate", "--scale-order", "128x4")])
def test_scales_of_used_keys(
    sdsa: Run, save_keys: SaveKeys, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    keys = torch.ones(70, 128)
    keys[0] = 1e-6  # 8 flushed blocks
    keys[69, :16] = 0
    keys[1, :16] = 0.02  # subnormal
    keys[2, :32] = 2700  # 2 saturated blocks
    save_file({"keys": keys}, tmp_path / "k.st")
    sdsa("quantize-cache", tmp_path / "k.st", "-o", tmp_path / "c.st", *layout).is_clean()
    answer = sdsa("inspect", tmp_path / "c.st")
    answer.is_clean()
    assert "560 of used keys" in answer.stdout
    assert "1.61 % (flushed, or all zeros)" in answer.stdout
    scales = sdsa("inspect", tmp_path / "c.st", "--json").document["scales"]
    assert {name: scales[name] for name in ("count", "zero", "subnormal", "largest")} == {
        "count": 560,
        "zero": 9,
        "subnormal": 1,
        "largest": 2,
    }


def test_a_folder_of_caches(sdsa: Run, save_keys: SaveKeys, tmp_path: Path) -> None:
    keys = save_keys(count=100)
    folder = tmp_path / "caches"
    folder.mkdir()
    for layer in (0, 2, 10):
        sdsa("quantize-cache", keys, "-o", folder / f"layer_{layer}.safetensors").is_clean()
    answer = sdsa("inspect", folder)
    answer.is_clean()
    assert answer.stdout.splitlines()[0].startswith(f"{folder}: 3 caches, ")
    assert "files  layer_*.safetensors" in answer.stdout
    rows = [line.split() for line in answer.stdout.splitlines()]
    wanted = [[layer, "nvfp4", "1", "100", "2", "9,216", "yes"] for layer in ("0", "2", "10")]
    assert [row for row in rows if row[1:2] == ["nvfp4"]] == wanted
    document = sdsa("inspect", folder, "--json").document
    assert (document["kind"], document["path"]) == ("caches", str(folder))
    assert [record["keys"] for record in document["caches"]] == [100, 100, 100]

    damaged = folder / "layer_2.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    keys.rename(folder / keys.name)
    answer = sdsa("inspect", folder)
    answer.fails_with(1, "1 of 3 caches not valid: ", "layer_2.safetensors: is not a whole")
    assert "1 other file of the folder left out" in answer.stdout
    assert ["2", "nvfp4", "-", "-", "-", "-", "no"] in [
        line.split() for line in answer.stdout.splitlines()
    ]
    records = sdsa("inspect", folder, "--json").document["caches"]
    assert [record["valid"] for record in records] == [True, False, True]


def test_a_bf16_cache_says_nothing_of_scales(sdsa: Run, make_cache: Callable[..., Path]) -> None:
    answer = sdsa("inspect", make_cache("--format", "bf16"))
    answer.is_clean()
    assert "scales" not in answer.stdout
    assert "smaller" not in answer.stdout


def set_nan_scale(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    tensors["pages"][3, 4096 + 2 * 8 + 5] = 0xFF


def set_table_entry(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    tensors["block_table"][1, 2] = 7


def set_length(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    tensors["context_lengths"][1] = 257


def cut_pages(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    tensors["pages"] = tensors["pages"][:, :4607].contiguous()


def drop_table(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    del tensors["block_table"]


def set_field(name: str, value: str) -> Callable[..., None]:
    def change(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
        metadata[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_nan_scale, ["scale of page 3, key 2, block 5 is NaN"]),
        (set_table_entry, ["block_table", "7"]),
        (set_length, ["block_table must have 5 columns for the 257 keys of request 1"]),
        (cut_pages, ["tensor pages must be U8 [7, 4608]", "[7, 4607]"]),
        (drop_table, ["block_table"]),
        (set_field("version", "9"), ["header field version", "'9'"]),
        (set_field("nibble_order", "high-first"), ["header field nibble_order", "'high-first'"]),
        (set_field("layout", "odd"), ["header field layout", "'odd'"]),
        (set_field("page_size", "32"), ["header field page_size", "'32'"]),
        (set_field("dim", "64"), ["header field dim", "'64'"]),
    ],
    ids=[
        "nan-scale",
        "entry",
        "length",
        "record",
        "no-table",
        "version",
        "nibbles",
        "layout",
        "page",
        "dim",
    ],
)
def test_invalid_caches_exit_with_1_and_the_reason(
    sdsa: Run, make_cache: Callable[..., Path], change: Callable[..., None], words: list[str]
) -> None:
    path = make_cache()
    edit(path, change)
    answer = sdsa("inspect", path)
    answer.fails_with(1, "cache.safetensors: ", *words)
    assert "valid   yes" not in answer.stdout
    answer = sdsa("inspect", path, "--json")
    answer.fails_with(1, *words)
    assert answer.document["valid"] is False
    assert answer.document["reason"] in answer.stderr


@pytest.mark.parametrize(
    ("damage", "exit_code"),
    # With its header whole, it is known to be a cache, and an invalid one; else just a bad file.
    [("cut", 1), ("longer", 1), ("pages", 1), ("empty", 2), ("header-size", 2), ("header", 2)],
)
def test_damaged_files(
    sdsa: Run, make_cache: Callable[..., Path], damage: str, exit_code: int
) -> None:
    path = make_cache()
    whole = path.read_bytes()
    damaged = {
        "cut": whole[:-1],
        "longer": whole + b"\0",
        "pages": whole.replace(b'"shape":[7,4608]', b'"shape":[8,4608]'),
        "empty": b"",
        "header-size": whole[:8],
        "header": whole[:8] + b"[" + whole[9:],
    }
    path.write_bytes(damaged[damage])
    assert path.read_bytes() != whole
    answer = sdsa("inspect", path)
    answer.fails_with(exit_code, "cache.safetensors: is not a whole safetensors file")
    assert answer.stdout == ""
    sdsa("inspect", path, "--page", "0").fails_with(2)
    answer = sdsa("inspect", path, "--json")
    answer.fails_with(exit_code)
    if exit_code == 1:
        assert answer.document["valid"] is False
        assert answer.document["header"]["values"] == "nvfp4"
    else:
        assert answer.stdout == ""


def test_a_file_that_is_not_there(sdsa: Run, tmp_path: Path) -> None:
    sdsa("inspect", tmp_path / "x.st").fails_with(
        2, "x.st: cannot be read: No such file or directory\n"
    )


@pytest.mark.parametrize(
    ("page", "first_key", "used"), [(2, 0, 64), (5, 192, 8)], ids=["full", "partial"]
)
@pytest.mark.parametrize(
    "options",
    [(), ("--layout", "separate", "--scale-order", "128x4"), ("--format", "bf16")],
    ids=["nvfp4", "tiled", "bf16"],
)
def test_a_page_decoded(
    sdsa: Run,
    make_cache: Callable[..., Path],
    keys: Path,
    options: tuple[str, ...],
    page: int,
    first_key: int,
    used: int,
) -> None:
    path = make_cache(*options)
    original = load_file(keys)["keys"][100 + first_key :][:used]
    codes, scales = quantize_nvfp4(original)
    expected = dequantize_nvfp4(codes, scales) if "bf16" not in options else original.float()
    document = sdsa("inspect", path, "--page", str(page), "--json").document
    assert document["kind"] == "page"
    assert (document["request"], document["first_key"], document["used"]) == (1, first_key, used)
    assert torch.tensor(document["keys"]).shape == (64, 128)
    assert torch.equal(torch.tensor(document["keys"])[:used], expected)
    assert not torch.tensor(document["keys"])[used:].any()
    if "bf16" in options:
        assert document["scales"] is None
    else:
        assert torch.equal(torch.tensor(document["scales"])[:used], scales.float())


def exact_dtype(values: str) -> torch.dtype:
    """The dtype in which the values shown of a key are the ones stored."""
    return torch.bfloat16 if values == "bf16" else torch.float32


@pytest.mark.parametrize("kind", ["file", "folder", "index"])
def test_headers_are_read_without_torch(tmp_path: Path, kind: str) -> None:
    save_file({"keys": torch.ones(9, 128)}, tmp_path / "a.safetensors")
    path = {"file": tmp_path / "a.safetensors", "folder": tmp_path}.get(kind)
    if path is None:
        path = tmp_path / "m.safetensors.index.json"
        path.write_text(json.dumps({"weight_map": {"keys": "a.safetensors"}}))
    code = (
        "import sys\nfrom sdsa_cli.app import app\n"
        "try: app(sys.argv[1:])\nexcept SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, "inspect", str(path)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "1 tensor" in " ".join(answer.stdout.split())


@pytest.mark.parametrize("values", ["nvfp4", "bf16"])
@pytest.mark.parametrize("columns", [80, 120])
def test_a_page_on_one_screen(
    sdsa: Run,
    make_cache: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    values: str,
    columns: int,
) -> None:
    path = make_cache("--format", values)
    monkeypatch.setenv("COLUMNS", str(columns))
    answer = sdsa("inspect", path, "--page", "5")
    answer.is_clean()
    lines = answer.stdout.splitlines()
    # The first line has the path, which stays whole.
    assert max(map(len, lines[1:])) <= columns
    assert len(lines) <= 50
    title = "page 5: request 1, keys 192 to 199 (8 of 64 used)"
    assert title in " ".join(answer.stdout.split())
    assert "(63)" in answer.stdout, "a key past the length is in brackets"
    page = sdsa("inspect", path, "--page", "5", "--json").document
    assert page["key"] is None
    if values == "nvfp4":
        scales = torch.tensor(page["scales"][0]).to(torch.float8_e4m3fn)
        assert bytes(scales.view(torch.uint8).tolist()).hex() in answer.stdout

    answer = sdsa("inspect", path, "--page", "5", "--key", "7")
    answer.is_clean()
    lines = answer.stdout.splitlines()
    assert max(map(len, lines[1:])) <= columns
    assert len(lines) <= 50
    assert "key 7 of the page, 199 of request 1" in lines[1:3]
    assert "(63)" not in answer.stdout, "the other keys are not shown"
    # Row i of a table holds value i of each block, as many digits as tell it apart.
    rows = [line.split() for line in lines]
    shown = [cell for row in rows if row[:1] == ["15"] for cell in row[1:]]
    exact = torch.tensor(page["keys"][7][15::16])
    assert len(shown) == 8
    assert torch.equal(torch.tensor(list(map(float, shown))).to(exact_dtype(values)).float(), exact)
    one = sdsa("inspect", path, "--page", "5", "--key", "7", "--json").document
    assert (one["key"], one["keys"]) == (7, page["keys"][7:8])
    assert one["scales"] == (page["scales"] and page["scales"][7:8])
    past = sdsa("inspect", path, "--page", "5", "--key", "63")
    assert "key 63 of the page, past the length" in past.stdout


def test_a_page_in_no_request(sdsa: Run, make_cache: Callable[..., Path]) -> None:
    path = make_cache()

    def forget_page_6(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
        tensors["context_lengths"][2] = 0

    edit(path, forget_page_6)
    answer = sdsa("inspect", path, "--page", "6")
    answer.is_clean()
    assert "page 6: in no request" in answer.stdout
    assert sdsa("inspect", path, "--page", "6", "--json").document["request"] is None


def test_page_and_key_are_checked(sdsa: Run, make_cache: Callable[..., Path], keys: Path) -> None:
    path = make_cache()
    sdsa("inspect", path, "--page", "7").fails_with(2, "--page must be 0 to 6, got 7")
    sdsa("inspect", path, "--page", "0", "--key", "64").fails_with(2, "--key")
    sdsa("inspect", path, "--key", "3").fails_with(2, "--key 3 needs --page")
    sdsa("inspect", keys, "--page", "0").fails_with(2, "--page needs a cache file")


def test_keys(sdsa: Run, keys: Path, tmp_path: Path) -> None:
    answer = sdsa("inspect", keys)
    answer.is_clean()
    rows = [line.split() for line in answer.stdout.splitlines()]
    assert ["keys", "BF16", "364", "x", "128", "93,184", "keys"] in rows
    assert ["lengths", "I32", "3", "12", "lengths"] in rows
    document = sdsa("inspect", keys, "--json").document
    assert document["kind"] == "tensors"
    assert document["tensors"][0] == {
        "name": "keys",
        "dtype": "BF16",
        "shape": [364, 128],
        "bytes": 93184,
        "file": str(keys),
        "use": "keys",
    }


def test_many_tensors_are_cut_on_the_terminal_only(sdsa: Run, tmp_path: Path) -> None:
    tensors = {f"layers.{layer}.k[0]": torch.ones(1, 128) for layer in range(50)}
    save_file(tensors, tmp_path / "many.safetensors", {"note": "[bold]x[/bold]"})
    answer = sdsa("inspect", tmp_path)
    answer.is_clean()
    assert answer.stdout.index("layers.2.k[0]") < answer.stdout.index("layers.10.k[0]")
    assert "... and 10 more" in answer.stdout
    assert "[bold]x[/bold]" in answer.stdout
    assert len(sdsa("inspect", tmp_path, "--json").document["tensors"]) == 50


def test_what_tensors_can_be(sdsa: Run, tmp_path: Path) -> None:
    tensors = {
        "a.q": torch.ones(2, 128),
        "k": torch.ones(2, 128),
        "any": torch.tensor([1]),
        "none": torch.ones(3),
    }
    save_file(tensors, tmp_path / "x.st")
    document = sdsa("inspect", tmp_path / "x.st", "--json").document
    uses = {record["name"]: record["use"] for record in document["tensors"]}
    assert uses == {"a.q": "queries", "k": "keys", "any": "lengths", "none": None}
    save_file({"k": torch.ones(2, 128)}, tmp_path / "x.st")
    assert "x.st: 1 tensor, 1,024 bytes" in sdsa("inspect", tmp_path / "x.st").stdout


@pytest.mark.parametrize("columns", [80, 120])
def test_long_names_of_tensors(
    sdsa: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    names = [f"model.layers.{layer}.self_attn.indexer.k_cache_captured" for layer in range(12)]
    save_file({name: torch.ones(1, 128) for name in names}, tmp_path / "x.st")
    monkeypatch.setenv("COLUMNS", str(columns))
    answer = sdsa("inspect", tmp_path / "x.st")
    answer.is_clean()
    lines = answer.stdout.splitlines()
    assert max(map(len, lines[1:])) <= columns
    wanted = [name.split(".")[2] for name in names] if columns == 80 else names
    assert [line.split()[0] for line in lines if "F32" in line] == wanted


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ([], "none"),
        ([4096], "4,096"),
        ([100, 100], "100 each (sum 200)"),
        ([4096, 2500, 777], "4,096 · 2,500 · 777 (sum 7,373)"),
        ([100] * 12, "100 each (sum 1,200)"),
        (range(1000, 1011), "1,000 to 1,010 (median 1,005, sum 11,055)"),
    ],
    ids=["none", "one", "two-equal", "few", "equal", "many"],
)
def test_lengths_in_words(lengths: list[int], text: str) -> None:
    assert describe_lengths(lengths) == text


def write_scores(path: Path, scores: torch.Tensor, lengths: list[int], top_k: torch.Tensor) -> None:
    groups = torch.tensor(lengths, dtype=torch.int32)
    requests = torch.arange(len(lengths), dtype=torch.int32)
    rows, width = scores.shape
    sizes = {"rows": rows, "max_context": width, "top_k": top_k.shape[1]}
    source = {"another": "mine", "query_name": "a.q", "cache": "c.st"}
    with ScoresWriter(path, groups, requests, **sizes, source=source) as writer:
        writer.write_rows(0, scores, top_k)


def test_scores(sdsa: Run, tmp_path: Path) -> None:
    scores = torch.full((4, 5), float("-inf"))
    scores[:2, :5] = torch.tensor([[3.0, 1.0, 2.0, -4.0, 0.5], [0.0, float("nan"), 1, 2, 3]])
    top_k = torch.full((4, 7), -1)
    top_k[0, :5] = torch.tensor([0, 2, 1, 4, 3])
    path = tmp_path / "scores.safetensors"
    write_scores(path, scores, [5, 0], top_k)
    answer = sdsa("inspect", path)
    answer.is_clean()
    assert "4 (2 groups of 2)" in answer.stdout
    assert "1 scores below a length" in answer.stdout
    assert "c.st" in answer.stdout
    assert "query tensor" in answer.stdout
    assert answer.stdout.index("c.st") < answer.stdout.index("a.q") < answer.stdout.index("mine")
    document = sdsa("inspect", path, "--json").document
    assert (document["kind"], document["rows"], document["rows_per_group"]) == ("scores", 4, 2)
    assert document["row_summaries"][0] == {
        "row": 0,
        "request": 0,
        "length": 5,
        "min": -4.0,
        "max": 3.0,
        "nonfinite": 0,
        "best_keys": [0, 2, 1, 4, 3],
    }
    assert document["row_summaries"][1]["nonfinite"] == 1
    assert document["row_summaries"][3] == {
        "row": 3,
        "request": 1,
        "length": 0,
        "min": None,
        "max": None,
        "nonfinite": 0,
        "best_keys": [],
    }


def test_damaged_scores(sdsa: Run, tmp_path: Path) -> None:
    path = tmp_path / "scores.safetensors"
    write_scores(path, torch.zeros(2, 5), [5, 5], torch.zeros(2, 1))
    edit(path, lambda tensors, metadata: tensors.pop("requests"))
    sdsa("inspect", path).fails_with(2, "tensor requests is missing")


def test_a_capture_is_checked_where_asked(sdsa: Run, tmp_path: Path) -> None:
    keys = torch.randn(100, 128, generator=torch.Generator().manual_seed(0))
    save_file({"keys": keys}, tmp_path / "right.safetensors")
    keys[40:] = 0
    save_file({"keys": keys}, tmp_path / "wrong.safetensors")
    answer = sdsa("inspect", tmp_path / "right.safetensors", "--check")
    answer.is_clean()
    assert "nothing was seen that a right capture does not have" in answer.stdout
    answer = sdsa("inspect", tmp_path / "wrong.safetensors", "--check")
    assert answer.exit_code == 1
    assert "keys: 60 of 100 rows are zeros" in " ".join(answer.stdout.split())
    assert "wrong.safetensors: 1 fault of the capture, the first in tensor keys" in answer.stderr
    document = sdsa("inspect", tmp_path / "wrong.safetensors", "--json").document
    assert document["findings"] is None
    document = sdsa("inspect", tmp_path / "wrong.safetensors", "--json", "--check").document
    assert [finding["tensor"] for finding in document["findings"]] == ["keys"]
