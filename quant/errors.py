"""Errors that a user can cause, each with the exit code that the command line gives for it.

Every message is one line: the file, the argument, the rule, what was found, and what to do. The
argument and the remedy are data, so that Python callers read parameters and the command line
spells its own flags.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

EXIT_FAILED = 1  # a check failed, or an internal error
EXIT_USAGE = 2  # bad usage or bad input
EXIT_UNSUPPORTED = 3  # this machine cannot do it
EXIT_INTERRUPTED = 130  # ended by Ctrl-C
EXIT_PIPE = 141  # a reader of stdout left before the end, as SIGPIPE would have it

# How an argument is written where the reader will give it: its name, and the value if one is known.
Spelling = Callable[[str, "object | None"], str]


def python_spelling(argument: str, value: object | None) -> str:
    """An argument as a Python caller gives it: ``force=True``, or its name alone."""
    return argument if value is None else f"{argument}={value!r}"


@dataclass(frozen=True, slots=True)
class Hint:
    """What would help: an argument to give, its value where one is known, and to what end."""

    argument: str
    purpose: str  # continues the sentence: "to replace it"
    value: object | None = None

    def text(self, spelling: Spelling) -> str:
        """Such as ``give force=True to replace it``."""
        return f"give {spelling(self.argument, self.value)} {self.purpose}"


class SdsaError(Exception):
    """Base of every error that is reported as one line instead of a traceback.

    Parameters
    ----------
    message : str
        The rule and what was found. With `argument` it continues a sentence that begins with the
        argument's name: ``"must be positive, got 0"``.
    argument : str, optional
        The Python parameter that is wrong.
    source : object, optional
        The file that is wrong, or in which the argument was looked for; leads the line.
    hint : Hint, optional
        What to give instead; ends the line.
    """

    exit_code = EXIT_FAILED

    def __init__(
        self,
        message: str,
        *,
        argument: str | None = None,
        source: object | None = None,
        hint: Hint | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.argument = argument
        self.source = source
        self.hint = hint

    def __str__(self) -> str:
        return self.text(python_spelling)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.argument, self.source, self.hint)

    def text(self, spelling: Spelling) -> str:
        """The line, with arguments written as `spelling` has them."""
        lead = "" if self.source is None else f"{self.source}: "
        subject = "" if self.argument is None else f"{spelling(self.argument, None)} "
        remedy = "" if self.hint is None else f"; {self.hint.text(spelling)}"
        return f"{lead}{subject}{self.message}{remedy}"


def _rebuild(
    kind: type[SdsaError],
    message: str,
    argument: str | None,
    source: object | None,
    hint: Hint | None,
) -> SdsaError:
    return kind(message, argument=argument, source=source, hint=hint)


class CheckFailedError(SdsaError):
    """A check ran and its answer is no: an invalid cache, a score that is not finite."""

    exit_code = EXIT_FAILED


class InputError(SdsaError, ValueError):
    """An argument or a file is not what it must be."""

    exit_code = EXIT_USAGE


class DtypeError(SdsaError, TypeError):
    """A tensor has the wrong dtype, or is not a tensor."""

    exit_code = EXIT_USAGE


class CacheFormatError(InputError):
    """A cache file breaks the cache format."""


class UnsupportedError(SdsaError, RuntimeError):
    """The request is right, but this machine or this build cannot serve it."""

    exit_code = EXIT_UNSUPPORTED


class DeviceLostError(UnsupportedError):
    """A kernel does not end: whatever else this process asks of its device would wait for good."""
