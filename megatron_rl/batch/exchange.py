"""Sequences move between data-parallel replicas, so that each holds what it will compute; flat bytes, no pickle.

Every rank trades with the ranks at its own place in the other replicas, so the bytes are spread over all links.
Shapes: n sequences that go from one replica to another, R replicas.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.batch.pack import Sample
from megatron_rl.batch.transfer import decode_rollouts, encode_rollouts

ALIGNMENT = 16  # bytes: every array begins at a multiple of it


def exchange(
    samples: Sequence[Sample], destinations: Sequence[int], group: dist.ProcessGroup | None
) -> list[list[Sample]]:
    """Send sample i to replica destinations[i]; returns what came from each replica, in its order.

    Those that stay are handed through.  Collective over `group` (None: a single replica).
    """
    if group is None or group.size() == 1:
        return [list(samples)]
    own = group.rank()
    leaving: list[list[Sample]] = [[] for _ in range(group.size())]
    for sample, to in zip(samples, destinations, strict=True):
        leaving[to].append(sample)
    stay, leaving[own] = leaving[own], []
    received = send_bytes([to_bytes(those) for those in leaving], group)
    arrived = [from_bytes(those) for those in received]
    arrived[own] = stay
    return arrived


def send_bytes(outgoing: Sequence[np.ndarray], group: dist.ProcessGroup) -> list[np.ndarray]:
    """uint8 arrays to each replica -> those from each."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    out_sizes = torch.tensor([len(part) for part in outgoing], dtype=torch.int64, device=device)
    in_sizes = torch.empty_like(out_sizes)
    dist.all_to_all_single(in_sizes, out_sizes, group=group)
    sizes = in_sizes.tolist()
    received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    sent = torch.from_numpy(np.concatenate(outgoing)).to(device)
    dist.all_to_all_single(received, sent, sizes, out_sizes.tolist(), group=group)
    return [part.numpy() for part in received.cpu().split(sizes)]


def to_bytes(samples: Sequence[Sample]) -> np.ndarray:
    """A JSON header with ids and the arrays' shapes and types, then the arrays; no bytes for no samples."""
    if not samples:
        return np.zeros(0, np.uint8)
    rollouts = [sample.rollout for sample in samples]
    learned = np.array([(sample.advantage, sample.in_loss) for sample in samples], np.float64)
    arrays = [np.ascontiguousarray(array) for array in (learned, *encode_rollouts(rollouts))]
    header = {
        "ids": [rollout.id for rollout in rollouts],
        "arrays": [(array.dtype.str, array.shape) for array in arrays],
    }
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    parts = [
        np.array([len(text)], np.int64).view(np.uint8),
        text,
        *(array.reshape(-1).view(np.uint8) for array in arrays),
    ]
    return np.concatenate([np.pad(part, (0, -len(part) % ALIGNMENT)) for part in parts])


def from_bytes(data: np.ndarray) -> list[Sample]:
    """Inverse of `to_bytes` up to texts, which only recorders need; arrays are views of `data`."""
    if not len(data):
        return []
    at = ALIGNMENT
    length = int(data[:8].view(np.int64)[0])
    header = json.loads(data[at : at + length].tobytes())
    at += length + -length % ALIGNMENT
    arrays = []
    for dtype, shape in header["arrays"]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        arrays.append(data[at : at + size].view(dtype).reshape(shape))
        at += size + -size % ALIGNMENT
    learned, *rest = arrays
    rollouts = decode_rollouts(rest, header["ids"])
    return [
        Sample(rollout, float(advantage), in_loss=bool(in_loss))
        for rollout, (advantage, in_loss) in zip(rollouts, learned.tolist(), strict=True)
    ]
