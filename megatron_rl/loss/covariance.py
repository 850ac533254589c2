"""loss.select: tokens chosen by the covariance of log-prob and advantage (Clip-Cov and KL-Cov,
arXiv 2505.22617).

They are chosen once for a mini-batch, over all its ranks, before its update.  The choice does not
depend on how the mini-batch is divided into micro-batches and over ranks.
Shapes: n tokens, this rank's rows of all micro-batches of one mini-batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from megatron_rl.config.loss_presets import LossSwitches
from megatron_rl.loss.sequences import sum_over_group

LOWEST, HIGHEST = -(2**63), 2**63 - 1  # the range of int64


def select_tokens(
    old_logprobs: Float[Tensor, " n"],
    advantages: Float[Tensor, " n"],
    mask: Bool[Tensor, " n"],
    keys: Int[Tensor, " n"],
    switches: LossSwitches,
    group: dist.ProcessGroup | None = None,
) -> Bool[Tensor, " n"]:
    """Return the tokens of `mask` that loss.select chooses: max(floor(select_share * N), 1) of the
    N tokens of the complete mini-batch.

    cov_t = (A_t - mean A) (log pi_old_t - mean log pi_old), with means over the mini-batch's
    tokens, in float64.
    cov_band: the tokens with the smallest `keys`, of those with cov_low < cov < cov_high; the keys
    make it a random draw (`token_keys`).
    cov_top: the tokens with the largest cov; of equal ones those with the smallest keys.
    group: the ranks that have the other tokens.  Collective over it; it does not wait for the
    device.
    """
    values = torch.stack([advantages.double(), old_logprobs.detach().double()])
    # one all-reduce for the sums of A and of log pi_old, and for N
    sums = torch.cat([torch.where(mask, values, 0.0).sum(dim=1), mask.sum().double()[None]])
    sums = sum_over_group(sums, group)
    # no token in the mask: the means are 0 then, not NaN
    count = sums[2].clamp(min=1)
    centred = values - (sums[:2] / count)[:, None]
    covariance = centred[0] * centred[1] + 0.0  # -0 becomes 0: they are ordered by their bits
    wanted = (switches.select_share * count).floor().clamp(min=1).long()
    if switches.select == "cov_band":
        candidates = mask & (covariance > switches.cov_low) & (covariance < switches.cov_high)
        return smallest(keys, candidates, wanted, group)
    # ~ reverses the order of integers: the largest covariance is the smallest number
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
    """Return the `count` candidates with the smallest keys over all ranks, or all of them where
    there are fewer.
    """
    # with count = 0 the bound is the least of all keys, which a candidate may have
    return candidates & (keys <= nth_smallest(keys, candidates, count, group)) & (count > 0)


def nth_smallest(
    keys: Int[Tensor, " n"],
    candidates: Bool[Tensor, " n"],
    count: Int[Tensor, ""],
    group: dist.ProcessGroup | None,
) -> Int[Tensor, ""]:
    """Return the smallest bound that the keys of at least `count` candidates do not exceed.

    It is found by bisection over int64: 64 sums over the ranks, and no keys are sent.
    """
    low, high = (
        torch.full((), bound, dtype=torch.int64, device=keys.device) for bound in (LOWEST, HIGHEST)
    )
    # 64 halvings of the range of int64 leave one number
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
    """Return a pseudo-random int64 for every token of a micro-batch, which does not depend on where
    the token is packed.

    names: ids of the rollouts of the sequences; ids: the index of the token's sequence in `names`,
    -1 on pads; positions: places in the sequence.  log mu, as the server reported it, changes the
    draw where a prompt is sampled again.
    """
    digests = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names]
    # one more number, at the end: the id -1 of the pads selects it
    numbers = [int.from_bytes(digest, "little", signed=True) for digest in [*digests, bytes(8)]]
    sequences = torch.tensor(numbers).to(ids.device, non_blocking=True)[ids]
    # its bits as an integer: log mu has no order here, only differences
    bits = rollout_logprobs.detach().float().view(torch.int32).long()
    return mixed(mixed(sequences + positions) + bits)


def mixed(values: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Return the output function of SplitMix64 (Steele, Lea, Flood 2014), modulo 2^64: every bit of
    the input affects all bits of the output.
    """
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        values = (values ^ ((values >> shift) & (HIGHEST >> (shift - 1)))) * factor
    return values ^ ((values >> 31) & (HIGHEST >> 30))


def ordered_bits(values: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Return int64 numbers in the same order as the float64 values."""
    bits = values.view(torch.int64)
    # the bits of negative floats ascend as the values descend: invert all but the sign
    return torch.where(bits < 0, bits ^ HIGHEST, bits)
