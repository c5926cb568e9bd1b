"""`sdsa calibrate`: captured keys and query rows to the statistics that rules quantize with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sdsa_cli.options import (
    CapturedKeysArgument,
    CapturedQueriesArgument,
    ForceFlag,
    JsonFlag,
    KeysOption,
    LengthsOption,
    QueryNameOption,
    ReportOption,
    examples,
)
from sdsa_cli.output import fields_table, report_sink

from .document import calibrate_document

COMMAND = "calibrate"
EXAMPLES = examples(
    "sdsa calibrate keys.safetensors queries.safetensors --lengths lengths -o stats.safetensors",
    "sdsa calibrate capture/ capture/ -o layers-stats.safetensors",
    "sdsa calibrate keys.safetensors queries.safetensors --lengths lengths -o both.safetensors "
    "--merge stats.safetensors",
)


def calibrate(
    keys: CapturedKeysArgument,
    queries: CapturedQueriesArgument,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="STATS", help="The calibration file.")
    ],
    keys_pattern: KeysOption = None,
    query_name: QueryNameOption = None,
    lengths: LengthsOption = None,
    merge: Annotated[
        list[str] | None,
        typer.Option(
            "--merge",
            metavar="STATS",
            help="Add the statistics of another capture of the same layers; repeatable.",
        ),
    ] = None,
    json: JsonFlag = False,
    report: ReportOption = None,
    force: ForceFlag = False,
) -> None:
    """Take the mean key and the covariances of keys and query rows, layer by layer.

    sdsa quantize-cache --rule covariance and sdsa study quantize with them. One file serves every
    transform. Requests that are to be measured must not be among those that are calibrated on.
    """
    from sdsa_quant.calibration.calibrate import calibrate as take_statistics

    sink = report_sink(
        json,
        report,
        outputs=[Path(output)],
        inputs=[Path(each) for each in (keys, queries, *(merge or ()))],
        force=force,
    )
    calibration = take_statistics(
        keys,
        queries,
        output,
        keys_pattern=keys_pattern,
        queries_pattern=query_name,
        lengths=lengths,
        merge=merge or (),
        force=force,
    )
    fields = {
        layer.name: f"{layer.keys:,} keys, {layer.rows:,} query rows, digest {layer.digest[:12]}"
        for layer in calibration.layers
    }
    sink.publish(calibrate_document(output, calibration), fields_table(fields))
