"""`sdsa verify`: whether an engine selects what the model selects, and what it gets wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from sdsa_cli.convert.command import BlockTableOption, DumpLengthsOption, LayoutOption, PagesOption
from sdsa_cli.options import ForceFlag, JsonFlag, ReportOption, examples
from sdsa_cli.output import report_sink, table
from sdsa_quant.errors import CheckFailedError

from .document import verify_document

if TYPE_CHECKING:
    from rich.console import RenderableType

    from .document import VerifyDocument

COMMAND = "verify"
EXAMPLES = examples(
    "sdsa verify selections.safetensors captured/",
    "sdsa verify dump.safetensors captured/ --layer layers.0",
)


def verify(
    dump: Annotated[
        str,
        typer.Argument(
            metavar="DUMP",
            help="What an engine selected, a tensor of integers [rows, k] for each layer; or its "
            "cache of one layer, as sdsa convert takes it.",
        ),
    ],
    capture: Annotated[
        str, typer.Argument(metavar="CAPTURE", help="A folder of sdsa capture, of the same texts.")
    ],
    layer: Annotated[
        str | None,
        typer.Option("--layer", metavar="NAME", help="The layer that a cache is of: layers.3."),
    ] = None,
    layout: LayoutOption = "auto",
    pages: PagesOption = None,
    block_table: BlockTableOption = "block_table",
    lengths: DumpLengthsOption = None,
    json: JsonFlag = False,
    report: ReportOption = None,
    force: ForceFlag = False,
) -> None:
    """Compare an engine's selections, or its cache, with what the model selects or holds.

    Quantized keys never select quite the same: an engine is right that is no worse than coarse
    formats are. Otherwise the known mistakes are tried on the capture, and the one that explains
    what the engine has is named. The exit code is 1 if any layer is not right.
    """
    from pathlib import Path

    from sdsa_quant.engines.dump import open_engine_cache
    from sdsa_quant.engines.verify import verify_cache, verify_selection
    from sdsa_quant.files.tensor_source import open_tensors

    sink = report_sink(json, report, inputs=[Path(dump), Path(capture)], force=force)
    found = None
    if pages is not None or any(tensor.dtype == "U8" for tensor in open_tensors(dump)):
        cache = open_engine_cache(
            dump,
            pages=pages,
            block_table=block_table,
            lengths=lengths,
            layout=None if layout == "auto" else layout,
        )
        found, verdicts = cache.layout.name, [verify_cache(cache, capture, layer)]
    else:
        verdicts = verify_selection(dump, capture)
    document = verify_document(dump, capture, found, verdicts)
    sink.publish(document, *_tables(document))
    wrong = [each for each in document.layers if not each.right]
    if wrong:
        names = ", ".join(f"{each.layer} {each.mistake or 'for no known reason'}" for each in wrong)
        raise CheckFailedError(
            f"{len(wrong)} of {len(document.layers)} layers are not what the model has: {names}"
        )


def _tables(document: VerifyDocument) -> list[RenderableType]:
    what = "selects" if document.kind == "selection" else "near its keys"
    rows = table("layer", "compared", what, "needed", "finding", text=("finding",))
    sentences = []
    for layer in document.layers:
        finding = "as the model" if layer.right else layer.mistake or "no known mistake"
        rows.add_row(
            layer.layer, f"{layer.compared:,}", f"{layer.share:.3f}", f"{layer.needed:.3f}", finding
        )
        if layer.mistake is not None:
            best = next(each for each in layer.explanations if each.name == layer.mistake)
            sentences.append(
                f"{layer.layer}: the engine {best.text}; that explains {best.share:.3f} of it."
            )
        elif not layer.right:
            best = layer.explanations[0]
            sentences.append(
                f"{layer.layer}: no known mistake explains the engine; {best.name} is nearest, "
                f"with {best.share:.3f}."
            )
    layout = [] if document.layout is None else [f"layout  {document.layout}"]
    return [*layout, rows, *sentences]
