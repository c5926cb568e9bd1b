"""`sdsa eval`: what formats of keys do to a model's own output."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sdsa_cli.options import (
    DeviceOption,
    ForceFlag,
    JsonFlag,
    ReportOption,
    RotateOption,
    choose_device,
    examples,
    listed,
)
from sdsa_cli.output import fields_table, report_sink, table
from sdsa_cli.text import counted
from sdsa_quant.errors import InputError

from .document import eval_document

if TYPE_CHECKING:
    from rich.console import RenderableType

    from .document import EvalDocument

COMMAND = "eval"
EXAMPLES = examples(
    "sdsa eval model/ --texts book.txt",
    "sdsa eval model/ --texts book.txt letters.txt --formats nvfp4,fp8 --rotate hadamard",
)
_DEFAULT_FORMATS = "nvfp4,nvfp4-mixed,mxfp4,fp8"
_DEFAULT_CHUNK = 512


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder with a model of transformers and its tokenizer, or a name on the "
            "Hugging Face hub.",
        ),
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
            help="A text in UTF-8; repeatable, or followed by more.",
        ),
    ] = None,
    formats: Annotated[
        str,
        typer.Option(
            "--formats",
            metavar="LIST",
            help="Formats of keys, and of query rows where they quantize them, as in sdsa study.",
        ),
    ] = _DEFAULT_FORMATS,
    rotate: RotateOption = "none",
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
    """Run a model with its indexers' keys quantized, and compare what it predicts.

    Keys and query rows are quantized where they are multiplied, so that the model selects as an
    engine with such keys would; nothing else is quantized. KL divergence, top-1 agreement and
    perplexity stand beside the model as it is, and the overlap of selections layer by layer.
    """
    files = [*(texts or ()), *(more_texts or ())]
    if not files:
        raise InputError("--texts must name a file, got none")
    sink = report_sink(json, report, inputs=[Path(each) for each in files], force=force)
    chosen = choose_device(device)

    from sdsa_quant.capturing.evaluate import evaluate_model

    with sink.progress_of("evaluating") as progress:
        found = evaluate_model(
            model,
            files,
            listed(formats),
            rotate=rotate,
            tokens=tokens,
            chunk=chunk,
            revision=revision,
            device=chosen,
            progress=progress,
        )
    document = eval_document(found)
    sink.publish(document, *_tables(document))


def _tables(document: EvalDocument) -> list[RenderableType]:
    rows = table("format", "KL", "largest KL", "top-1", "perplexity", "worst overlap")
    rows.add_row("as it is", "0", "0", "1", f"{document.perplexity:.4f}", "1")
    for each in document.formats:
        known = [layer.overlap for layer in each.layers if layer.overlap is not None]
        rows.add_row(
            each.format,
            f"{each.kl_mean:.3g}",
            f"{each.kl_largest:.3g}",
            f"{each.top1_agreement:.4f}",
            f"{each.perplexity:.4f}",
            f"{min(known):.3f}" if known else "-",
        )
    fields = {
        "model": f"{document.model}, {document.class_name}",
        "texts": f"{counted(len(document.texts), 'text')}, {document.tokens:,} predictions",
        "rotate": document.rotate,
    }
    if not any(layer.rows for each in document.formats for layer in each.layers):
        fields["note"] = "no row sees more keys than it selects: every selection is the same"
    return [fields_table(fields), rows]
