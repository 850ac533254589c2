"""Rules between keys of different sections."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_rl.config.all_sections import AllSections
from megatron_rl.config.rules.adapter_rules import lora_problems
from megatron_rl.config.rules.sft_rules import sft_problems
from megatron_rl.config.rules.teacher_rules import teacher_problems
from megatron_rl.config.rules.teacher_servers import started_problems


def section_problems(cfg: AllSections) -> Iterator[str]:
    """Yield a message for every broken rule."""
    yield from sft_problems(cfg)
    yield from teacher_problems(cfg)
    yield from started_problems(cfg)
    yield from staleness_problems(cfg)
    yield from time_problems(cfg)
    yield from lora_problems(cfg)
    yield from loss_problems(cfg)
    yield from batch_problems(cfg)
    yield from route_problems(cfg)
    if cfg.run.device == "cpu" and cfg.model.layer_spec == "transformer_engine":
        yield (
            "model.layer_spec = transformer_engine needs a GPU; use auto or local with run.device "
            "= cpu"
        )
    if "recompute_modules" in cfg.megatron.fields and cfg.model.recompute != "selective":
        yield (
            f"megatron.recompute_modules has no effect with model.recompute = {cfg.model.recompute}"
            ": core reads it with selective recompute alone; remove it, or set model.recompute = "
            "selective"
        )


def staleness_problems(cfg: AllSections) -> Iterator[str]:
    """Yield what is wrong with tokens that are older than the weights that are trained."""
    rollout, run, agent = cfg.rollout, cfg.run, cfg.agent
    staleness = f"rollout.max_staleness = {rollout.max_staleness}"
    # both cut episodes short for an update of weights
    if agent.name and agent.resume == "restart":
        for key, value, default in (
            ("partial", "resume", "drop"), ("weight_update", "abort", "drain"),
        ):  # fmt: skip
            if getattr(rollout, key) == value:
                yield (
                    f"rollout.{key} = {value} with agent.resume = restart: episodes that were cut "
                    "short would start again, which favours short ones; set agent.resume = "
                    f"continue, or rollout.{key} = {default}"
                )
    if agent.name and rollout.weight_update == "in_place":
        yield (
            f"rollout.weight_update = in_place with {agent.setting}: an episode is several "
            "requests, and one that became too old between them would not be cut short; set "
            "rollout.weight_update = abort"
        )
    if rollout.max_staleness and not cfg.loss.corrects_age:
        # the ratio of any form but logp lacks pi_old/mu
        weight = "total" if cfg.loss.switches.form == "logp" else "train_infer"
        yield (
            f"{staleness} with loss.name = {cfg.loss.name}: tokens are of older weights than "
            "pi_old, and this loss has no importance weight against mu, so its gradient would be "
            f"biased; set loss.weight = {weight}, another loss.name (minirl, tis, decoupled_ppo, "
            "...), or rollout.max_staleness = 0"
        )
    if rollout.max_staleness >= max(2, run.num_steps):  # a test of few steps may leave it at 1
        yield (
            f"{staleness} can never be used with run.num_steps = {run.num_steps}: no token is "
            f"older than {run.num_steps - 1} weight syncs; lower it, or raise run.num_steps"
        )


def time_problems(cfg: AllSections) -> Iterator[str]:
    """Yield what is wrong with time limits and with the division of a step into updates."""
    start, run = cfg.rollout.start_timeout_seconds, cfg.run
    # rank 0 starts servers within one stage of the watchdog
    if not cfg.rollout.urls and start != "auto" and start >= cfg.stage_seconds:
        yield (
            f"rollout.start_timeout_seconds = {start:g} must be below {cfg.stage_seconds:g}, 90 % "
            f"of run.collective_timeout_minutes = {run.collective_timeout_minutes:g}: the ranks "
            "wait for the servers, and the watchdog would end the run first, without the server's "
            "log; lower it, or raise the other"
        )
    if run.prompts_per_step % run.num_mini_batches:
        yield (
            f"run.prompts_per_step = {run.prompts_per_step} must be a multiple of "
            f"run.num_mini_batches = {run.num_mini_batches}: mini-batches hold complete prompt "
            "groups"
        )


def loss_problems(cfg: AllSections) -> Iterator[str]:
    """Yield what the loss and its advantages lack in a step."""
    run = cfg.run
    # the routers of pi and pi_old differ from the second update on
    if run.num_mini_batches == 1 and cfg.loss.switches.router_shift:
        yield (
            f"loss.router_shift = true (loss.name = {cfg.loss.name}) has no effect with "
            "run.num_mini_batches = 1: in the only update of a step the routers are still those of "
            "the old-logprob pass, and the shift costs one more forward pass; set "
            "run.num_mini_batches above 1, or another loss.name (gmpo)"
        )
    # batch_whitened has its baseline over the batch, not over the group; reward has none
    is_compared = cfg.advantage_kind not in ("batch_whitened", "reward") and cfg.advantage.weight
    if is_compared and run.group_size < 2:
        yield (
            f"advantage.kind = {cfg.advantage_kind} needs run.group_size >= 2, got "
            f"{run.group_size}: a response alone in its group has no other to be compared with, "
            "and its advantage would be 0; or set advantage.kind = batch_whitened, or reward"
        )
    if cfg.advantage_kind == "per_reward":
        yield from per_reward_problems(cfg)


def per_reward_problems(cfg: AllSections) -> Iterator[str]:
    """Yield what acts on the sum of a response's rewards, which per_reward does not read, and what
    returns no metrics, which it reads.
    """
    batch = cfg.batch
    for key, is_set in (
        ("batch.dynamic_sampling", batch.dynamic_sampling),
        ("batch.overlong_cache", batch.overlong_cache),
        ("batch.length_penalty", batch.length_penalty),
        ("reward.format_penalty", cfg.reward.format_penalty),
    ):
        if is_set:
            yield (
                f"{key} with advantage.kind = per_reward: it acts on the sum of the rewards, which "
                "has no effect there; remove it, or return it as a metric of reward.function and "
                "name it in advantage.rewards"
            )
    if cfg.reward.on_error not in ("raise", "drop"):
        yield (
            f"reward.on_error = {cfg.reward.on_error} with advantage.kind = per_reward: a response "
            "that could not be scored has no metrics; set reward.on_error = drop or raise"
        )
    # an agent may return metrics
    if cfg.reward.function == "math" and not cfg.agent.name:
        yield (
            "reward.function = math with advantage.kind = per_reward: it returns no metrics, and "
            "advantage.rewards names metrics; set reward.function to a function that returns "
            f"{', '.join(cfg.advantage.rewards)}, or advantage.kind = std"
        )


def batch_problems(cfg: AllSections) -> Iterator[str]:
    """Yield what is wrong with the choice of responses and of the best checkpoint."""
    if cfg.batch.dynamic_sampling and cfg.run.group_size < 2:
        yield (
            f"batch.dynamic_sampling needs run.group_size >= 2, got {cfg.run.group_size}: rewards "
            "of one response never differ"
        )
    elif cfg.batch.dynamic_sampling and cfg.advantage_kind in ("batch_whitened", "reward"):
        yield (
            f"batch.dynamic_sampling with advantage.kind = {cfg.advantage_kind}: groups of equal "
            "rewards have advantages there, and would be thrown away; remove one of the two"
        )
    if cfg.batch.overlong_cache > cfg.rollout.max_response_tokens:
        yield (
            f"batch.overlong_cache = {cfg.batch.overlong_cache} exceeds "
            f"rollout.max_response_tokens = {cfg.rollout.max_response_tokens}: it is the last part "
            "of a response; lower it"
        )
    best = cfg.checkpoint.best_metric or ""
    if best.startswith("eval/") and not cfg.is_sft and not cfg.eval.measures(best):
        yield (
            f"checkpoint.best_metric = {best} is never measured: eval.sets names "
            f"{', '.join(cfg.eval.sets) or 'no file'}; write eval/NAME/avg@{cfg.eval.samples} with "
            "a NAME of eval.sets"
        )
    elif best.startswith("eval/"):
        yield from best_problems(cfg)


def best_problems(cfg: AllSections) -> Iterator[str]:
    """Yield why no checkpoint before the last one has a metric of an evaluation."""
    saved, evaluated, end = cfg.checkpoint.every, cfg.eval.every, cfg.run.num_steps
    # lcm(n, 0) = 0: evaluated before the first step and after the last one only
    coincide = math.lcm(saved, evaluated) or end
    # sft.epochs set another number of steps, when the rows are read
    if cfg.sft.epochs is None and 0 < saved < end <= coincide:
        yield (
            f"checkpoint.best_metric = {cfg.checkpoint.best_metric} with checkpoint.every = {saved}"
            f" and eval.every = {evaluated}: no step before the last one, run.num_steps = {end}, is"
            " both saved and evaluated, so no other checkpoint could be the best; set eval.every ="
            f" {saved}"
        )


def route_problems(cfg: AllSections) -> Iterator[str]:
    """Yield what is wrong with the treatment of missing routes."""
    replay = cfg.replay
    if replay.on_missing_route != "error" and not cfg.needs_routes:
        yield (
            f"replay.on_missing_route = {replay.on_missing_route} has no effect: replay.mode = "
            f"{replay.mode} without replay.measure asks for no routes; remove it"
        )
    if replay.on_missing_route == "mask_token" and replay.mode != "R3":
        yield (
            "replay.on_missing_route = mask_token needs replay.mode = R3, got "
            f"{replay.mode}: otherwise no token trains on the rollout's routes; use live, or "
            "drop_sample"
        )
