"""GPUs of servers that a run starts: their tensor parallel size, and that no training rank has one
of them.
"""

import pytest

from megatron_rl.config import RolloutConfig
from megatron_rl.config.rules.rollout_rules import check_rollout
from megatron_rl.config.rules.server_gpus import (
    check_count,
    check_overlap,
    derived_tensor_ranks,
    devices_of_server,
    most_on_a_rank,
)


@pytest.mark.parametrize(
    ("gpus", "num_servers", "args", "size"),
    [
        ((4, 5, 6, 7), 2, (), 2),
        ((4, 5, 6, 7), 1, (), 4),
        ((4, 5, 6, 7), 1, ("--pp-size", "2"), 2),
        ((4, 5, 6, 7), 1, ("--dp-size=2",), 2),
        ((4, 5, 6, 7), 1, ("--dp-size", "2", "--enable-dp-attention"), 4),
        ((4, 5, 6, 7), 2, ("--tp-size", "2"), 0),
        ((4, 5, 6, 7), 1, ("--tensor-parallel-size=2", "--pp-size=2"), 0),
        ((), 2, (), 0),
    ],
)
def test_tensor_parallel_size_is_derived_from_the_gpus_of_a_server(gpus, num_servers, args, size):
    rollout = RolloutConfig(gpus=gpus, num_servers=num_servers, server_args=args)
    assert derived_tensor_ranks(rollout) == size


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ("--tp-size", "4"),
            r"need 4 GPUs for a server.*num_servers = 2 2: must be equal.*remove --tp-size",
        ),
        (("--tp=1",), "need 1 GPUs"),
        (("--tp-size", "2", "--pp-size", "2"), "need 4 GPUs"),
        (("--pp-size", "4"), "need a multiple of 4 GPUs"),
    ],
)
def test_options_that_need_another_number_of_gpus_are_refused(args, message):
    with pytest.raises(ValueError, match=message):
        check_rollout(RolloutConfig(gpus=(4, 5, 6, 7), num_servers=2, server_args=args))


@pytest.mark.parametrize(
    ("rollout", "ranks", "visible", "shared"),
    [
        ({}, 1, None, "GPU 0,"),
        ({"gpus": (3, 4)}, 4, None, "GPU 3,"),
        ({"gpus": (4, 5)}, 4, None, None),
        ({"gpus": (0, 1)}, 2, "2,3", None),
        ({"gpus": (2, 3)}, 2, "2,3,4,5", "GPU 2, 3,"),
        ({"gpus": (4, 5)}, 2, "2,3,4,5", None),
        ({}, 2, "4,5,6,7", "GPU 4,"),
        ({"server_args": ("--base-gpu-id", "2", "--tp-size", "2")}, 2, "4,5,6,7", None),
        ({"server_args": ("--base-gpu-id", "1")}, 2, "GPU-a,GPU-b", "GPU GPU-b,"),
        ({"weight_sync": "disk"}, 8, None, None),
        ({"weight_sync": "colocated"}, 8, None, None),
        ({"urls": ("http://a:1",)}, 8, None, None),
    ],
)
def test_a_gpu_of_a_training_rank_is_refused_for_a_broadcast(rollout, ranks, visible, shared):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    if shared is None:
        check_overlap(RolloutConfig(**rollout), ranks, environ)
        return
    with pytest.raises(
        ValueError, match=r"rollout\.gpus = .*NCCL refuses.*set rollout\.gpus to other GPUs"
    ) as caught:
        check_overlap(RolloutConfig(**rollout), ranks, environ)
    assert f"servers would use {shared}" in str(caught.value)


def test_two_servers_on_one_gpu_are_refused_for_a_broadcast():
    with pytest.raises(
        ValueError,
        match=r"num_servers = 2 without rollout\.gpus: all would use GPU 1, and NCCL refuses",
    ):
        check_overlap(RolloutConfig(num_servers=2, server_args=("--base-gpu-id", "1")), 1, {})


@pytest.mark.parametrize(
    ("rollout", "host", "visible", "message"),
    [
        (
            {"gpus": (6, 7, 8, 9)},
            8,
            None,
            r"has GPUs 0 to 7, not 8, 9: .*on that host only.*set rollout\.urls",
        ),
        ({"gpus": (6, 7)}, 8, "0,1", None),
        (
            {"server_args": ("--tp", "16")},
            8,
            None,
            r"need 16 GPUs for a server, the host of rank 0 has 8",
        ),
        (
            {"server_args": ("--tp", "4")},
            8,
            "0,1",
            r"need 4 GPUs for a server, the host of rank 0 has 2",
        ),
        (
            {"gpus": (2, 3), "weight_sync": "colocated"},
            8,
            "0,1",
            r"rank 0 sends weights .* does not see 2, 3 \(",
        ),
        ({"gpus": (2, 3), "weight_sync": "colocated"}, 8, None, None),
        ({"urls": ("http://a:1",)}, 1, None, None),
    ],
)
def test_gpus_that_the_host_does_not_have_are_refused(rollout, host, visible, message):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    if message is None:
        check_count(RolloutConfig(**rollout), host, environ)
        return
    with pytest.raises(ValueError, match=message):
        check_count(RolloutConfig(**rollout), host, environ)


def test_gpus_of_a_server_as_rank_0_numbers_them():
    rollout = RolloutConfig(num_servers=2, gpus=(6, 7, 4, 5), weight_sync="colocated")
    assert devices_of_server(rollout, 1, {}) == [4, 5]
    assert devices_of_server(rollout, 0, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}) == [2, 3]
    first = RolloutConfig(server_args=("--tp", "2"), weight_sync="colocated")
    assert devices_of_server(first, 0, {}) == [0, 1]
    assert devices_of_server(first, 0, {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}) == [0, 1]


def test_servers_on_a_gpu_of_a_rank_are_counted():
    assert (
        most_on_a_rank(RolloutConfig(gpus=(0, 1, 2, 3), num_servers=2, weight_sync="disk"), 4, {})
        == 1
    )
    assert most_on_a_rank(RolloutConfig(gpus=(4, 5)), 4, {}) == 0
    assert most_on_a_rank(RolloutConfig(num_servers=3, weight_sync="disk"), 4, {}) == 3
    assert most_on_a_rank(RolloutConfig(urls=("http://a:1",)), 4, {}) == 0
