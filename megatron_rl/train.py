"""The RL loop.  Run it under torchrun:

    torchrun --nproc_per_node N -m megatron_rl.train --config FILE.toml [--section.key value ...]
        --dry-run [--gpus N]   check everything that can be checked here and say what the run will do (megatron-rl dry-run)
        --only rollout         sample and score every step, write the rollouts with their tensors, train nothing
        --from-rollouts DIR    train on the rollouts that the run in DIR wrote, step by step, without a server
        --resume               go on from the newest checkpoint of the run directory, which must have one

Read `train` first, top to bottom: it is the algorithm.  Everything it calls is one stage in one folder.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from megatron_rl import CallableModule
from megatron_rl.batch.advantage import with_advantages
from megatron_rl.batch.penalties import with_penalties
from megatron_rl.batch.split import split
from megatron_rl.cli import parse, report_plan
from megatron_rl.config import Config, ConfigError, load_config
from megatron_rl.launch.exit_codes import BAD_CONFIG, INTERRUPTED
from megatron_rl.launch.signals import REQUEUE, StoppedBySignal, StopSignal, follow_launcher
from megatron_rl.records import RolloutGroup
from megatron_rl.rollout.inference import SamplingStopped
from megatron_rl.trainer.build import start_run
from megatron_rl.trainer.trainer import Trainer


def train(cfg: Config, rollouts: Path | None = None) -> None:
    """Train `cfg.run.num_steps` steps: rollouts, advantages, N mini-batches, old log-probs, N updates, push, report.

    One step ahead (rollout.max_staleness), mu_old is of the weights before those of pi_old: see docs/guides/servers.md.

    rollouts: a run directory whose saved rollouts are trained on; nothing is sampled, evaluated or pushed then.
    """
    with StopSignal(cfg.checkpoint.grace_seconds) as stop, start_run(cfg, rollouts) as run:
        run.checkpoint_policy.listen(stop, run.stop_sampling)
        if run.first_step == 0:
            run.evaluate(step=0)
        for step in range(run.first_step, cfg.run.num_steps):
            run.begin(step)
            groups = (
                sample(run, step) if run.saved is None else run.load(step)
            )  # y ~ mu_old, log mu_old, e^mu_old, R(x, y)
            run.stop_if_signalled()
            run.sample_ahead(step + 1)  # while this step trains, where rollout.max_staleness allows it
            with run.time("split"):
                groups = with_penalties(groups, cfg)
                groups = with_advantages(groups, cfg.advantage_kind, run.parallel.dp_group)  # A(x, y), on every rank
                batches = split(groups, cfg, seed=step, rule=run.engine.pack_rule, dp_group=run.parallel.dp_group)
                run.record(groups, step)
            if cfg.rollout.release_memory and run.inference is not None:
                run.inference.release_memory()  # the trainer's from here to the push
            with run.time("old_logprob"):  # pi_old; R2 records here, R3 replays here
                old = [run.engine.old_logprobs(batch, run.sums, replay=cfg.replay.mode) for batch in batches]
            run.stop_if_signalled()
            with run.time("update"):
                for batch, old_pass in zip(batches, old, strict=True):
                    run.engine.update(batch, old_pass, run.sums, replay=cfg.replay.mode)
            with run.time("rollout"):
                run.finish_sampling(version=step + 1)  # nothing is sampled while weights change
            with run.time("weight_sync"):
                run.push(version=step + 1)  # mu_old <- theta
            run.report(step, old)
            if run.is_due(step, cfg.eval.every):
                run.evaluate(step=step + 1)
            run.end(step)  # checkpoint
        run.finish()


def sample(run: Trainer, step: int) -> list[RolloutGroup]:
    """The step's sampled and scored groups of this replica, on each of its ranks.  StoppedBySignal where a signal ended it."""
    try:
        with run.time("rollout"):
            prompts, groups = run.take_samples(step)  # y ~ mu_old, with log mu_old and e^mu_old
        with run.time("reward"):
            groups = run.score(groups)  # R(x, y)
        if run.cfg.batch.dynamic_sampling:
            prompts, groups = run.refill(prompts, groups)  # other prompts for groups without advantage
    except SamplingStopped:
        run.stop_if_signalled()
        raise
    with run.time("split"):
        return run.share(groups, prompts)


def collect(cfg: Config) -> None:
    """Sample, score and write the rollouts of every step; the weights stay what they were at the start."""
    with start_run(cfg) as run:
        for step in range(run.first_step, cfg.run.num_steps):
            run.record(sample(run, step), step)
            run.report(step, [])


def main(argv: list[str] | None = None) -> int:
    """Parse arguments and train.

    Returns the exit status: 0 done, 2 bad configuration, 85 saved and stopped by SIGTERM or SIGUSR1 (start it again), 130
    interrupted, 1 anything else that stopped the run.  The watchdog ends the process with 87 (launch/exit_codes.py).
    """
    arguments, overrides = parse(argv)
    if arguments.dry_run:
        return report_plan(arguments, overrides)
    try:
        cfg = load_config(arguments.config, overrides)
    except ConfigError as error:
        print(f"megatron_rl.train: {error}", file=sys.stderr)
        return BAD_CONFIG
    signal.signal(signal.SIGTERM, raise_interrupt)
    follow_launcher()
    try:
        collect(cfg) if arguments.only else train(cfg, arguments.from_rollouts)
    except StoppedBySignal as stopped:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher repeats it while the other ranks leave
        if os.environ.get("RANK", "0") == "0":
            print(f"megatron_rl.train: {stopped}", file=sys.stderr)
        return REQUEUE
    except KeyboardInterrupt:
        print(f"rank {os.environ.get('RANK', 0)}: interrupted; stopped", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, RuntimeError, OSError) as error:
        where = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        print(
            f"megatron_rl.train: rank {os.environ.get('RANK', 0)}: {type(error).__name__}: {error}{where}",
            file=sys.stderr,
        )
        return 1
    return 0


def raise_interrupt(signum: int, frame: object) -> None:
    """SIGTERM ends the run as Ctrl-C does: servers and worker processes are stopped on the way out."""
    raise KeyboardInterrupt


sys.modules[__name__].__class__ = CallableModule  # megatron_rl.train(config)

if __name__ == "__main__":
    sys.exit(main())
