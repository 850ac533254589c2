"""Sends rollouts between ranks as bytes, without pickle: from the leader of a replica to its ranks, and between replicas.

NCCL and gloo support neither int16 nor bool; both support bytes.  Shapes: n sequences, G responses of a group, R replicas.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.batch import codec
from megatron_rl.batch.collectives import device_of
from megatron_rl.batch.pack import Sample
from megatron_rl.records import Prompt, RolloutGroup

CHUNK_BYTES = 256 * 2**20  # of a broadcast: limits the memory that it takes on the device


def share_groups(
    groups: Sequence[RolloutGroup] | None,
    prompts: Sequence[Prompt],
    *,
    group: dist.ProcessGroup,
    leader: int,
    device: torch.device,
) -> list[RolloutGroup]:
    """Broadcast scored groups from global rank `leader` to all ranks of `group` (tp x cp x pp of one replica).

    Every rank passes the same `prompts`, in the groups' order; only the leader passes `groups`.  Texts are not sent.
    """
    if group.size() == 1 and groups is not None:
        return list(groups)
    data = None
    if dist.get_rank() == leader:
        assert groups, "the leader of a replica has no rollouts to share"
        rewards = np.stack([np.asarray(group.rewards, np.float32) for group in groups])
        data = codec.to_bytes([rollout for group in groups for rollout in group.rollouts], rewards=rewards)
    received = broadcast_bytes(data, leader, group, device)
    if groups is not None:
        return list(groups)
    rollouts, columns = codec.from_bytes(received)
    rewards = columns["rewards"]
    size = rewards.shape[1]
    return [
        RolloutGroup(prompt, tuple(rollouts[i * size : (i + 1) * size]), rewards[i]) for i, prompt in enumerate(prompts)
    ]


def exchange(
    samples: Sequence[Sample], destinations: Sequence[int], group: dist.ProcessGroup | None
) -> list[list[Sample]]:
    """Send sample i to replica destinations[i]; returns the samples received from each replica, in its order.

    Every rank exchanges with the ranks at its own place in the other replicas, which spreads the bytes over all links.
    Samples that stay are not copied.  Collective over `group` (None: a single replica).
    """
    if group is None or group.size() == 1:
        return [list(samples)]
    own = group.rank()
    leaving: list[list[Sample]] = [[] for _ in range(group.size())]
    for sample, to in zip(samples, destinations, strict=True):
        leaving[to].append(sample)
    stay, leaving[own] = leaving[own], []  # not encoded
    received = send_bytes([encode_samples(those) for those in leaving], group)
    arrived = [decode_samples(those) for those in received]
    arrived[own] = stay
    return arrived


def encode_samples(samples: Sequence[Sample]) -> np.ndarray:
    """uint8 [bytes], empty without samples."""
    if not samples:
        return np.zeros(0, np.uint8)
    # float64: an advantage must not change by being sent
    learned = np.array([(sample.advantage, sample.in_loss) for sample in samples], np.float64)
    return codec.to_bytes([sample.rollout for sample in samples], learned=learned)


def decode_samples(data: np.ndarray) -> list[Sample]:
    """Inverse of `encode_samples` up to texts, which only recorders need; arrays are views of `data`."""
    if not len(data):
        return []
    rollouts, columns = codec.from_bytes(data)
    return [
        Sample(rollout, float(advantage), in_loss=bool(in_loss))
        for rollout, (advantage, in_loss) in zip(rollouts, columns["learned"].tolist(), strict=True)
    ]


def broadcast_bytes(data: np.ndarray | None, leader: int, group: dist.ProcessGroup, device: torch.device) -> np.ndarray:
    """uint8 [bytes] of the leader on every rank of `group`; `device`: what the group's backend needs."""
    size = torch.tensor([0 if data is None else len(data)], dtype=torch.int64, device=device)
    dist.broadcast(size, src=leader, group=group)
    host = torch.empty(int(size), dtype=torch.uint8) if data is None else torch.from_numpy(data)
    for chunk in host.split(CHUNK_BYTES):
        moved = chunk.to(device)  # on the CPU this is the chunk itself: no copy back
        dist.broadcast(moved, src=leader, group=group)
        if data is None and moved.data_ptr() != chunk.data_ptr():
            chunk.copy_(moved)
    return host.numpy()


def send_bytes(outgoing: Sequence[np.ndarray], group: dist.ProcessGroup) -> list[np.ndarray]:
    """uint8 arrays to each replica -> those from each."""
    device = device_of(group)
    out_sizes = torch.tensor([len(part) for part in outgoing], dtype=torch.int64, device=device)
    in_sizes = torch.empty_like(out_sizes)
    dist.all_to_all_single(in_sizes, out_sizes, group=group)  # receivers must know the sizes first
    sizes = in_sizes.tolist()
    received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    sent = torch.from_numpy(np.concatenate(outgoing)).to(device)
    dist.all_to_all_single(received, sent, sizes, out_sizes.tolist(), group=group)
    return [part.numpy() for part in received.cpu().split(sizes)]
