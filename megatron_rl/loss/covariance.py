"""Tokens chosen by the covariance of log-prob and advantage (Clip-Cov and KL-Cov, arXiv
2505.22617): `loss.select`.

They are chosen once for a mini-batch, over all its ranks, before its update: the same ones however
it is divided.
Shapes: n tokens, this rank's rows of all micro-batches of one mini-batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from megatron_rl.config.loss_presets import LossSpec

LOWEST, HIGHEST = -(2**63), 2**63 - 1  # int64


def select_tokens(
    old_logprobs: Float[Tensor, " n"],
    advantages: Float[Tensor, " n"],
    mask: Bool[Tensor, " n"],
    keys: Int[Tensor, " n"],
    switches: LossSpec,
    group: dist.ProcessGroup | None = None,
) -> Bool[Tensor, " n"]:
    """Which tokens of `mask` loss.select chooses: max(floor(select_share * N), 1) of the N of the
    whole mini-batch.

    cov_t = (A_t - mean A) (log pi_old_t - mean log pi_old), means over the mini-batch's tokens,
    float64.
    cov_band: of the tokens with cov_low < cov < cov_high those with the smallest `keys`, a random
    draw (`token_keys`).
    cov_top: those with the largest cov; of equal ones those with the smallest keys.
    group: the ranks that hold the other tokens.  Collective over it; no wait for the device.
    """
    values = torch.stack([advantages.double(), old_logprobs.detach().double()])
    sums = torch.cat([torch.where(mask, values, 0.0).sum(dim=1), mask.sum().double()[None]])
    sums = sum_over_group(sums, group)
    count = sums[2].clamp(min=1)
    centred = values - (sums[:2] / count)[:, None]
    covariance = centred[0] * centred[1] + 0.0  # -0 becomes 0: they are ordered by their bits
    wanted = (switches.select_share * count).floor().clamp(min=1).long()
    if switches.select == "cov_band":
        candidates = mask & (covariance > switches.cov_low) & (covariance < switches.cov_high)
        return smallest(keys, candidates, wanted, group)
    order = ~ordered_bits(torch.where(mask, covariance, 0.0))
    last = nth_smallest(order, mask, wanted, group)
    larger = mask & (order < last)
    left = wanted - sum_over_group(larger.sum(), group)
    return larger | smallest(keys, mask & (order == last), left, group)


def smallest(
    keys: Int[Tensor, " n"],
    candidates: Bool[Tensor, " n"],
    count: Int[Tensor, ""],
    group: dist.ProcessGroup | None,
) -> Bool[Tensor, " n"]:
    """The `count` candidates with the smallest keys on all ranks, or all of them where there are
    fewer.
    """
    return candidates & (keys <= nth_smallest(keys, candidates, count, group)) & (count > 0)


def nth_smallest(
    keys: Int[Tensor, " n"],
    candidates: Bool[Tensor, " n"],
    count: Int[Tensor, ""],
    group: dist.ProcessGroup | None,
) -> Int[Tensor, ""]:
    """The smallest bound that `count` candidates' keys do not exceed, by bisection: 64 sums over
    ranks, no keys travel.
    """
    low, high = (
        torch.full((), bound, dtype=torch.int64, device=keys.device) for bound in (LOWEST, HIGHEST)
    )
    for _ in range(64):
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, rounded down, without overflow
        enough = sum_over_group((candidates & (keys <= middle)).sum(), group) >= count
        low, high = torch.where(enough, low, middle + 1), torch.where(enough, middle, high)
    return high


def token_keys(
    names: Sequence[str],
    ids: Int[Tensor, " T"],
    positions: Int[Tensor, " T"],
    rollout_logprobs: Float[Tensor, " T"],
) -> Int[Tensor, " T"]:
    """A pseudo-random int64 of each token of a micro-batch, the same wherever the token is packed.

    names: of the sequences; ids: which of them each token belongs to (-1 on pads); positions:
    inside the sequence.  log mu, as the server reported it, makes the draw another one where a
    prompt is sampled again.
    """
    digests = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names]
    numbers = [
        int.from_bytes(digest, "little", signed=True) for digest in [*digests, bytes(8)]
    ]  # ids of -1: the last one
    sequences = torch.tensor(numbers).to(ids.device, non_blocking=True)[ids]
    bits = rollout_logprobs.detach().float().view(torch.int32).long()
    return mixed(mixed(sequences + positions) + bits)


def mixed(values: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014), modulo 2^64: every bit of the
    input changes all others.
    """
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        values = (values ^ ((values >> shift) & (HIGHEST >> (shift - 1)))) * factor
    return values ^ ((values >> 31) & (HIGHEST >> 30))


def ordered_bits(values: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
    """int64 in the order of the float64 values."""
    bits = values.view(torch.int64)
    return torch.where(bits < 0, bits ^ HIGHEST, bits)


def sum_over_group(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None and group.size() > 1:
        values = values.clone()
        dist.all_reduce(values, group=group)
    return values
