"""The `sdsa` Typer app: which commands there are, and how their errors become exit codes.

Commands raise; only this module turns an exception into a line on stderr and an exit code. Each
command's module is light to import and loads torch inside its function, so that `sdsa --help`
answers at once.
"""

from __future__ import annotations

import errno
import functools
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sdsa_quant.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PIPE, EXIT_USAGE, SdsaError

from . import __version__, doctor
from .bench import command as bench
from .calibrate import command as calibrate
from .capture import command as capture
from .command import SdsaCommand
from .convert import command as convert
from .evaluate import command as evaluate
from .flags import flag_spelling
from .help_page import print_help
from .inspect import command as inspect
from .interrupts import interrupted, interruption
from .options import help_text
from .output import ReaderLeftError, abandon_stdout, print_error
from .quantize_cache import command as quantize_cache
from .score import command as score
from .study import command as study
from .study import compare, report
from .verify import command as verify

DEBUG_FLAG = "--debug"
# What a failed write to stdout gives. Every other file's errors have its name.
_STDOUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


class SdsaGroup(TyperGroup):
    """Runs a command and turns what it raises into one line on stderr and an exit code.

    Exit codes: 0 done; 1 a check failed, or an internal error; 2 bad usage or bad input; 3 this
    machine cannot do it; 130 interrupted; 141 a reader of stdout left before the end. ``--debug``
    may stand anywhere on the line and lets an error keep its traceback.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help as `print_help` lays it out."""
        print_help(self, ctx)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        arguments = list(sys.argv[1:] if args is None else args)
        debug = DEBUG_FLAG in arguments
        if debug:
            arguments = [DEBUG_FLAG, *(word for word in arguments if word != DEBUG_FLAG)]
        run = functools.partial(
            super().main,
            arguments,
            prog_name,
            complete_var,
            standalone_mode=False,
            windows_expand_args=windows_expand_args,
            **extra,
        )
        if not standalone_mode:
            return run()
        try:
            exit_code = run()
            sys.stdout.flush()  # here, and not when Python ends, so that a failure is reported
        except KeyboardInterrupt:
            exit_code = EXIT_INTERRUPTED
        except Exception as error:
            exit_code = EXIT_INTERRUPTED if interrupted() else report_error(error, debug)
        if exit_code == EXIT_INTERRUPTED or interrupted():
            exit_code = EXIT_INTERRUPTED
            print_error(interruption())
        sys.exit(exit_code or 0)


def report_error(error: Exception, debug: bool) -> int:
    """Print `error` as one line on stderr, traceback first where asked; returns the exit code."""
    if debug:
        traceback.print_exception(error)
    if isinstance(error, ReaderLeftError):
        abandon_stdout()
        return EXIT_PIPE
    if isinstance(error, SdsaError):
        print_error(error.text(flag_spelling))
        return error.exit_code
    if hasattr(error, "format_message"):  # Typer's usage errors share no public base class
        print_error(_usage_message(error))
        return getattr(error, "exit_code", EXIT_USAGE)
    if isinstance(error, OSError) and error.filename is not None:
        print_error(f"{error.filename}: {error.strerror}")
        return EXIT_USAGE
    if isinstance(error, OSError) and error.errno in _STDOUT_ERRORS:
        abandon_stdout()
        if error.errno == errno.EPIPE:  # a reader that has seen enough is not an error to speak of
            return EXIT_PIPE
        print_error(f"stdout: cannot be written: {error.strerror}")
        return EXIT_FAILED
    hint = "" if debug else f" (run with {DEBUG_FLAG} for the traceback)"
    print_error(f"internal error: {type(error).__name__}: {error}{hint}")
    return EXIT_FAILED


def _usage_message(error: Any) -> str:
    context = getattr(error, "ctx", None)
    message = error.format_message().replace("Value error, ", "")  # the words of a library below
    message = message.removesuffix(".")
    if context is None:
        return message
    see = " See" if message.endswith("?") else "; see"
    return f"{message}{see} {context.command_path} --help"


app = typer.Typer(
    cls=SdsaGroup,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sdsa {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def sdsa(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(DEBUG_FLAG, help="Show the traceback of an error; may stand anywhere."),
    ] = False,
) -> None:
    """NVFP4 key caches for sparse-attention indexers: build them, score them, measure them."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(EXIT_USAGE)


def _add_command(name: str, function: Callable[..., None], examples: str) -> None:
    app.command(name, cls=SdsaCommand, help=help_text(function), epilog=examples)(function)


_add_command(quantize_cache.COMMAND, quantize_cache.quantize_cache, quantize_cache.EXAMPLES)
_add_command(calibrate.COMMAND, calibrate.calibrate, calibrate.EXAMPLES)
_add_command(capture.COMMAND, capture.capture, capture.EXAMPLES)
_add_command(convert.COMMAND, convert.convert, convert.EXAMPLES)
_add_command(verify.COMMAND, verify.verify, verify.EXAMPLES)
_add_command(evaluate.COMMAND, evaluate.evaluate, evaluate.EXAMPLES)
_add_command(score.COMMAND, score.score, score.EXAMPLES)
_add_command(inspect.COMMAND, inspect.inspect, inspect.EXAMPLES)
_add_command(study.COMMAND, study.study, study.EXAMPLES)
_add_command(bench.COMMAND, bench.bench, bench.EXAMPLES)
_add_command(doctor.COMMAND, doctor.doctor, doctor.EXAMPLES)
_add_command(report.COMMAND, report.report, report.EXAMPLES)
_add_command(compare.COMMAND, compare.compare, compare.EXAMPLES)
