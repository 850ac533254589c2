"""Per-token and per-response statistics of the two passes, added to sums that are reduced once per
step.

Nothing here waits for the device: values stay on it until `MetricSums.reduce`.  Formulas are in
docs/reference/metrics.md.

Shapes: T packed rows of a micro-batch; n rows of all micro-batches of a pass; R their responses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from megatron_rl.engine.logprobs import TokenLogprobs
from megatron_rl.loss.policy import PolicyLoss
from megatron_rl.loss.ratios import finite_tokens
from megatron_rl.metrics.histogram import Histogram, tabulate
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.records.packed import PackedBatch, RowState

FLIP_GROUPS = {"flips_0": 0, "flips_1": 1, "flips_2_3": 2, "flips_4_7": 4, "flips_8_up": 8}
"""Groups of tokens by the number of MoE layers that flipped -> fewest flips of the group."""

AGE_GROUPS = {"age_0": 0, "age_1": 1, "age_2_3": 2, "age_4_up": 4}
"""Groups of tokens by age, the weight syncs since they were sampled -> lowest age of the group."""

LARGEST_LOG = 300.0
"""Limit of a logarithm: exp of it, and the square of that, are finite in float64."""


@dataclass(frozen=True)
class PassTokens:
    """This rank's rows of one mini-batch, micro-batches end to end."""

    rollout_logprobs: Float[Tensor, " n"]
    mask: Bool[Tensor, " n"]
    """True on response tokens."""
    response: Int[Tensor, " n"]
    """Index of the row's response among this replica's R; R on pads."""
    num_responses: int
    """R."""
    flip_group: Int[Tensor, " n"] | None
    """Index into FLIP_GROUPS, len(FLIP_GROUPS) on rows without a route; None: not measured."""
    age_group: Int[Tensor, " n"] | None
    """Index into AGE_GROUPS; None: not measured."""
    mini_batch: int
    """Index of the mini-batch in its step."""
    cp_group: dist.ProcessGroup | None
    """The ranks that have the other rows of these responses; None without context parallelism."""


def pass_tokens(
    micro_batches: Sequence[PackedBatch],
    flips: Sequence[Tensor] | None,
    *,
    mini_batch: int,
    cp_group: dist.ProcessGroup | None,
    policy_version: int | None = None,
) -> PassTokens:
    """Concatenate micro-batches, and their flips [T] (see replay.mismatch.flips_per_token).

    policy_version: the weights' version, for ages (see MiniBatch); None: no ages.
    """
    counts = [len(batch.rollout_ids) for batch in micro_batches]
    total, first, response = sum(counts), 0, []
    for batch, count in zip(micro_batches, counts, strict=True):
        ids = batch.sequence_ids
        response.append(torch.where(ids >= 0, ids + first, total))
        first += count
    flip_group = None
    if flips is not None:
        states = torch.cat([batch.row_state for batch in micro_batches])
        groups = group_of(torch.cat(list(flips)), FLIP_GROUPS)
        flip_group = torch.where(states == RowState.REPLAYED, groups, len(FLIP_GROUPS))
    age_group = None
    if policy_version is not None:
        versions = torch.cat([batch.policy_versions for batch in micro_batches])
        age_group = group_of(policy_version - versions, AGE_GROUPS)
    return PassTokens(
        rollout_logprobs=torch.cat([batch.rollout_logprobs for batch in micro_batches]),
        mask=torch.cat([batch.loss_mask for batch in micro_batches]),
        response=torch.cat(response),
        num_responses=total,
        flip_group=flip_group,
        age_group=age_group,
        mini_batch=mini_batch,
        cp_group=cp_group,
    )


def add_old_pass(sums: MetricSums, tokens: PassTokens, old_logprobs: Float[Tensor, " n"]) -> None:
    """Add the training-inference discrepancy of one mini-batch, pi_old against mu.

    Collective over tokens.cp_group.
    """
    mask = tokens.mask & finite_tokens(old_logprobs, tokens.rollout_logprobs)
    gap = log_ratio(old_logprobs, tokens.rollout_logprobs, mask)
    count = mask.sum()
    sums.add("train/kl_mu_pi", -gap.sum(), count)
    sums.add("train/kl_mu_pi_k3", (torch.expm1(gap) - gap).sum(), count)
    sums.add("train/logratio_abs_mean", gap.abs().sum(), count)
    sums.add_max("train/logratio_abs_max", gap.abs().max())
    # tokens whose probabilities differ by more than a factor of 2, and of 5
    sums.add("logratio/f2_frac", (gap.abs() > math.log(2)).sum(), count)
    sums.add("logratio/f5_frac", (gap.abs() > math.log(5)).sum(), count)
    add_log_ratio(sums, "logratio/train_infer", gap, mask, tokens)
    add_first_order(sums, {"first_order/train_infer": gap}, mask, tokens)
    if tokens.flip_group is not None:
        compared = (mask & (tokens.flip_group < len(FLIP_GROUPS))).sum()
        for index, group in enumerate(FLIP_GROUPS):
            in_group = (mask & (tokens.flip_group == index)).sum()
            sums.add(f"logratio/share/{group}", in_group, compared)
    if tokens.age_group is not None:
        for index, group in enumerate(AGE_GROUPS):
            sums.add(f"logratio/share/{group}", (mask & (tokens.age_group == index)).sum(), count)


