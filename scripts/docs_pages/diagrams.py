"""Pictures of how things lie: the way through the tools, records, tiles, tables, shares.

Sizes that the code defines are taken from it, so that a picture cannot say something else.
"""

from __future__ import annotations

import itertools

from sdsa_quant.layout import (
    BLOCK,
    CODE_PAGE_BYTES,
    NVFP4_RECORD_BYTES,
    PACKED_DIM,
    PAGE,
    SCALES_PER_KEY,
)

from .svg import (
    BLUE,
    GREEN,
    INK,
    LINE,
    ORANGE,
    PALE,
    PALE_BLUE,
    PALE_GREEN,
    PALE_ORANGE,
    PALE_PURPLE,
    PURPLE,
    QUIET,
    Drawing,
)

PALES = (PALE_BLUE, PALE_ORANGE, PALE_GREEN, PALE_PURPLE)
COLORS = (BLUE, ORANGE, GREEN, PURPLE)


def overview() -> str:
    """Capture, quantize, score, study, serve: what goes from one to the next."""
    drawing = Drawing(
        860, 270, "From captured keys to an engine: capture, quantize, score, study, serve"
    )
    width, height, top = 150, 84, 30
    steps = (
        ("1 capture", "forward hooks", "keys, queries, lengths", PALE, 20),
        ("2 quantize", "sdsa quantize-cache", "a paged cache file", PALE_BLUE, 243),
        ("3 score", "sdsa score", "recall, errors, time", PALE_GREEN, 466),
        ("5 serve", "indexer_scores", "in a CUDA graph", PALE_PURPLE, 689),
    )
    for title, command, gives, fill, x in steps:
        _step(drawing, x, top, width, height, (title, command, gives), fill)
    middle = top + height / 2
    for (*_, left), (*_, right) in itertools.pairwise(steps):
        drawing.arrow((left + width + 3, middle), (right - 4, middle))
    for x, words in ((206, "keys"), (429, "cache"), (652, "if it holds")):
        drawing.text(x, middle - 8, words, size=12, color=QUIET, anchor="middle")
    study_top, study_left = 166, 243
    study = ("4 study", "sdsa study", "which format, which transform")
    _step(drawing, study_left, study_top, 373, height, study, PALE_ORANGE)
    drawing.arrow((95, top + height + 3), (95, study_top + 42), (study_left - 4, study_top + 42))
    drawing.text(106, study_top + 34, "keys and queries of", size=12, color=QUIET)
    drawing.text(106, study_top + 58, "every layer", size=12, color=QUIET)
    drawing.arrow((318, study_top - 3), (318, top + height + 4))
    drawing.text(326, 146, "what to build", size=12, color=QUIET)
    drawing.arrow((616, study_top + 42), (764, study_top + 42), (764, top + height + 4))
    drawing.text(628, study_top + 34, "what it costs", size=12, color=QUIET)
    return drawing.svg()


def _step(
    drawing: Drawing,
    x: float,
    y: float,
    width: float,
    height: float,
    words: tuple[str, str, str],
    fill: str,
) -> None:
    title, command, gives = words
    middle = x + width / 2
    drawing.box(x, y, width, height, fill=fill, radius=8)
    drawing.text(middle, y + 25, title, size=15, bold=True, anchor="middle")
    drawing.text(middle, y + 47, command, size=12, mono=True, anchor="middle")
    drawing.text(middle, y + 69, gives, size=12, color=QUIET, anchor="middle")


