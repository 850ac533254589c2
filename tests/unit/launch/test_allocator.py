"""Segments of torch's allocator grow in ranks on GPUs, unless something needs their addresses."""

import os

import pytest
import torch

from megatron_rl.config import load_config
from megatron_rl.launch.allocator import GROWING, VARIABLES, allocator_line
from megatron_rl.plan.dry_run import report
from megatron_rl.trainer import build
from megatron_rl_tools.doctor.check_model import check_allocator

SETTINGS = torch._C._accelerator_getAllocatorSettings


@pytest.fixture(autouse=True)
def as_torch_starts(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    yield
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def config(*overrides, device="cuda"):
    sections = {"model": {"path": "qwen3-30b-a3b"}, "data": {"train": __file__}}
    return load_config(None, ["--run.device", device, *overrides], sections)


def start(*overrides, has_servers=True, device="cuda"):
    """(torch's settings, the first line of the log) of a rank."""
    cfg = config(*overrides, device=device)
    lines = build.prepare_gpus(cfg, has_servers=has_servers)
    assert not lines or lines[0] == allocator_line(cfg, os.environ, has_servers=has_servers)
    return SETTINGS(), (lines or [""])[0]


COLOCATED = ("--rollout.weight_sync", "colocated")


@pytest.mark.parametrize("way", ["distributed", "disk"])
def test_segments_grow_where_servers_get_copies(way):
    settings, line = start("--rollout.weight_sync", way)
    assert settings == GROWING and GROWING in line
    # servers would inherit a variable
    assert not [name for name in VARIABLES if name in os.environ]


def test_segments_grow_without_servers_whatever_the_setting():
    assert start(*COLOCATED, has_servers=False)[0] == GROWING


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (COLOCATED, "weight_sync = colocated"),
        (("--megatron.nccl_ub", "true"), "megatron.nccl_ub keeps addresses"),
        (("--megatron.cuda_graph_impl", "local"), "megatron.cuda_graph_impl keeps addresses"),
    ],
)
def test_they_stay_where_addresses_are_kept_or_shared(overrides, reason):
    settings, line = start(*overrides)
    assert settings != GROWING and reason in line
    assert start("--megatron.cuda_graph_impl", "none")[0] == GROWING


@pytest.mark.parametrize("name", VARIABLES)
def test_a_value_of_the_user_is_never_replaced(monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:64")
    settings, line = start()
    assert settings != GROWING and f"{name} = max_split_size_mb:64, set by the user" in line


def test_ranks_on_the_cpu_change_nothing():
    assert start(device="cpu") == ("expandable_segments:False", "")


def test_dry_run_and_doctor_say_it(monkeypatch):
    separate = ("--rollout.urls", "http://a:1", "--parallel.ep", "8", "--model.dtype", "bfloat16")
    cfg = config(*separate)
    cpu = report(config(*separate, device="cpu"), 16)
    assert allocator_line(cfg, os.environ, has_servers=True) in report(cfg, 16)
    assert "torch's allocator" not in cpu
    assert (check_allocator(cfg).status, GROWING in check_allocator(cfg).found) == ("OK", True)
    assert check_allocator(config(*COLOCATED)).status == "OK"
    monkeypatch.setenv(VARIABLES[1], f"max_split_size_mb:64,{GROWING}")
    assert check_allocator(cfg).status == "OK"
    assert check_allocator(config(*COLOCATED)).status == "WARN"
