"""`sdsa convert`: the cache of an inference engine to keys that the other commands read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from sdsa_cli.options import ForceFlag, JsonFlag, ReportOption, examples
from sdsa_cli.output import fields_table, report_sink
from sdsa_cli.output_paths import require_name
from sdsa_cli.text import counted

from .document import convert_document

COMMAND = "convert"
EXAMPLES = examples(
    "sdsa convert dump.safetensors -o served.safetensors",
    "sdsa convert dump.safetensors -o again.safetensors --layout fp8-planes",
)
LayoutOption = Annotated[
    Literal["auto", "fp8-rows", "fp8-planes", "mxfp4-rows", "mxfp4-planes"],
    typer.Option(
        "--layout",
        help="How a page is laid out: each key followed by its scale (rows), or all keys before "
        "their scales (planes). auto finds it; one that does not fit is refused.",
    ),
]
PagesOption = Annotated[
    str | None,
    typer.Option(
        "--pages",
        metavar="NAME",
        help="Tensor of the engine's pages; default: the only uint8 one.",
    ),
]
BlockTableOption = Annotated[
    str,
    typer.Option("--block-table", metavar="NAME", help="Tensor of the pages of each request."),
]
DumpLengthsOption = Annotated[
    str | None,
    typer.Option(
        "--lengths",
        metavar="NAME",
        help="Tensor of each request's keys; default: context_lengths, lengths or seq_lens.",
    ),
]


def convert(
    dump: Annotated[
        str,
        typer.Argument(
            metavar="DUMP",
            help="A safetensors file with the pages of an engine's cache, uint8 [pages, 64, "
            "bytes], a block table and lengths.",
        ),
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="KEYS", help="The file of keys to write.")
    ],
    layout: LayoutOption = "auto",
    pages: PagesOption = None,
    block_table: BlockTableOption = "block_table",
    lengths: DumpLengthsOption = None,
    json: JsonFlag = False,
    report: ReportOption = None,
    force: ForceFlag = False,
) -> None:
    """Decode the cache of an inference engine to keys that quantize-cache and study take.

    FP8 keys have 132 bytes (E4M3 and an FP32 scale), MXFP4 keys 68 (E2M1 and an E8M0 scale per 32
    values). The layout is found by which one decodes to finite keys of similar lengths, and said.
    """
    from sdsa_quant.engines.convert import convert_engine_cache

    require_name("-o", output)
    sink = report_sink(json, report, outputs=[Path(output)], inputs=[Path(dump)], force=force)
    written = convert_engine_cache(
        dump,
        output,
        pages=pages,
        block_table=block_table,
        lengths=lengths,
        layout=None if layout == "auto" else layout,
        force=force,
    )
    document = convert_document(written)
    requests = counted(len(document.context_lengths), "request")
    fields = {
        "dump": f"{document.dump}, tensor {document.tensor}",
        "layout": f"{document.layout}, {document.bytes_per_key} bytes a key",
        "keys": f"{document.keys:,} of {requests}",
        "written": f"{document.path}, {document.file_bytes:,} bytes",
    }
    sink.publish(document, fields_table(fields))
