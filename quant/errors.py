"""Errors that a user can cause, each with the exit code that the command line gives for it.

Every message is one line: the argument or file, the rule, and what was found.
"""

EXIT_FAILED = 1  # a check failed, or an internal error
EXIT_USAGE = 2  # bad usage or bad input
EXIT_UNSUPPORTED = 3  # this machine cannot do it
EXIT_INTERRUPTED = 130  # ended by Ctrl-C


class SdsaError(Exception):
    """Base of every error that is reported as one line instead of a traceback."""

    exit_code = EXIT_FAILED


class CheckFailedError(SdsaError):
    """A check ran and its answer is no: an invalid cache, a score that is not finite."""

    exit_code = EXIT_FAILED


class InputError(SdsaError, ValueError):
    """An argument or a file is not what it must be."""

    exit_code = EXIT_USAGE


class DtypeError(SdsaError, TypeError):
    """A tensor has the wrong dtype, or is no tensor at all."""

    exit_code = EXIT_USAGE


class CacheFormatError(InputError):
    """A cache file breaks the cache format."""


class UnsupportedError(SdsaError, RuntimeError):
    """The request is right, but this machine or this build cannot serve it."""

    exit_code = EXIT_UNSUPPORTED


class DeviceLostError(UnsupportedError):
    """A kernel does not end: whatever else this process asks of its device would wait for good."""
