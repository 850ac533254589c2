"""One run at a time in a run directory."""

import errno
import fcntl
import os
import re
import signal
import socket
import time

import pytest

from megatron_rl.checkpoint.lock import locked
from megatron_rl.config import load_config
from tests.saved_run import make_material, sections


def test_a_second_run_is_refused_and_the_error_names_the_holder(tmp_path):
    with locked(tmp_path / "run"):
        with pytest.raises(
            ValueError,
            match=rf"run is in use by pid {os.getpid()} on {socket.gethostname()}.*run\.name",
        ):
            with locked(tmp_path / "run"):
                pass
        with locked(tmp_path / "other"):
            pass
    with locked(tmp_path / "run"):
        text = (tmp_path / "run/run.lock").read_text()
        assert re.fullmatch(
            rf"pid {os.getpid()} on {socket.gethostname()}, started [\d-]+ [\d:]+\n", text
        )


def test_a_killed_run_leaves_no_lock(tmp_path):
    started, says = os.pipe()
    pid = os.fork()
    if not pid:
        with locked(tmp_path):
            os.write(says, b"x")
            time.sleep(60)
        os._exit(0)
    assert os.read(started, 1) == b"x"
    with pytest.raises(ValueError, match=f"pid {pid} on"):
        with locked(tmp_path):
            pass
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with locked(tmp_path):
        pass
    os.close(started)
    os.close(says)


def test_a_file_system_without_locks_is_logged(tmp_path, monkeypatch, caplog):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path):
        assert "no lock on this file system" in caplog.text


def test_another_error_of_a_lock_is_raised(tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="Input/output error"), locked(tmp_path):
        pass


def test_a_run_takes_the_lock_before_it_removes_what_another_is_writing(tmp_path):
    from megatron_rl.trainer.build import start_trainer

    material = make_material(tmp_path, steps=1)
    cfg = load_config(None, [], sections(material, tmp_path / "work", steps=1))
    writing = cfg.run_dir / "checkpoints/.step_000001.tmp"
    writing.mkdir(parents=True)
    with locked(cfg.run_dir), pytest.raises(ValueError, match="is in use by pid"):
        with start_trainer(cfg, material / "live"):
            pass
    assert writing.exists()
    with start_trainer(cfg, material / "live"):
        assert not writing.exists(), "left by a run that is gone"
        with pytest.raises(ValueError, match="is in use by pid"):
            with locked(cfg.run_dir):
                pass
        with locked(material / "live"):  # rollouts of another run are only read
            pass
    with locked(cfg.run_dir):
        pass
