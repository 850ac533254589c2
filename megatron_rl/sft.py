"""Supervised training (SFT): the same engine on rows that have their answers.  Under torchrun:

    torchrun --nproc_per_node N -m megatron_rl.sft --config FILE.toml [--section.key value ...]
        --resume               continue from the newest checkpoint of the run directory, which must
                               have one

The loss is the mean of -log pi over the tokens that the model would write (docs/guides/sft.md).
Read `sft` first: it is `train` of train.py without servers and without an old-logprob pass.
"""

from __future__ import annotations

import sys

from megatron_rl.config import Config, ConfigError, load_config
from megatron_rl.config.rules.no_effect import check_read_by_sft
from megatron_rl.config.rules.sft_rules import DEFAULTS, check_is_sft
from megatron_rl.launch.exit_codes import BAD_CONFIG
from megatron_rl.launch.log_lines import LogLines
from megatron_rl.launch.signals import StopSignal, grace_period
from megatron_rl.metrics.trackers.background import exit_if_tracker_hangs
from megatron_rl.options import parse_sft
from megatron_rl.train import run_job

PROGRAM = "megatron_rl.sft"


def sft(cfg: Config) -> None:
    """Train `cfg.run.num_steps` steps, or sft.epochs epochs: rows, N updates, report, evaluation by
    loss, checkpoint.
    """
    # these load torch and megatron-core, seconds that refusals save
    from megatron_rl.distributed import device_of
    from megatron_rl.trainer.build import start_trainer
    from megatron_rl.trainer.sft_rows import read_rows, without_old_pass

    grace = grace_period(cfg.checkpoint.grace_seconds, device_of(cfg.run.device))
    with StopSignal(grace) as stop:
        rows = read_rows(cfg)
        with start_trainer(rows.cfg, rows=rows) as trainer:
            trainer.listen(stop)
            trainer.evaluate(trainer.first_step)
            for step in trainer.steps():
                # every row is a response with reward 1, so that its advantage is 1
                groups = trainer.add_advantages(trainer.sample(step), step)
                trainer.record(groups, step)
                batches = trainer.make_batches(groups, step)
                # after its first update a step must finish
                trainer.stop_if_signalled()
                for batch in batches:
                    # the loss reads no ratio, so that log pi_old is not computed
                    trainer.update(batch, without_old_pass(trainer.engine, batch))
                trainer.sync_weights(version=step + 1)  # counts the version; there is no server
                trainer.report(step, [])
                trainer.evaluate(step + 1)
                trainer.save(step + 1)
            trainer.finish()


def main(argv: list[str] | None = None) -> int:
    """Parse arguments and train; the exit status is that of megatron_rl.train."""
    status = run(argv)
    exit_if_tracker_hangs(status)
    return status


def run(argv: list[str] | None) -> int:
    """Return the exit status."""
    arguments, overrides = parse_sft(argv)
    try:
        cfg = load_config(arguments.config, overrides, defaults=DEFAULTS)
        check_is_sft(cfg)
        check_read_by_sft(cfg)
    except ConfigError as error:
        LogLines(arguments.log_format or "text").print_error(
            f"{PROGRAM}: {error}", error="ConfigError"
        )
        return BAD_CONFIG
    return run_job(cfg, lambda: sft(cfg), PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
