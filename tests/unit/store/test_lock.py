"""The lock on a state directory."""

import os
import signal
import subprocess
import sys

import pytest

from memd.errors import MemdError
from memd.store.lock import StateLock, StateLocked

HOLDER = """
import sys, time
from pathlib import Path
from memd.store.lock import StateLock
with StateLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def holder(directory):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_c128_a_second_daemon_is_refused_with_the_pid_of_the_first(tmp_path):
    with StateLock(tmp_path):
        with pytest.raises(StateLocked, match=rf"daemon with pid {os.getpid()};"):
            StateLock(tmp_path).__enter__()
        assert (tmp_path / "memd.lock").read_text() == f"{os.getpid()}\n"
    with StateLock(tmp_path):
        pass  # given back


def test_c128_the_lock_of_a_killed_daemon_is_free(tmp_path):
    process = holder(tmp_path)
    try:
        with pytest.raises(StateLocked, match=f"pid {process.pid};"):
            StateLock(tmp_path).__enter__()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    assert (tmp_path / "memd.lock").read_text() == f"{process.pid}\n"
    with StateLock(tmp_path):
        assert (tmp_path / "memd.lock").read_text() == f"{os.getpid()}\n"


def test_a_child_does_not_keep_the_lock(tmp_path):
    with StateLock(tmp_path):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with StateLock(tmp_path):
            pass
    finally:
        child.kill()
        child.wait(10)


def test_directories_are_made_for_their_owner_alone(tmp_path):
    with StateLock(tmp_path / "a" / "state"):
        pass
    assert (tmp_path / "a" / "state").stat().st_mode & 0o777 == 0o700


def test_a_directory_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MemdError, match="file/state cannot be used: Not a directory"):
        StateLock(tmp_path / "file" / "state").__enter__()
