"""Pictures of a study, from its report, as PNG bytes.

A panel is a transform and a colour is a format wherever both are shown, so that the pictures can be
read side by side.
"""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sdsa_cli.text import visible
from sdsa_quant.errors import UnsupportedError
from sdsa_quant.layout import E2M1_MAX, E4M3_MIN, E4M3_MIN_NORMAL, NVFP4_MAX

from .tables import leading_setting

if TYPE_CHECKING:
    from sdsa_quant.accuracy.summary import Statistic
    from sdsa_quant.study.report import StudyReport
    from sdsa_quant.study.results import LengthBin, SettingResult


# Okabe and Ito's colours, which most colour-blind readers can tell apart.
_COLOURS = {
    "bf16": "#000000",
    "nvfp4": "#D55E00",
    "nvfp4-mixed": "#E69F00",
    "nvfp4-4over6": "#CC79A7",
    "nvfp4-search": "#8C564B",
    "nvfp4-search-mixed": "#C49C94",
    "nvfp4-covariance": "#0072B2",
    "nvfp4-covariance-mixed": "#F0E442",
    "mxfp4": "#56B4E9",
    "fp8": "#009E73",
}
_MARKERS = "osD^vP*X<>hpd8H1234+x|_"
PLOTS = (
    "recall-by-layer",
    "recall-by-bytes",
    "recall-by-length",
    "score-errors",
    "channel-errors",
    "block-magnitudes",
)
PNG_TITLE = "sdsa study"  # in the file, by which a picture is known to be a study's
_DPI = 100
_PANELS_PER_LINE = 4
_WIDE = 10.0  # inches
_ENTRIES_PER_LINE = 4  # of a legend under a narrower figure
_MAGNITUDE_COLUMNS = 3  # of the legend under the block magnitudes
_STYLES: tuple[tuple[Statistic, str], ...] = (("mean", "-"), ("p1", ":"))
_LINE_STYLES = ("-", "--", "-.", ":")
_ROWS_LABELLED = 48  # of the channel map, 8 inches high at most
_LAYERS_LABELLED = 12  # of an axis
_LEVEL_LABELS = 4  # characters of a layer's label that stands level
_MOST_LABEL = 40  # characters of a layer's label
_MOST_PATTERN = 100  # characters of what layers' names have in common
_ENTRY_HEIGHT = 0.18  # inches of an entry in a legend beside a picture
_SIZE_WIDTH = 0.8  # of the column of one size; columns are 1 apart


def choose_plots(asked: bool | None, note: Callable[[str], None]) -> bool:
    """Whether to draw pictures, decided before a long run.

    Parameters
    ----------
    asked : bool or None
        ``--plots`` or ``--no-plots``; None for neither, which draws where it can.
    note : callable
        Is told where pictures are left out, and what to install.

    Raises
    ------
    UnsupportedError
        Pictures are asked for, and matplotlib is not installed.
    """
    if asked is False or importlib.util.find_spec("matplotlib") is not None:
        return asked is not False
    missing = "matplotlib, which is not installed: pip install 'matplotlib>=3.8'"
    if asked:
        raise UnsupportedError(f"the plots need {missing}, or leave them out with --no-plots")
    note(
        f"note: no pictures, which need {missing}; then `sdsa report FOLDER` draws them, and "
        f"--no-plots leaves them out without this note"
    )
    return False


def study_plots(report: StudyReport) -> dict[str, bytes]:
    """PNG by file name without its suffix; pictures of what was not measured are left out."""
    makers: tuple[Callable[[StudyReport], Any], ...] = (
        plot_recall_by_layer,
        plot_recall_by_bytes,
        plot_recall_by_length,
        plot_score_errors,
        plot_channel_errors,
        plot_block_magnitudes,
    )
    from matplotlib import rc_context

    plots = {}
    # Names are text, whatever is between two dollar signs.
    with rc_context({"text.parse_math": False}):
        for name, make in zip(PLOTS, makers, strict=True):
            figure = make(report)
            if figure is not None:
                plots[name] = _png(figure)
    return plots


@dataclass(frozen=True, slots=True)
class _LayerLabels:
    """Short names of a study's layers."""

    labels: tuple[str, ...]
    pattern: str  # what they have in common, such as ``layers.*.keys``

    @property
    def title(self) -> str:
        """What an axis of layers is called."""
        return "layer" if self.pattern == "*" else f"layer, * of {self.pattern}"


def _layer_labels(report: StudyReport) -> _LayerLabels:
    from sdsa_quant.files.names import without_common_ends

    pattern, names = without_common_ends([layer.name for layer in report.layers])
    if "" in names:  # one name is the beginning of another
        pattern, names = "*", [layer.name for layer in report.layers]
    return _LayerLabels(
        tuple(_drawable(name, _MOST_LABEL) for name in names), _drawable(pattern, _MOST_PATTERN)
    )


