"""avg@n and pass@k on evaluation sets, through the same client and reward pool as training: within
a run, or as a command.

options.py has the options of the command, `megatron-rl evaluate`.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.config import Config, ConfigError, EvalConfig, dump_config, load_config
from megatron_rl.config.rules.adapter_rules import check_adapter_is_merged
from megatron_rl.config.run_paths import RunFolder
from megatron_rl.data.prompt_files import eval_file
from megatron_rl.data.prompts import load_prompt_files, load_tokenizer
from megatron_rl.launch.log_lines import LogLines
from megatron_rl.metrics.accuracy import average, pass_at
from megatron_rl.metrics.console import Console
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.metrics.sinks import finite
from megatron_rl.options import parse_evaluate
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.reward.failures import KINDS
from megatron_rl.rollout.scoring import score_groups
from megatron_rl.rollout.standalone import StandaloneSampler

Results = dict[str, Any]
"""The content of results.json: checkpoint, settings, and for each set its file, counts and metrics.
"""

SampleAndScore = Callable[[Sequence[Prompt]], list[RolloutGroup]]
"""This replica's prompts -> groups of n responses with rewards (NaN: not scored), [] off its
leader.  Collective.
"""


def evaluate(
    sets: Mapping[str, Sequence[Prompt]],
    config: EvalConfig,
    on_error: float | str,
    sample_and_score: SampleAndScore,
    *,
    dp_rank: int,
    dp_size: int,
    device: torch.device,
) -> dict[str, float]:
    """eval/NAME/... of every set, see `summarize` and docs/reference/metrics.md.

    Collective over all ranks; every replica takes every dp_size-th prompt, and every rank gets the
    same numbers.
    """
    metrics: dict[str, float] = {}
    for name, prompts in sets.items():
        chosen = list(prompts[: config.max_prompts])
        table = torch.zeros(len(chosen), config.samples, 3, dtype=torch.float64, device=device)
        groups = sample_and_score(chosen[dp_rank::dp_size])
        if groups:
            table[dp_rank::dp_size] = torch.from_numpy(tabulate_groups(groups)).to(device)
        # rows of other replicas are 0 here: the sum is the whole table
        dist.all_reduce(table)
        metrics |= summarize(name, table.cpu().numpy(), config, on_error)
        metrics |= users_metrics(name, groups).reduce(dist.group.WORLD, device)
    return metrics


def users_metrics(name: str, groups: Sequence[RolloutGroup]) -> MetricSums:
    """Return the metrics of the reward function and of the rollout function or environment,
    averaged over the responses that have them.
    """
    sums = MetricSums()
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        for metric, value in rollout.reward_metrics.items():
            sums.add(f"eval/{name}/reward/{metric}", value, 1)
        for metric, value in rollout.episode.metrics.items():
            sums.add(f"eval/{name}/episode/{metric}", value, 1)
    return sums


def tabulate_groups(groups: Sequence[RolloutGroup]) -> np.ndarray:
    """float64 [P, n, 3]: reward (NaN: not scored), response tokens, whether it was cut off at the
    limit.
    """
    return np.array(
        [
            [
                (float(reward), rollout.episode_length, rollout.finish_reason == "length")
                for rollout, reward in zip(group.rollouts, np.asarray(group.rewards), strict=True)
            ]
            for group in groups
        ],
        np.float64,
    )


def summarize(
    name: str, table: np.ndarray, config: EvalConfig, on_error: float | str
) -> dict[str, float]:
    """The metrics of one set from its table [P, n, 3] (see `tabulate`).

    on_error: what counts for a reward that is NaN.
    """
    rewards, samples = table[..., 0], config.samples
    failed = np.isnan(rewards)
    if not isinstance(on_error, str):
        rewards = np.where(failed, on_error, rewards)
    mean = average(rewards)
    metrics = {
        f"eval/{name}/avg@{samples}": mean.value,
        f"eval/{name}/avg@{samples}_low": mean.low,
        f"eval/{name}/avg@{samples}_high": mean.high,
        f"eval/{name}/response_length_mean": float(table[..., 1].mean()),
        f"eval/{name}/truncated_frac": float(table[..., 2].mean()),
        f"eval/{name}/failed_frac": float(failed.mean()),
    }
    for k in sorted({samples, *config.pass_at}):
        best = pass_at(rewards, k)
        metrics[f"eval/{name}/pass@{k}"] = best.value
        metrics[f"eval/{name}/pass@{k}_low"] = best.low
        metrics[f"eval/{name}/pass@{k}_high"] = best.high
    return metrics


# As a tool ----------------------------------------------------------------------------------------


def evaluate_checkpoint(config: Config, out: Path) -> Results:
    """avg@n and pass@k of the HF checkpoint config.model.path on the sets of config.eval.sets:
    `megatron_rl.evaluate`.

    Starts SGLang servers, or uses those of config.rollout.urls.  Writes results.json and
    responses.jsonl into `out` and returns the results.  Raises ValueError for bad input,
    RuntimeError for a server that does not serve this model.
    """
    return run_tool(config, out, console_of(config))


def console_of(cfg: Config) -> Console:
    """Return a console that writes lines in run.log_format, without secrets."""
    return Console(enabled=True, lines=LogLines(cfg.run.log_format, hidden=cfg.key_variables))


def run_tool(cfg: Config, out: Path, console: Console) -> Results:
    """Evaluate cfg.model.path on cfg.eval.sets; writes `out`/results.json and responses.jsonl,
    returns the results.
    """
    tokenizer = load_tokenizer(cfg.model.path)
    files = load_prompt_files({name: eval_file(cfg, name) for name in cfg.eval.sets}, tokenizer)
    out.mkdir(parents=True, exist_ok=True)
    RunFolder(out).config.write_text(dump_config(cfg))
    results: Results = {"checkpoint": str(cfg.model.path), "settings": settings_of(cfg), "sets": {}}
    sampler = StandaloneSampler(cfg, tokenizer, log_dir=out, console=console)
    with sampler, open(out / "responses.jsonl", "w", encoding="ascii") as responses:
        for name, file in files.items():
            console.log(f"{name}: {file.line(cfg.data)}")
            started, before = time.monotonic(), dict(sampler.pool.counters)
            groups = sampler.sample(name, file.prompts[: cfg.eval.max_prompts])
            groups = score_groups(groups, sampler.pool, tokenizer, for_training=False)
            metrics = summarize(name, tabulate_groups(groups), cfg.eval, cfg.reward.on_error)
            metrics |= users_metrics(name, groups).reduce(None, "cpu")
            results["sets"][name] = {
                "file": str(file.path),
                "num_prompts": len(groups),
                "samples": cfg.eval.samples,
                "seconds": time.monotonic() - started,
                "failures": {
                    kind: sampler.pool.counters[kind] - before.get(kind, 0) for kind in KINDS
                },
                **values_of_set(name, metrics),
            }
            responses.writelines(
                json.dumps(line) + "\n" for group in groups for line in lines_of_set(name, group)
            )
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    return results


def values_of_set(name: str, metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return the metrics of a set by their names in results.json; null for what is not a number, or
    infinite: the interval of one prompt whose reward is outside [0, 1].
    """
    return {key.removeprefix(f"eval/{name}/"): finite(value) for key, value in metrics.items()}


