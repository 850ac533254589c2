"""The RL loop.  Run it under torchrun:

    torchrun --nproc_per_node N -m megatron_rl.train --config FILE.toml [--section.key value ...]
        --dry-run [--gpus N]   check everything that needs no GPU and print what the run will do
                               (megatron-rl dry-run)
        --only rollout         sample and score every step, write the rollouts with their tensors,
                               train nothing
        --from-rollouts DIR    train on the rollouts that the run in DIR wrote, step by step,
                               without a server
        --resume               continue from the newest checkpoint of the run directory, which must
                               have one

Read `train` first: it is the algorithm.  Its stages are methods of Trainer (trainer/trainer.py).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from megatron_rl.config import Config, ConfigError, load_config
from megatron_rl.config.rules.sft_rules import check_is_rl
from megatron_rl.launch.errors import report_error
from megatron_rl.launch.exit_codes import BAD_CONFIG, INTERRUPTED
from megatron_rl.launch.log_lines import LogLines
from megatron_rl.launch.signals import (
    REQUEUE,
    SIGNALS,
    StoppedBySignal,
    StopSignal,
    follow_launcher,
    grace_period,
)
from megatron_rl.metrics.trackers.background import exit_if_tracker_hangs
from megatron_rl.options import parse


def train(cfg: Config, saved_run: Path | None = None) -> None:
    """Train `cfg.run.num_steps` steps: rollouts, advantages, N mini-batches, old log-probs, N
    updates, weight sync, report.

    mu: the policy as the servers sample it.  pi_old: the policy in the training engine before the
    step's updates.  pi: the policy that the updates change (docs/concepts/formulation.md).

    With rollout.max_staleness above 0 the servers sample later steps while this one trains, and mu
    may be older than pi_old (docs/design/architecture.md#scheduler).

    saved_run: a run directory whose saved rollouts are trained on; nothing is sampled, evaluated or
    sent then.
    """
    # these load torch and megatron-core, seconds that --dry-run saves
    from megatron_rl.distributed import device_of
    from megatron_rl.trainer.build import start_trainer

    grace = grace_period(cfg.checkpoint.grace_seconds, device_of(cfg.run.device))
    with StopSignal(grace) as stop, start_trainer(cfg, saved_run) as trainer:
        # from here a signal no longer interrupts: it ends sampling, saves and stops
        trainer.listen(stop)
        # the weights as loaded
        trainer.evaluate(trainer.first_step)
        for step in trainer.steps():
            groups = trainer.sample(step)  # y ~ mu: log mu, the experts used, R(x, y)
            groups = trainer.add_advantages(groups, step)  # A(x, y)
            trainer.record(groups, step)  # their files and metrics
            batches = trainer.make_batches(groups, step)  # N mini-batches, packed
            # log pi_old.  replay.mode = R2 records here the experts that the updates use; R3 uses
            # the servers' experts here and in the updates
            old_passes = trainer.old_logprobs(batches)
            for batch, old in zip(batches, old_passes, strict=True):
                trainer.update(batch, old)  # one optimizer update of pi on the loss
            trainer.sync_weights(version=step + 1)  # mu <- pi
            # report first: evaluating and saving reset the step's clock.  save last: it keeps that
            # this step was evaluated
            trainer.report(step, old_passes)
            trainer.evaluate(step + 1)
            trainer.save(step + 1)
            # free the routes: they take gigabytes of host memory, which the next step needs
            del groups, batches, batch, old_passes, old
        trainer.finish()


def collect(cfg: Config) -> None:
    """Sample, score and save the rollouts of every step; the weights never change."""
    from megatron_rl.trainer.build import start_trainer

    # the engine is needed although nothing is trained: it sends the weights and checks parity
    with start_trainer(cfg) as trainer:
        for step in trainer.steps():
            trainer.record(trainer.sample(step), step)
            trainer.check_recorded()
            trainer.report(step, [])


def main(argv: list[str] | None = None) -> int:
    """Parse arguments and train.  Ends the process itself where a tracker hangs.

    Returns the exit status: 0 done, 2 bad configuration, or what it names cannot be loaded, 85
    saved and stopped by SIGTERM or SIGUSR1 (start it again), 130 interrupted, 1 anything else that
    stopped the run.  The watchdog ends the process with 87 (launch/exit_codes.py).
    """
    status = run(argv)
    exit_if_tracker_hangs(status)
    return status


def run(argv: list[str] | None) -> int:
    """Return the exit status; see `main`."""
    arguments, overrides = parse(argv)
    if arguments.dry_run:
        from megatron_rl.plan.dry_run import print_report

        return print_report(arguments, overrides)
    try:
        cfg = load_config(arguments.config, overrides)
        check_is_rl(cfg)
    except ConfigError as error:
        LogLines(arguments.log_format or "text").print_error(
            f"megatron_rl.train: {error}", error="ConfigError"
        )
        return BAD_CONFIG

    def job() -> None:
        collect(cfg) if arguments.only else train(cfg, arguments.from_rollouts)

    return run_job(cfg, job, "megatron_rl.train")


def run_job(cfg: Config, job: Callable[[], None], program: str) -> int:
    """Run `job` on this rank and return the exit status; see `main`.

    program: the name under which errors are reported.
    """
    lines = LogLines(cfg.run.log_format, hidden=cfg.key_variables)
    for number in SIGNALS:
        signal.signal(number, raise_interrupt)
    follow_launcher()  # under torchrun: SIGTERM for this rank, too, when the launcher dies
    try:
        # stderr without secrets; before the imports, as some libraries keep the stream they find
        with lines.clean_stderr():
            job()
    except StoppedBySignal as stopped:
        # a launcher repeats the signal while the other ranks exit
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if os.environ.get("RANK", "0") == "0":
            lines.print_error(f"{program}: {stopped}", error="StoppedBySignal")
        return REQUEUE
    except KeyboardInterrupt as interrupt:
        lines.print_error(
            f"rank {os.environ.get('RANK', 0)}: interrupted; stopped", error="KeyboardInterrupt"
        )
        return REQUEUE if isinstance(interrupt, InterruptedBySignal) else INTERRUPTED
    # the cause and the user's frames on the terminal, the traceback in a file
    except Exception as error:
        report_error(error, cfg.run_dir, program, lines)
        return BAD_CONFIG if isinstance(error, ConfigError) else 1
    return 0


class InterruptedBySignal(KeyboardInterrupt):
    """A signal came where there is nothing to save; main exits with REQUEUE."""


def raise_interrupt(signum: int, frame: object) -> None:
    """A signal ends the run as Ctrl-C does, so that servers and worker processes are stopped."""
    raise InterruptedBySignal


if __name__ == "__main__":
    sys.exit(main())