def _drawable(name: str, most: int) -> str:
    """A name in what the font has letters for, others written out; the middle of a long one left
    out."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties()))
    text = "".join(
        each if font.get_char_index(ord(each)) else each.encode("unicode_escape").decode()
        for each in visible(name)
    )
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


def _png(figure: Any) -> bytes:
    data = io.BytesIO()
    # No software version in the file, so that the same study gives the same bytes.
    figure.savefig(data, format="png", dpi=_DPI, metadata={"Software": None, "Title": PNG_TITLE})
    return data.getvalue()


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _panels(report: StudyReport, height: float, **shared: Any) -> tuple[Any, list[Any]]:
    """A figure with one titled panel for each transform."""
    labels = report.transforms
    across = min(len(labels), _PANELS_PER_LINE)
    down = math.ceil(len(labels) / across)
    figure = _figure(max(6.4, 3.4 * across + 1.2), height * down + 0.7)
    axes = figure.subplots(down, across, squeeze=False, **shared).flatten().tolist()
    for spare in axes[len(labels) :]:
        spare.remove()
    for axis, label in zip(axes, labels, strict=False):
        axis.set_title("no transform" if label == "none" else label, fontsize=10)
        axis.grid(alpha=0.3, linewidth=0.6)
    return figure, axes[: len(labels)]


def _format_legend(figure: Any, axes: Sequence[Any], *, title: str | None = None) -> None:
    handles, labels = axes[0].get_legend_handles_labels()
    # One line of entries if there is room for it.
    one_line = figure.get_figwidth() > _WIDE or len(labels) <= _ENTRIES_PER_LINE
    columns = len(labels) if one_line else math.ceil(len(labels) / 2)
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=columns,
        fontsize=9,
        frameon=False,
        title=title,
        title_fontsize=8,
    )


def _colour(name: str) -> str:
    return _COLOURS[name]


def _overall(report: StudyReport, format_name: str, transform: str) -> SettingResult:
    return next(
        result
        for result in report.overall
        if (result.format, result.transform) == (format_name, transform)
    )


def _k_name(report: StudyReport) -> str:
    return f"recall@{report.settings.top_k[report.leading_index]:,}"


def plot_recall_by_layer(report: StudyReport) -> Any:
    """Mean recall of every layer, worst 1 % as a thin line; settings in a list for one layer."""
    if len(report.layers) == 1:
        return _plot_recall_by_setting(report)
    figure, axes = _panels(report, 2.7, sharey=True)
    k_index, layers = report.leading_index, _layer_labels(report)
    for axis, transform in zip(axes, report.transforms, strict=True):
        for name in report.formats:
            results = report.by_layer(name, transform)
            for statistic, style in _STYLES:
                recalls = [result.recall(k_index).statistic(statistic) for result in results]
                axis.plot(
                    range(len(recalls)),
                    [math.nan if value is None else value for value in recalls],
                    style,
                    color=_colour(name),
                    label=name if statistic == "mean" else None,
                    linewidth=1.5 if statistic == "mean" else 1.0,
                    marker="o" if statistic == "mean" and len(recalls) <= 16 else None,
                    markersize=3,
                )
        _label_layers(axis, layers)
    axes[0].set_ylabel(f"{_k_name(report)}\n(dotted: worst 1 % of rows)")
    _format_legend(figure, axes, title=layers.title)
    return figure


def _label_layers(axis: Any, layers: _LayerLabels) -> None:
    """Name layers, evenly chosen ones of many."""
    step = math.ceil(len(layers.labels) / _LAYERS_LABELLED)
    shown = range(0, len(layers.labels), step)
    labels = [layers.labels[index] for index in shown]
    slanted = max(map(len, labels)) > _LEVEL_LABELS
    axis.set_xticks(
        list(shown),
        labels,
        fontsize=8,
        rotation=45 if slanted else 0,
        ha="right" if slanted else "center",
        rotation_mode="anchor" if slanted else None,
    )


def _plot_recall_by_setting(report: StudyReport) -> Any:
    """Every setting on a line of its own: mean, median, worst 1 % and worst row."""
    k_index = report.leading_index
    results = [result for result in report.overall if result.recall(k_index).mean is not None]
    if not results:
        return None
    figure = _figure(7.6, 0.24 * len(results) + 1.4)
    axis = figure.subplots()
    for height, result in enumerate(results):
        recall = result.recall(k_index)
        colour = _colour(result.format)
        axis.plot([recall.minimum, recall.maximum], [height] * 2, color=colour, linewidth=1.2)
        axis.plot(recall.mean, height, "o", color=colour, markersize=6)
        axis.plot(recall.minimum, height, "|", color=colour, markersize=9)
    axis.set_yticks(range(len(results)), [result.label for result in results], fontsize=8)
    axis.set_ylim(len(results) - 0.5, -0.5)
    axis.grid(axis="x", alpha=0.3, linewidth=0.6)
    axis.set_xlabel(f"{_k_name(report)}: mean (dot), worst to best row (line)")
    return figure


def plot_recall_by_bytes(report: StudyReport) -> Any:
    """Mean recall against the size of a key; a marker is a transform."""
    k_index, labels, names = report.leading_index, report.transforms, report.formats
    results = [each for each in report.overall if each.recall(k_index).mean is not None]
    if not results:
        return None
    sizes = sorted({result.bytes_per_key for result in results})
    entries = len(names) + (len(labels) if len(labels) > 1 else 0)
    figure = _figure(7.6, max(4.2, _ENTRY_HEIGHT * entries + 0.6))
    axis = figure.subplots()
    for column, size in enumerate(sizes):
        # Settings of one size stand side by side.
        same_size = [result for result in results if result.bytes_per_key == size]
        same_size.sort(key=lambda result: names.index(result.format))
        for index, result in enumerate(same_size):
            axis.plot(
                column + _SIZE_WIDTH * ((index + 0.5) / len(same_size) - 0.5),
                result.recall(k_index).mean,
                linestyle="none",
                marker=_MARKERS[labels.index(result.transform) % len(_MARKERS)],
                color=_colour(result.format),
                markersize=6,
            )
    axis.set_xticks(range(len(sizes)), [f"{size} bytes" for size in sizes])
    axis.set_xlim(-0.5, len(sizes) - 0.5)
    axis.set_xlabel("size of a key (settings of one size side by side)")
    axis.set_ylabel(f"mean {_k_name(report)}")
    axis.grid(axis="y", alpha=0.3, linewidth=0.6)
    _two_legends(figure, names, labels)
    return figure


def _two_legends(figure: Any, names: Sequence[str], labels: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], linestyle="none", marker="s", color=_colour(name), label=name)
        for name in names
    ]
    if len(labels) > 1:
        handles += [
            Line2D(
                [],
                [],
                linestyle="none",
                marker=_MARKERS[index % len(_MARKERS)],
                color="#777777",
                label="no transform" if label == "none" else label,
            )
            for index, label in enumerate(labels)
        ]
    figure.legend(handles=handles, loc="outside right upper", fontsize=8, frameon=False)


def plot_recall_by_length(report: StudyReport) -> Any:
    """Mean recall by context length, over all layers, beside what chance gives."""
    k_index = report.leading_index
    k = report.settings.top_k[k_index]
    results = report.overall
    recalls = [
        value
        for result in results
        for each in result.by_length
        if (value := each.recall[k_index]) is not None
    ]
    if len({each.longest for each in results[0].by_length if each.rows_longer_than_k[k_index]}) < 2:
        return None  # no row was measured, or all are about as long
    figure, axes = _panels(report, 2.7, sharey=True)
    for axis, transform in zip(axes, report.transforms, strict=True):
        bins: Sequence[LengthBin] = ()
        for name in report.formats:
            bins = [
                each
                for each in _overall(report, name, transform).by_length
                if each.recall[k_index] is not None
            ]
            axis.plot(
                [each.longest for each in bins],
                [each.recall[k_index] for each in bins],
                "o-",
                color=_colour(name),
                label=name,
                markersize=4,
                linewidth=1.3,
            )
        lengths = [each.longest for each in bins]
        axis.plot(
            lengths,
            [min(k, length) / length for length in lengths],
            "--",
            color="#999999",
            label="chance, where in view",
            linewidth=1.0,
        )
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=45, fontsize=8)
        axis.minorticks_off()
        axis.set_xlabel("keys seen, up to")
    lowest = min(recalls)
    axes[0].set_ylim(lowest - 0.08 * (1 - lowest) - 0.01, 1 + 0.08 * (1 - lowest))
    axes[0].set_ylabel(f"mean {_k_name(report)}")
    _format_legend(figure, axes)
    return figure


def plot_score_errors(report: StudyReport) -> Any:
    """How often scores are off by how much, in standard deviations of the row's scores."""
    steps = report.settings.error_steps
    if not any(sum(result.error_counts) for result in report.overall):
        return None
    figure, axes = _panels(report, 2.7, sharey=True, sharex=True)
    edges = [(index - steps) / steps for index in range(2 * steps + 1)]
    widest = 0.0
    for axis, transform in zip(axes, report.transforms, strict=True):
        for name in report.formats:
            counts = _overall(report, name, transform).error_counts
            total = sum(counts)
            if name == "bf16" or not total:
                continue
            shares = [count / total for count in counts]
            axis.stairs(shares, edges, color=_colour(name), label=name, linewidth=1.3)
            seen = [abs(edges[i]) for i, each in enumerate(shares) if each > 1e-4]
            widest = max([widest, *seen])
        axis.set_xlabel("score error / spread of the row's scores", fontsize=9)
    axes[0].set_yscale("log")
    # Its own labels are mathematics, which text between dollar signs is not here.
    axes[0].yaxis.set_major_formatter("{x:g}")
    axes[0].yaxis.set_minor_formatter("")
    axes[0].set_ylim(1e-5, 1)
    axes[0].set_xlim(-min(1.0, widest + 0.05), min(1.0, widest + 0.05))
    axes[0].set_ylabel("share of scores")
    _format_legend(figure, axes)
    return figure


