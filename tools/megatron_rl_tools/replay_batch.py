"""Compute a saved mini-batch again: loss, gradient and metrics (run.save_batches;
docs/guides/mismatch.md).

    # one rank, also without a GPU
    megatron-rl replay-batch runs/NAME/batches/step_000012_update_0
    # another layout
    torchrun --nproc_per_node 4 -m megatron_rl.cli replay-batch BUNDLE --layout tp=2,ep=2
In the layout and on the device that saved it, every number must be equal in every bit; elsewhere,
loss and gradient norm must agree within --tolerance.  Exit code: 0 they do, 1 they do not, 2
invalid arguments.
"""

from __future__ import annotations

import argparse
import heapq
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from megatron_rl.checkpoint.all_ranks import gather_values, layout_name
from megatron_rl.checkpoint.batches.bundle import Bundle
from megatron_rl.checkpoint.batches.bundle_header import BUNDLE, Header, read_header
from megatron_rl.checkpoint.batches.bundle_sequences import BundleError
from megatron_rl.checkpoint.batches.bundle_writer import Results, results_of
from megatron_rl.config import Config, load_config
from megatron_rl.data.prompts import load_tokenizer
from megatron_rl.distributed import disable_tf32, make_parallel
from megatron_rl.engine.engine import Engine
from megatron_rl.engine.pass_results import OldPass, UpdateTokens
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.records.packed import MiniBatch
from megatron_rl_tools.options import parse_replay_batch

TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
LEAST_LOSS = 1e-2
"""Differences of smaller losses, which mean-centred advantages give, are relative to this one."""
SIZES = ("tp", "pp", "vp", "cp", "ep", "etp")


@dataclass(frozen=True, order=True)
class TokenShare:
    """A sampled token with its part of the loss, ordered by that part's size."""

    size: float
    """|share|."""
    share: float = field(compare=False)
    """The token's summand of the loss."""
    rollout: str = field(compare=False)
    position: int = field(compare=False)
    token: int = field(compare=False)
    log_mu: float = field(compare=False)
    log_old: float = field(compare=False)
    log_pi: float = field(compare=False)
    weight: float = field(compare=False)
    advantage: float = field(compare=False)
    state: str = field(compare=False)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_replay_batch(argv)
    try:
        header = read_header(args.bundle)
        cfg = batch_config(args, header)
        if cfg.model.is_exact:
            disable_tf32()
        parallel = make_parallel(
            cfg.parallel, device=cfg.run.device, timeout_minutes=cfg.run.collective_timeout_minutes
        )
    except ValueError as error:
        print(f"megatron-rl replay-batch: {error}", file=sys.stderr)
        return 2
    try:
        try:
            engine = Engine(cfg, parallel, total_updates=1)
            bundle = Bundle(args.bundle, engine)
            batch, old = bundle.load()
        except ValueError as error:
            print(f"megatron-rl replay-batch: {error}", file=sys.stderr)
            return 2
        results, tokens = compute(bundle, batch, old, args.tokens)
        if parallel.rank == 0:
            print("\n".join(describe_batch(bundle, results, tolerance_of(args, cfg))))
            if tokens:
                print("\n".join(markdown_table(tokens, load_tokenizer(cfg.model.path))))
        return 0 if is_reproduced(bundle, results, tolerance_of(args, cfg)) else 1
    finally:
        parallel.destroy()


def batch_config(args: argparse.Namespace, header: Header) -> Config:
    """Return the run's configuration with these weights, layout and device.

    Raises ValueError, which names the option.
    """
    if header["config"].get("lora", {}).get("rank"):
        raise BundleError(
            f"{args.bundle} is of a run with adapters (lora.rank > 0): its weights are merged, and"
            " the gradient of A and B cannot be computed from them; replay a batch of full training"
        )
    if missing := [name for name in ("model", "run") if name not in header["config"]]:
        raise BundleError(
            f"{args.bundle / BUNDLE}: config has no [{missing[0]}], which every run has; name a"
            " bundle as the run wrote it"
        )
    weights = args.weights or args.bundle / header["weights"]
    if not weights.is_dir():
        raise BundleError(
            f"{args.bundle} has no weights, it needs those {header['weights']}; name an HF"
            " checkpoint of them with --weights"
        )
    values = {name: dict(keys) for name, keys in header["config"].items()}
    values["model"]["path"] = str(weights)
    values["run"]["device"] = args.device
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if args.layout is not None:
        values["parallel"] = {**read_layout(args.layout)}
    elif world == 1:
        values["parallel"] = {}
    elif world != header["ranks"]:
        raise BundleError(
            f"{args.bundle} was saved by {header['ranks']} ranks ({header['layout']}), there are"
            f" {world}; start {header['ranks']}, or name a layout with --layout"
        )
    return load_config(None, [], values)


def read_layout(text: str) -> dict[str, int]:
    """Parse "tp=2,ep=2" as sizes.  Raises BundleError for anything else."""
    sizes = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in SIZES or not size.isdecimal() or int(size) < 1:
            raise BundleError(
                f"--layout {text}: {part!r} must be one of {', '.join(SIZES)} with its size, such"
                " as tp=2"
            )
        sizes[name] = int(size)
    return sizes


