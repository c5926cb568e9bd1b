"""Output files that appear whole or not at all, also when the writer is killed."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sdsa_quant.errors import InputError
from sdsa_quant.files.atomic_file import AtomicFile, write_text


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_the_name_appears_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "out.bin"
    with AtomicFile(path) as file:
        file.write_at(4, b"late")
        file.write_at(0, b"soon")
        assert not path.exists()
        assert file.read_at(0, 10) == b"soonlate\0\0"
    assert path.read_bytes() == b"soonlate"
    assert names(tmp_path) == ["out.bin"]


def test_an_exception_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out.bin"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError, match="stop"), AtomicFile(path, force=True) as file:
        file.write_at(0, b"new")
        raise RuntimeError("stop")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["out.bin"]


def test_existing_files_need_force(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    write_text(path, "first")
    with pytest.raises(InputError, match=r"out\.txt: exists already; give force=True"):
        write_text(path, "second")
    assert path.read_text() == "first"
    write_text(path, "third", force=True)
    assert path.read_text() == "third"


def test_a_file_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    with pytest.raises(InputError, match="exists already"), AtomicFile(path) as file:
        file.write_at(0, b"mine")
        path.write_text("theirs")
    assert path.read_text() == "theirs"
    assert names(tmp_path) == ["out.txt"]


def test_links_are_followed_and_permissions_are_ordinary(tmp_path: Path) -> None:
    target = tmp_path / "target.txt"
    target.write_text("old")
    (tmp_path / "link.txt").symlink_to(target)
    write_text(tmp_path / "link.txt", "new", force=True)
    assert target.read_text() == "new"
    assert (tmp_path / "link.txt").is_symlink()
    umask = os.umask(0)
    os.umask(umask)
    assert target.stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize("force", [False, True])
def test_what_is_no_regular_file_is_never_replaced(tmp_path: Path, force: bool) -> None:
    for target in ("/dev/null", str(tmp_path)):
        with pytest.raises(InputError, match="must be a regular file"):
            AtomicFile(target, force=force)


def test_missing_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a/b\.txt: cannot be written: No such file"):
        write_text(tmp_path / "a" / "b.txt", "")


def test_a_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(InputError, match=r"out\.txt: cannot be written: No space left"):
        write_text(tmp_path / "out.txt", "text")
    assert names(tmp_path) == []


WRITER = """
import sys, time
from sdsa_quant.files.atomic_file import AtomicFile
with AtomicFile(sys.argv[1], force=True) as file:
    file.write_at(0, b"half")
    print("writing", flush=True)
    time.sleep(60)
"""


def start_writer(path: Path) -> subprocess.Popen[str]:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "writing\n"
    return writer


def test_a_killed_run_is_cleaned_up_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "out[1].txt"  # a name that a pattern would misread
    path.write_text("old")
    writer = start_writer(path)
    with writer:
        # A second run beside a live one leaves the live one's hidden file alone.
        write_text(path, "second", force=True)
        assert len(names(tmp_path)) == 2
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert path.read_text() == "second"
    assert len(names(tmp_path)) == 2
    deadline = time.monotonic() + 10
    while len(names(tmp_path)) == 2 and time.monotonic() < deadline:
        write_text(path, "third", force=True)
    assert path.read_text() == "third"
    assert names(tmp_path) == ["out[1].txt"]


def test_only_our_own_hidden_files_are_removed(tmp_path: Path) -> None:
    for name in (".out.notes.partial", ".out.b.0123abcd.partial", ".out.0123abcd.partial.old"):
        (tmp_path / name).write_text("not ours")
    (tmp_path / ".out.0123abcd.partial").write_text("abandoned")
    write_text(tmp_path / "out", "text")
    assert names(tmp_path) == [
        ".out.0123abcd.partial.old",
        ".out.b.0123abcd.partial",
        ".out.notes.partial",
        "out",
    ]


def test_a_clean_up_between_creation_and_lock_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock
    removed: list[str] = []

    def clean_up_first(fd: int, operation: int) -> None:
        if not removed:
            removed.extend(names(tmp_path))
            (tmp_path / removed[0]).unlink()
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", clean_up_first)
    write_text(tmp_path / "out", "text")
    assert names(tmp_path) == ["out"]
    assert removed[0].endswith(".partial")


def test_many_runs_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    code = (
        "import sys; from sdsa_quant.files.atomic_file import write_text\n"
        "for _ in range(100): write_text(sys.argv[1], 'text', force=True)"
    )
    path = tmp_path / "out"
    runs = [subprocess.Popen([sys.executable, "-c", code, str(path)]) for _ in range(3)]
    assert [run.wait() for run in runs] == [0, 0, 0]
    assert path.read_text() == "text"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("length", [200, 201, 255])
def test_names_as_long_as_names_may_be(tmp_path: Path, length: int) -> None:
    path = tmp_path / ("n" * length)
    write_text(path, "first")
    write_text(path, "second", force=True)
    assert names(tmp_path) == [path.name]


def test_a_replaced_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("old")
    path.chmod(0o600)
    write_text(path, "new", force=True)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("taken", [False, True])
def test_file_systems_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    path = tmp_path / "out"

    def refuse(*arguments: object) -> None:
        if taken:
            path.write_text("theirs")
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    if taken:
        with pytest.raises(InputError, match="exists already"):
            write_text(path, "mine")
    else:
        write_text(path, "mine")
    assert path.read_text() == ("theirs" if taken else "mine")
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_file_systems_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    path = tmp_path / "out"
    # Nothing can tell whether a run still writes it.
    (tmp_path / ".out.0123abcd.partial").write_text("another run's")
    write_text(path, "first")
    write_text(path, "second", force=True)
    assert path.read_text() == "second"
    assert names(tmp_path) == [".out.0123abcd.partial", "out"]
