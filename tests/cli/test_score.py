"""`sdsa score` from files to report: the real keys, the faults of the field, every exit code."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sdsa_kernels.problem import ScoreCall
from sdsa_kernels.scoring import chunks
from sdsa_kernels.testing.reference import reference_scores
from sdsa_quant.files.cache_file import open_cache
from sdsa_quant.formats.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from support.caches import write_cache
from support.command_line import Run, read_document
from support.score_files import LENGTHS, Files

# --------------------------------------------------------------- the main job on the real keys


def test_the_real_keys_end_to_end(
    sdsa: Run, tmp_path: Path, real: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    cache, report = tmp_path / "cache.safetensors", tmp_path / "report.json"
    sdsa("quantize-cache", real, "-o", cache, "--lengths", "lengths").is_clean()
    outcome = sdsa(
        *("score", cache, "--queries", real, "--baseline", real, "--graph-replay", "5"),
        *("-o", tmp_path / "scores.safetensors", "--report", report, "--device", "cpu"),
    )
    outcome.is_clean()
    document = read_document(report)

    # The same once more in plain operations on dense tensors.
    tensors = load_file(real)
    parts = tensors["keys"].split(tensors["lengths"].tolist())
    queries = dequantize_nvfp4(*quantize_nvfp4(tensors["queries"])).double()
    for record in document["rows"]:
        row, keys = record["row"], parts[record["request"]]
        baseline = keys.double() @ tensors["queries"][row].double()
        scores = dequantize_nvfp4(*quantize_nvfp4(keys)).double() @ queries[row]
        powers = (baseline / math.sqrt(128)).softmax(0)
        assert record["length"] == len(keys)
        for measured in record["accuracy"]["top_k"]:
            kept = min(measured["k"], len(keys))
            best, chosen = baseline.topk(kept).indices, scores.topk(kept).indices
            assert measured["recall"] == torch.isin(chosen, best).sum().item() / kept
            mass = float(powers[chosen].sum() / powers[best].sum())
            assert measured["mass"] == pytest.approx(mass)
        error = float((scores - baseline).norm() / baseline.norm())
        assert record["accuracy"]["relative_l2"] == pytest.approx(error, rel=1e-5)

    longer = [row for row in document["rows"] if row["length"] > 64]
    recall = [row["accuracy"]["top_k"][0]["recall"] for row in longer]
    assert document["accuracy"]["top_k"][0]["recall"]["mean"] == pytest.approx(sum(recall) / 6)
    assert min(recall) > 0.8  # chance is 64 of 4,096 keys for the longest request
    assert (document["timing"]["replay"], document["timing"]["repeats"]) == ("eager", 5)

    lines = outcome.stdout.splitlines()
    assert len(lines) <= 24, "the report is one screen"
    assert max(map(len, lines)) <= 80
    order = [outcome.stdout.index(word) for word in ("recall", "relative L2", "replay: eager")]
    assert order == sorted(order)


def test_nvfp4_beats_chance_and_bf16_loses_nothing(sdsa: Run, tmp_path: Path, real: Path) -> None:
    top_k = {}
    for values in ("nvfp4", "bf16"):
        cache = tmp_path / f"{values}.safetensors"
        sdsa("quantize-cache", real, "-o", cache, "--lengths", "lengths", "--format", values)
        outcome = sdsa("score", cache, "--queries", real, "--baseline", real, "--json")
        top_k[values] = outcome.document["accuracy"]["top_k"][0]
    assert top_k["nvfp4"]["recall"]["mean"] > 3 * top_k["nvfp4"]["chance"]
    # BF16 keys are the unquantized keys: only float32 sums differ from the exact baseline.
    assert top_k["bf16"]["recall"]["minimum"] == 1.0


# --------------------------------------------------------------- what is written


def test_the_scores_file_holds_scores_and_choices(files: Files) -> None:
    output = files.folder / "scores.safetensors"
    files.report("-o", output, "--top-k", 80)
    stored = load_file(output)
    assert stored["context_lengths"].tolist() == LENGTHS
    assert stored["requests"].tolist() == [0, 1, 2]
    paged = open_cache(files.cache).paged_keys()
    codes, scales = quantize_nvfp4(files.query_values)
    call = ScoreCall(
        codes,
        paged.key_cache,
        paged.block_table,
        stored["context_lengths"],
        stored["requests"],
        stored["scores"],
        scales,
        paged.key_scales,
    )
    expected = reference_scores(call)
    visible = ~expected.isnan()
    assert (stored["scores"][~visible] == -torch.inf).all()
    torch.testing.assert_close(
        stored["scores"][visible].double(), expected[visible], rtol=1e-4, atol=1e-2
    )
    for row, choices in enumerate(stored["top_k_indices"].tolist()):
        kept = min(80, LENGTHS[row // 2])
        order = stored["scores"][row].sort(descending=True, stable=True).indices[:kept]
        assert choices == order.tolist() + [-1] * (80 - kept)
    with safe_open(output, framework="pt") as file:
        assert file.metadata()["query_format"] == "nvfp4"


def test_chunks_write_the_same_file_and_report(files: Files) -> None:
    # CASES 64: chunked results are bitwise equal.
    stored, reports = [], []
    for options in ((), ("--chunk", 1), ("--chunk", 2)):
        output = files.folder / "scores.safetensors"
        reports.append(files.report("-o", output, "--force", "--baseline", files.keys, *options))
        stored.append(output.read_bytes())
    assert stored[1] == stored[0]
    assert stored[2] == stored[0]
    for report in reports[1:]:
        assert report["rows"] == reports[0]["rows"]
        assert report["accuracy"] == reports[0]["accuracy"]
    assert [report["problem"]["buffer_bytes"] for report in reports] == [5976, 1992, 3984]


def test_writes_only_where_it_is_told(files: Files) -> None:
    # CASES 74.
    before = {path: path.read_bytes() for path in files.folder.iterdir()}
    folder = files.folder / "out"
    folder.mkdir()
    outputs = [folder / "report.json", folder / "scores.safetensors"]
    options = ("--baseline", files.keys, "--report", outputs[0], "-o", outputs[1])
    files.score(*options).is_clean()
    assert sorted(folder.iterdir()) == outputs
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("option", ["-o", "--report"])
def test_an_existing_output_is_kept_without_force(files: Files, option: str) -> None:
    # CASES 74.
    output = files.folder / "mine"
    output.write_text("mine")
    refused = files.score(option, output)
    refused.fails_with(2, f"{output}: exists already; give --force to replace it")
    assert refused.stdout == ""
    assert output.read_text() == "mine"
    files.score(option, output, "--force").is_clean()
    assert output.read_bytes() != b"mine"


@pytest.mark.parametrize("option", ["-o", "--report"])
def test_an_input_is_never_replaced(files: Files, option: str) -> None:
    before = files.cache.read_bytes()
    files.score(option, files.cache, "--force").fails_with(2, "is the input")
    assert files.cache.read_bytes() == before


def test_a_clean_run_is_silent_on_stderr(files: Files) -> None:
    # CASES 75.
    outcome = files.score("--graph-replay", 2)
    outcome.is_clean()
    assert "best keys" in outcome.stdout
    report = files.report("--graph-replay", 2)
    assert (report["schema"], report["command"]) == ("sdsa.score/2", "score")
    assert report["accuracy"] is None
    assert report["environment"]["packages"]["torch"]


# --------------------------------------------------------------- rows, ties, undefined values


def test_k_is_cut_to_each_rows_length(files: Files) -> None:
    # CASES 20: k = 2048 with lengths 249, 1 and 0.
    write_cache(files.cache, files.key_values[:250], [249, 1, 0], "bf16")
    report = files.report("--baseline", files.cache, "--top-k", 2048)
    top_k = [row["accuracy"]["top_k"] for row in report["rows"]]
    assert [[each["kept"] for each in row] for row in top_k] == [[249]] * 2 + [[1]] * 2 + [[]] * 2
    assert report["rows_empty"] == 2
    assert report["accuracy"]["rows_measured"] == 4
    assert report["accuracy"]["top_k"][0]["recall"]["minimum"] is None
    assert report["accuracy"]["top_k"][0]["rows_longer_than_k"] == 0


def test_a_k_beyond_every_length_takes_no_memory(files: Files) -> None:
    # 2^31 - 1 indices a row would be 103 GB.
    files.score("--top-k", "5,2147483647", "-o", files.folder / "scores").is_clean()
    assert load_file(files.folder / "scores")["top_k_indices"].shape == (6, max(LENGTHS))


def test_lengths_that_are_all_zero(files: Files) -> None:
    write_cache(files.cache, files.key_values[:0], [0, 0, 0])
    output = files.folder / "scores.safetensors"
    report = files.report("-o", output, "--top-k", 8, "--graph-replay", 2)
    assert (report["rows_empty"], report["problem"]["max_context"]) == (6, 0)
    assert (report["rows"][0]["best_key"], report["rows"][0]["best_keys"]) == (None, [])
    assert list(load_file(output)["scores"].shape) == [6, 0]


def test_keys_that_are_all_zero(files: Files) -> None:
    # CASES 25 and 58: what is undefined is null.
    keys = torch.zeros(130, 128, dtype=torch.bfloat16)
    save_file({"keys": keys}, files.keys)
    write_cache(files.cache, keys, [130])
    files.save_queries(torch.ones(2, 128))
    report = files.score("--baseline", files.keys, "--json").document
    assert all(row["minimum"] == row["maximum"] == 0.0 for row in report["rows"])
    accuracy = report["accuracy"]
    assert accuracy["rows_constant"] == 2
    assert accuracy["top_k"][0]["recall"]["minimum"] is None
    assert accuracy["max_abs"]["maximum"] == 0.0
    for measure in ("relative_l2", "cosine", "spearman"):
        names = ("mean", "median", "minimum", "p1", "p99", "maximum", "worst")
        assert accuracy[measure] == {"rows": 0, **dict.fromkeys(names)}
        assert report["rows"][0]["accuracy"][measure] is None
    outcome = files.score("--baseline", files.keys)
    outcome.fails_with(1, "2 of 2 rows have one baseline score for all of their keys")
    assert "2 CONSTANT rows" in outcome.stdout


def test_equal_keys_tie_and_the_lowest_indices_are_chosen(files: Files) -> None:
    # CASES 54: 300 equal scores and k = 64, the same on every run.
    output = files.folder / "scores.safetensors"
    keys = torch.full((301, 128), 1.5, dtype=torch.bfloat16)
    keys[300] = 0.5  # so that not all are equal
    for _ in range(5):
        report = files.accuracy_of(keys, "--top-k", 64, "-o", output, "--force")
        top_k = report["accuracy"]["top_k"][0]
        assert (top_k["recall"]["minimum"], top_k["mass"]["minimum"]) == (1.0, 1.0)
        assert (top_k["rows_with_same_scores"], top_k["rows_with_same_set"]) == (2, 2)
        assert (top_k["rows_with_ties"], top_k["most_ties_left_out"]) == (2, 236)
        assert load_file(output)["top_k_indices"].tolist() == [list(range(64))] * 2
    shown = files.score("--baseline", files.keys, "--top-k", 64).stdout
    assert "64: TIES DECIDE 2 rows" in shown


def test_a_tensor_name_that_looks_like_a_number_stays_a_name(files: Files) -> None:
    # CASES 58.
    save_file({"NaN.Infinity": files.query_values}, files.queries, {"rows_per_group": "2"})
    report = files.report("--query-name", "NaN.Infinity")
    assert report["problem"]["query_name"] == "NaN.Infinity"
    assert report["inputs"]["query_name"] == "NaN.Infinity"


def test_a_nan_fails_the_run_and_spares_the_other_rows(files: Files) -> None:
    # CASES 56 and 23: a NaN among the keys of request 1, whose rows are 2 and 3.
    options = ("--baseline", files.keys, "--top-k", 64)
    write_cache(files.cache, files.key_values, LENGTHS, "bf16")
    clean = files.report(*options)
    broken = files.key_values.clone()
    broken[LENGTHS[0] + 7, 3] = math.nan
    write_cache(files.cache, broken, LENGTHS, "bf16")

    written, output = files.folder / "report.json", files.folder / "scores.safetensors"
    failed = files.score(*options, "--graph-replay", 3, "-o", output, "--report", written)
    failed.fails_with(1, "2 of 6 rows have a score", "row 2 of request 1, 70 keys")
    assert "2 INVALID rows" in failed.stdout

    report = read_document(written)
    assert [row["row"] for row in report["rows"] if not row["valid"]] == [2, 3]
    assert report["rows"][2]["nonfinite_scores"] == 1
    assert report["rows"][2]["accuracy"]["top_k"] == []
    assert report["rows_invalid"] == report["accuracy"]["rows_invalid"] == 2
    assert report["accuracy"]["top_k"][0]["recall"]["rows"] == 4
    assert report["timing"] is None  # no time is shown for wrong scores
    assert 7 not in load_file(output)["top_k_indices"][2].tolist()
    for row in (0, 1, 4, 5):
        assert report["rows"][row] == clean["rows"][row]


# --------------------------------------------------------------- options


def test_groups_spread_over_the_requests_by_default(files: Files) -> None:
    for options, groups in (((), 3), (("--rows-per-group", 1), 6)):
        report = files.report(*options)
        assert report["problem"]["groups"] == groups
        assert [row["request"] for row in report["rows"]] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("option", ["2,0,2", "of_group"])
def test_requests_can_be_said(files: Files, option: str) -> None:
    files.save_queries(files.query_values, of_group=torch.tensor([2, 0, 2]))
    report = files.report("--requests", option)
    assert [row["request"] for row in report["rows"]] == [2, 2, 0, 0, 2, 2]
    assert [row["length"] for row in report["rows"]] == [249, 249, 100, 100, 249, 249]


def test_bf16_query_rows_meet_nvfp4_keys(files: Files) -> None:
    # CASES 36, the mixed path: the query rows are not quantized, so the error is smaller.
    errors = {}
    for query_format in ("bf16", "nvfp4"):
        report = files.report("--baseline", files.keys, "--query-format", query_format)
        assert report["problem"]["query_format"] == query_format
        assert report["problem"]["key_format"] == "nvfp4"
        errors[query_format] = report["accuracy"]["relative_l2"]["mean"]
    assert 0 < errors["bf16"] < errors["nvfp4"]


def test_nvfp4_query_rows_do_not_meet_bf16_keys(files: Files) -> None:
    write_cache(files.cache, files.key_values, LENGTHS, "bf16")
    assert files.report()["problem"]["query_format"] == "bf16"
    files.score("--query-format", "nvfp4").fails_with(2, "NVFP4 query rows go with NVFP4 keys")


def test_softmax_scale_changes_mass_and_nothing_else(files: Files) -> None:
    flat = files.report("--baseline", files.keys, "--softmax-scale", 1e-6, "--top-k", 16)
    peaked = files.report("--baseline", files.keys, "--top-k", 16)
    assert peaked["inputs"]["softmax_scale"] == pytest.approx(1 / math.sqrt(128))
    for row in range(6):
        first, second = (report["rows"][row]["accuracy"] for report in (flat, peaked))
        assert first["top_k"][0]["mass"] == pytest.approx(1.0, abs=0.01)
        for accuracy in (first, second):
            del accuracy["top_k"][0]["mass"]
        assert first == second


def test_a_bf16_cache_is_as_good_a_baseline_as_its_keys(files: Files) -> None:
    bf16 = write_cache(files.folder / "bf16.safetensors", files.key_values, LENGTHS, "bf16")
    reports = [files.report("--baseline", path) for path in (files.keys, bf16.path)]
    assert reports[0]["rows"] == reports[1]["rows"]
    assert [report["baseline"]["kind"] for report in reports] == ["keys", "cache"]


def test_top_k_is_sorted_and_each_once(files: Files) -> None:
    report = files.report("--baseline", files.keys, "--top-k", "64, 8,64")
    assert [top_k["k"] for top_k in report["accuracy"]["top_k"]] == [8, 64]


# --------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--top-k 0", "--top-k must be numbers from 1 to 2147483647 such as 64,256, got '0'"),
        ("--top-k 2147483648", "--top-k must be numbers from 1 to 2147483647"),
        ("--top-k 1" + "0" * 5000, "such as 64,256, got '1" + "0" * 59 + "...'"),
        ("--top-k 64,\u00b2", "--top-k must be numbers from 1 to 2147483647"),
        ("--requests " + "9" * 5000, "no tensor is named 999"),
        ("--chunk 2147483648", "--chunk must be at most 2147483647, got 2147483648"),
        ("--top-k 64,x", "--top-k must be numbers from 1 to 2147483647 such as 64,256, got '64,x'"),
        ("--softmax-scale 0", "--softmax-scale must be positive and finite, got 0.0"),
        ("--softmax-scale nan", "--softmax-scale must be positive and finite, got nan"),
        ("--requests 0,1", "request of each of the 3 groups, got 2"),
        ("--requests 0,1,3", "requests must be 0 to 2, the requests of the cache, got 3"),
        ("--requests nothing", "no tensor is named nothing; found queries"),
        ("--rows-per-group 4", "must make whole groups of 4 (see --rows-per-group), got 6"),
        ("--rows-per-group 3", "2 groups cannot be spread evenly over the 3 requests of the keys"),
        ("--rows-per-group 9", "rows per group must be 1 to 8 (see --rows-per-group), got 9"),
        ("--rows-per-group 0", "--rows-per-group must be at least 1, got 0"),
        ("--query-name other", "no tensor is named other; found queries"),
        ("--chunk 0", "--chunk must be at least 1, got 0"),
        ("--graph-replay 0", "--graph-replay must be at least 1, got 0"),
        ("--backend fpga", "error: Invalid value for '--backend': 'fpga' is not one of"),
        ("--topk 64", "error: No such option: --topk (Possible options: --top-k); see sdsa score"),
        ("--device tpu", "--device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        ("--keys keys", "--keys keys names a tensor of --baseline, which is not given"),
        ("--baseline missing.safetensors", "missing.safetensors: cannot be read"),
    ],
    ids=lambda value: value if value.startswith("--") and " must" not in value else "",
)
def test_bad_usage_is_one_line_and_exit_code_2(files: Files, options: str, message: str) -> None:
    # CASES 73.
    refused = files.score(*options.split())
    refused.fails_with(2, message)
    assert refused.stdout == ""


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(6, 64), "tensor queries must be [rows, 128]"),
        (torch.zeros(6, 127), "got [6, 127]"),
        (torch.zeros(6, 256), "got [6, 256]"),
        (torch.zeros(6, 128, dtype=torch.uint8), "unquantized query rows"),
        (torch.zeros(6, 32, dtype=torch.uint8), "got U8 [6, 32]"),
        (
            torch.full((6, 128), math.inf),
            "queries.safetensors, tensor queries: query rows must be finite, but row 0 is not",
        ),
        (torch.zeros(0, 128), "must make whole groups of 2 (see --rows-per-group), got 0 rows"),
    ],
    ids=["64", "127", "256", "uint8-128", "uint8-32", "infinite", "no-rows"],
)
def test_queries_that_are_none(files: Files, tensor: torch.Tensor, message: str) -> None:
    # CASES 7 and 36.
    files.save_queries(tensor)
    files.score().fails_with(2, message)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", "4"),
        ("nibble_order", "high-first"),
        ("layout", "planar"),
        ("scale_order", "tiled"),
        ("page_size", "32"),
        ("dim", "64"),
        ("values", "fp8"),
        ("rule", "amax/7"),
    ],
)
def test_an_unknown_header_value_is_named(files: Files, field: str, value: str) -> None:
    # CASES 32.
    with safe_open(files.cache, framework="pt") as file:
        metadata = file.metadata()
    save_file(load_file(files.cache), files.cache, metadata | {field: value})
    named = f"{files.cache}: header field {field} must be"
    files.score().fails_with(2, named, f"got {value!r}")


def test_a_cache_with_a_broken_table_fails_its_check(files: Files) -> None:
    with safe_open(files.cache, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(files.cache)
    tensors["block_table"][0, 0] = 77
    save_file(tensors, files.cache, metadata)
    files.score().fails_with(1, "block_table[0, 0] must be a page")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_that_is_not_there_is_exit_code_3(files: Files) -> None:
    files.score("--device", "cuda").fails_with(3, "--device cuda: this process sees 0 CUDA")


def test_scores_beyond_memory_are_refused_before_anything_is_written(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    # CASES 64: 6 rows x 249 keys x 4 bytes.
    monkeypatch.setattr(chunks, "available_bytes", lambda device: 5_000)
    output = files.folder / "scores.safetensors"
    refused = files.score("-o", output)
    refused.fails_with(3, "needs 5,976 bytes (6 rows x 249 keys x 4 bytes)", "--chunk 2")
    assert not output.exists()
    files.score("-o", output, "--chunk", 2).is_clean()


def test_what_is_no_cache_is_told_from_a_damaged_one(files: Files) -> None:
    scores = files.folder / "scores.st"
    files.score("-o", scores).is_clean()
    for file, format_found in ((files.keys, "none"), (scores, "sdsa-scores")):
        files.cache = file
        named = f"{file}: is not a cache (format in its header: {format_found})"
        files.score().fails_with(2, named, "sdsa quantize-cache makes")
    files.cache = files.folder
    files.score().fails_with(2, "is a folder; score one cache file of it at a time")


@pytest.mark.parametrize("option", ["-o", "--report"])
def test_an_output_that_cannot_be_is_refused_before_any_work(files: Files, option: str) -> None:
    files.cache.write_text("not read")
    blocked = files.keys / "deep" / "file"
    files.score(option, blocked).fails_with(2, f"{blocked}: cannot be", f"{files.keys} is not a fo")
    files.score(option, files.folder).fails_with(2, "must be a file to write, but is a folder")
    same = files.folder / "same"
    files.score("-o", same, "--report", same).fails_with(
        2, "two outputs cannot go to the same file"
    )


def test_folders_of_outputs_are_made_unless_the_inputs_are_wrong(files: Files) -> None:
    outputs = (files.folder / "a" / "b" / "scores.st", files.folder / "c" / "report.json")
    options = ("-o", outputs[0], "--report", outputs[1])
    files.score(*options, "--query-name", "wrong").fails_with(2, "no tensor is named wrong")
    assert not outputs[0].parents[1].exists()
    files.score(*options).is_clean()
    assert all(path.is_file() for path in outputs)
