"""`sdsa bench` on a CPU: shapes, checks, its table and its document."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import get_args

import pytest
import torch
from rich.console import Console

from sdsa_cli.bench import command as bench
from sdsa_cli.bench.document import BenchResult
from sdsa_cli.bench.shapes import parse_shape, read_lengths_file
from sdsa_cli.bench.tables import bench_tables
from sdsa_cli.measurement import measurement_fields
from sdsa_cli.options import BackendName
from sdsa_kernels import backend_names
from sdsa_kernels.backends import AUTO
from sdsa_kernels.measure import measurement as measure
from sdsa_kernels.measure.clocks import Clocks
from sdsa_kernels.measure.measurement import Measurement
from sdsa_kernels.measure.timing import Rotation, Timing
from sdsa_kernels.measure.traffic import Traffic
from sdsa_kernels.testing import compare as score_check
from sdsa_kernels.testing.problems import Shape, synthetic_problems
from sdsa_quant.errors import CheckFailedError, InputError, UnsupportedError
from sdsa_quant.layout import FORMAT_PAIRS
from support.command_line import Run

QUICK = ("--repeats", "2", "--device", "cpu")


def test_document(sdsa: Run) -> None:
    shapes = ("--shape", "3,2,100,300", "--shape", "1,8,64")
    outcome = sdsa("bench", *shapes, *QUICK, "--check", "--json")
    outcome.is_clean()
    document = outcome.document
    assert document["command"] == "bench"
    results = document["results"]
    assert [(r["shape"]["name"], r["format_pair"]) for r in results] == [
        (name, values) for name in ("(3,2,100,300)", "(1,8,64)") for values in FORMAT_PAIRS
    ]
    first = results[1]
    assert first["format_pair"] == "nvfp4"
    assert first["backend"] == "torch"
    assert first["replay"] == "eager"
    assert first["checked"] is True
    assert first["repeats"] == 2
    assert first["shape"]["max_context"] == 300
    assert first["shape"]["keys"] == 300
    assert first["key_bytes"] == 3 * 2 * 4608
    assert first["query_bytes"] == 6 * 72
    assert first["score_bytes"] == 3 * 100 * 2 * 4
    assert first["gather_share"] is None
    assert first["host_us"] is None


def test_without_options_it_measures_the_default_shapes(
    sdsa: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "DEFAULT_SHAPES", ("1,1,64", "2,8,65"))
    outcome = sdsa("bench")
    outcome.is_clean()
    shapes = [line.split()[0] for line in outcome.stdout.splitlines() if line[:1] == "("]
    assert set(shapes) == {"(1,1,64)", "(2,8,65)"}
    assert len(shapes) >= 2 * len(FORMAT_PAIRS), "a remark may follow"


def test_options_of_graphs_are_remarked_on_without_a_gpu(sdsa: Run) -> None:
    outcome = sdsa("bench", "--shape", "1,1,64", "--format-pair", "bf16", "--hot", *QUICK)
    assert outcome.exit_code == 0
    assert "on a CPU they do nothing" in outcome.stderr


def test_table_and_file(sdsa: Run, tmp_path: Path) -> None:
    report = tmp_path / "bench.json"
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("100\n\n0\n70\n")
    words = (
        "bench",
        "--lengths-file",
        lengths,
        "--format-pair",
        "nvfp4",
        *QUICK,
        "--report",
        report,
    )
    outcome = sdsa(*words)
    outcome.is_clean()
    assert "lengths.txt" in outcome.stdout
    assert "torch" in outcome.stdout
    assert '"keys": 170' in report.read_text()
    sdsa(*words).fails_with(2, "bench.json", "--force")
    sdsa(*words, "--force").is_clean()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--shape", "1,2"), ("--shape must be GROUPS,ROWS,LENGTH", "1,2")),
        (("--shape", "1,x,3"), ("--shape must be", "1,x,3")),
        (("--shape", "1,9,64"), ("--shape must have 1 to 8 rows", "1,9,64")),
        (("--shape", "0,1,64"), ("--shape must be", "from 1")),
        (("--shape", "1,1,64,63"), ("MAX_CONTEXT of at least its LENGTH",)),
        (("--format-pair", "bf16,fp8"), ("--format-pair must be of bf16, nvfp4, mixed", "fp8")),
        (("--backend", "cuda"), ("--backend must be of auto, cute, triton, torch", "cuda")),
        (("--repeats", "0"), ("--repeats must be at least 1, got 0",)),
        (("--repeats", "1" + "0" * 21), ("--repeats must be at most 2147483647",)),
        (("--seed", "1" + "0" * 21), ("--seed", "2147483647")),
        (("--calls-per-replay", "0"), ("--calls-per-replay must be at least 1, got 0",)),
        (("--lengths-file", "missing.txt"), ("missing.txt",)),
    ],
)
def test_bad_usage(sdsa: Run, words: tuple[str, ...], expected: tuple[str, ...]) -> None:
    sdsa("bench", *QUICK, *words).fails_with(2, *expected)


def test_a_backend_that_cannot_run_is_not_replaced(sdsa: Run) -> None:
    outcome = sdsa("bench", "--shape", "1,1,64", "--backend", "triton", *QUICK)
    outcome.fails_with(3, "backend triton cannot run here", "CUDA device")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one group"),
        ("12\nx\n", "line 2"),
        ("0\n", "at least one group that has any"),
        ("9" * 5000, r"line 1 must be a group's keys, 0 to 2147483647, got '9{60}\.\.\.'"),
    ],
    ids=["empty", "word", "zero", "5000-digits"],
)
def test_bad_lengths_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_lengths_file(path)


def test_a_lengths_file_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe: must be a regular file"):
        read_lengths_file(tmp_path / "pipe")


@pytest.mark.parametrize(
    "number",
    ["0", "-1", "1" + "0" * 21, "9" * 5000, "\u00b2"],
    ids=["zero", "negative", "10^21", "5000-digits", "superscript"],
)
def test_a_shape_of_other_than_int32_sizes_is_refused(number: str) -> None:
    with pytest.raises(InputError, match=r"--shape must be .* from 1 to 2147483647, got '1,1,"):
        parse_shape(f"1,1,{number}")


def test_shapes() -> None:
    shape = parse_shape("32,4,4096,1048576")
    assert shape.lengths == (4096,) * 32
    assert shape.rows_per_group == 4
    assert shape.max_context == 1_048_576
    assert shape.name == "(32,4,4K,1M)"
    assert parse_shape("2,1,5").max_context == 5
    assert parse_shape("70000,1,65536").name == "(70000,1,64K)"


@pytest.mark.parametrize("values", FORMAT_PAIRS)
def test_rotations_read_different_pages(values: str) -> None:
    shape = Shape((130, 64, 0), 2, 200)
    problems = synthetic_problems(shape, values, torch.device("cpu"), rotations=3, seed=1)
    pages = torch.cat([problem.block_table[problem.block_table >= 0] for problem in problems])
    assert pages.unique().numel() == pages.numel() == 3 * 4
    again = synthetic_problems(shape, values, torch.device("cpu"), rotations=3, seed=1)
    assert torch.equal(again[2].block_table, problems[2].block_table)
    assert torch.equal(again[0].query, problems[0].query)


def test_too_little_memory_is_said_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdsa_kernels.testing.problems.available_bytes", lambda device: 10_000)
    with pytest.raises(UnsupportedError, match="needs 14,080 bytes for 3 rotations"):
        synthetic_problems(Shape((64,), 1, 64), "nvfp4", torch.device("cpu"), rotations=3, seed=1)


@pytest.mark.parametrize("values", FORMAT_PAIRS)
def test_the_check_finds_a_wrong_score(values: str) -> None:
    shape = Shape((130, 0, 64), 2, 200)
    problem = synthetic_problems(shape, values, torch.device("cpu"), rotations=1, seed=1)[0]
    problem.scores.fill_(score_check.UNTOUCHED)
    measure.scoring_call(problem, "torch")()
    score_check.compare_scores(problem)
    right = problem.scores[5, 63].clone()
    problem.scores[5, 63] += max(1.0, 0.01 * abs(float(right)))
    with pytest.raises(CheckFailedError, match="group 2, row 1, key 63: score"):
        score_check.compare_scores(problem)
    problem.scores[5, 63] = float("nan")
    with pytest.raises(CheckFailedError, match="group 2, row 1, key 63"):
        score_check.compare_scores(problem)
    problem.scores[5, 63] = right
    problem.scores[3, 7] = 0.0
    with pytest.raises(CheckFailedError, match="group 1: an entry past its length 0"):
        score_check.compare_scores(problem)


def measurement(median_us: float, rotation: Rotation) -> Measurement:
    timing = Timing("graph", (median_us,))
    return Measurement(timing, Traffic(1, 10**9, 0, 0), 1, rotation, timing, 4.0e12, 1.0, 2.0)


def test_bandwidth_above_the_roof_is_the_caches() -> None:
    cold = Rotation(3, 300, 100)
    honest = measurement(500.0, cold)  # 2 TB/s
    assert not honest.cache_resident
    assert honest.read_share == 0.5
    above = measurement(200.0, cold)  # 5 TB/s, more than the memory reads
    assert above.cache_resident
    assert above.read_share is None
    warm = measurement(500.0, Rotation(1, 100, 100))
    assert warm.cache_resident
    assert warm.read_share is None


def test_a_gpus_tables_fit_80_columns() -> None:
    shape = parse_shape("32,1,4096,1048576")
    cold = Rotation(3, 300, 100)
    results = [
        BenchResult(shape, values, "triton", measurement(time_us, cold), True, 1234.5, 905.2)
        for values, time_us in (("nvfp4", 512.34), ("mixed", 1234.56), ("bf16", 201.0))
    ]
    console = Console(width=80, file=io.StringIO())
    console.print(*bench_tables(results))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    assert "1,234.6" in text
    assert "0.49" in text  # 2 of 4 TB/s
    assert "cache-resident" in text


@pytest.mark.parametrize(
    ("samples", "clocks", "said"),
    [
        ((100.0,) * 9 + (2500.0, 2500.0), Clocks(1980, 1980, None), "p90 is 25.0 times p10"),
        ((100.0,) * 10, Clocks(1980, 1410, None), "the SM clock fell from 1,980 to 1,410 MHz"),
        ((100.0,) * 10, Clocks(None, None, "no nvidia-smi"), "SM clock unknown: no nvidia-smi"),
        ((100.0,) * 10, Clocks(1980, 1965, None), "SM clock 1,980 MHz before, 1,965 after"),
    ],
    ids=["spread", "throttled", "unknown", "steady"],
)
def test_what_is_odd_about_a_time_is_said(
    samples: tuple[float, ...], clocks: Clocks, said: str
) -> None:
    timing = Timing("graph", samples)
    cold = Rotation(3, 300, 100)
    measured = Measurement(timing, Traffic(1, 10**6, 0, 0), 1, cold, timing, 4e12, 1.0, 2.0, clocks)
    shape = parse_shape("1,1,64")
    results = [BenchResult(shape, "nvfp4", "cute", measured, True, "not here", "needs BF16 keys")]
    console = Console(width=120, file=io.StringIO())
    console.print(*bench_tables(results))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert said in text
    assert "flashinfer -: not here (every line)" in text
    assert "bmm -: needs BF16 keys (every line)" in text
    remarks = measurement_fields(measured)["remarks"]
    assert any(said in remark for remark in remarks) == (
        "SM clock u" not in said and "before" not in said
    )


def test_graphs_that_do_nothing_fail_the_run(sdsa: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "scoring_call", lambda problem, backend: lambda: None)
    for words in ((), ("--check",)):
        outcome = sdsa("bench", "--shape", "1,1,64", *QUICK, *words)
        outcome.fails_with(1, "two plain calls wrote different scores, or none, to row 0")


def test_the_backend_option_lists_every_backend() -> None:
    assert sorted(get_args(BackendName)) == sorted([AUTO, *backend_names()])
