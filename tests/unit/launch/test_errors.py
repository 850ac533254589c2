"""What is printed for an error: the user's file and line, and the cause first and last; an error of
this package is one line.
"""

import errno
import sys

import pytest

from megatron_rl.config import load_config
from megatron_rl.config.base import ConfigError
from megatron_rl.launch.errors import report_error


def raised(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_an_error_in_the_users_code_shows_file_and_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "my_loss.py").write_text(
        "import torch\n\ndef loss(n):\n    return torch.ones(n) + torch.ones(n + 1)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_loss

    report_error(raised(my_loss.loss, 3), tmp_path / "run")
    printed = capsys.readouterr().err.splitlines()
    assert printed[0].startswith(
        "megatron_rl.train: rank 0: RuntimeError: The size of tensor a (3)"
    )
    assert f"  {tmp_path}/my_loss.py:4 in loss: return torch.ones(n) + torch.ones(n + 1)" in printed
    assert printed[-1] == printed[0] and len(printed) <= 15
    full = (tmp_path / "run/logs/error_rank0.txt").read_text()
    assert "Traceback (most recent call last)" in full and "my_loss.py" in full
    sys.modules.pop("my_loss")


def test_an_error_raised_by_this_package_is_its_message_alone(tmp_path, capsys):
    error = raised(
        load_config, None, ["--run.num_step", "5", "--model.path", "m", "--data.train", "t"]
    )
    # without the frame of this test, which is the user's
    error.__traceback__ = error.__traceback__.tb_next
    assert isinstance(error, ConfigError)
    report_error(error, tmp_path)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_error_with_the_name_of_a_file_that_is_not_utf_8_is_reported(tmp_path, capsys):
    report_error(RuntimeError("no file caf\udce9.txt"), tmp_path / "run")
    assert "caf?.txt" in capsys.readouterr().err
    assert r"caf\udce9.txt" in (tmp_path / "run/logs/error_rank0.txt").read_text()


class Lines:
    """A file that is kept open, as those of metrics and rollouts are."""

    def __init__(self, path, code):
        self.file = open(path, "w")  # noqa: SIM115  closed by the test
        self.code = code

    def write(self):
        raise OSError(self.code, "the disk refuses")


@pytest.mark.parametrize(
    ("code", "is_disk"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.ECONNREFUSED, False)]
)
def test_a_full_disk_names_file_space_and_fix(tmp_path, capsys, code, is_disk):
    lines = Lines(tmp_path / "rollouts.jsonl", code)
    report_error(raised(lines.write), tmp_path)
    lines.file.close()
    first = capsys.readouterr().err.splitlines()[0]
    words = (f"writing {tmp_path}/rollouts.jsonl: ", "GiB free", "another run.dir", "--resume")
    assert [word in first for word in words] == [is_disk] * 4, first


def test_tensors_that_do_not_fit_name_their_file(tmp_path, capsys):
    """safetensors' error is no OSError and names no file."""

    def save(path):
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    report_error(raised(save, tmp_path / "rollouts_000003.safetensors"), tmp_path)
    assert f"writing {tmp_path}/rollouts_000003.safetensors: " in capsys.readouterr().err
