"""The command `megatron-rl explain-mismatch`, for a server, a run or a saved mini-batch.

options.py parses its arguments.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import torch
from safetensors import SafetensorError

from megatron_rl.checkpoint.batches.bundle_header import BUNDLE
from megatron_rl.config import Config, load_config
from megatron_rl.config.rules.adapter_rules import check_adapter_is_merged
from megatron_rl.distributed import disable_tf32, make_parallel
from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import load_hf_config
from megatron_rl.rollout.server.server_info import ServerError
from megatron_rl_tools.explain_mismatch.history import History, read_history
from megatron_rl_tools.explain_mismatch.ladder import Explanation, Ladder
from megatron_rl_tools.explain_mismatch.mismatch_page import write_page
from megatron_rl_tools.explain_mismatch.options import COMMAND, DTYPES, OF_REQUESTS, parse
from megatron_rl_tools.explain_mismatch.server_side import ServerSide, connect_to_server
from megatron_rl_tools.explain_mismatch.token_inputs import (
    Saved,
    make_prompts,
    read_bundle,
    read_run,
)
from megatron_rl_tools.explain_mismatch.trainer_side import TrainerSide
from megatron_rl_tools.json_output import json_text

LONGEST, LEAST_LENGTH = 160, 4
RESERVED = 8
"""Positions that servers keep free."""


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    for module in ("megatron", "torch"):
        warnings.filterwarnings("ignore", module=rf"{module}\..*")
        logging.getLogger(module).setLevel(logging.ERROR)
    explanation, history, problem = None, None, ""
    try:
        check_output(args.output)
        if args.folder is not None:
            check_folder(args)
            if not (args.folder / BUNDLE).is_file():
                history = read_history(args.folder)  # shown also where the ladder cannot run
        explanation = of_server(args) if args.folder is None else of_folder(args)
    except (
        ValueError,
        ServerError,
        httpx.HTTPError,
        SafetensorError,
        OSError,
        MemoryError,
        RuntimeError,
    ) as error:
        problem = describe_error(error)
        print(f"{COMMAND}: {problem}", file=sys.stderr)
        if history is None:
            return 2
    if history is not None and explanation is None:
        reason = (
            problem or "no tokens were saved that the weights of model.path sampled (first step)"
        )
        history = replace(history, notes=(*history.notes, f"no ladder: {reason}"))
    if args.json:
        print(json_text(as_json(explanation, history)))
    else:
        lines = history.lines() if history else []
        lines += describe_inputs(explanation) if explanation else []
        print("\n".join(lines))
    try:
        page = write_page(args.output, explanation, history, title=str(args.folder or args.url))
    except OSError as error:
        problem = f"--output {args.output}: the page cannot be written: {error}; name another file"
        print(f"{COMMAND}: {problem}", file=sys.stderr)
    else:
        if not args.json:
            print(f"page: {page}")
    if problem:
        return 2
    return int(bool((explanation and explanation.verdicts) or (history and history.accuses)))


def check_output(path: Path) -> None:
    """Raise ValueError if the page cannot be written, before any work is done."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    target = path if path.exists() else folder
    if path.is_dir() or not folder.is_dir() or not os.access(target, os.W_OK):
        raise ValueError(
            f"--output {path}: cannot be written; name a file in a folder that you can write to"
        )


