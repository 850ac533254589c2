"""Sends rollouts between ranks as bytes, without pickle: from the leader of a replica to its ranks,
and between replicas.

NCCL and gloo support neither int16 nor bool; both support bytes.  A step's routes take up to tens
of gigabytes: neither host nor GPU ever holds a second copy of them, only CHUNK_BYTES at a time.
Shapes: n sequences, G responses of a group, R replicas.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.batch import codec
from megatron_rl.batch.collectives import all_reduce_ints, device_of_group
from megatron_rl.batch.pack import Sample
from megatron_rl.records import Prompt, RolloutGroup

# of one collective: sent and received, limits the memory that a transfer takes
CHUNK_BYTES = 64 * 2**20


def share_groups(
    groups: Sequence[RolloutGroup] | None,
    prompts: Sequence[Prompt],
    *,
    group: dist.ProcessGroup,
    leader: int,
) -> list[RolloutGroup]:
    """Broadcast scored groups from global rank `leader` to all ranks of `group` (tp x cp x pp of
    one replica, over gloo).

    Every rank passes the same `prompts`, in the groups' order; only the leader passes `groups`.
    Texts are not sent.
    """
    if group.size() == 1 and groups is not None:
        return list(groups)
    data = None
    if dist.get_rank() == leader:
        assert groups, "the leader of a replica has no rollouts to share"
        rewards = np.stack([np.asarray(group.rewards, np.float32) for group in groups])
        data = codec.encode(
            [rollout for group in groups for rollout in group.rollouts], rewards=rewards
        )
    received = broadcast_bytes(data, leader, group)
    if groups is not None:
        return list(groups)
    rollouts, columns = codec.from_bytes(received)
    rewards = columns["rewards"]
    size = rewards.shape[1]
    return [
        RolloutGroup(prompt, tuple(rollouts[i * size : (i + 1) * size]), rewards[i])
        for i, prompt in enumerate(prompts)
    ]


def exchange(
    samples: Sequence[Sample], destinations: Sequence[int], group: dist.ProcessGroup | None
) -> list[list[Sample]]:
    """Send sample i to replica destinations[i]; returns the samples received from each replica, in
    its order.

    Every rank exchanges with the ranks at its own place in the other replicas, which spreads the
    bytes over all links. Samples that stay are not copied.  Collective over `group` (None: a single
    replica).
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
    learned = np.array(
        [(sample.advantage, sample.in_loss, sample.length) for sample in samples], np.float64
    )
    origins = np.array([(sample.sampled_by, sample.save_tokens) for sample in samples], np.int32)
    responses = np.array(
        [-1 if sample.response is None else sample.response for sample in samples], np.int64
    )
    rollouts = [sample.rollout for sample in samples]
    return codec.to_bytes(rollouts, learned=learned, origins=origins, responses=responses)


def decode_samples(data: np.ndarray) -> list[Sample]:
    """Inverse of `encode_samples` up to texts, which only recorders need; arrays are views of
    `data`.
    """
    if not len(data):
        return []
    rollouts, columns = codec.from_bytes(data)
    # older saved mini-batches have neither of these
    origins = columns.get("origins", np.zeros((len(rollouts), 2), np.int32)).tolist()
    responses = columns.get("responses", np.full(len(rollouts), -1)).tolist()
    return [
        Sample(
            rollout,
            advantage,
            bool(in_loss),
            int(length),
            by,
            bool(save),
            None if number < 0 else number,
        )
        for rollout, (advantage, in_loss, length), (by, save), number in zip(
            rollouts, columns["learned"].tolist(), origins, responses, strict=True
        )
    ]


def broadcast_bytes(
    data: codec.Encoded | None, leader: int, group: dist.ProcessGroup
) -> np.ndarray:
    """uint8 [bytes] of the leader on every other rank of `group`, a gloo one; on the leader, which
    has them, none.
    """
    size = torch.tensor([0 if data is None else len(data)], dtype=torch.int64)
    dist.broadcast(size, src=leader, group=group)
    total = int(size)
    received = np.empty(total if data is None else 0, np.uint8)
    staged = np.empty(0 if data is None else min(CHUNK_BYTES, total), np.uint8)
    for start in range(0, total, CHUNK_BYTES):
        end = min(start + CHUNK_BYTES, total)
        if data is None:
            chunk = received[start:end]
        else:
            chunk = staged[: end - start]
            data.copy_to(chunk, start)
        dist.broadcast(torch.from_numpy(chunk), src=leader, group=group)
    return received


def send_bytes(outgoing: Sequence[np.ndarray], group: dist.ProcessGroup) -> list[np.ndarray]:
    """uint8 arrays to each replica -> those from each.

    In rounds: the device holds CHUNK_BYTES to send and as many received.
    """
    device = device_of_group(group)
    out_sizes = torch.tensor([len(part) for part in outgoing], dtype=torch.int64, device=device)
    in_sizes = torch.empty_like(out_sizes)
    dist.all_to_all_single(in_sizes, out_sizes, group=group)  # receivers must know the sizes first
    received = [np.empty(size, np.uint8) for size in in_sizes.tolist()]
    # of thousands of replicas a rank sends to some tens, and receives from as many: only these
    # share a round's bytes
    peers = max(sum(len(part) > 0 for part in parts) for parts in (outgoing, received))
    longest, most_peers = all_reduce_ints(
        [max(map(len, outgoing)), peers], dist.ReduceOp.MAX, group
    )
    step = max(CHUNK_BYTES // max(most_peers, 1), 1)
    for start in range(0, longest, step):
        parts = [part[start : start + step] for part in outgoing]
        arriving = [part[start : start + step] for part in received]
        sizes = [len(part) for part in arriving]
        sent = torch.from_numpy(np.concatenate(parts)).to(device)
        moved = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        dist.all_to_all_single(moved, sent, sizes, [len(part) for part in parts], group=group)
        for part, chunk in zip(arriving, moved.cpu().split(sizes), strict=True):
            part[:] = chunk.numpy()
    return received