def compute(
    bundle: Bundle, batch: MiniBatch, old: OldPass, num_tokens: int
) -> tuple[Results, list[TokenShare]]:
    """Compute the gradient of the mini-batch again, and the tokens that carry most of its loss.

    Collective.
    """
    engine = bundle.engine
    sums, largest = MetricSums(), list[TokenShare]()

    def observe(tokens: UpdateTokens) -> None:
        if num_tokens and engine.parallel.tp_rank == 0:
            largest[:] = heapq.nlargest(num_tokens, [*largest, *layer_shares(tokens)])

    grad_norm = engine.compute_gradient(batch, old, sums, replay=bundle.replay, observe=observe)
    metrics = sums.reduce(dist.group.WORLD, engine.parallel.device)
    everyone = [token for part in gather_values(largest) for token in part]
    return results_of(engine, metrics, grad_norm), heapq.nlargest(num_tokens, everyone)


def layer_shares(tokens: UpdateTokens) -> list[TokenShare]:
    """Return every learned token of this rank's rows, with its part of the loss."""
    shares, loss, batch = [], tokens.loss, tokens.micro_batch
    for row in loss.mask.nonzero().flatten().tolist():
        if bool(loss.clipped_high[row] | loss.clipped_low[row]):
            state = "clipped"
        else:
            state = "rejected" if bool(loss.rejected[row]) else ""
        shares.append(
            TokenShare(
                abs(float(tokens.shares[row])),
                float(tokens.shares[row]),
                batch.rollout_ids[int(batch.sequence_ids[row])],
                int(batch.positions[row]) + 1,
                int(batch.labels[row]),
                float(batch.rollout_logprobs[row]),
                float(tokens.old_logprobs[row]),
                float(tokens.logprobs[row]),
                float(loss.is_weight[row]),
                float(batch.advantages[row]),
                state,
            )
        )
    return shares


# Results


def tolerance_of(args: argparse.Namespace, cfg: Config) -> float:
    return TOLERANCE[cfg.model.dtype] if args.tolerance is None else float(args.tolerance)


def is_reproduced(bundle: Bundle, results: Results, tolerance: float) -> bool:
    header = bundle.header
    if bundle.is_exact:
        same = results.gradients == header["gradients"]
        return same and dict(results.metrics) == header["metrics"]
    same = is_near(results.loss, header["loss"], tolerance, LEAST_LOSS)
    return same and is_near(results.grad_norm, header["grad_norm"], tolerance)


def is_near(value: float | None, saved: float | None, tolerance: float, least: float = 0.0) -> bool:
    """Return whether two numbers agree; None stands for one that is not finite."""
    if value is None or saved is None:
        return value is saved
    return math.isclose(value, saved, rel_tol=tolerance, abs_tol=tolerance * least)


def describe_batch(bundle: Bundle, results: Results, tolerance: float) -> list[str]:
    header, here = bundle.header, layout_name(bundle.engine)
    exact = bundle.is_exact
    other = "device" if bundle.is_same_layout else "layout"
    rule = f"another {other}: within {tolerance:g}"
    if exact:
        rule = "every number must be equal in every bit"
    equal = sum(results.metrics.get(name) == value for name, value in header["metrics"].items())
    others = {
        name: abs(value - computed) / max(abs(value), 1e-6)
        for name, value in header["metrics"].items()
        if value is not None
        and (computed := results.metrics.get(name)) is not None
        and computed != value
    }
    worst = max(others, key=lambda name: others[name], default="")
    verdict = "equal on every rank" if results.gradients == header["gradients"] else "DIFFER"
    furthest = ""
    if worst:
        saved, here_value = header["metrics"][worst], results.metrics[worst]
        furthest = f"; furthest {worst}: {saved:.6g}, here {here_value:.6g}"
    return [
        f"step {header['step'] + 1}, update {header['update']}, saved because: {header['reason']}",
        f"saved as {header['layout']}, computed as {here}: {rule}",
        metric_line("loss", header["loss"], results.loss),
        metric_line("gradient norm", header["grad_norm"], results.grad_norm),
        *([f"  gradients      {verdict}"] if exact else []),
        f"  metrics         {equal} of {len(header['metrics'])} equal{furthest}",
        "reproduced" if is_reproduced(bundle, results, tolerance) else "NOT reproduced",
    ]


def metric_line(name: str, saved: float | None, computed: float | None) -> str:
    def shown(value: float | None) -> str:
        return "not finite" if value is None else f"{value:.9g}"

    return f"  {name:<14} {shown(saved)}, here {shown(computed)}"


def markdown_table(tokens: Sequence[TokenShare], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    rows = [
        "  loss        rollout            at  token                 log mu  log pi_old  log pi   "
        " pi/mu  advantage"
    ]
    for token in tokens:
        # ascii: a model's text must not send control characters to a terminal
        text = ascii(tokenizer.decode([token.token]))
        rows.append(
            f"  {token.share:+.3e}  {token.rollout:<16} {token.position:>4}  {token.token:>6}"
            f" {text:<14} {token.log_mu:>8.3f} {token.log_old:>9.3f} {token.log_pi:>8.3f}"
            f" {token.weight:>9.3g} {token.advantage:>+9.3f} {token.state}".rstrip()
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
