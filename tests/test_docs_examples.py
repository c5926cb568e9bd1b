"""The examples of the how-to pages run, and the page of environment variables has them all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
ENGINE = DOCS / "how-to" / "serve-from-an-engine.md"
BLOCKS = re.compile(r"```python\n(.*?)```", re.DOTALL)


def run_blocks(blocks: list[str], page: Path) -> dict[str, Any]:
    """Run the blocks of a page one after another in one namespace."""
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
    return names


def expected_scores(names: dict[str, Any], length: int) -> torch.Tensor:
    """Scores of the first request's rows, from the decoded keys and query rows."""
    from sdsa_quant import dequantize_nvfp4

    keys = dequantize_nvfp4(names["key_cache"], names["key_scales"]).view(-1, 128)[:length]
    query = dequantize_nvfp4(names["query_codes"], names["query_scales"])[:2]
    return query.double() @ keys.double().T


def test_an_engine_step_scores_what_it_wrote() -> None:
    blocks = BLOCKS.findall(ENGINE.read_text(encoding="utf-8"))
    before_the_graph = [block for block in blocks if "CUDAGraph" not in block]
    assert len(before_the_graph) == len(blocks) - 1 == 5
    source = [block.replace('"cuda" if', '"cpu" if') for block in before_the_graph]
    names = run_blocks(source, ENGINE)
    torch.testing.assert_close(
        names["scores"][:2, :100].double(), expected_scores(names, 100), rtol=1e-5, atol=1e-5
    )
    best = names["scores"][:2, :100].topk(names["k"]).indices.sort().values
    assert torch.equal(names["top_slots"][:2], best.int()), "pages 0 and 1: slots are key indices"
    assert (names["top_slots"][2:] == -1).all()


@pytest.mark.gpu
def test_a_captured_engine_step_scores_what_it_wrote() -> None:
    names = run_blocks(BLOCKS.findall(ENGINE.read_text(encoding="utf-8")), ENGINE)
    torch.cuda.synchronize()
    torch.testing.assert_close(
        names["scores"][:2, :65].double(), expected_scores(names, 65), rtol=1e-5, atol=1e-5
    )


def test_every_environment_variable_is_on_its_page() -> None:
    used = set()
    for folder in ("quant", "kernels", "sdsa_cli", "tests"):
        for source in (ROOT / folder).rglob("*.py"):
            used |= set(re.findall(r"\bSDSA_[A-Z][A-Z0-9_]+", source.read_text(encoding="utf-8")))
    page = (DOCS / "reference" / "environment.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(SDSA_[A-Z0-9_]+)`", page))
    assert documented == used


def test_the_readme_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    monkeypatch.chdir(tmp_path)
    page = ROOT / "README.md"
    names = run_blocks(BLOCKS.findall(page.read_text(encoding="utf-8")), page)
    printed = dict(line.rsplit(" ", 1) for line in capsys.readouterr().out.splitlines())
    assert 0.8 < float(printed["nvfp4"]) < float(printed["fp8"]) < 1
    for group, length in enumerate(names["lengths"].tolist()):
        row = names["scores"][2 * group, :length]
        assert row.isfinite().all()
        assert row.abs().max() > 1
