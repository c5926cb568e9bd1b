"""`sdsa study` from files to pages, and every way it ends."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sdsa_cli.study import plots as study_plots
from sdsa_cli.study.plots import study_plots as draw
from sdsa_quant import study
from sdsa_quant.formats.key_formats import KEY_FORMATS
from sdsa_quant.study import StudyReport, whole_study
from sdsa_quant.study.inputs import DEFAULT_FORMATS
from support.command_line import Run, program
from support.studies import FAST, PICTURES, PNG, Studies, same_page, save_layers

REPORT_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "reports" / "study.md"


@pytest.fixture
def studies(sdsa: Run, tmp_path: Path, generator: torch.Generator) -> Studies:
    return Studies(sdsa, tmp_path, generator)


def without_timing(document: dict[str, Any]) -> dict[str, Any]:
    """A report without what is another every time: durations, its date and its command line."""
    environment = dict(document["environment"])
    assert environment.pop("date").startswith("20")
    del environment["command_line"]
    kept = {name: value for name, value in document.items() if name != "timing"}
    return kept | {"environment": environment}


def test_the_real_keys(sdsa: Run, real: Path, tmp_path: Path) -> None:
    outcome = sdsa(
        "study", real, real, "-o", tmp_path / "report", "--lengths", "lengths", *FAST,
        "--formats", "bf16,nvfp4,fp8", "--rotate", "none,hadamard", "--top-k", "64,256",
    )  # fmt: skip
    outcome.is_clean()
    for words in ("Recall of the unquantized keys", "hadamard", "0.8906", "At 72 bytes a key"):
        assert words in outcome.stdout
    files = {path.name for path in (tmp_path / "report").iterdir()}
    pictures = {f"{name}.png" for name in PICTURES}
    assert files == {"report.json", "report.csv", "report.html"} | pictures
    for name in pictures:
        assert (tmp_path / "report" / name).read_bytes().startswith(PNG)
    document = json.loads((tmp_path / "report" / "report.json").read_text())
    overall = {
        (each["format"], each["transform"]): each["accuracy"]["top_k"][0]["recall"]["mean"]
        for each in document["results"]
        if each["layer"] is None
    }
    assert overall["bf16", "none"] == 1.0
    assert 0.89 < overall["nvfp4", "none"] < overall["nvfp4", "hadamard"]
    assert overall["nvfp4", "hadamard"] < overall["fp8", "none"] < overall["fp8", "hadamard"]


def test_rotation_helps_an_outlier_channel(
    studies: Studies, sdsa: Run, tmp_path: Path, generator: torch.Generator
) -> None:
    # CASES 38: one channel 50 times the others; keys and queries otherwise Gaussian.
    keys = torch.randn(1000, 128, generator=generator)
    keys[:, 5] *= 50
    queries = torch.randn(8, 128, generator=generator)
    queries[:, 5] = 0
    path = tmp_path / "outlier.safetensors"
    save_file({"keys": keys.bfloat16(), "queries": queries.bfloat16()}, path)
    options = ("--formats", "nvfp4", "--rotate", "none,hadamard", "--top-k", "32", "--no-plots")
    sdsa("study", path, path, "-o", tmp_path / "out", *options, *FAST).is_clean()
    plain, rotated = studies.document("out")["results"][:2]
    assert rotated["transform"] == "hadamard"
    for statistic in ("mean", "p1"):
        recall = [each["accuracy"]["top_k"][0]["recall"][statistic] for each in (plain, rotated)]
        assert all(value is not None for value in recall)
    outliers = [each["profile"]["outliers"] for each in studies.document("out")["blocks"][:2]]
    assert outliers[0] > 10 * outliers[1]


def test_the_default_formats_are_all_but_the_baseline(studies: Studies) -> None:
    studies.run("out", "--top-k", "5").is_clean()
    names = [each["name"] for each in studies.document("out")["settings"]["formats"]]
    assert names == list(DEFAULT_FORMATS) == [name for name in KEY_FORMATS if name != "bf16"]


# The command and the call.


def same(report: StudyReport) -> StudyReport:
    """The report without what differs from run to run."""
    timing = dataclasses.replace(report.timing, seconds=0.0, workers=1)
    environment = dataclasses.replace(report.environment, date="", command_line="")
    return dataclasses.replace(report, timing=timing, environment=environment)


def test_the_call_and_the_command_make_the_same_report(studies: Studies) -> None:
    options = ("--rotate", "none,hadamard", "--center", "channel", "--gain", "none,2^3")
    studies.run("command", "--formats", "bf16,fp8", "--top-k", "5", *options).is_clean()
    report = study.run(
        studies.layers,
        studies.layers,
        studies.folder / "call",
        lengths="*.lengths",
        formats=["bf16", "fp8"],
        rotate=["none", "hadamard"],
        center=["channel"],
        gain=["none", "2^3"],
        top_k=[5],
    )
    assert same(report) == same(StudyReport.read(studies.folder / "command"))


def test_the_call_and_the_command_have_the_same_defaults(studies: Studies) -> None:
    studies.run("command").is_clean()
    path = studies.layers
    report = study.run(path, path, studies.folder / "call", lengths="*.lengths")
    assert same(report) == same(StudyReport.read(studies.folder / "command"))


# Documents and tables.


def test_the_document_is_the_same_on_stdout_and_in_the_folder(studies: Studies) -> None:
    outcome = studies.run("out", "--json", "--formats", "nvfp4")
    outcome.is_clean()
    assert outcome.document == studies.document("out")


def test_every_field_is_documented(studies: Studies) -> None:
    studies.run("out", "--rotate", "none,hadamard").is_clean()
    words = set(re.findall(r"`([A-Za-z_0-9]+)`", REPORT_PAGE.read_text()))

    def names(value: Any) -> set[str]:
        if isinstance(value, dict):
            return set(value).union(*map(names, value.values()))
        if isinstance(value, list):
            return set().union(*map(names, value))
        return set()

    document = studies.document("out")
    del document["environment"]  # described with sdsa score
    missing = names(document) - words
    assert not missing, f"docs/reference/reports/study.md does not describe {sorted(missing)}"


def test_names_like_numbers_stay_names_and_undefined_is_null(sdsa: Run, tmp_path: Path) -> None:
    # CASES 58: all scores are 0, so that ratios are undefined; the layer is called NaN.Infinity.
    path = tmp_path / "zero.safetensors"
    save_file({"NaN.Infinity": torch.zeros(90, 128), "queries": torch.ones(2, 128)}, path)
    options = ("--keys", "NaN.Infinity", "--formats", "nvfp4", "--top-k", "8")
    outcome = sdsa("study", path, path, "-o", tmp_path / "out", *options, *FAST, "--json")
    layer = outcome.document["results"][1]
    assert layer["layer"] == "NaN.Infinity"
    assert layer["accuracy"]["cosine"]["mean"] is None
    assert layer["key_error"] is None
    # CASES 25: every key is as good as any other, which is not a merit of a format.
    assert layer["accuracy"]["rows_constant"] == 2
    assert layer["accuracy"]["top_k"][0]["recall"]["minimum"] is None


def test_the_csv_has_a_line_for_each_layer_setting_and_k(studies: Studies) -> None:
    studies.run("out", "--formats", "nvfp4,fp8", "--top-k", "5,64").is_clean()
    with (studies.folder / "out" / "report.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == (1 + 3) * 2 * 2
    assert [line["layer"] for line in lines[::4]] == ["", *(f"layers.{n}.keys" for n in (0, 2, 10))]
    first = studies.document("out")["results"][0]["accuracy"]
    assert float(lines[0]["recall_mean"]) == first["top_k"][0]["recall"]["mean"]
    assert float(lines[0]["cosine_min"]) == first["cosine"]["minimum"]
    assert lines[0]["no_better_than_chance"] == "False"


class Page(HTMLParser):
    """Checks that every element is closed, and collects what a page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in ("img", "meta", "link", "br"):
            self.open.append(tag)
        named = [value or "" for name, value in attributes if name in ("src", "href")]
        self.sources += [value for value in named if not value.startswith("#")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_no_other_file(
    sdsa: Run, tmp_path: Path, generator: torch.Generator
) -> None:
    path = tmp_path / "odd.safetensors"
    keys, queries = (torch.rand(rows, 128, generator=generator) for rows in (90, 2))
    save_file({"<b>.keys": keys, "<b>.queries": queries}, path)
    options = ("--formats", "nvfp4,fp8", "--top-k", "8", *FAST)
    sdsa("study", path, path, "-o", tmp_path / "out", *options).is_clean()
    page = Page()
    page.feed((tmp_path / "out" / "report.html").read_text())
    assert page.open == []
    assert len(page.sources) == len(PICTURES) - 1, "all rows are as long, so none by length"
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert "<b>.keys" in page.text
    assert "At 72 bytes a key" in page.text


@pytest.mark.slow
def test_a_terminal_of_80_columns_shows_every_number(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--rotate", "none,hadamard", "--gain", "none,auto", "--center", "none,channel")
    studies.run("out", *options).is_clean()
    words, rows = [], []
    for columns in ("80", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        text = studies.sdsa("report", studies.folder / "out", "--no-plots").stdout
        rows.append([line for line in text.splitlines() if line.startswith("  nvfp4")])
        words.append([word for word in text.split() if word[:1].isdigit()])
    assert len(rows[0]) == 2 * 3 * 8, "two tables, three formats, eight transforms"
    assert max(map(len, rows[0])) <= 80
    assert not Counter(words[1]) - Counter(words[0]), "what breaks off goes below names again"


@pytest.mark.parametrize(
    ("factor", "said"),
    [(1e5, "100 % of NVFP4's blocks saturate"), (1e-5, "flushed to zero"), (1, "")],
)
def test_keys_out_of_range_are_said_in_words(
    sdsa: Run, tmp_path: Path, generator: torch.Generator, factor: float, said: str
) -> None:
    path = tmp_path / "k.safetensors"
    keys = torch.randn(100, 128, generator=generator)
    save_file({"keys": keys * factor, "queries": torch.randn(4, 128)}, path)
    words = ("--formats", "nvfp4,fp8", "--gain", "none,auto", "--top-k", "8", "--no-plots")
    outcome = sdsa("study", path, path, "-o", tmp_path / "out", *words, *FAST)
    page = unescape((tmp_path / "out" / "report.html").read_text())
    for shown in (outcome.stdout, page):
        assert ("OUT OF RANGE" in shown) == bool(said)
        assert said in shown
        assert "gain auto, " not in shown.partition("OUT OF RANGE")[2].partition("gain would")[0]


def test_layers_come_worst_first(studies: Studies) -> None:
    outcome = studies.run("out", "--formats", "nvfp4", "--top-k", "8")
    table = outcome.stdout.partition("worst layers first")[2].partition("Relative L2")[0]
    means = [
        float(value) for value in re.findall(r"^layers\.\d+\.keys +([\d.]+)", table, re.MULTILINE)
    ]
    assert len(means) == 3
    assert means == sorted(means)


def test_flushed_keys_are_reported(sdsa: Run, tmp_path: Path, generator: torch.Generator) -> None:
    path = tmp_path / "tiny.safetensors"
    keys = torch.randn(1000, 128, generator=generator) * 2.0**-14
    queries = torch.randn(8, 128, generator=generator)
    save_file({"keys": keys.bfloat16(), "queries": queries.bfloat16()}, path)
    options = ("--formats", "nvfp4", "--gain", "none,auto", "--top-k", "64", "--no-plots", *FAST)
    outcome = sdsa("study", path, path, "-o", tmp_path / "out", *options)
    outcome.is_clean()
    assert "NO BETTER THAN CHANCE: nvfp4 at k = 64 in every layer" in outcome.stdout
    assert "chance: nvfp4, gain auto" not in outcome.stdout
    flat = " ".join(outcome.stdout.split())
    assert "At 72 bytes a key: nvfp4, gain auto" in flat
    assert re.search(r"no transform +1 +100 %", outcome.stdout)


# Ending.


@pytest.mark.parametrize(
    ("factor", "flushed", "saturated"),
    [(1e-3, 32, 0), (1e-9, 32, 0), (1e5, 0, 32), (1.0, 0, 0)],
    ids=str,
)
def test_query_rows_that_formats_lose_are_told(
    sdsa: Run,
    tmp_path: Path,
    generator: torch.Generator,
    factor: float,
    flushed: int,
    saturated: int,
) -> None:
    keys, queries = (torch.randn(n, 128, generator=generator) for n in (300, 4))
    save_file({"keys": keys, "queries": queries * factor}, tmp_path / "f.safetensors")
    files = (tmp_path / "f.safetensors", tmp_path / "f.safetensors", "-o", tmp_path / "report")
    options = ("--formats", "nvfp4,nvfp4-mixed,mxfp4", "--top-k", "16", "--no-plots", *FAST)
    answer = sdsa("study", *files, *options)
    report = StudyReport.read(tmp_path / "report")
    rows_lost = {each.format: each.query_rows_lost for each in report.overall}
    assert rows_lost == {"nvfp4": 0 if factor == 1.0 else 4, "nvfp4-mixed": 0, "mxfp4": 0}
    profile = report.blocks[0].query_profile
    assert (profile.blocks, profile.flushed, profile.saturated) == (32, flushed, saturated)
    assert ("QUERY ROWS LOST: nvfp4 loses more than 0.25" in answer.stdout) == (factor != 1.0)
    assert "LOST: mxfp4" not in answer.stdout


def test_limits(studies: Studies) -> None:
    kept = ("--fail-below", "recall@5.p1=0.1", "--fail-below", "cosine.min=0.5")
    studies.run("out", "--formats", "fp8", "--top-k", "5", *kept).is_clean()
    broken = ("--fail-below", "recall@5.mean=0.9999", "--fail-below", "mass@5.mean=0.1")
    outcome = studies.run("again", "--formats", "nvfp4,fp8", "--top-k", "5", *broken)
    outcome.fails_with(1, "below the limit", "recall@5.mean=0.9999", "with nvfp4", "with fp8")
    assert "mass@5" not in outcome.stderr
    assert studies.document("again")["command"] == "study", "the report is there all the same"


@pytest.mark.parametrize(
    "limit",
    [
        *("recall@5.p1", "recall.p1=0.5", "cosine@5.p1=0.5", "recall@5.p2=0.5", "recall@5.p1=x"),
        *("recall@\u00b2.p1=0.5", f"recall@{'9' * 5000}.p1=0.5"),
    ],
    ids=["no-limit", "no-k", "k", "statistic", "number", "superscript", "5000-digits"],
)
def test_refuses_a_limit(studies: Studies, limit: str) -> None:
    outcome = studies.run("out", "--top-k", "5", "--fail-below", limit)
    outcome.fails_with(2, "--fail-below must be like recall@2048.p1=0.95", repr(limit))
    assert not (studies.folder / "out").exists()


def test_refuses_a_limit_of_an_unmeasured_k(studies: Studies) -> None:
    outcome = studies.run("out", "--top-k", "5", "--fail-below", "recall@64.p1=0.5")
    outcome.fails_with(2, "k must be one of --top-k 5, got 64")


def test_rows_that_are_not_finite_fail_the_run(sdsa: Run, tmp_path: Path) -> None:
    # CASES 56.
    queries = torch.ones(2, 128)
    queries[1] = 3e38
    path = tmp_path / "large.safetensors"
    keys = torch.full((20, 128), 100.0)
    keys[0] = 90.0  # so that not all are equal
    save_file({"keys": keys, "queries": queries}, path)
    options = ("--formats", "fp8", "--top-k", "2", "--no-plots", *FAST)
    outcome = sdsa("study", path, path, "-o", tmp_path / "out", *options)
    outcome.fails_with(1, "1 rows have a score or baseline score that is not finite, with fp8")
    accuracy = json.loads((tmp_path / "out" / "report.json").read_text())["results"][0]["accuracy"]
    assert (accuracy["rows_invalid"], accuracy["rows_measured"]) == (1, 1)
    assert accuracy["top_k"][0]["recall"]["mean"] == 1.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--formats", "int4"), "format must be one of bf16, nvfp4"),
        (("--rotate", "givens"), "rotate must be one of none, hadamard"),
        (("--gain", "3"), "gain must be none, auto or a power of two"),
        (("--center", "row"), "center must be one of none, channel"),
        (("--top-k", "0"), "--top-k must be numbers from 1"),
        (("--workers", "0"), "--workers must be at least 1"),
        (("--keys", "nothing"), "no tensor is named nothing"),
        (("--lengths", "nothing"), "no tensor is named nothing"),
    ],
)
def test_refuses_options(studies: Studies, options: tuple[str, str], words: str) -> None:
    studies.run("out", *options).fails_with(2, words)
    assert not (studies.folder / "out").exists()


def test_an_existing_report_is_kept_without_force(studies: Studies) -> None:
    studies.run("out", "--formats", "nvfp4").is_clean()
    before = (studies.folder / "out" / "report.json").read_bytes()
    studies.run("out", "--formats", "fp8").fails_with(2, "report.json: exists already", "--force")
    assert (studies.folder / "out" / "report.json").read_bytes() == before
    studies.run("out", "--formats", "fp8", "--force").is_clean()
    assert studies.document("out")["results"][0]["format"] == "fp8"


def test_without_matplotlib_a_study_has_no_pictures_and_says_how_to_get_them(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_plots.importlib.util, "find_spec", lambda name: None)
    options = [each for each in studies.arguments("out", *FAST) if each != "--no-plots"]
    outcome = studies.sdsa(*options, "--plots")
    outcome.fails_with(3, "need matplotlib", "pip install 'matplotlib>=3.8'", "--no-plots")
    assert not (studies.folder / "out").exists(), "it is said before the work, not after it"
    for arguments in (options, ["report", studies.folder / "out"]):
        outcome = studies.sdsa(*arguments)
        assert outcome.exit_code == 0
        assert "no pictures, which need matplotlib, which is not installed" in outcome.stderr
        assert "pip install 'matplotlib>=3.8'" in outcome.stderr
        assert not list((studies.folder / "out").glob("*.png"))


# Ranks, workers, kills.


OPTIONS = ("--formats", "nvfp4,fp8", "--rotate", "none,hadamard", "--gain", "auto", "--no-plots")


@pytest.mark.slow
def test_workers_change_nothing(studies: Studies, sdsa_process: Run) -> None:
    studies.run("one", *OPTIONS).is_clean()
    sdsa_process(
        *studies.arguments("two", *OPTIONS, "--workers", "2", "--device", "cpu")
    ).is_clean()
    assert without_timing(studies.document("one")) == without_timing(studies.document("two"))
    assert studies.document("two")["timing"]["workers"] == 2
    for name in ("report.csv", "report.html"):
        files = [same_page(studies.folder / output / name) for output in ("one", "two")]
        assert files[0] == files[1]


@pytest.mark.slow
def test_two_ranks_change_nothing(studies: Studies) -> None:
    studies.run("one", *OPTIONS).is_clean()
    arguments = studies.arguments("two", *OPTIONS, "--device", "cpu")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "sdsa_cli", *arguments]
    answer = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("Recall of the unquantized keys") == 1, "one rank reports"
    assert without_timing(studies.document("one")) == without_timing(studies.document("two"))
    timing = studies.document("two")["timing"]
    assert timing["ranks"] == 2
    assert timing["joined_by"] == "gloo"
    assert not (studies.folder / "two" / "work").exists()


