"""Transfer of rollouts between ranks as bytes, without pickle: from the leader of a replica to its
ranks, and between replicas.

NCCL and gloo support neither int16 nor bool; both support bytes.  A step's routes take up to tens
of gigabytes: no host or GPU ever has a second copy of them, only CHUNK_BYTES at a time.  The
ranks of a replica on one node have one copy together (distributed/node_ranks.py).
Shapes: n sequences, G responses of a group, R replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.batch import codec
from megatron_rl.batch.collectives import all_reduce_ints, device_of_group
from megatron_rl.batch.pack import Sample
from megatron_rl.distributed.node_ranks import NodeFile, NodeRanks, file_of
from megatron_rl.records import Prompt, Rollout, RolloutGroup

CHUNK_BYTES = 64 * 2**20
"""The largest number of bytes that one collective sends, and that it receives; it limits the memory
of a transfer.
"""


def share_groups(
    groups: Sequence[RolloutGroup] | None, prompts: Sequence[Prompt], node: NodeRanks
) -> list[RolloutGroup]:
    """Return the leader's scored groups on all ranks of a replica.  Collective over the replica.

    Every node gets their bytes once; its ranks share this memory, which is read-only.
    prompts: the same on every rank, in the order of the groups.
    groups: only the leader, the first rank of node.group, passes them.  Texts are not sent.
    """
    if node.group.size() == 1 and groups is not None:
        return list(groups)
    is_leader = node.group.rank() == 0
    data = ids = None
    routes: list[np.ndarray] = []
    if is_leader:
        assert groups, "the leader of a replica has no rollouts to share"
        groups = [
            replace(group, rollouts=tuple(in_node_memory(one, node) for one in group.rollouts))
            for group in groups
        ]
        # one matrix: all groups of a call have equally many responses
        rewards = np.stack([np.asarray(group.rewards, np.float32) for group in groups])
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        data = codec.encode(rollouts, routes, rewards=rewards)
        # a receiver must know the starts of the routes in what it receives
        sizes = np.array([array.nbytes for array in routes], np.int64)
        ids = codec.encoded([np.array([len(sizes)], np.int64), sizes, *routes])
    files, places = _on_node(data, ids, routes, node)
    if groups is not None:
        return list(groups)
    # (file, start) of the next routes
    following = zip(places[::2], places[1::2], strict=True)

    def next_routes(dtype: str, shape: Sequence[int]) -> np.ndarray:
        number, start = next(following)
        return files[number].array(start, dtype, shape)

    received = files[0].array(0, np.uint8, (len(files[0]),))
    rollouts, columns = codec.from_bytes(received, next_routes)
    rewards = columns["rewards"]
    size = rewards.shape[1]
    return [
        RolloutGroup(prompt, tuple(rollouts[i * size : (i + 1) * size]), rewards[i])
        for i, prompt in enumerate(prompts)
    ]


def _on_node(
    data: codec.Encoded | None,
    ids: codec.Encoded | None,
    routes: Sequence[np.ndarray],
    node: NodeRanks,
) -> tuple[list[NodeFile], list[int]]:
    """Send the leader's bytes to the first rank of every node, and tell its ranks where they are.

    Returns the files of this node, of which the first one has `data`, and (file, start) of every
    array of routes, flat.  ids: the number of routes, their sizes and the routes.
    """
    if not node.is_first:
        return node.tell()
    if data is not None and ids is not None:  # the leader
        if node.between is not None:
            broadcast_bytes(data, node.between)
            broadcast_bytes(ids, node.between)
        if node.is_alone:
            return node.tell()
        file = NodeFile.create(len(data))
        data.copy_to(file.bytes(0, len(data)))
        return node.tell(*_places(file, routes))
    assert node.between is not None
    file, received = (broadcast_bytes(None, node.between) for _ in range(2))
    count = int(received.array(0, np.int64, (1,))[0])
    sizes = received.array(codec.ALIGNMENT, np.int64, (count,))
    first = codec.ALIGNMENT + codec.aligned(sizes.nbytes)
    starts = np.cumsum([first, *map(codec.aligned, sizes.tolist())])[:-1]
    return node.tell([file, received], [value for start in starts.tolist() for value in (1, start)])


def _places(first: NodeFile, arrays: Sequence[np.ndarray]) -> tuple[list[NodeFile], list[int]]:
    """Return (files, numbers): `first` and the files of the arrays; (file, start) of every array,
    flat.
    """
    files, numbers = [first], []
    for array in arrays:
        file = file_of(array)
        assert file is not None, "routes outside of the node's memory"
        if file not in files:
            files.append(file)
        numbers += [files.index(file), array.ctypes.data - file.address]
    return files, numbers


def in_node_memory(rollout: Rollout, node: NodeRanks) -> Rollout:
    """Return the rollout with the routes of all its sequences where the other ranks of this node
    can map them; unchanged where they are there, or where there is no other rank.
    """
    if node.is_alone:
        return rollout
    if earlier := rollout.episode.earlier:
        rollout = rollout.with_episode(earlier=tuple(in_node_memory(one, node) for one in earlier))
    routes = rollout.routed_experts
    if routes is None or file_of(routes) is not None:
        return rollout
    ids = node.memory.copy(codec.layer_major(routes).transpose(1, 0, 2))
    return replace(rollout, routed_experts=ids.transpose(1, 0, 2))


def exchange(
    samples: Sequence[Sample],
    destinations: Sequence[int],
    group: dist.ProcessGroup | None,
    node: NodeRanks | None = None,
) -> list[list[Sample]]:
    """Send sample i to replica destinations[i]; return the samples received from every replica, in
    the order in which it passed them.

    A rank exchanges with the ranks at the same place in the other replicas; the first one on each
    node of a replica receives, and the others there map its memory.  Samples that stay are not
    copied.  node: None: every rank receives.  Collective over `group` (None: a single replica), and
    over this replica.
    """
    if group is None or group.size() == 1:
        return [list(samples)]
    replica = group.rank()
    leaving: list[list[Sample]] = [[] for _ in range(group.size())]
    for sample, to in zip(samples, destinations, strict=True):
        leaving[to].append(sample)
    staying, leaving[replica] = leaving[replica], []  # these are not encoded
    if node is None:
        received = send_bytes([encode_samples(part) for part in leaving], group)
    else:
        flags = [node.is_first * (other == replica) for other in range(group.size())]
        receives = all_reduce_ints(flags, dist.ReduceOp.SUM, group)
        leaving = [part if to else [] for part, to in zip(leaving, receives, strict=True)]
        received = _received_on_node([encode_samples(part) for part in leaving], group, node)
    arrived = [decode_samples(data) for data in received]
    arrived[replica] = staying
    return arrived


def _received_on_node(
    outgoing: Sequence[np.ndarray], group: dist.ProcessGroup, node: NodeRanks
) -> list[np.ndarray]:
    """Do `send_bytes`; return on every rank of a node what its first rank received."""
    if not node.is_shared:
        return send_bytes(outgoing, group)
    files: list[NodeFile] = []
    bounds: list[int] = []

    def make_memory(sizes: Sequence[int]) -> list[np.ndarray]:
        starts = np.cumsum([0, *map(codec.aligned, sizes)]).tolist()
        files.append(NodeFile.create(starts[-1]))
        bounds.extend(value for pair in zip(starts, sizes, strict=False) for value in pair)
        return [files[0].bytes(start, size) for start, size in zip(starts, sizes, strict=False)]

    if node.is_first:
        send_bytes(outgoing, group, make_memory)
        files, bounds = node.tell(files, bounds)
    else:
        send_bytes(outgoing, group)
        files, bounds = node.tell()
    parts = zip(bounds[::2], bounds[1::2], strict=True)
    return [files[0].array(start, np.uint8, (size,)) for start, size in parts]


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
    teachers = np.array([sample.teacher_weight for sample in samples], np.float64)
    rollouts = [sample.rollout for sample in samples]
    return codec.to_bytes(
        rollouts, learned=learned, origins=origins, responses=responses, teachers=teachers
    )


def decode_samples(data: np.ndarray) -> list[Sample]:
    """Return the samples that `encode_samples` encoded, without their texts, which only recorders
    need.  Arrays are views of `data`.
    """
    if not len(data):
        return []
    rollouts, columns = codec.from_bytes(data)
    # older saved mini-batches have none of these
    origins = columns.get("origins", np.zeros((len(rollouts), 2), np.int32)).tolist()
    responses = columns.get("responses", np.full(len(rollouts), -1)).tolist()
    teachers = columns.get("teachers", np.zeros(len(rollouts))).tolist()
    learned = columns["learned"].tolist()
    rows = zip(rollouts, learned, origins, responses, teachers, strict=True)
    return [
        Sample(
            rollout,
            advantage,
            in_loss=bool(in_loss),
            episode_length=int(length),
            sampled_by=sampled_by,
            save_tokens=bool(save),
            response=None if response < 0 else response,
            teacher_weight=beta,
        )
        for rollout, (advantage, in_loss, length), (sampled_by, save), response, beta in rows
    ]


def broadcast_bytes(data: codec.Encoded | None, group: dist.ProcessGroup) -> NodeFile:
    """Broadcast the bytes of the first rank of `group`, a gloo group; return them on every other
    rank, and an empty file on the first, which has them.
    """
    # the other ranks must know the size first
    source = dist.get_global_rank(group, 0)
    size = torch.tensor([0 if data is None else len(data)], dtype=torch.int64)
    dist.broadcast(size, src=source, group=group)
    total = int(size)
    file = NodeFile.create(total if data is None else 0)
    # one buffer for all chunks: the leader never has a second copy of all routes
    staged = np.empty(0 if data is None else min(CHUNK_BYTES, total), np.uint8)
    for start in range(0, total, CHUNK_BYTES):
        end = min(start + CHUNK_BYTES, total)
        if data is None:
            chunk = file.bytes(start, end - start)
        else:
            chunk = staged[: end - start]
            data.copy_to(chunk, start)
        dist.broadcast(torch.from_numpy(chunk), src=source, group=group)
    return file


def new_memory(sizes: Sequence[int]) -> list[np.ndarray]:
    return [np.empty(size, np.uint8) for size in sizes]


def send_bytes(
    outgoing: Sequence[np.ndarray],
    group: dist.ProcessGroup,
    make_memory: Callable[[Sequence[int]], list[np.ndarray]] = new_memory,
) -> list[np.ndarray]:
    """Send an array of bytes to every replica, and return the array received from each, uint8.

    make_memory: sizes -> the arrays to receive into.
    The bytes are sent in rounds, in which the device has CHUNK_BYTES to send and as many received.
    """
    device = device_of_group(group)
    out_sizes = torch.tensor([len(part) for part in outgoing], dtype=torch.int64, device=device)
    in_sizes = torch.empty_like(out_sizes)
    dist.all_to_all_single(in_sizes, out_sizes, group=group)  # receivers must know the sizes first
    received = make_memory(in_sizes.tolist())
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