def add_update_pass(
    sums: MetricSums,
    tokens: PassTokens,
    logprobs: Float[Tensor, " n"],
    old_logprobs: Float[Tensor, " n"],
) -> None:
    """Add the staleness of one mini-batch, pi against pi_old, and the total, pi against mu.

    Collective over tokens.cp_group.
    """
    mask = tokens.mask & finite_tokens(logprobs, old_logprobs, tokens.rollout_logprobs)
    staleness = log_ratio(logprobs, old_logprobs, mask)
    total = log_ratio(logprobs, tokens.rollout_logprobs, mask)
    add_log_ratio(sums, "logratio/staleness", staleness, mask, tokens)
    gaps = {"first_order/staleness": staleness, "first_order/total": total}
    add_first_order(sums, gaps, mask, tokens)


def add_update(
    sums: MetricSums,
    share_of_loss: Float[Tensor, ""],
    parts: int,
    loss: PolicyLoss,
    token_logprobs: TokenLogprobs,
    micro_batch: PackedBatch,
    policy_version: int | None = None,
    mini_batch: int = 0,
) -> None:
    """Add the statistics of this rank's rows of one micro-batch of an update.

    share_of_loss: the rows' part of the mini-batch loss.  parts: number of such parts over
    micro-batches, data- and context-parallel ranks.  policy_version, mini_batch: version and index
    of the MiniBatch.
    """
    mask, count = loss.mask, loss.mask.sum()
    # the weights 1 / parts add up to 1, so that the metric is the sum of the parts
    sums.add("train/loss", share_of_loss.detach(), 1 / parts)
    ratio, weight = masked(loss.ratio, mask), masked(loss.is_weight, mask)
    sums.add("train/entropy", masked(token_logprobs.entropy.detach(), mask).sum(), count)
    sums.add("train/ratio_mean", ratio.sum(), count)
    sums.add_max("train/ratio_max", ratio.max())
    sums.add("train/is_weight_mean", weight.sum(), count)
    sums.add("train/is_weight_square_mean", weight.square().sum(), count)
    sums.add("train/tis_truncated_frac", loss.bounded.sum(), count)
    sums.add("train/clip_high_frac", loss.clipped_high.sum(), count)
    sums.add("train/clip_low_frac", loss.clipped_low.sum(), count)
    sums.add("train/rejected_frac", loss.rejected.sum(), count)
    sums.add("train/masked_frac", count - loss.in_weight_mask.sum(), count)
    sums.add("train/selected_frac", loss.selected.sum(), count)
    if loss.penalty_tokens is not None and loss.penalised is not None:
        group = f"mini_batch_{mini_batch}"
        sums.add(f"train/penalty_frac/{group}", loss.penalised.sum(), loss.penalty_tokens.sum())
    if loss.trust is not None:
        sums.add("train/router_trust_mean", masked(loss.trust, mask).sum(), count)
    if loss.at_floor is not None:
        sums.add("train/router_floor_frac", loss.at_floor.sum(), count)
    if loss.gate is not None:
        sums.add("train/gate_mean", masked(loss.gate, mask).sum(), count)
    kept_entropy, log_mass = token_logprobs.kept_entropy, token_logprobs.log_mass
    if kept_entropy is not None and log_mass is not None:
        sums.add("train/kept_entropy", masked(kept_entropy, mask).sum(), count)
        sums.add("train/kept_mass", masked(log_mass.exp(), mask).sum(), count)
    if loss.kl is not None:
        sums.add("train/kl_reference", masked(loss.kl.detach(), mask).sum(), count)
    if policy_version is not None:
        ages = group_of(policy_version - micro_batch.policy_versions, AGE_GROUPS)
        for index, group in enumerate(AGE_GROUPS):
            of_age = mask & (ages == index)
            sums.add(f"train/is_weight_mean/{group}", masked(weight, of_age).sum(), of_age.sum())
            clipped = (loss.clipped_high | loss.clipped_low) & of_age
            sums.add(f"train/clip_frac/{group}", clipped.sum(), of_age.sum())
    all_tokens = micro_batch.loss_mask.sum()
    sums.add("train/nonfinite_frac", all_tokens - count, all_tokens)