def page_record() -> str:
    """One page's bytes in an interleaved NVFP4 cache, and one key of them."""
    drawing = Drawing(760, 330, "One NVFP4 record: 64 keys' codes, then their scales")
    scale_bytes = NVFP4_RECORD_BYTES - CODE_PAGE_BYTES
    left, width = 30, 700
    codes = width * 0.8
    drawing.text(
        left, 32, f"One record: a page of {PAGE} keys, {NVFP4_RECORD_BYTES:,} bytes", bold=True
    )
    drawing.box(left, 62, codes, 44, fill=PALE_BLUE)
    drawing.box(left + codes, 62, width - codes, 44, fill=PALE_ORANGE)
    drawing.text(
        left + codes / 2,
        89,
        f"codes: {PAGE} keys x {PACKED_DIM} bytes = {CODE_PAGE_BYTES:,}",
        anchor="middle",
    )
    drawing.text(
        left + (codes + width) / 2,
        89,
        f"scales: {PAGE} x {SCALES_PER_KEY} = {scale_bytes}",
        anchor="middle",
        size=12,
    )
    for x, label, anchor in (
        (left, "byte 0", "start"),
        (left + codes, f"byte {CODE_PAGE_BYTES:,}", "middle"),
        (left + width, f"byte {NVFP4_RECORD_BYTES:,}", "end"),
    ):
        drawing.text(x, 56, label, size=11, color=QUIET, anchor=anchor)
    for number in range(1, 5):
        drawing.line((left + 14 * number, 62), (left + 14 * number, 106))
    drawing.text(left, 156, f"One key: {PACKED_DIM + SCALES_PER_KEY} bytes", bold=True)
    drawing.line((left + 14, 106), (left, 170), color=LINE, dashed=True)
    drawing.line((left + 28, 106), (left + codes, 170), color=LINE, dashed=True)
    block = codes / SCALES_PER_KEY
    for number in range(SCALES_PER_KEY):
        fill = PALE_BLUE if number % 2 else "#e6f2f9"
        drawing.box(left + block * number, 170, block, 40, fill=fill)
        drawing.text(
            left + block * (number + 0.5), 188, f"block {number}", size=11, anchor="middle"
        )
        drawing.text(
            left + block * (number + 0.5),
            203,
            f"{BLOCK} values",
            size=10,
            color=QUIET,
            anchor="middle",
        )
        step = (width - codes - 10) / SCALES_PER_KEY
        x = left + codes + 10 + step * number
        drawing.box(x, 170, step, 40, fill=PALE_ORANGE if number % 2 else "#fdf5e3")
        drawing.text(x + step / 2, 194, f"s{number}", size=11, anchor="middle")
    drawing.text(left, 252, "One byte of codes, low nibble first", bold=True)
    for number, (words, fill) in enumerate(
        (("value 2i + 1: bits 7 to 4", PALE_GREEN), ("value 2i: bits 3 to 0", PALE_PURPLE))
    ):
        drawing.box(left + 190 * number, 266, 190, 34, fill=fill)
        drawing.text(left + 190 * number + 95, 288, words, size=12, anchor="middle")
    drawing.text(
        left + 400,
        282,
        "a code is E2M1: sign, 2 exponent bits, 1 mantissa bit",
        size=12,
        color=QUIET,
    )
    drawing.text(
        left + 400, 299, "value = code x the scale of its block of 16", size=12, color=QUIET
    )
    return drawing.svg()


def tiled_scales() -> str:
    """The 128x4 order: a tile of 128 rows and 4 columns in 32 lines of 16 bytes."""
    drawing = Drawing(
        760, 350, "The 128x4 order of scales: four rows, 32 apart, share a line of 16 bytes"
    )
    drawing.text(30, 32, "Scale matrix: 128 rows x 4 columns", bold=True)
    drawing.text(330, 32, "In memory: 32 lines of 16 bytes = 512 bytes", bold=True)
    top, height = 62, 248
    quarter = height / 4
    for number in range(4):
        y = top + quarter * number
        drawing.box(60, y, 150, quarter, fill=PALES[number])
        drawing.text(52, y + 16, f"{32 * number}", size=11, color=QUIET, anchor="end")
        for row, offset in ((32 * number, 18), (32 * number + 1, 36)):
            drawing.text(135, y + offset, f"row {row}:  c0 c1 c2 c3", size=11, anchor="middle")
        drawing.text(135, y + 54, "...", size=11, color=QUIET, anchor="middle")
    drawing.text(52, top + height, "128", size=11, color=QUIET, anchor="end")
    line = height / 8
    for index in range(7):
        y = top + (line + 4) * index
        if index == 3:
            drawing.text(530, y + 20, "...", color=QUIET, anchor="middle")
            continue
        number = index if index < 3 else 25 + index
        drawing.text(322, y + 20, f"{16 * number}", size=11, color=QUIET, anchor="end")
        for part in range(4):
            x = 330 + 100 * part
            drawing.box(x, y, 100, line, fill=PALES[part])
            drawing.text(
                x + 50, y + 20, f"row {number + 32 * part}: c0-c3", size=11, anchor="middle"
            )
    drawing.arrow((218, top + 12), (286, top + 14))
    drawing.text(
        30,
        338,
        "byte of row r, column c:  (r // 128 * 2 + c // 4) * 512  +  r % 32 * 16"
        "  +  r % 128 // 32 * 4  +  c % 4",
        size=12,
        mono=True,
        color=INK,
    )
    return drawing.svg()


