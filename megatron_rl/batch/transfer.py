"""One rank of a data-parallel replica fetches rollouts; this hands them to the replica's other ranks as flat arrays.

No pickle: one header with shapes and dtypes, then one broadcast of bytes per array, as neither gloo nor NCCL has int16 (the
routes of more than 256 experts).  Prompts are known to every rank already.
Shapes: n sequences of the replica, S tokens each, R response tokens each, G responses a group, L layers, K top-k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.records import DIGEST_BYTES, Prompt, Rollout, RolloutGroup

FINISH_REASONS = ("stop", "length")
DTYPES = tuple(np.dtype(kind) for kind in (np.int64, np.float32, np.uint8, np.int16, np.bool_, np.int32))
NUM_ARRAYS, MAX_DIMS = 8, 3


def share_groups(
    groups: Sequence[RolloutGroup] | None,
    prompts: Sequence[Prompt],
    *,
    group: dist.ProcessGroup,
    leader: int,
    device: torch.device,
) -> list[RolloutGroup]:
    """Broadcast scored groups from global rank `leader` to all ranks of `group` (tp x cp x pp of one replica).

    Every rank passes the same `prompts`, in the groups' order; only the leader passes `groups`.
    """
    if group.size() == 1:
        assert groups is not None
        return list(groups)
    is_leader = dist.get_rank() == leader
    arrays = encode(groups) if is_leader else []
    header = torch.zeros(NUM_ARRAYS, 2 + MAX_DIMS, dtype=torch.int64)
    for row, array in zip(header, arrays, strict=False):
        row[0], row[1] = DTYPES.index(array.dtype), array.ndim
        row[2 : 2 + array.ndim] = torch.tensor(array.shape)
    header = broadcast(header, leader, group, device)
    received = []
    for index, (kind, dims, *sizes) in enumerate(header.tolist()):
        dtype, shape = DTYPES[kind], sizes[:dims]
        own = (
            as_bytes(arrays[index]) if is_leader else torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
        )
        received.append(broadcast(own, leader, group, device).numpy().view(dtype).reshape(shape))
    return list(groups) if groups is not None else decode(received, prompts)


def as_bytes(array: np.ndarray) -> torch.Tensor:
    """uint8 [bytes], a view where the array is contiguous."""
    return torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def encode(groups: Sequence[RolloutGroup] | None) -> list[np.ndarray]:
    """[rewards f32 [n / G, G], then the arrays of `encode_rollouts`]."""
    assert groups, "the leader of a replica has no rollouts to share"
    rewards = np.stack([np.asarray(group.rewards, np.float32) for group in groups])
    return [rewards, *encode_rollouts([rollout for group in groups for rollout in group.rollouts])]


def decode(arrays: Sequence[np.ndarray], prompts: Sequence[Prompt]) -> list[RolloutGroup]:
    """Rebuild the groups; inverse of `encode` up to texts, which only the leader needs."""
    rewards, *rest = arrays
    size = rewards.shape[1]
    rollouts = decode_rollouts(rest, [f"{prompt.id}/{index}" for prompt in prompts for index in range(size)])
    return [
        RolloutGroup(prompt, tuple(rollouts[i * size : (i + 1) * size]), rewards[i]) for i, prompt in enumerate(prompts)
    ]


def encode_rollouts(rollouts: Sequence[Rollout]) -> list[np.ndarray]:
    """[table int64 [n, 3], tokens int64 [sum S], logprobs f32 [sum R], routes [L, sum (S-1), K],
    digests uint8 [n, 16] (no rows without routes), missing bool [sum (S-1)] (no rows where no route is missing),
    versions int32 [sum R]]."""
    routes = [rollout.routed_experts for rollout in rollouts if rollout.routed_experts is not None]
    assert len(routes) in (0, len(rollouts)), "some rollouts carry routes and some do not"
    table = [[len(r.tokens), r.prompt_length, FINISH_REASONS.index(r.finish_reason)] for r in rollouts]
    return [
        np.asarray(table, np.int64),
        np.concatenate([rollout.tokens for rollout in rollouts]).astype(np.int64),
        np.concatenate([rollout.rollout_logprobs for rollout in rollouts]).astype(np.float32),
        np.concatenate([ids.transpose(1, 0, 2) for ids in routes], axis=1) if routes else np.zeros((0, 0, 0), np.uint8),
        np.array([list(r.routes_digest or b"") for r in rollouts], np.uint8).reshape(-1, DIGEST_BYTES),
        np.concatenate([missing_rows(rollout) for rollout in rollouts])
        if any(rollout.missing_routes is not None for rollout in rollouts)
        else np.zeros(0, bool),
        np.concatenate([rollout.policy_versions for rollout in rollouts]).astype(np.int32),
    ]


def missing_rows(rollout: Rollout) -> np.ndarray:
    """bool [S - 1], also where no row is missing."""
    none = np.zeros(len(rollout.tokens) - 1, bool)
    return none if rollout.missing_routes is None else rollout.missing_routes


def decode_rollouts(arrays: Sequence[np.ndarray], ids: Sequence[str]) -> list[Rollout]:
    """Rebuild the rollouts; inverse of `encode_rollouts` up to ids and texts."""
    table, tokens, logprobs, routes, digests, missing, versions = arrays
    layer_rows = routes.transpose(1, 0, 2)  # a view: layer-major in memory, as they came
    token_ends, route_ends = np.cumsum(table[:, 0]), np.cumsum(table[:, 0] - 1)
    response_ends = np.cumsum(table[:, 0] - table[:, 1])
    rollouts = []
    for index, (length, prompt_length, finish) in enumerate(table.tolist()):
        rows = slice(route_ends[index] - (length - 1), route_ends[index])
        response = slice(response_ends[index] - (length - prompt_length), response_ends[index])
        gaps = missing[rows] if len(missing) else None
        rollouts.append(
            Rollout(
                id=ids[index],
                tokens=tokens[token_ends[index] - length : token_ends[index]],
                prompt_length=prompt_length,
                rollout_logprobs=logprobs[response],
                routed_experts=layer_rows[rows] if len(routes) else None,
                finish_reason=FINISH_REASONS[finish],  # type: ignore[arg-type]
                policy_versions=versions[response],
                missing_routes=gaps if gaps is not None and gaps.any() else None,
                routes_digest=digests[index].tobytes() if len(routes) else None,
            )
        )
    return rollouts


def broadcast(tensor: torch.Tensor, leader: int, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    """Broadcast through the device the group's backend needs; gloo silently corrupts non-contiguous tensors."""
    moved = tensor.contiguous().to(device)
    dist.broadcast(moved, src=leader, group=group)
    return moved.cpu()