def settings_of(cfg: Config) -> dict[str, object]:
    return {
        "temperature": cfg.eval.temperature,
        "top_p": cfg.eval.top_p,
        "top_k": cfg.eval.top_k,
        "min_p": cfg.eval.min_p,
        "max_response_tokens": cfg.eval.max_response_tokens or cfg.rollout.max_response_tokens,
        "template": cfg.eval_data.template,
        "chat_template": cfg.data.chat_template,
        "reward": cfg.reward.function,
        "on_error": cfg.reward.on_error,
        "seed": cfg.run.seed,
    }


def lines_of_set(name: str, group: RolloutGroup) -> list[dict[str, object]]:
    rewards = [None if np.isnan(reward) else float(reward) for reward in np.asarray(group.rewards)]
    return [
        {
            "set": name,
            "prompt_id": group.prompt.id,
            "reward": reward,
            "response_length": rollout.episode_length,
            "finish_reason": rollout.finish_reason,
            "label": group.prompt.label,
            "prompt": group.prompt.text,
            "response": rollout.response_text,
            "num_turns": rollout.num_spans,
            "reward_metrics": dict(rollout.reward_metrics),
        }
        for rollout, reward in zip(group.rollouts, rewards, strict=True)
    ]


def table_of(results: Results) -> str:
    """A readable table: one line per set, values with their 95 % intervals."""
    rows = []
    for name, values in results["sets"].items():
        scores = [
            key
            for key in values
            if key.startswith(("avg@", "pass@")) and not key.endswith(("_low", "_high"))
        ]
        row = {"set": name, "prompts": str(values["num_prompts"])}
        row |= {
            key: with_interval(*(values[key + end] for end in ("", "_low", "_high")))
            for key in scores
        }
        row |= {
            "tokens": f"{values['response_length_mean']:.1f}",
            "truncated": f"{values['truncated_frac']:.3f}",
        }
        rows.append(row | {"failed": f"{values['failed_frac']:.3f}"})
    columns = list(rows[0])
    widths = {column: max(len(column), *(len(row[column]) for row in rows)) for column in columns}
    lines = [{column: column for column in columns}, *rows]
    return "\n".join(
        "  ".join(line[column].ljust(widths[column]) for column in columns).rstrip()
        for line in lines
    )