def plot_channel_errors(report: StudyReport) -> Any:
    """Error of every channel of the keys: by layer, or by setting if there is one layer."""
    labels, rows = _channel_rows(report)
    if not rows:
        return None
    figure = _figure(8.6, max(2.2, min(0.22 * len(rows), 8.0) + 1.4))
    axis = figure.subplots()
    image = axis.imshow(rows, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0)
    shown = range(0, len(rows), math.ceil(len(rows) / _ROWS_LABELLED))
    axis.set_yticks(list(shown), [labels[index] for index in shown], fontsize=8)
    if len(report.layers) > 1:
        layers = _layer_labels(report)
        axis.set_title(f"Keys in {leading_setting(report).label}\n{layers.title}", fontsize=9)
    axis.set_xticks(range(0, 128, 16))
    axis.set_xlabel("channel of the key")
    figure.colorbar(image, ax=axis, label="RMS error / RMS of all values", pad=0.01)
    return figure


def _channel_rows(report: StudyReport) -> tuple[list[str], list[Sequence[float]]]:
    """Labels and errors: of every setting for one layer, else of every layer for the setting to
    take; what was stored without loss has nothing to show."""
    if len(report.layers) == 1:
        named = [(result.label, result.channel_errors) for result in report.overall]
    else:
        leading = leading_setting(report)
        results = report.by_layer(leading.format, leading.transform)
        labels = _layer_labels(report).labels
        named = [(each, of.channel_errors) for each, of in zip(labels, results, strict=True)]
    defined = [(label, errors) for label, errors in named if errors is not None and any(errors)]
    return [label for label, _ in defined], [errors for _, errors in defined]