def describe_error(error: Exception) -> str:
    """Return the error's text with what to do.  Raises it again if it is this command's defect."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text:
        return (
            f"{text}; the model must fit on one device: lower --longest or --prompts, or use"
            " --device cpu"
        )
    if isinstance(error, httpx.HTTPError):
        return (
            f"--url: the server stopped answering ({text}); see its log, and start the command"
            " again"
        )
    if isinstance(error, RuntimeError) and not isinstance(error, ServerError):
        raise error
    return str(error)


# A server


def of_server(args: argparse.Namespace) -> Explanation:
    """Compare the trainer with the server at --url.

    Raises ValueError and ServerError, which name the option and what to do.
    """
    check_arguments(args)
    spec = make_spec(load_hf_config(args.model))
    check_max_tokens(args, spec.max_positions)
    cfg = explain_config(args, longest=args.longest + args.response + 1)
    server = connect_to_server(
        args.url, cfg.rollout, spec, want_routes=bool(spec.moe_layers) and not args.no_routes
    )
    cfg = with_dtype(cfg, args, server.facts.info.dtype)
    try:
        prompts = make_prompts(
            args.prompts, args.longest, spec.vocab_size, server.facts, seed=args.seed
        )
        rollouts = server.sample(prompts, args.response)
        fresh = [server.fresh(rollout) for rollout in rollouts]
        saved = Saved(args.model, cfg, rollouts, server.facts.info.dtype)
        return climb(saved, args, server=server, fresh=fresh)
    finally:
        server.close()


def check_arguments(args: argparse.Namespace) -> None:
    """Set the defaults of the requests.  Raises ValueError, which names the option."""
    if args.url is None or args.model is None:
        raise ValueError(
            "needs RUN_DIR, or --url and --model: a server alone does not say what the trainer"
            " computes; name the HF checkpoint that the trainer loads with --model"
        )
    if not (args.model / "config.json").is_file():
        raise ValueError(
            f"--model {args.model}: no config.json; must be an HF checkpoint directory"
        )
    for name, least in (("prompts", 1), ("longest", LEAST_LENGTH), ("response", 4)):
        if (value := getattr(args, name)) is not None and value < least:
            raise ValueError(
                f"--{name} {value}: must be at least {least}; leave it out for the default"
            )
    for name, default in OF_REQUESTS.items():
        if getattr(args, name) is None:
            setattr(args, name, default)


def check_max_tokens(args: argparse.Namespace, max_positions: int) -> None:
    """Set the default of --longest.

    Raises ValueError if prompt and response together exceed the model's positions.
    """
    most = max_positions - args.response - RESERVED
    if most < LEAST_LENGTH or (args.longest or 0) > most:
        raise ValueError(
            f"--longest {args.longest or LEAST_LENGTH}, --response {args.response}: together they"
            f" must be at most max_position_embeddings - {RESERVED} = {max_positions - RESERVED};"
            " lower one of them"
        )
    args.longest = args.longest or min(LONGEST, most)


def with_dtype(cfg: Config, args: argparse.Namespace, served: str) -> Config:
    """Set the server's dtype if neither --dtype nor --config names one, so that a healthy pair
    differs by rounding only.
    """
    if args.dtype or args.config or served not in DTYPES:
        return cfg
    return cfg.model_copy(update={"model": cfg.model.model_copy(update={"dtype": served})})


def explain_config(args: argparse.Namespace, *, longest: int, base: Config | None = None) -> Config:
    """Return the trainer's configuration: that of --config or of the run, on one rank, without
    replay's own measurements.
    """
    sections: dict[str, dict[str, object]] = {
        "model": {"path": str(args.model)},
        "parallel": {},
        "replay": {"mode": "R3", "measure": False, "on_missing_route": "live"},
        "run": {"device": args.device, "max_tokens_per_micro_batch": max(1024, 2 * longest)},
    }
    if args.dtype or not (args.config or base):
        sections["model"]["dtype"] = args.dtype or "float32"
    if args.temperature is not None:
        sections["rollout"] = {"temperature": args.temperature}
    values: dict[str, dict[str, object]] = {"data": {"train": "unused"}}
    if base is not None:
        values = base.model_dump(mode="json", exclude_unset=True)
    elif args.config is not None:
        named = load_config(args.config)
        check_adapter_is_merged(named, args.model, "--model")
        values = named.model_dump(mode="json", exclude_unset=True)
    for name, keys in sections.items():
        values[name] = keys if name in ("parallel", "replay") else {**values.get(name, {}), **keys}
    # RouterScores reads packed rows
    values["model"] = {**values["model"], "batch_format": "thd"}
    values["run"] = {key: values["run"][key] for key in KEPT_OF_RUN}
    values["rollout"] = {
        key: value for key, value in values.get("rollout", {}).items() if key in KEPT_OF_ROLLOUT
    }
    used: dict[str, dict[str, object]] = {name: values[name] for name in USED if name in values}
    return load_config(None, [], used)


USED = ("model", "parallel", "replay", "run", "data", "rollout", "megatron")
"""Sections of a configuration that the trainer of this command reads."""
KEPT_OF_RUN = ("device", "max_tokens_per_micro_batch")
"""Keys of [run] that this command uses.  The others need sections that are left out."""
KEPT_OF_ROLLOUT = ("temperature", "api_key_env", "probe_timeout_seconds", "allow_unproven")
"""Keys of [rollout] that this command uses.  The others start servers, and some require others."""


# A run, or a mini-batch of one


def check_folder(args: argparse.Namespace) -> None:
    options = [name for name in ("url", "config", *OF_REQUESTS) if getattr(args, name) is not None]
    if options:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in options)
        raise ValueError(
            f"{args.folder}: no effect of {names} with RUN_DIR, which has its settings and its"
            " tokens; leave out what is named"
        )


def of_folder(args: argparse.Namespace) -> Explanation | None:
    """Climb the ladder with saved tokens if the weights that sampled them are known: those of the
    first step of a run, or of a saved mini-batch.  Returns None otherwise.
    """
    read = read_bundle if (args.folder / BUNDLE).is_file() else read_run
    saved = read(args.folder, lambda base, longest: of_run(args, base, longest), args.model)
    return None if saved is None else climb(saved, args)


def of_run(args: argparse.Namespace, base: Config, longest: int) -> Config:
    args.model = args.model or base.model.path
    return explain_config(args, longest=longest, base=base)


def climb(
    saved: Saved,
    args: argparse.Namespace,
    *,
    server: ServerSide | None = None,
    fresh: list | None = None,
) -> Explanation:
    cfg = saved.cfg
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise ValueError(
            f"WORLD_SIZE = {world}: must be 1, this command is one process; start it without"
            " torchrun"
        )
    if cfg.model.is_exact:
        disable_tf32()
    parallel = make_parallel(cfg.parallel, device=cfg.run.device, timeout_minutes=30)
    try:
        ladder = Ladder(
            TrainerSide(cfg, parallel),
            saved.rollouts,
            fresh=fresh,
            server=server,
            server_dtype=saved.server_dtype,
            is_refereed=not args.no_referee,
            log=lambda line: print(f"... {line}", file=sys.stderr),
        )
        return ladder.climb()
    finally:
        parallel.destroy()


# Output


def describe_inputs(explanation: Explanation) -> list[str]:
    evidence = explanation.evidence
    lines = ["rung                      KL(mu, pi)   mean |log mu - log pi|   taken off"]
    for rung in explanation.rungs:
        lines.append(
            f"{rung.name:<24}  {rung.kl:>10.3e}   {rung.difference:>22.3e}   {rung.share:>8.1%} "
            f" {rung.what}"
        )
    lines += [
        f"{name:<28} {value if isinstance(value, str) else format(value, '.6g')}"
        for name, value in sorted(evidence.items())
    ]
    if not explanation.verdicts:
        lines.append(
            f"HEALTHY: the two differ by rounding: mean {evidence['diff.live']:.1e} nats, limit"
            f" {evidence['limit.diff']:.1e}"
        )
    for verdict in explanation.verdicts:
        part = "not measured" if verdict.share is None else f"{verdict.share:.0%}"
        lines += [
            f"CAUSE {verdict.name}: {verdict.cause}",
            f"  share of KL(mu, pi_old): {part}",
            f"  change {verdict.key}: {verdict.value}",
        ]
    return [*lines, *([str(evidence["limit.note"])] if "limit.note" in evidence else [])]


def as_json(explanation: Explanation | None, history: History | None) -> dict[str, object]:
    result: dict[str, object] = {}
    if explanation is not None:
        result = {
            "verdicts": [vars(verdict) for verdict in explanation.verdicts],
            "rungs": [vars(rung) for rung in explanation.rungs],
            "evidence": dict(explanation.evidence),
            "layers": list(explanation.layers),
        }
    return result if history is None else {**result, "history": history.as_json()}


if __name__ == "__main__":
    sys.exit(main())
