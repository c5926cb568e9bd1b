"""The page of a study: complete in itself, and alive in a browser where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sdsa_quant.study import StudyReport
from support.studies import FAST

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
LAYERS = 61
NAME = "model.layers.{}.<indexer>.keys"
# Sorts the layers by a click and points at a cell, then leaves what a reader would see.
SCRIPT = """<script>{
const map = document.querySelector("table.map");
const names = () => [...map.rows].slice(1).map(row => row.cells[0].textContent);
const before = names();
const button = map.rows[0].cells[1].querySelector("button");
button.click();
const up = [...map.rows].slice(1).map(row => Number(row.cells[1].textContent));
button.click();
const down = [...map.rows].slice(1).map(row => Number(row.cells[1].textContent));
map.rows[1].cells[2].dispatchEvent(new MouseEvent("mouseenter"));
const tip = document.getElementById("tip");
const shown = !tip.hidden && tip.getBoundingClientRect().width > 0;
map.rows[1].cells[2].dispatchEvent(new MouseEvent("mouseleave"));
document.title = JSON.stringify({
  rows: before.length,
  up: up.every((value, index) => index === 0 || up[index - 1] <= value),
  down: down.every((value, index) => index === 0 || down[index - 1] >= value),
  moved: names().join() !== before.join(),
  tip: tip.textContent, shown, hidden: tip.hidden,
  wide: document.documentElement.scrollWidth <= innerWidth,
  dark: getComputedStyle(document.body).backgroundColor,
});
}</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a study of 61 layers, whose names hold what HTML would obey."""
    from typer.testing import CliRunner

    from sdsa_cli.app import app

    folder, generator = tmp_path_factory.mktemp("page"), torch.Generator().manual_seed(3)
    tensors = {}
    for layer in range(LAYERS):
        keys = torch.randn(70, 128, generator=generator) + layer % 5
        tensors[NAME.format(layer)] = keys.bfloat16()
        queries = torch.randn(3, 128, generator=generator).bfloat16()
        tensors[NAME.format(layer).replace("keys", "queries")] = queries
    save_file(tensors, folder / "many.safetensors")
    files = [str(folder / "many.safetensors")] * 2
    options = ("--formats", "nvfp4,fp8", "--rotate", "none,hadamard", "--top-k", "16")
    words = ["study", *files, "-o", str(folder / "out"), *options, "--no-plots", *FAST]
    done = CliRunner().invoke(app, [*words, "--goal", "recall@16=0.9"])
    assert done.exit_code == 0, done.output
    return folder / "out" / "report.html"


def test_every_layer_is_in_the_map_with_its_figures(page: Path) -> None:
    html, report = page.read_text(), StudyReport.read(page.parent)
    assert "<indexer>" not in html
    tips = re.findall(r'data-tip="([^"]*)">([^<]*)</td>', html)
    assert len(tips) == LAYERS * len(report.overall)
    cells = iter(tips)
    for layer in report.layers:
        for result in report.of_layer(layer.name):
            tip, text = next(cells)
            recall = result.recall(0)
            assert recall.mean is not None
            assert layer.name.replace("<", "&lt;").replace(">", "&gt;") in tip
            assert f"{result.label}, {result.bytes_per_key} bytes a key" in tip
            assert f"{recall.rows} rows longer than k" in tip
            assert text.replace("&gt;", ">") in (f"{recall.mean:.4f}", ">0.9999")
    for anchor in re.findall(r'href="#([^"]*)"', html):
        assert f'id="{anchor}"' in html
    assert not re.search(r'(src|href)="(?!#|data:)', html)
    assert len(html) < 5_000_000


@pytest.mark.skipif(BROWSER is None, reason="there is no browser")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [500, 1280], ids=["phone", "desktop"])
def test_a_browser_sorts_and_shows(page: Path, tmp_path: Path, scheme: str, width: int) -> None:

    copy = tmp_path / "page.html"
    copy.write_text(page.read_text().replace("</body>", f"{SCRIPT}</body>"))
    assert BROWSER is not None
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},900")
    chosen = ("--blink-settings=preferredColorScheme=0",) if scheme == "dark" else ()
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    words = (BROWSER, *options, *chosen, profile, "--dump-dom", f"file://{copy}")
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stderr
    seen = json.loads(title[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert seen["rows"] == LAYERS
    assert (seen["up"], seen["down"], seen["moved"]) == (True, True, True)
    assert (seen["shown"], seen["hidden"]) == (True, True)
    assert "<indexer>" in seen["tip"]
    assert "recall@16" in seen["tip"]
    assert seen["wide"], "nothing makes the page wider than the window"
    assert seen["dark"] == ("rgb(22, 24, 27)" if scheme == "dark" else "rgb(255, 255, 255)")