def plot_block_magnitudes(report: StudyReport) -> Any:
    """Largest magnitudes of the blocks of 16, shaded in the range of coarse or clipped scales."""
    first = report.settings.first_exponent
    figure = _figure(
        7.6, 3.4 + _ENTRY_HEIGHT * math.ceil(len(report.transforms) / _MAGNITUDE_COLUMNS)
    )
    axis = figure.subplots()
    used: set[int] = set()
    for index, each in enumerate(each for each in report.blocks if each.layer is None):
        counts = each.profile.by_exponent
        blocks = each.profile.blocks
        if not blocks:
            continue
        used |= {index for index, count in enumerate(counts) if count}
        edges = [first + index for index in range(len(counts) + 1)]
        axis.stairs(
            [count / blocks for count in counts],
            edges,
            label="no transform" if each.transform == "none" else each.transform,
            linewidth=1.6,
            linestyle=_LINE_STYLES[index % len(_LINE_STYLES)],
            color=f"C{index}",
        )
    if not used:
        return None
    low, high = first + min(used) - 1, first + max(used) + 2
    subnormal = math.log2(E2M1_MAX * E4M3_MIN_NORMAL)
    flushed = math.log2(E2M1_MAX * E4M3_MIN / 2)
    saturated = math.log2(NVFP4_MAX)
    axis.axvspan(low, max(low, flushed), color="#D55E00", alpha=0.18, linewidth=0)
    axis.axvspan(max(low, flushed), max(low, subnormal), color="#E69F00", alpha=0.18, linewidth=0)
    axis.axvspan(min(high, saturated), high, color="#CC79A7", alpha=0.25, linewidth=0)
    axis.set_xlim(low, high)
    axis.set_xlabel("log2 of a block's largest magnitude, after transform and gain")
    axis.set_ylabel("share of blocks")
    axis.set_title(
        "shaded, if in view: flushed (red), subnormal scales (orange), saturated (pink)", fontsize=9
    )
    axis.grid(alpha=0.3, linewidth=0.6)
    figure.legend(loc="outside lower center", ncols=_MAGNITUDE_COLUMNS, fontsize=8, frameon=False)
    return figure
