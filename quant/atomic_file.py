"""Output files that appear whole or not at all.

Everything is written to a hidden file in the same folder, flushed to the disk, then renamed. A
killed run leaves the old file, or none, under the final name; what it leaves under the hidden name
is removed by the next run for the same output, which knows that nobody works on it any more
because nobody holds its lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from pathlib import Path
from types import TracebackType

from .errors import InputError

_SUFFIX = ".partial"


class AtomicFile:
    """A file to write at any offset; a context manager that keeps it only if the block succeeds.

    Parameters
    ----------
    path : str or Path
        The final name. A symbolic link is followed.
    force : bool
        Whether an existing file may be replaced.

    Raises
    ------
    ValueError
        The file exists and `force` is false, it is no regular file, or its folder does not exist
        or cannot be written.
    """

    def __init__(self, path: str | Path, *, force: bool = False) -> None:
        self.path = Path(os.path.realpath(path))
        self._name = str(path)
        self._force = force
        self._check_target()
        _remove_abandoned(self.path)
        self._partial = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}{_SUFFIX}")
        try:
            self.fd = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as error:
            raise InputError(f"{self._name}: cannot be written: {error.strerror}") from error
        fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _check_target(self) -> None:
        try:
            mode = self.path.stat().st_mode
        except FileNotFoundError:
            return
        except OSError as error:
            raise InputError(f"{self._name}: cannot be written: {error.strerror}") from error
        if not stat.S_ISREG(mode):
            raise InputError(f"{self._name}: must be a regular file to be replaced, it is not")
        if not self._force:
            raise InputError(f"{self._name}: exists already; give --force to replace it")

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        """Write all of `data` at `offset` bytes.

        Raises
        ------
        ValueError
            The disk is full or failing; the message names the file.
        """
        view = memoryview(data).cast("B")
        try:
            while view.nbytes:
                written = os.pwrite(self.fd, view, offset)
                view = view[written:]
                offset += written
        except OSError as error:
            raise InputError(f"{self._name}: cannot be written: {error.strerror}") from error

    def read_at(self, offset: int, size: int) -> bytes:
        """`size` bytes at `offset`; bytes that were never written are zero."""
        data = os.pread(self.fd, size, offset)
        return data + bytes(size - len(data))

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            # After a publication the hidden name is gone already, unless it was linked.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._partial)
            os.close(self.fd)

    def _publish(self) -> None:
        try:
            os.fsync(self.fd)
            if self._force:
                os.replace(self._partial, self.path)
            else:
                # A link, unlike a rename, fails where the name has been taken meanwhile.
                os.link(self._partial, self.path)
        except FileExistsError:
            raise InputError(f"{self._name}: exists already; give --force to replace it") from None
        except OSError as error:
            raise InputError(f"{self._name}: cannot be written: {error.strerror}") from error
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_text(path: str | Path, text: str, *, force: bool = False) -> None:
    """Write a whole text file (UTF-8) atomically; errors as `AtomicFile`."""
    with AtomicFile(path, force=force) as file:
        file.write_at(0, text.encode())


def _remove_abandoned(path: Path) -> None:
    """Remove what killed runs left for this output: hidden files that nobody holds a lock on."""
    for partial in path.parent.glob(f".{_escape(path.name)}.*{_SUFFIX}"):
        try:
            fd = os.open(partial, os.O_RDWR)
        except OSError:
            continue  # gone meanwhile, or another user's: not ours to remove
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            partial.unlink(missing_ok=True)
        except BlockingIOError:
            continue  # a live run is writing it
        finally:
            os.close(fd)


def _escape(name: str) -> str:
    """`name` with the characters that `Path.glob` treats specially made literal."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