@pytest.mark.slow
def test_a_killed_study_continues_to_the_same_result(
    studies: Studies, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [200] * 60
    studies.layers = save_layers(studies.layers, generator, lengths=many)
    studies.run("whole", *OPTIONS).is_clean()
    work = studies.folder / "cut" / "work"
    options = studies.arguments("cut", *OPTIONS, *FAST)
    with subprocess.Popen(program(*options), stdout=subprocess.PIPE) as process:
        deadline = time.monotonic() + 100
        while len(list(work.glob("layer-*"))) < 20 and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    done = {path.name: path.stat().st_mtime_ns for path in work.glob("layer-*")}
    assert 20 <= len(done) < 180, "the kill fell into the work"
    assert not (studies.folder / "cut" / "report.json").exists()
    seen: list[dict[str, int]] = []
    real = whole_study.summarize_study

    def summarize(study: Any) -> Any:
        seen.append({path.name: path.stat().st_mtime_ns for path in work.glob("layer-*")})
        return real(study)

    monkeypatch.setattr(whole_study, "summarize_study", summarize)
    studies.run("cut", *OPTIONS).is_clean()
    assert done.items() <= seen[0].items(), "what was measured is not measured again"
    assert len(seen[0]) == 180
    assert without_timing(studies.document("cut")) == without_timing(studies.document("whole"))
    assert not work.exists()


@pytest.mark.slow
def test_an_interrupted_study_says_so_once_and_ends_its_workers(
    studies: Studies, generator: torch.Generator
) -> None:
    studies.layers = save_layers(studies.layers, generator, lengths=[400] * 60)
    work = studies.folder / "cut" / "work"
    options = studies.arguments("cut", *OPTIONS, "--workers", "2", "--device", "cpu")
    with subprocess.Popen(
        program(*options), stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        deadline = time.monotonic() + 100
        while len(list(work.glob("layer-*"))) < 3 and time.monotonic() < deadline:
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate()
    assert process.returncode == 130
    assert re.fullmatch(
        r"error: interrupted; the same command goes on from \d+ %\n|error: interrupted\n", stderr
    )
    # multiprocessing's own helper process ends a moment after its parent.
    deadline = time.monotonic() + 20
    while group_lives(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not group_lives(process.pid)
    assert (work / "study.json").exists(), "the next run continues it"


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_unfinished_study_of_other_settings_is_refused(studies: Studies) -> None:
    work = studies.folder / "out" / "work"
    work.mkdir(parents=True)
    (work / "study.json").write_text(json.dumps({"record_version": "1", "settings": "other"}))
    studies.run("out", "--formats", "nvfp4").fails_with(2, "unfinished study", "--force")
    studies.run("out", "--formats", "nvfp4", "--force").is_clean()


# Pictures.


@pytest.mark.slow
def test_pictures_of_many_layers_and_settings(studies: Studies) -> None:
    options = ("--rotate", "none,hadamard", "--gain", "none,auto", "--formats", "bf16,nvfp4,mxfp4")
    studies.run("out", *options, "--top-k", "8").is_clean()
    report = StudyReport.read(studies.folder / "out")
    plots = draw(report)
    assert set(plots) == PICTURES
    assert all(data.startswith(PNG) for data in plots.values())
    assert draw(report) == plots, "the same study gives the same bytes"


def test_pictures_of_what_was_not_measured_are_left_out(sdsa: Run, tmp_path: Path) -> None:
    path = tmp_path / "empty.safetensors"
    keys, lengths = torch.zeros(0, 128), torch.tensor([0])
    save_file({"keys": keys, "queries": torch.ones(2, 128), "lengths": lengths}, path)
    options = ("--lengths", "lengths", "--formats", "nvfp4", *FAST)
    outcome = sdsa("study", path, path, "-o", tmp_path / "out", *options)
    outcome.is_clean()
    assert "2 rows of length 0" in outcome.stdout
    assert draw(StudyReport.read(tmp_path / "out")) == {}


def test_causal_studies(sdsa: Run, real: Path, tmp_path: Path) -> None:
    keys = load_file(real)
    path = tmp_path / "causal.safetensors"
    save_file({"keys": keys["keys"][:200], "queries": keys["keys"][:200].clone()}, path)
    options = ("--causal", "--formats", "nvfp4", "--top-k", "16", "--no-plots", *FAST, "--json")
    document = sdsa("study", path, path, "-o", tmp_path / "out", *options).document
    accuracy = document["results"][0]["accuracy"]
    assert (accuracy["rows"], accuracy["rows_empty"]) == (200, 0)
    assert accuracy["top_k"][0]["rows_longer_than_k"] == 184
    assert [each["rows"] for each in document["results"][0]["by_length"]] == [
        1, 1, 2, 4, 8, 16, 32, 64, 72,
    ]  # fmt: skip
