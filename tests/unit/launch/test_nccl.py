"""NCCL's environment is the same in training ranks and in servers where they form a communicator,
and the user's values are kept.
"""

import os

import pytest

from megatron_rl.config import load_config
from megatron_rl.launch import nccl
from megatron_rl.rollout.server.process import spawn
from megatron_rl.trainer import build

NAMES = list(nccl.DEFAULTS)


@pytest.fixture
def unset(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)


def servers_environment(folder, *args):
    with open(folder / "log", "wb") as log:
        assert spawn(["sh", "-c", "env", *args], "cuda", log).wait() == 0
    lines = (folder / "log").read_text().splitlines()
    return {
        name: value for name, _, value in (line.partition("=") for line in lines) if name in NAMES
    }


def start_rank(monkeypatch, *, device="cuda", has_servers=True, **rollout):
    """Return the variables that NCCL reads in a rank, and the lines of its log."""
    monkeypatch.setattr(build.allocator, "grow_segments", lambda: None)
    sections = {"model": {"path": "x"}, "data": {"train": "x"}, "rollout": rollout}
    cfg = load_config(None, ["--run.device", device], sections)
    _, *lines = build.prepare_gpus(cfg, has_servers=has_servers) or [""]
    return {name: os.environ[name] for name in NAMES if name in os.environ}, lines


def test_both_sides_have_sglangs_values(unset, tmp_path, monkeypatch):
    expected = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    assert servers_environment(tmp_path) == expected
    assert start_rank(monkeypatch) == (expected, [])


def test_a_value_of_the_user_is_used_on_both_sides_and_logged(unset, tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    expected = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "1"}
    values, (line,) = start_rank(monkeypatch)
    assert values == servers_environment(tmp_path) == expected
    assert line.startswith("NCCL_NVLS_ENABLE = 1, set by the user (default 0)")


@pytest.mark.parametrize(
    "run", [{"weight_sync": "disk"}, {"weight_sync": "colocated"}, {"has_servers": False}]
)
def test_ranks_without_a_communicator_with_servers_keep_nvls(unset, tmp_path, monkeypatch, run):
    """Servers of the run have SGLang's values all the same."""
    assert start_rank(monkeypatch, **run) == ({}, [])
    assert servers_environment(tmp_path) == dict.fromkeys(NAMES, "0")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "2")
    assert start_rank(monkeypatch, **run) == ({"NCCL_NVLS_ENABLE": "2"}, [])


def test_ranks_on_the_cpu_change_no_variable(unset, monkeypatch):
    assert start_rank(monkeypatch, device="cpu") == ({}, [])


@pytest.mark.parametrize(
    ("args", "environ", "message"),
    [
        (
            ("--enable-symm-mem",),
            {},
            "NCCL_CUMEM_ENABLE = 1 for them, the training ranks have 0.*export NCCL_CUMEM_ENABLE=1",
        ),
        (("--enable-symm-mem",), {"NCCL_CUMEM_ENABLE": "1"}, "NCCL_NVLS_ENABLE = 1"),
        (("--enable-symm-mem",), {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "1"}, None),
        (("--enable-nccl-nvls",), {"NCCL_NVLS_ENABLE": "0"}, "NCCL_NVLS_ENABLE = 1"),
        (("--moe-a2a-backend=deepep_v2",), {}, "NCCL_CUMEM_ENABLE = 1"),
        (("--tp-size", "2"), {}, None),
    ],
)
def test_options_with_which_sglang_uses_other_values_are_refused(args, environ, message):
    if message is None:
        nccl.check_nccl_of_servers(args, environ)
    else:
        with pytest.raises(ValueError, match=rf"rollout\.server_args = .*{message}"):
            nccl.check_nccl_of_servers(args, environ)


def test_servers_of_an_evaluation_get_what_their_options_need(unset, tmp_path):
    """There are no training ranks then, and SGLang sets nothing that is already set."""
    expected = {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
    assert servers_environment(tmp_path, "--moe-a2a-backend", "deepep_v2") == expected