def with_interval(value: float | None, low: float | None, high: float | None) -> str:
    """Format a value; low, high: None where its interval is infinite."""
    if value is None:
        return "none scored"
    return f"{value:.3f}" if low is None or high is None else f"{value:.3f} [{low:.3f}, {high:.3f}]"


def configure(args: argparse.Namespace, overrides: list[str]) -> tuple[Config, Path]:
    """The configuration that the arguments describe, and the directory for results.

    Raises ConfigError.
    """
    evaluation: dict[str, object] = {}
    sets = named_files(args.sets)
    if sets:
        evaluation["sets"] = sets
    if args.samples:
        evaluation["samples"] = args.samples
    if args.k:
        evaluation["pass_at"] = args.k
    sections: dict[str, dict[str, object]] = {"eval": evaluation}
    if args.run is not None:
        folder = RunFolder(args.run)
        model, path, out = folder.hf, folder.config, folder.evaluation
        # the run's servers have other weights by now, or have stopped
        sections["rollout"] = {"urls": []}
        if not model.is_dir():
            raise ConfigError(
                f"--run {args.run}: no exported model in it ({model}); finish the run with"
                " checkpoint.export_hf = true, or convert a checkpoint with megatron-rl convert"
            )
    else:
        model, path, out = (
            args.checkpoint,
            args.config,
            Path("runs") / f"eval-{args.checkpoint.resolve().name}",
        )
    model_of: dict[str, object] = {"path": str(model)}
    sections["model"] = model_of
    # of the run's own sets and samples; nothing is saved here
    sections["checkpoint"] = {"best_metric": None}
    if path is None:
        sections["data"] = {"train": next(iter(sets.values()), "none")}  # not read
    cfg = load_config(path, overrides, sections, of_a_run=args.run is not None)
    if args.run is None and cfg.lora.path is not None:
        # with the file's model.path, which --checkpoint replaces above
        named = load_config(path, overrides, sections | {"model": {}}, defaults={"model": model_of})
        check_adapter_is_merged(named, cfg.model.path, "--checkpoint")
    if not cfg.eval.sets:
        raise ConfigError("--sets: no evaluation set; name one as --sets NAME=FILE")
    return cfg, args.out or out


def named_files(texts: Sequence[str]) -> dict[str, str]:
    """Return the files of --sets by their names.  Raises ConfigError where two have one name."""
    sets: dict[str, str] = {}
    for name, file in map(named_file, texts):
        if name in sets:
            raise ConfigError(
                f"--sets {name}={sets[name]} {name}={file}: two files have the name {name}, under"
                " which results are written; give every file a name of its own"
            )
        sets[name] = file
    return sets


def named_file(text: str) -> tuple[str, str]:
    name, separator, file = text.partition("=")
    if not (name and separator and file):
        raise ConfigError(f"--sets {text}: must be NAME=FILE, e.g. aime25=data/aime25.jsonl")
    return name, file


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0 done, 2 bad arguments or configuration, 1 anything that stopped
    it.
    """
    args, overrides = parse_evaluate(argv)
    lines = LogLines(args.log_format or "text")
    if args.log_format:
        overrides += ["--run.log_format", args.log_format]
    signal.signal(signal.SIGTERM, raise_interrupt)
    try:
        cfg, out = configure(args, overrides)
        console = console_of(cfg)
        lines = console.lines
        lines.catch_warnings()
        results = run_tool(cfg, out, console)
        console.summary(table_of(results), results)
        console.log(f"results {out / 'results.json'}")
    except ConfigError as error:
        lines.print_error(f"megatron_rl.evaluate: {error}", error="ConfigError")
        return 2
    except KeyboardInterrupt:
        lines.print_error("megatron_rl.evaluate: interrupted; stopped", error="KeyboardInterrupt")
        return 130
    except (ValueError, RuntimeError, OSError) as error:
        lines.print_error(
            f"megatron_rl.evaluate: {type(error).__name__}: {error}", error=type(error).__name__
        )
        return 1
    return 0


def raise_interrupt(signum: int, frame: object) -> None:
    """SIGTERM ends it as Ctrl-C does, so that servers and worker processes are stopped."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
