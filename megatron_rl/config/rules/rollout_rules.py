"""Rules between keys of [rollout]."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.parity_limits import check_parity_keys
from megatron_rl.config.rules.server_rules import check_servers
from megatron_rl.config.sections import RolloutConfig
from megatron_rl.config.sglang_settings import check_allowed

MASK_TOKENS = 4096
"""SGLang's default of --sampling-mask-max-tokens."""


def check_rollout(rollout: RolloutConfig) -> None:
    """Raise ValueError for the first broken rule."""
    check_allowed(rollout.allow_unproven)
    check_servers(rollout)
    check_parity_keys(rollout)
    for problems in (truncation_problems, resume_problems, ahead_problems):
        for problem in problems(rollout):
            raise ValueError(problem)


def truncation_problems(rollout: RolloutConfig) -> Iterator[str]:
    """Yield why servers with these server_args cannot return the kept sets of top_k."""
    if rollout.truncation is None:
        return
    if rollout.top_k < 2:
        yield (
            f"top_k = {rollout.top_k} with top_p = {rollout.top_p:g}, min_p = {rollout.min_p:g}: "
            "must be at least 2: SGLang returns the kept sets, which log pi needs, only of a "
            "limited size (and of 1 token there is nothing to learn); set top_k, e.g. 1024, or "
            "remove all three"
        )
    if rollout.urls:
        return  # start-up asks these servers: rollout/server/sampling_defaults.py
    words = " ".join(rollout.server_args).replace("=", " ").split()
    if "--speculative-algorithm" in words:
        yield (
            f"top_k = {rollout.top_k} with --speculative-algorithm in server_args: SGLang returns "
            "no kept sets under speculative decoding, and log pi needs them; remove that option, "
            "or top_p, top_k and min_p"
        )
    option = "--sampling-mask-max-tokens"
    most = words[words.index(option) + 1] if option in words[:-1] else str(MASK_TOKENS)
    if most.isdecimal() and rollout.top_k > int(most):
        yield (
            f"top_k = {rollout.top_k}: must be at most the servers' {option} = {most}, the largest "
            f'kept set that they return; lower it, or add "{option}={rollout.top_k}" to '
            "server_args"
        )


def resume_problems(rollout: RolloutConfig) -> Iterator[str]:
    """Yield what partial = resume lacks."""
    if rollout.partial == "resume" and not (rollout.over_sample > 0 and rollout.max_staleness > 0):
        yield (
            f"partial = resume needs over_sample > 0, got {rollout.over_sample:g}, which aborts "
            f"responses, and max_staleness >= 1, got {rollout.max_staleness}: a resumed response "
            "is older than the step's weights"
        )


def ahead_problems(rollout: RolloutConfig) -> Iterator[str]:
    """Yield what is wrong with sampling while the model trains."""
    staleness, partial = f"max_staleness = {rollout.max_staleness}", f"partial = {rollout.partial}"
    if not rollout.steps_ahead:
        if rollout.weight_update != "drain":
            yield (
                f"weight_update = {rollout.weight_update} has no effect with {staleness} and "
                f"{partial}: nothing is sampled while weights change; remove it, or raise "
                "max_staleness"
            )
        return
    if rollout.partial == "drop" and rollout.over_sample:
        yield (
            f"over_sample = {rollout.over_sample:g} with partial = drop must be 0 where "
            f"{staleness} samples ahead: a step takes the groups that are complete, and the others "
            "are not dropped; remove it"
        )
    if rollout.partial == "resume" and rollout.weight_update == "drain":
        yield (
            f"partial = resume with {staleness} samples ahead, and weight_update = drain would "
            "wait for the responses that it is to cut short; set weight_update = abort or "
            "in_place, or max_staleness = 1"
        )
    if rollout.release_memory:
        yield (
            f"{staleness} with {partial} samples while the model trains, for which release_memory "
            "= true takes the servers' memory; set max_staleness lower, or release_memory = false"
        )
