"""Output files that appear whole or not at all.

Everything is written to a hidden file in the same folder, flushed to the disk, then renamed. A
killed run leaves the old file, or none, under the final name; what it leaves under the hidden name
is removed by the next run for the same output, which knows that nobody works on it any more
because nobody holds its lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
from pathlib import Path
from types import TracebackType

from sdsa_quant.errors import Hint, InputError

_SUFFIX = ".partial"
_LONGEST_STEM_BYTES = 200  # file names may have 255, and the rest of a hidden one takes 18
OVERWRITE = Hint("force", "to replace it", True)


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
        The file exists and `force` is false, it is not a regular file, or its folder does not exist
        or cannot be written.
    """

    def __init__(self, path: str | Path, *, force: bool = False) -> None:
        self.path = Path(os.path.realpath(path))
        self._name = str(path)
        self._force = force
        self._mode: int | None = None  # of the file to be replaced, which its successor keeps
        self._check_target()
        _remove_abandoned(self.path)
        self._partial, self.fd = self._open_partial()

    def _open_partial(self) -> tuple[Path, int]:
        """Create a hidden file and lock it; another run's clean-up may come between the two."""
        while True:
            partial = self.path.with_name(
                f".{_hidden_stem(self.path.name)}.{secrets.token_hex(4)}{_SUFFIX}"
            )
            try:
                fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            except OSError as error:
                raise InputError(f"{self._name}: cannot be written: {error.strerror}") from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_nlink:
                    return partial, fd
            except BlockingIOError:
                pass  # a clean-up holds it and is about to remove it
            except OSError:
                return partial, fd  # no locks here, so that no clean-up removes what it finds
            os.close(fd)

    def _check_target(self) -> None:
        try:
            mode = self.path.stat().st_mode
        except FileNotFoundError:
            return
        except OSError as error:
            raise InputError(f"{self._name}: cannot be written: {error.strerror}") from error
        if not stat.S_ISREG(mode):
            raise InputError(f"{self._name}: must be a regular file to be replaced, but is not")
        if not self._force:
            raise InputError("exists already", source=self._name, hint=OVERWRITE)
        self._mode = stat.S_IMODE(mode)

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
            self.discard()

    def discard(self) -> None:
        """Close the file and remove its hidden name, which a publication has done with."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._partial)
        os.close(self.fd)

    def _publish(self) -> None:
        try:
            if self._mode is not None:
                os.fchmod(self.fd, self._mode)
            os.fsync(self.fd)
            if self._force:
                os.replace(self._partial, self.path)
            else:
                self._link()
        except FileExistsError:
            raise InputError("exists already", source=self._name, hint=OVERWRITE) from None
        except OSError as error:
            raise InputError(f"{self._name}: cannot be written: {error.strerror}") from error
        # The file is whole and in place. Not every file system can flush a folder.
        with contextlib.suppress(OSError):
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _link(self) -> None:
        """Give the file its name, unless that has been taken meanwhile."""
        try:
            os.link(self._partial, self.path)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
            # No hard links here. A rename would replace what has appeared, so look first.
            if self.path.exists():
                raise FileExistsError from error
            os.replace(self._partial, self.path)


def write_text(path: str | Path, text: str, *, force: bool = False) -> None:
    """Write a whole text file (UTF-8) atomically; errors as `AtomicFile`."""
    with AtomicFile(path, force=force) as file:
        file.write_at(0, text.encode())


def _hidden_stem(name: str) -> str:
    """What a hidden file's name begins with: the output's name, or a hash of a very long one."""
    if len(os.fsencode(name)) <= _LONGEST_STEM_BYTES:
        return name
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:32]


def _remove_abandoned(path: Path) -> None:
    """Remove what killed runs left for this output: hidden files that nobody holds a lock on."""
    ours = re.compile(rf"\.{re.escape(_hidden_stem(path.name))}\.[0-9a-f]{{8}}{re.escape(_SUFFIX)}")
    try:
        names = os.listdir(path.parent)
    except OSError:
        return  # the attempt to create a file there will say what is wrong
    for name in filter(ours.fullmatch, names):
        partial = path.with_name(name)
        try:
            fd = os.open(partial, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # gone meanwhile, or another user's: not ours to remove
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            partial.unlink(missing_ok=True)
        except OSError:
            continue  # a live run is writing it, or nothing can tell whether one is
        finally:
            os.close(fd)