def block_table() -> str:
    """How a request's keys are found: block table, pages, lengths."""
    drawing = Drawing(760, 325, "The block table says in which page each 64 keys of a request lie")
    drawing.text(30, 32, "block_table", bold=True, mono=True)
    drawing.text(250, 32, "context_lengths", bold=True, mono=True)
    drawing.text(440, 32, "pages of the cache", bold=True)
    table = ((5, 0, 3), (2, -1, -1), (1, 4, -1))
    lengths = (150, 64, 100)
    owner = {page: request for request, row in enumerate(table) for page in row if page >= 0}
    used = {
        page: min(PAGE, length - PAGE * block)
        for row, length in zip(table, lengths, strict=True)
        for block, page in enumerate(row)
        if page >= 0
    }
    for request, row in enumerate(table):
        y = 70 + 58 * request
        drawing.text(30, y + 23, f"request {request}", size=12, color=QUIET)
        for block, page in enumerate(row):
            x = 100 + 44 * block
            drawing.box(x, y, 44, 36, fill=PALES[request] if page >= 0 else "#ffffff")
            drawing.text(
                x + 22, y + 23, str(page), anchor="middle", color=INK if page >= 0 else LINE
            )
        drawing.box(270, y, 60, 36, fill=PALES[request])
        drawing.text(300, y + 23, str(lengths[request]), anchor="middle")
    for page in range(6):
        y = 50 + 36 * page
        drawing.box(480, y, 200, 30)
        share = used[page] / PAGE
        drawing.box(480, y, 200 * share, 30, fill=PALES[owner[page]])
        drawing.text(472, y + 20, f"page {page}", size=12, color=QUIET, anchor="end")
        drawing.text(580, y + 20, f"{used[page]} keys", size=12, anchor="middle")
    drawing.text(
        30, 292, "Key k of a request is row k % 64 of page block_table[request, k // 64].", size=13
    )
    drawing.text(
        30,
        313,
        "Only entries of pages below a length are read; the unused ones are -1.",
        size=12,
        color=QUIET,
    )
    return drawing.svg()


def shares() -> str:
    """The pages of all groups as one list, cut into equal shares."""
    drawing = Drawing(
        760, 250, "Cost follows the keys: one list of pages, cut into equal contiguous shares"
    )
    pages = (7, 2, 12, 3)
    drawing.text(30, 32, "The pages that the lengths define, group by group", bold=True)
    size, x, total = 28, 30, sum(pages)
    for group, count in enumerate(pages):
        drawing.text(
            x + size * count / 2, 58, f"group {group}", size=12, color=QUIET, anchor="middle"
        )
        for number in range(count):
            drawing.box(x + size * number, 66, size, size, fill=PALES[group])
            drawing.text(x + size * (number + 0.5), 85, str(number), size=11, anchor="middle")
        x += size * count
    teams = 6
    each = total / teams
    for team in range(teams):
        left, right = 30 + size * each * team, 30 + size * each * (team + 1)
        drawing.line(
            (left + 3, 108), (left + 3, 116), (right - 3, 116), (right - 3, 108), color=QUIET
        )
        drawing.arrow(((left + right) / 2, 116), ((left + right) / 2, 142))
        drawing.box(left + 4, 144, right - left - 8, 30, fill=PALE, radius=5)
        drawing.text((left + right) / 2, 164, f"team {team}", size=12, anchor="middle")
    drawing.text(
        30,
        206,
        "Every team takes as many pages as every other, wherever groups begin and end:",
        size=13,
    )
    drawing.text(
        30,
        226,
        "one long request uses the whole GPU, and the width of the scores does not matter.",
        size=13,
    )
    return drawing.svg()
