"""Drawings as SVG text: rectangles, lines, arrows and words, written in a fixed order.

A drawing has a white ground of its own, so that it can be read on a dark page too.
"""

from __future__ import annotations

from html import escape

INK = "#1f2933"
QUIET = "#616e7c"
LINE = "#9aa5b1"
PALE = "#e4e7eb"
# Four colours that people with any colour vision can tell apart (Okabe and Ito).
BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#e69f00", "#009e73", "#cc79a7"
PALE_BLUE, PALE_ORANGE, PALE_GREEN, PALE_PURPLE = "#cfe5f3", "#fae7c0", "#c6e9dd", "#f3dfea"

_FONT = "Helvetica, Arial, DejaVu Sans, sans-serif"
_MONO = "Menlo, Consolas, DejaVu Sans Mono, monospace"


class Drawing:
    """Shapes in the order in which they are added, in pixels from the upper left."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height = width, height
        self._shapes = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" font-family="{_FONT}">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{QUIET}"/></marker>'
            "</defs>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        ]

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "none",
        line: str = LINE,
        radius: float = 0,
        dashed: bool = False,
    ) -> None:
        """A rectangle."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
            f'fill="{fill}" stroke="{line}"{dash}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 13,
        color: str = INK,
        anchor: str = "start",
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        """One line of words; `y` is their base line."""
        weight = ' font-weight="bold"' if bold else ""
        family = f' font-family="{_MONO}"' if mono else ""
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{color}" '
            f'text-anchor="{anchor}"{weight}{family}>{escape(words)}</text>'
        )

    def line(
        self,
        *points: tuple[float, float],
        color: str = LINE,
        width: float = 1,
        dashed: bool = False,
    ) -> None:
        """A line through the points."""
        self._path(points, color, width, dashed, "")

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """A line through the points with a tip at the last one."""
        self._path(points, QUIET, 1.5, dashed, ' marker-end="url(#tip)"')

    def dot(self, x: float, y: float, *, fill: str, line: str, radius: float = 5) -> None:
        """A circle."""
        self._shapes.append(
            f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" fill="{fill}" stroke="{line}" '
            'stroke-width="2"/>'
        )

    def svg(self) -> str:
        """The drawing as a file's text."""
        return "\n".join([*self._shapes, "</svg>\n"])

    def _path(
        self,
        points: tuple[tuple[float, float], ...],
        color: str,
        width: float,
        dashed: bool,
        end: str,
    ) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        way = "L".join(f"{x:g} {y:g}" for x, y in points)
        self._shapes.append(
            f'<path d="M{way}" fill="none" stroke="{color}" stroke-width="{width:g}"{dash}{end}/>'
        )
