"""Charts of recorded figures: shares of the roof, and recall against bytes."""

from __future__ import annotations

import re
from pathlib import Path

from sdsa_quant.formats.key_formats import key_format

from . import measurements
from .svg import BLUE, INK, LINE, ORANGE, PALE, QUIET, Drawing

DOCS = Path(__file__).parents[2] / "docs"
BACKEND_COLORS = {"cute": BLUE, "triton": ORANGE}
PLAIN, BEST = "none", "center + hadamard"
TOP_K = 256


def roof_shares() -> str:
    """Share of the page-gather roof, for every shape, pair of formats and backend."""
    found = measurements.results(measurements.BACKENDS)
    shapes = measurements.labels(found)
    row, bar, panel, left, top = 34, 12, 190, 170, 78
    drawing = Drawing(
        left + 3 * (panel + 20) + 10,
        top + row * len(shapes) + 34,
        "Share of the page-gather roof by shape, formats and backend",
    )
    drawing.text(
        20, 30, "Share of the page-gather roof: 1 is as fast as memory allows", size=15, bold=True
    )
    for x, (backend, color) in zip((640, 710), BACKEND_COLORS.items(), strict=True):
        drawing.box(x, 19, 13, 13, fill=color, line=color)
        drawing.text(x + 19, 30, backend)
    drawing.text(20, 62, "groups, rows, keys", size=12, color=QUIET)
    bottom = top + row * len(shapes)
    for number, pair in enumerate(measurements.FORMAT_PAIRS):
        x = left + number * (panel + 20)
        name = {"bf16": "BF16", "nvfp4": "NVFP4"}.get(pair, "BF16 query x NVFP4 keys")
        drawing.text(x, 62, name, bold=True)
        for tenths in (0, 5, 10):
            tick = x + panel * tenths / 10
            drawing.line((tick, top - 6), (tick, bottom), color=PALE)
            drawing.text(
                tick, bottom + 16, f"{tenths / 10:g}", size=11, color=QUIET, anchor="middle"
            )
        for index, label in enumerate(shapes):
            for place, (backend, color) in enumerate(BACKEND_COLORS.items()):
                one = measurements.find(found, label=label, format_pair=pair, backend=backend)
                y = top + row * index + (bar + 1) * place
                width = panel * min(one.gather_share, 1)
                drawing.box(x, y, width, bar, fill=color, line=color)
                drawing.text(
                    x + width - 4,
                    y + 10,
                    f"{one.gather_share:.2f}",
                    size=10,
                    color="#ffffff" if backend == "cute" else INK,
                    anchor="end",
                )
    for index, label in enumerate(shapes):
        drawing.text(left - 10, top + row * index + 17, label, size=12, anchor="end")
    return drawing.svg()


def recall_by_bytes() -> str:
    """Recall against bytes a key, plain and after the best transform, on real keys."""
    recalls = study_recalls()
    drawing = Drawing(640, 330, "Mean recall of the top 256 by bytes of a key")
    left, top, width, height = 70, 56, 520, 210
    least, most, bytes_most = 0.82, 1.0, 280
    drawing.text(
        20, 28, f"Recall@{TOP_K} by bytes a key, one real attention layer", size=15, bold=True
    )

    def at(size: float, recall: float) -> tuple[float, float]:
        return left + width * size / bytes_most, top + height * (most - recall) / (most - least)

    for step in range(10):
        recall = least + 0.02 * step
        y = at(0, recall)[1]
        drawing.line((left, y), (left + width, y), color=PALE)
        drawing.text(left - 8, y + 4, f"{recall:.2f}", size=11, color=QUIET, anchor="end")
    for size in (0, 64, 128, 192, 256):
        x = at(size, least)[0]
        drawing.line((x, top + height), (x, top + height + 5))
        drawing.text(x, top + height + 19, str(size), size=11, color=QUIET, anchor="middle")
    drawing.line((left, top + height), (left + width, top + height), color=LINE)
    drawing.text(left + width, top + height + 36, "bytes a key", size=12, color=QUIET, anchor="end")
    # mxfp4 and nvfp4 are 4 bytes apart: one label goes left, the other right.
    sides = {
        "mxfp4": ("end", -10),
        "nvfp4": ("start", 10),
        "fp8": ("start", 10),
        "bf16": ("end", -10),
    }
    for name, (anchor, offset) in sides.items():
        size = key_format(name).bytes_per_key
        plain, best = at(size, recalls[PLAIN][name]), at(size, recalls[BEST][name])
        drawing.line(plain, best, color=LINE, width=2)
        drawing.dot(*plain, fill="#ffffff", line=BLUE)
        drawing.dot(*best, fill=BLUE, line=BLUE)
        drawing.text(
            plain[0] + offset,
            plain[1] + (18 if name == "bf16" else 4),
            f"{name}, {size} bytes",
            size=12,
            anchor=anchor,
        )
    for x, fill, words in ((70, "#ffffff", "plain"), (140, BLUE, "keys centered and rotated")):
        drawing.dot(x + 6, 311, fill=fill, line=BLUE)
        drawing.text(x + 18, 315, words, size=12)
    return drawing.svg()


def study_recalls() -> dict[str, dict[str, float]]:
    """Mean recall by transform and format, as the tested table of `choose-a-format.md` has it."""
    text = (DOCS / "how-to" / "choose-a-format.md").read_text(encoding="utf-8")
    part = text[text.index(f"Mean recall@{TOP_K}") :]
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in re.findall(r"^\|.*\|$", part.split("\n\n")[1], re.MULTILINE)
    ]
    formats = lines[0][1:]
    return {row[0]: dict(zip(formats, map(float, row[1:]), strict=True)) for row in lines[2:]}
