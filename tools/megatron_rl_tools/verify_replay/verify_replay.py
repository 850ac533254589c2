"""The command `megatron-rl verify-replay`: the proof on the ranks of one layout.

options.py parses its arguments.
"""

from __future__ import annotations

import argparse
import gc
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
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from megatron_rl.config import Config, ParallelConfig, load_config
from megatron_rl.distributed import Parallel, disable_tf32, make_parallel
from megatron_rl.models.families import make_spec
from megatron_rl.models.known import KNOWN, is_known
from megatron_rl.models.spec import ModelSpec, RouterKind, load_hf_config
from megatron_rl_tools.json_output import json_text
from megatron_rl_tools.verify_replay.fingerprints import Given, Shape, make_given
from megatron_rl_tools.verify_replay.options import (
    EPISODE_FAULTS,
    FORMATS,
    SIZES,
    num_layers,
    parse,
)
from megatron_rl_tools.verify_replay.outcome_checks import PassOutcome, compare_outcomes
from megatron_rl_tools.verify_replay.passes import Proof
from megatron_rl_tools.verify_replay.random_checkpoint import (
    shrunk_config,
    small_config,
    write_random_checkpoint,
)
from megatron_rl_tools.verify_replay.router_hooks import RouteCheck
from megatron_rl_tools.verify_replay.router_kinds import router_kind


@dataclass
class ProofReport:
    """The printed result."""

    setup: list[str] = field(default_factory=list)
    checks: list[RouteCheck] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def hint(self) -> str:
        """Return the likeliest fault, from the first failed check that names one."""
        return next((check.hint for check in self.checks if check.hint), "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run on every rank and return the exit code; that of rank 0 is the verdict.

    The other ranks end with 0 unless they raised: after one rank fails, torchrun kills all of them,
    possibly before rank 0 has printed.
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
            inputs = make_given(
                shape_of(spec, parallel, args.micro_batches, args.turns), seed=args.seed
            )
            in_episode = args.fault in EPISODE_FAULTS
            used = inputs.broken(args.fault) if in_episode else inputs
            proof = Proof(cfg, parallel, used, spec, fault=None if in_episode else args.fault)
        except ValueError as error:
            if is_first:
                print(f"megatron-rl verify-replay: {error}", file=sys.stderr)
            if parallel is not None:
                parallel.destroy()
            return 2
        report.setup = describe_proof(args, cfg, spec, parallel, inputs)
        try:
            run_checks(report, proof, cfg, inputs, compare=not args.no_reference)
        # print on this rank: its peers wait for it until torchrun ends them
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
    report: ProofReport, proof: Proof, cfg: Config, inputs: Given, *, compare: bool
) -> None:
    """Run all checks in order and add them to `report.checks`.

    Afterwards torch.distributed is shut down if make_parallel started it.
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
        # frees this layout's engine before the whole model is built on one rank
        del proof
        gc.collect()
        report.checks += compare_outcomes(outcome, one_rank(cfg, spec, inputs, routes, device))


def one_rank(
    cfg: Config, spec: ModelSpec, inputs: Given, routes: dict[Any, Any], device: torch.device
) -> PassOutcome:
    """Compute the same sequences and routes in one process that holds the whole model."""
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
    everything = tuple(micro_batch for replica in inputs.samples[-1] for micro_batch in replica)
    parallel = make_parallel(alone.parallel, device=device.type)
    try:
        proof = Proof(alone, parallel, Given(((everything,),), inputs.is_unique), spec)
        return proof.outcome(*proof.known_routes(routes))
    finally:
        parallel.destroy()
        dist.destroy_process_group()


def parallel_sizes(args: argparse.Namespace) -> ParallelConfig:
    """Return the sizes of the TOML file, if there is one, overridden by flags."""
    base = load_config(args.model).parallel if is_toml(args.model) else ParallelConfig()
    names = (*SIZES, "layers_per_stage")
    flags = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    # the stages of the whole model: a shrunk one has other layers
    sizes = base.model_dump(exclude={"layers_per_stage"} if args.shrink else set())
    return ParallelConfig.model_validate({**sizes, **flags})


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
    """Return the engine's configuration: float32, lr 0, and the model of the flags or a random one
    that this host writes.
    """
    toml = args.model if is_toml(args.model) else None
    source = load_config(toml).model.path if toml else args.model
    stages, size = sizes.pp * sizes.vp, {"tp": sizes.tp, "etp": sizes.expert_tp}
    if source is not None and source.name == "config.json":
        source = source.parent
    path = source
    if source is None:
        small = small_config(
            num_layers=num_layers(args),
            first_k_dense=args.first_k_dense,
            top_k=args.topk,
            num_experts=args.experts,
            **size,
        )
        path = write_on_host(small, args.seed, stack)
    elif args.shrink or not any(source.glob("*.safetensors")):
        hf = KNOWN[str(source).lower()] if is_known(source) else load_hf_config(source)
        layers = sum(args.layers_per_stage or ()) or None
        small = shrunk_config(hf, stages=stages, num_layers=layers, **size) if args.shrink else hf
        path = write_on_host(small, args.seed, stack)
    spec = make_spec(load_hf_config(path))
    if args.router is not None:
        kind = router_kind(args.router, num_experts=spec.num_experts, top_k=spec.top_k)
        spec = replace(spec, router=kind)
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
    used = used_sections(toml) if toml else {}
    sections: dict[str, dict[str, Any]] = {
        **used,
        "model": used.get("model", {})
        | {key: value for key, value in model.items() if value is not None},
        "data": {"train": "unused"},
        "optim": {"lr": 0.0, "weight_decay": 0.0, "distributed": False, "clip_grad": 0.0},
        "parallel": sizes.model_dump(exclude_none=True),
        "replay": {"mode": args.mode, "measure": False},
        "loss": {"name": "minirl", "scale": 1.0},
    }
    return load_config(None, [], sections), spec


def used_sections(toml: Path) -> dict[str, dict[str, Any]]:
    """Return the sections of a configuration that the proof reads; the layout is that of
    parallel_sizes.

    Fields of the optimizer are left out: the proof updates in float32 with lr 0.
    """
    values = load_config(toml).model_dump(mode="json", exclude_unset=True)
    kept: dict[str, dict[str, Any]] = {
        name: values[name] for name in ("model", "megatron") if name in values
    }
    of_model = {field.name for field in fields(TransformerConfig)}
    optimizer = {field.name for field in fields(OptimizerConfig)} - of_model
    for name in optimizer & kept.get("megatron", {}).keys():
        del kept["megatron"][name]
    return kept


def write_on_host(config: dict[str, Any], seed: int, stack: ExitStack) -> Path:
    """Write the checkpoint on one rank per host and return its path to all.  Collective.

    The same seed gives the same weights on all hosts.
    """
    host = socket.gethostname()
    folder = None
    if os.environ.get("LOCAL_RANK", "0") == "0":
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="verify_replay_"))
        write_random_checkpoint(config, Path(folder), seed=seed)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (host, folder))
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
    args: argparse.Namespace, cfg: Config, spec: ModelSpec, parallel: Parallel, inputs: Given
) -> list[str]:
    dense = spec.num_layers - len(spec.moe_layers)
    tokens = sum(len(rollout.tokens) for rollout in inputs.rollouts(-1))
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
            if inputs.is_unique
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
    print(json_text({**values, "checks": [asdict(check) for check in report.checks]}))


def is_toml(path: Path | None) -> bool:
    return path is not None and path.suffix == ".toml"


if __name__ == "__main__":
    sys.exit(main())
