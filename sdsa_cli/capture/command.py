"""`sdsa capture`: a model and texts to what its indexers score and select."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sdsa_cli.options import (
    DeviceOption,
    ForceFlag,
    JsonFlag,
    ReportOption,
    choose_device,
    examples,
    parse_numbers,
)
from sdsa_cli.output import fields_table, report_sink, table
from sdsa_cli.output_paths import require_name
from sdsa_cli.text import counted
from sdsa_quant.errors import InputError

from .document import capture_document

if TYPE_CHECKING:
    from rich.console import RenderableType

    from .document import CaptureDocument

COMMAND = "capture"
EXAMPLES = examples(
    "sdsa capture model/ --texts book.txt -o captured",
    "sdsa capture model/ --texts book.txt letters.txt -o two-texts --every 16 --tokens 4096",
)
_DEFAULT_CHUNK = 512


def capture(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder with a model of transformers and its tokenizer, or a name on the "
            "Hugging Face hub.",
        ),
    ],
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="FOLDER", help="A file for each layer goes there."),
    ],
    more_texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE", help="More texts, so that --texts *.txt works."),
    ] = None,
    texts: Annotated[
        list[str] | None,
        typer.Option(
            "--texts",
            metavar="FILE",
            help="A text in UTF-8, which becomes a request; repeatable, or followed by more.",
        ),
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(
            "--attention",
            metavar="HEADS",
            help="For a model without an indexer: capture these query heads of its attention, "
            "such as 0,5, after RoPE.",
        ),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(
            "--every",
            metavar="N",
            help="Keep the query row of one position in N, the last among them; keys are kept of "
            "all. Default: such that no text keeps more than 1,024.",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", metavar="N", help="Take only the first N tokens of each text."),
    ] = None,
    chunk: Annotated[
        int,
        typer.Option("--chunk", metavar="N", help="Tokens of a forward pass."),
    ] = _DEFAULT_CHUNK,
    revision: Annotated[
        str | None,
        typer.Option("--revision", metavar="NAME", help="Branch, tag or commit on the hub."),
    ] = None,
    device: DeviceOption = "auto",
    json: JsonFlag = False,
    report: ReportOption = None,
    force: ForceFlag = False,
) -> None:
    """Run a model over texts and capture the keys, query rows and selections of its indexers.

    Before anything is written, the selection of every row is computed anew from what was captured:
    unless all rows select what the model selected, ties of float32 aside, the command fails. The
    folder is good for sdsa study FOLDER FOLDER.
    """
    require_name("-o", output)
    files = [*(texts or ()), *(more_texts or ())]
    if not files:
        raise InputError("--texts must name a file, got none")
    heads = None if attention is None else parse_numbers(attention)
    if heads == []:
        raise InputError(f"--attention must be numbers of heads such as 0,5, got {attention!r}")
    sink = report_sink(json, report, inputs=[Path(each) for each in files], force=force)
    chosen = choose_device(device)

    from sdsa_quant.capturing.model import capture_model

    with sink.progress_of("capturing") as progress:
        written = capture_model(
            model,
            files,
            output,
            attention=heads,
            every=every,
            tokens=tokens,
            chunk=chunk,
            revision=revision,
            device=chosen,
            force=force,
            progress=progress,
        )
    document = capture_document(output, written)
    sink.publish(document, *_tables(document))


def _tables(document: CaptureDocument) -> list[RenderableType]:
    rows = table(
        "layer", "score", "heads", "selects", "keys", "rows", "as the model",
        numbers_from=4, text=("as the model",),
    )  # fmt: skip
    for layer in document.layers:
        agreement = "-"
        if layer.compared is not None:
            agreement = f"{layer.same:,} of {layer.compared:,}"
            agreement += f", {layer.ties:,} by a tie" if layer.ties else ""
        rows.add_row(
            layer.name,
            layer.score,
            str(layer.heads),
            layer.select or "-",
            f"{layer.keys:,}",
            f"{layer.rows:,}",
            agreement,
        )
    tokens = sum(text.tokens for text in document.texts)
    size = sum(layer.file_bytes for layer in document.layers)
    fields = {
        "model": f"{document.model}, {document.class_name}",
        "texts": f"{counted(len(document.texts), 'text')}, {tokens:,} tokens",
        "rows": "of every position" if document.every == 1 else f"of one in {document.every}",
        "written": f"{counted(len(document.layers), 'file')}, {size:,} bytes",
    }
    pools = sorted({layer.pool for layer in document.layers} - {1})
    if pools:
        fields["keys"] = f"each of {' or '.join(map(str, pools))} tokens"
    return [fields_table(fields), rows]
