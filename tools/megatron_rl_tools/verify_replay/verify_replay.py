"""The command `megatron-rl verify-replay`: the proof on the ranks of one layout; options.py parses
its arguments.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.config import Config, ParallelConfig, load_config
from megatron_rl.distributed import Parallel, disable_tf32, make_parallel
from megatron_rl.models.families import make_spec
from megatron_rl.models.known import KNOWN, is_known
from megatron_rl.models.spec import ModelSpec, RouterKind, load_hf_config
from megatron_rl_tools.verify_replay.fingerprints import (
    Given,
    Shape,
    make_given,
    shrunk_config,
    small_config,
    write_random_checkpoint,
)
from megatron_rl_tools.verify_replay.options import (
    EPISODE_FAULTS,
    FORMATS,
    SIZES,
    num_layers,
    parse,
)
from megatron_rl_tools.verify_replay.passes import PassOutcome, Proof
from megatron_rl_tools.verify_replay.router_hooks import RouteCheck
from megatron_rl_tools.verify_replay.router_kinds import router_kind

LOGPROB_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-4  # of each tensor's largest element


@dataclass
class ProofReport:
    """What is printed.  `hint` is the likeliest fault, from the first failed check that has one."""

    setup: list[str] = field(default_factory=list)
    checks: list[RouteCheck] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def hint(self) -> str:
        return next((check.hint for check in self.checks if check.hint), "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run on every rank; the exit code.  Rank 0's is the verdict.

    The others end with 0 unless they raised: once one rank fails, torchrun kills all of them, and
    rank 0 may not have printed.
    """
    args = parse(arguments)
    for module in ("megatron", "torch"):
        warnings.filterwarnings("ignore", module=rf"{module}\..*")
        logging.getLogger(module).setLevel(logging.ERROR)
    disable_tf32()  # (c) compares in float32; before CUDA starts
    started = time.perf_counter()
    report = ProofReport()
    is_first = os.environ.get("RANK", "0") == "0"
    parallel = None
    with ExitStack() as stack:
        try:
            sizes = parallel_sizes(args)
            check_micro_batches(args.micro_batches, sizes)
            parallel = make_parallel(
                sizes, device=args.device, timeout_minutes=args.timeout_minutes
            )
            cfg, spec = proof_config(args, sizes, parallel, stack)
            given = make_given(
                shape_of(spec, parallel, args.micro_batches, args.turns), seed=args.seed
            )
            in_episode = args.fault in EPISODE_FAULTS
            used = given.broken(args.fault) if in_episode else given
            proof = Proof(cfg, parallel, used, spec, fault=None if in_episode else args.fault)
        except ValueError as error:
            if is_first:
                print(f"verify_replay: {error}", file=sys.stderr)
            if parallel is not None:
                parallel.destroy()
            return 2
        report.setup = describe_proof(args, cfg, spec, parallel, given)
        try:
            run_checks(report, proof, cfg, given, compare=not args.no_reference)
        # its peers would wait for this rank: print here, torchrun ends them
        except Exception as error:
            report.checks.append(
                RouteCheck(f"rank {parallel.rank}", False, f"{type(error).__name__}: {error}")
            )
            if not args.json:
                traceback.print_exc()
            is_first = True
    if not is_first:
        return 0
    report.seconds = time.perf_counter() - started
    print_json(report) if args.json else print_table(report)
    return 0 if report.passed else 1


def run_checks(
    report: ProofReport, proof: Proof, cfg: Config, given: Given, *, compare: bool
) -> None:
    """All checks, in order, into `report.checks`.

    Ends with torch.distributed shut down where make_parallel started it.
    """
    parallel = proof.parallel
    checks, routes = proof.run_rounds()
    report.checks += checks
    check, old, loss = proof.replay_live()
    report.checks.append(check)
    if compare:
        if cfg.replay.mode == "R3":
            old, loss = proof.known_routes(routes)
        outcome = proof.outcome(old, loss)
    dist.barrier()
    parallel.destroy()
    if compare and parallel.rank == 0:
        if not parallel.owns_process_group:
            raise RuntimeError(
                "the comparison with one rank needs to start torch.distributed itself"
            )
        device, spec = parallel.device, proof.engine.spec
        del proof
        gc.collect()
        report.checks += compare_outcomes(outcome, one_rank(cfg, spec, given, routes, device))


