"""A signal is noticed whatever the main thread does, and the process exits when the grace period is
over.
"""

import os
import signal
import subprocess
import sys
import time

import pytest

from megatron_rl.launch.signals import REQUEUE, StoppedBySignal, StopSignal, follow_launcher


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_sets_name_and_the_handlers_are_restored(number):
    before = signal.getsignal(number)
    with StopSignal(30.0) as stop:
        stop.hold()
        assert stop.name is None
        os.kill(os.getpid(), number)
        deadline = time.monotonic() + 60
        while stop.name is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert stop.name == number.name
    assert signal.getsignal(number) is before


def test_before_there_is_anything_to_save_a_signal_interrupts(sigint):
    started = time.monotonic()
    with pytest.raises(StoppedBySignal, match="before the first step"):
        with StopSignal(30.0):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
    assert time.monotonic() - started < 50
    with pytest.raises(KeyboardInterrupt):  # Ctrl-C is another matter
        with StopSignal(30.0):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)


SCRIPT = """
import ctypes, sys
from megatron_rl.launch.signals import StopSignal
with StopSignal(float(sys.argv[1])) as stop:
    stop.hold()
    print("ready", flush=True)
    ctypes.CDLL(None).pause()
    ctypes.CDLL(None).sleep(600)
    ctypes.CDLL(None).sleep(600)
"""


def test_a_process_that_cannot_save_in_time_ends_with_the_requeue_code():
    """Its main thread waits in C and runs no Python, as inside a collective whose peer is gone."""
    command = [sys.executable, "-c", SCRIPT, "0.3"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == REQUEUE == 85
    assert "SIGTERM: not saved" in errors and "last complete checkpoint" in errors


def test_a_rank_ends_with_its_launcher(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    read, write = os.pipe()
    launcher = os.fork()
    if launcher == 0:
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            follow_launcher()
            os.write(write, b".")
        time.sleep(60)
        os._exit(0)
    os.close(write)
    assert os.read(read, 1) == b"."
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    started = time.monotonic()
    assert os.read(read, 1) == b"" and time.monotonic() - started < 50
    os.close(read)
