"""What is printed for an error: the user's file and line, and the cause first and last; an error of this package is one line."""

import sys

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
    (tmp_path / "my_loss.py").write_text("import torch\n\ndef loss(n):\n    return torch.ones(n) + torch.ones(n + 1)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_loss

    report_error(raised(my_loss.loss, 3), tmp_path / "run")
    printed = capsys.readouterr().err.splitlines()
    assert printed[0].startswith("megatron_rl.train: rank 0: RuntimeError: The size of tensor a (3)")
    assert f"  {tmp_path}/my_loss.py:4 in loss: return torch.ones(n) + torch.ones(n + 1)" in printed
    assert printed[-1] == printed[0] and len(printed) <= 15
    full = (tmp_path / "run/error_rank0.txt").read_text()
    assert "Traceback (most recent call last)" in full and "my_loss.py" in full
    sys.modules.pop("my_loss")


def test_an_error_raised_by_this_package_is_its_message_alone(tmp_path, capsys):
    error = raised(load_config, None, ["--run.num_step", "5", "--model.path", "m", "--data.train", "t"])
    error.__traceback__ = error.__traceback__.tb_next  # without the frame of this test, which is the user's
    assert isinstance(error, ConfigError)
    report_error(error, tmp_path)
    assert len(capsys.readouterr().err.splitlines()) == 1
