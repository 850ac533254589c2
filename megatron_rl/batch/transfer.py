"""Transfer of rollouts between ranks as bytes, without pickle: from the leader of a replica to its
ranks, and between replicas.

NCCL and gloo support neither int16 nor bool; both support bytes.  A step's routes take up to tens
of gigabytes: neither host nor GPU ever has a second copy of them, only CHUNK_BYTES at a time.
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

CHUNK_BYTES = 64 * 2**20
"""The largest number of bytes that one collective sends, and that it receives; it limits the memory
of a transfer.
"""


def share_groups(
    groups: Sequence[RolloutGroup] | None,
    prompts: Sequence[Prompt],
    *,
    group: dist.ProcessGroup,
    leader: int,
) -> list[RolloutGroup]:
    """Broadcast scored groups from global rank `leader` to all ranks of `group`, and return them.

    group: the tp x cp x pp ranks of one replica, over gloo.
    prompts: the same on every rank, in the order of the groups.
    groups: only the leader passes them.  Texts are not sent.
    """
    if group.size() == 1 and groups is not None:
        return list(groups)
    data = None
    if dist.get_rank() == leader:
        assert groups, "the leader of a replica has no rollouts to share"
        # one matrix: all groups of a call have equally many responses
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
    """Send sample i to replica destinations[i]; return the samples received from every replica, in
    the order in which it passed them.

    A rank exchanges with the ranks at the same place in the other replicas, which spreads the bytes
    over all links.  Samples that stay are not copied.  Collective over `group` (None: a single
    replica).
    """
    if group is None or group.size() == 1:
        return [list(samples)]
    replica = group.rank()
    leaving: list[list[Sample]] = [[] for _ in range(group.size())]
    for sample, to in zip(samples, destinations, strict=True):
        leaving[to].append(sample)
    staying, leaving[replica] = leaving[replica], []  # these are not encoded
    received = send_bytes([encode_samples(part) for part in leaving], group)
    arrived = [decode_samples(data) for data in received]
    arrived[replica] = staying
    return arrived


def encode_samples(samples: Sequence[Sample]) -> np.ndarray:
    """Return the samples as uint8 [bytes], empty without samples."""
    if not samples:
        return np.zeros(0, np.uint8)
    # float64, so that an advantage is sent exactly
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
    """Return the samples that `encode_samples` encoded, without their texts, which only recorders
    need.  Arrays are views of `data`.
    """
    if not len(data):
        return []
    rollouts, columns = codec.from_bytes(data)
    # older saved mini-batches have neither of these
    origins = columns.get("origins", np.zeros((len(rollouts), 2), np.int32)).tolist()
    responses = columns.get("responses", np.full(len(rollouts), -1)).tolist()
    rows = zip(rollouts, columns["learned"].tolist(), origins, responses, strict=True)
    return [
        Sample(
            rollout,
            advantage,
            in_loss=bool(in_loss),
            episode_length=int(length),
            sampled_by=sampled_by,
            save_tokens=bool(save),
            response=None if response < 0 else response,
        )
        for rollout, (advantage, in_loss, length), (sampled_by, save), response in rows
    ]


def broadcast_bytes(
    data: codec.Encoded | None, leader: int, group: dist.ProcessGroup
) -> np.ndarray:
    """Broadcast the leader's bytes over `group`, a gloo group; return uint8 [bytes] on every other
    rank, and an empty array on the leader, which has them.
    """
    # the other ranks must know the size first
    size = torch.tensor([0 if data is None else len(data)], dtype=torch.int64)
    dist.broadcast(size, src=leader, group=group)
    total = int(size)
    received = np.empty(total if data is None else 0, np.uint8)
    # one buffer for all chunks: the leader never has a second copy of all routes
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
    """Send an array of bytes to every replica, and return the array received from each, uint8.

    The bytes are sent in rounds, in which the device has CHUNK_BYTES to send and as many received.
    """
    device = device_of_group(group)
    out_sizes = torch.tensor([len(part) for part in outgoing], dtype=torch.int64, device=device)
    in_sizes = torch.empty_like(out_sizes)
    dist.all_to_all_single(in_sizes, out_sizes, group=group)  # receivers must know the sizes first
    received = [np.empty(size, np.uint8) for size in in_sizes.tolist()]
    # the bytes of a round are divided by the number of replicas that a rank exchanges with, which
    # is some tens also where there are thousands of replicas
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
