"""A study among ranks that do not come: it says whom it waits for, and ends when it is told to."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sdsa_quant.errors import InputError
from sdsa_quant.study import rendezvous
from sdsa_quant.study.rendezvous import Meeting, Place, meet, place_of_environment
from support.command_line import Run, program

NAMES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
WHOLE = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    tensors = {"keys": torch.randn(300, 128), "queries": torch.randn(4, 128)}
    save_file(tensors, tmp_path / "s.safetensors")
    return tmp_path / "s.safetensors"


@pytest.mark.parametrize(
    ("rank", "number", "code"),
    [(0, signal.SIGINT, 130), (1, signal.SIGINT, 130), (1, signal.SIGTERM, 143)],
    ids=["first-ctrl-c", "other-ctrl-c", "other-term"],
)
def test_a_rank_that_waits_says_so_and_can_be_ended(
    capture: Path, tmp_path: Path, port: int, rank: int, number: int, code: int
) -> None:
    command = program("study", capture, capture, "-o", tmp_path / "out", "--no-plots")
    environment = {**os.environ, **WHOLE, "RANK": str(rank), "MASTER_PORT": str(port)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        process.send_signal(number)
        _, rest = process.communicate(timeout=20)
    wanted = f"waiting for 1 of 2 ranks at 127.0.0.1:{port} (unset WORLD_SIZE to run alone)"
    assert line.strip() == f"note: {wanted}"
    assert process.returncode == code
    assert rest == ("error: interrupted\n" if number == signal.SIGINT else "")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RANK": None}, "RANK must be a whole number, 0 to 1, got ''"),
        ({"RANK": "2"}, "RANK must be a whole number, 0 to 1, got '2'"),
        ({"RANK": "first"}, "RANK must be a whole number"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be a whole number, 1 or more, got 'two'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be a whole number, 1 or more"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT must be a whole number, 1 to 65535"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR must be set for 2 ranks"),
    ],
    ids=["no-rank", "rank-2", "word", "count", "zero", "port", "address"],
)
def test_an_environment_that_nobody_can_join_is_bad_input(
    sdsa: Run,
    capture: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str | None],
    words: str,
) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in {**WHOLE, **changes}.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    answer = sdsa("study", capture, capture, "-o", tmp_path / "out", "--no-plots")
    answer.fails_with(2, f"environment variable {words}", "unset WORLD_SIZE to run alone")


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "1", "RANK": "0"}, {"RANK": "3"}])
def test_one_process_waits_for_nobody(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert place_of_environment() is None


@pytest.mark.parametrize("rank", [0, 1])
def test_the_wait_has_an_end(monkeypatch: pytest.MonkeyPatch, port: int, rank: int) -> None:
    monkeypatch.setattr(rendezvous, "PATIENCE_SECONDS", 0.2)
    place = Place(rank, 3, "127.0.0.1", port, store_is_there=False)
    with pytest.raises(InputError, match=f"2 of 3 ranks did not come to 127.0.0.1:{port}"):
        meet(place)


def test_ranks_meet_more_than_once(port: int) -> None:
    met: dict[int, Meeting] = {}

    def come(rank: int) -> None:
        met[rank] = meet(Place(rank, 2, "127.0.0.1", port, store_is_there=False))

    # The names of meetings are counted in each process: here both ranks share one.
    rendezvous._joined = iter((7, 7, 8, 8))  # type: ignore[assignment]
    for _ in range(2):
        threads = [threading.Thread(target=come, args=(rank,)) for rank in (1, 0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        assert sorted(met) == [0, 1]
        waits = [threading.Thread(target=met[rank].wait) for rank in (0, 1)]
        for wait in waits:
            wait.start()
        for wait in waits:
            wait.join(timeout=30)
            assert not wait.is_alive()