def one_rank(
    cfg: Config, spec: ModelSpec, given: Given, routes: dict[Any, Any], device: torch.device
) -> PassOutcome:
    """The same sequences and routes in one process that holds the whole model."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    plain = {
        "recompute": "none",
        "recompute_layers": 1,
        "token_dispatcher": "alltoall",
        "batch_format": "thd",
    }
    model = cfg.model.model_copy(update=plain)
    alone = cfg.model_copy(update={"model": model, "parallel": ParallelConfig()})
    everything = tuple(micro_batch for replica in given.samples[-1] for micro_batch in replica)
    parallel = make_parallel(alone.parallel, device=device.type)
    try:
        proof = Proof(alone, parallel, Given(((everything,),), given.is_unique), spec)
        return proof.outcome(*proof.known_routes(routes))
    finally:
        parallel.destroy()
        dist.destroy_process_group()


def compare_outcomes(ours: PassOutcome, reference: PassOutcome) -> list[RouteCheck]:
    """(c): largest differences, with where they are."""
    checks = []
    if ours.logprobs.keys() == reference.logprobs.keys():
        worst, who = max(
            (abs(ours.logprobs[key] - reference.logprobs[key]), key) for key in ours.logprobs
        )
        detail = (
            f"largest difference {worst:.2g} at rollout {who[0]}, position {who[1]} (limit"
            f" {LOGPROB_TOLERANCE:.0e})"
        )
        checks.append(RouteCheck("(c) log-probs, one rank", worst <= LOGPROB_TOLERANCE, detail))
    else:
        odd = sorted(ours.logprobs.keys() ^ reference.logprobs.keys())
        checks.append(
            RouteCheck(
                "(c) log-probs, one rank",
                False,
                f"{len(odd)} tokens on one side only, first {odd[0]}",
            )
        )
    difference = abs(ours.loss - reference.loss)
    limit = LOGPROB_TOLERANCE * max(1.0, abs(reference.loss))
    detail = f"{ours.loss:.7g}, one rank {reference.loss:.7g} (limit {limit:.1g})"
    checks.append(RouteCheck("(c) loss, one rank", difference <= limit, detail))
    checks.append(compare_gradients(ours.gradients, reference.gradients))
    return checks


def compare_gradients(
    ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]
) -> RouteCheck:
    """Each HF tensor against its own largest element, but no finer than 1e-4 of the largest
    anywhere (rounding noise).
    """
    name = "(c) gradients, one rank"
    if ours.keys() != reference.keys():
        odd = sorted(ours.keys() ^ reference.keys())
        return RouteCheck(name, False, f"{len(odd)} tensors on one side only, first {odd[0]}")
    floor = 1e-4 * max(float(tensor.abs().max()) for tensor in reference.values())
    ratios = {
        key: float(
            ((ours[key] - tensor).abs().max() / max(float(tensor.abs().max()), floor)).nan_to_num(
                nan=torch.inf
            )
        )
        for key, tensor in reference.items()
    }
    worst = max(ratios, key=lambda key: ratios[key])
    wrong = sum(ratio > GRADIENT_TOLERANCE for ratio in ratios.values())
    detail = (
        f"largest relative difference {ratios[worst]:.2g} in {worst} (limit"
        f" {GRADIENT_TOLERANCE:.0e})"
    )
    if wrong:
        detail = f"{wrong} of {len(ratios)} tensors differ; {detail}"
    return RouteCheck(name, not wrong, detail)


def parallel_sizes(args: argparse.Namespace) -> ParallelConfig:
    """From the TOML file where there is one, overridden by flags."""
    base = load_config(args.model).parallel if is_toml(args.model) else ParallelConfig()
    names = (*SIZES, "layers_per_stage")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return ParallelConfig.model_validate({**base.model_dump(), **given})


def check_micro_batches(count: int, sizes: ParallelConfig) -> None:
    """Raise ValueError for a number that the interleaved schedule does not accept."""
    if sizes.vp > 1 and count % sizes.pp:
        raise ValueError(
            f"--micro-batches {count} with pp = {sizes.pp}, vp = {sizes.vp}: the interleaved"
            f" schedule needs a multiple of pp; use {count + -count % sizes.pp}, or --vp 1"
        )


def proof_config(
    args: argparse.Namespace, sizes: ParallelConfig, parallel: Parallel, stack: ExitStack
) -> tuple[Config, ModelSpec]:
    """The engine's configuration: float32, lr 0, and the model of the flags, or a random one that
    this host writes.
    """
    toml = args.model if is_toml(args.model) else None
    source = load_config(toml).model.path if toml else args.model
    stages, size = sizes.pp * sizes.vp, {"tp": sizes.tp, "etp": sizes.expert_tp}
    if source is not None and source.name == "config.json":
        source = source.parent
    path = source
    if source is None:
        shape = {
            "num_layers": num_layers(args),
            "first_k_dense": args.first_k_dense,
            "top_k": args.top_k,
        }
        path = write_on_host(
            small_config(**shape, num_experts=args.experts, **size), args.seed, stack
        )
    elif args.shrink or not any(source.glob("*.safetensors")):
        hf = KNOWN[str(source).lower()] if is_known(source) else load_hf_config(source)
        layers = sum(args.layers_per_stage or ()) or None
        small = shrunk_config(hf, stages=stages, num_layers=layers, **size) if args.shrink else hf
        path = write_on_host(small, args.seed, stack)
    spec = make_spec(load_hf_config(path))
    if args.router is not None:
        spec = replace(
            spec, router=router_kind(args.router, num_experts=spec.num_experts, top_k=spec.top_k)
        )
    model = {
        "path": path,
        "dtype": "float32",
        "recompute": args.recompute,
        "token_dispatcher": args.dispatcher,
    }
    # TransformerEngine computes float32 in TF32
    model |= {"batch_format": args.format, "layer_spec": "local"}
    if args.recompute is not None:
        model["recompute_layers"] = 1
    sections: dict[str, dict[str, Any]] = {
        "model": {key: value for key, value in model.items() if value is not None},
        "data": {"train": "unused"},
        "optim": {"lr": 0.0, "weight_decay": 0.0, "distributed": False, "clip_grad": 0.0},
        "parallel": sizes.model_dump(exclude_none=True),
        "replay": {"mode": args.mode, "measure": False},
        "loss": {"name": "minirl", "scale": 1.0},
    }
    return load_config(toml, [], sections), spec


def write_on_host(config: dict[str, Any], seed: int, stack: ExitStack) -> Path:
    """One rank per host writes the checkpoint; all get its path.

    Collective.  The same seed gives the same weights.
    """
    host = socket.gethostname()
    mine = None
    if os.environ.get("LOCAL_RANK", "0") == "0":
        mine = stack.enter_context(tempfile.TemporaryDirectory(prefix="verify_replay_"))
        write_random_checkpoint(config, Path(mine), seed=seed)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (host, mine))
    return Path(next(path for name, path in everyone if name == host and path))


def shape_of(spec: ModelSpec, parallel: Parallel, micro_batches: int, turns: int = 1) -> Shape:
    return Shape(
        num_layers=len(spec.moe_layers),
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        vocab_size=spec.vocab_size,
        dp_size=parallel.dp_size,
        cp_size=parallel.cp_size,
        micro_batches=micro_batches,
        turns=turns,
    )


def describe_proof(
    args: argparse.Namespace, cfg: Config, spec: ModelSpec, parallel: Parallel, given: Given
) -> list[str]:
    dense = spec.num_layers - len(spec.moe_layers)
    tokens = sum(len(rollout.tokens) for rollout in given.rollouts(-1))
    sizes = " ".join(
        f"{name}{getattr(parallel, f'{name}_size')}"
        for name in ("tp", "pp", "vp", "cp", "ep", "etp", "dp")
    )
    backend = "nccl" if parallel.device.type == "cuda" else "gloo"
    stages = "+".join(map(str, cfg.parallel.layers_per_stage))
    lines = [
        (
            f"model    {spec.num_layers} layers ({dense} dense), {spec.num_experts} experts,"
            f" top-{spec.top_k}, {describe_router(spec.router)}, float32"
        ),
        f"layout   {parallel.world_size} ranks on {backend}: {sizes}"
        + (", sequence parallel" if cfg.parallel.use_sequence_parallel else "")
        + (f", layers {stages}" if stages else ""),
        (
            f"passes   {cfg.replay.mode}, {FORMATS[cfg.model.batch_format]}, {args.micro_batches}"
            f" micro-batches, recompute {cfg.model.recompute}, {cfg.model.token_dispatcher}"
            " dispatch"
        ),
        f"routes   {tokens} tokens x {len(spec.moe_layers)} MoE layers, "
        + (f"{args.turns} turns each, " if args.turns > 1 else "")
        + (
            "no two equal"
            if given.is_unique
            else "too few sets of experts for all to differ: hints may be wrong"
        ),
    ]
    return [*lines, f"BROKEN   {args.fault}, on purpose"] if args.fault else lines


def describe_router(kind: RouterKind) -> str:
    parts = [
        kind.score_function
        + (" before top-k" if kind.pre_softmax else "")
        + (" + bias" * kind.expert_bias)
    ]
    if kind.num_groups is not None:
        parts.append(f"{kind.group_topk} of {kind.num_groups} groups")
    if kind.scaling_factor is not None:
        parts.append(f"x {kind.scaling_factor}")
    return ", ".join(parts)


def print_table(report: ProofReport) -> None:
    print("\n".join(report.setup))
    width = max(len(check.name) for check in report.checks)
    for check in report.checks:
        print(f"{check.name:<{width}}  {'PASS' if check.passed else 'FAIL'}  {check.detail}")
    if report.hint:
        print(f"looks like    {report.hint}")
    passed = sum(check.passed for check in report.checks)
    print(
        f"{'PASS' if report.passed else 'FAIL'}: {passed} of {len(report.checks)} checks passed in"
        f" {report.seconds:.1f} s"
    )


def print_json(report: ProofReport) -> None:
    values = {
        "passed": report.passed,
        "hint": report.hint,
        "seconds": round(report.seconds, 2),
        "setup": report.setup,
    }
    print(json.dumps({**values, "checks": [asdict(check) for check in report.checks]}, indent=2))


def is_toml(path: Path | None) -> bool:
    return path is not None and path.suffix == ".toml"


if __name__ == "__main__":
    sys.exit(main())