def add_divergence(
    sums: MetricSums,
    divergence: Float[Tensor, " T"],
    token_logprobs: TokenLogprobs,
    micro_batch: PackedBatch,
    loss: PolicyLoss,
) -> None:
    """Add the divergence from the teacher over its most probable tokens, and the probability that
    the student and the teacher give to these.
    """
    top, student = micro_batch.top, token_logprobs.top
    assert top is not None and student is not None, "a divergence without the teacher's tokens"
    is_taught = loss.mask & ~top.sets.is_empty
    count, in_loss = is_taught.sum(), is_taught[top.sets.rows]
    sums.add("teacher/divergence", masked(divergence.detach(), is_taught).sum(), count)
    sums.add("teacher/top_mass_student", masked(student.detach().exp(), in_loss).sum(), count)
    sums.add("teacher/top_mass_teacher", masked(top.logprobs.exp(), in_loss).sum(), count)


def add_log_ratio(
    sums: MetricSums,
    name: str,
    gap: Float[Tensor, " n"],
    mask: Bool[Tensor, " n"],
    tokens: PassTokens,
) -> None:
    """Add the histogram of a log-ratio over the tokens under `mask`: of all tokens, of this
    mini-batch's, by flips, and by age.
    """
    groups = tokens.flip_group
    if groups is None:
        groups = torch.zeros_like(tokens.response)
    spread = tabulate(gap, mask, groups, len(FLIP_GROUPS) + 1)
    for group in ("", f"mini_batch_{tokens.mini_batch}"):
        sums.add_histogram(name, spread.together(), (group,))
    if tokens.flip_group is not None:
        # the last group has the rows without a route
        by_flips = Histogram(spread.sums[:-1], spread.largest[:-1])
        sums.add_histogram(name, by_flips, tuple(FLIP_GROUPS))
    if tokens.age_group is not None:
        by_age = tabulate(gap, mask, tokens.age_group, len(AGE_GROUPS))
        sums.add_histogram(name, by_age, tuple(AGE_GROUPS))


def add_first_order(
    sums: MetricSums,
    gaps: Mapping[str, Float[Tensor, " n"]],
    mask: Bool[Tensor, " n"],
    tokens: PassTokens,
) -> None:
    """Add the first-order error of every response: what the token-level surrogate leaves out.

        abs(prod_t (1 + delta_t) - (1 + sum_t delta_t)) with 1 + delta_t = exp(gap_t)

    The product is computed as a sum of logarithms.  Logarithms are limited to LARGEST_LOG, so that
    the metric is finite.
    """
    # per response: number of tokens, then sum of log(1 + delta) and sum of delta for every gap
    columns = [mask.double()]
    for gap in gaps.values():
        gap = gap.clamp(-LARGEST_LOG, LARGEST_LOG)
        columns += [gap, torch.expm1(gap)]
    per_response = columns[0].new_zeros(tokens.num_responses + 1, len(columns))
    per_response.index_add_(0, tokens.response, torch.stack(columns, dim=1))
    counted = True
    if tokens.cp_group is not None and tokens.cp_group.size() > 1:
        dist.all_reduce(per_response, group=tokens.cp_group)
        # every context rank now has the same sums: count them once
        counted = tokens.cp_group.rank() == 0
    count, *parts = per_response[:-1].unbind(1)
    for name, log_product, first_order in zip(gaps, parts[::2], parts[1::2], strict=True):
        error = (torch.expm1(log_product.clamp(max=LARGEST_LOG)) - first_order).abs()
        one_group = torch.zeros_like(error, dtype=torch.long)
        spread = tabulate(error, (count > 0) & counted, one_group, 1)
        for group in ("", f"mini_batch_{tokens.mini_batch}"):
            sums.add_histogram(name, spread, (group,))


def group_of(counts: Integer[Tensor, " n"], groups: Mapping[str, int]) -> Int[Tensor, " n"]:
    """Return the index of every count's group in FLIP_GROUPS or AGE_GROUPS."""
    return sum(
        ((counts >= fewest).long() for fewest in list(groups.values())[1:]),
        torch.zeros_like(counts),
    )


def log_ratio(
    numerator: Float[Tensor, " n"], denominator: Float[Tensor, " n"], mask: Bool[Tensor, " n"]
) -> Float[Tensor, " n"]:
    """Return the log-ratio of two policies in float64, 0 outside the mask, without limits."""
    return masked(numerator.detach().double() - denominator.detach().double(), mask)


def masked(values: Float[Tensor, " T"], mask: Bool[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Return `values` with 0 outside the mask."""
    # indexing by a mask would wait for the device
    return torch.where(mask, values, 0.0)
