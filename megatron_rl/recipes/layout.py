"""The planner's layout, as settings of a recipe's config.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from megatron_rl.config import Config, load_config
from megatron_rl.models.fit import length_problems
from megatron_rl.models.known import find_spec
from megatron_rl.plan.hardware import GIB, Assumptions, Hardware
from megatron_rl.plan.proposal import with_servers
from megatron_rl.plan.search import Candidate, Search
from megatron_rl.plan.server_time import configured_servers
from megatron_rl.plan.training_time import TrainingModel

NO_SERVERS: dict[str, object] = {
    "urls": [],
    "num_servers": 1,
    "gpus": [],
    "weight_sync": "distributed",
    "release_memory": False,
    "max_server_restarts": 3,
}
"""A configuration for which the planner proposes servers."""
SERVER_KEYS = (
    "urls", "num_servers", "gpus", "weight_sync", "release_memory", "max_server_restarts",
    "max_total_tokens",
)  # fmt: skip
MOST_TOKENS = 524_288
"""The longest KV cache that is asked of a server on a GPU it shares, in tokens."""


@dataclass(frozen=True)
class Layout:
    """Settings of a layout, and what was computed for it."""

    values: dict[str, object]
    """"section.key" -> value; None: not set in the file."""
    line: str
    """The layout, its memory and its seconds, in words."""


def propose(
    config: Path,
    model: str,
    path: str,
    gpus: int,
    hardware: Hardware,
    changes: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
) -> Layout:
    """Return the fastest layout that fits, for the step that a recipe's config.toml describes.

    model: a checkpoint directory or a known name.  path: model.path of the project.  changes:
    sections of settings that replace those of the recipe.
    Raises ValueError where the model cannot train or be served on so many GPUs.
    """
    assumed = Assumptions()
    step: dict[str, Mapping[str, object]] = {
        "rollout": NO_SERVERS,
        "model": {"path": model},
        **changes,
    }
    cfg, spec = load_config(config, (), step), find_spec(model)
    cfg = with_servers(spec, cfg, gpus, hardware, assumed, ranks=gpus, option="--gpus")
    if cfg.rollout.release_memory:
        tokens = min(cfg.rollout.max_total_tokens, MOST_TOKENS)
        cfg = with_rollout(cfg, max_total_tokens=tokens)
    if problems := list(length_problems(cfg, spec)):
        raise ValueError("\n".join(problems))
    trainer = TrainingModel(spec, cfg, gpus, hardware, assumed)
    search = Search(trainer, hardware.memory - hardware.reserve)
    if not search.candidates:
        reasons = "".join(f"\n{text}" for text in search.refusals[:3])
        raise ValueError(
            f"no layout of {model} fits on {gpus} x {hardware.name}; give more GPUs (--gpus), a"
            f" larger kind (--gpu) or a smaller model (--model){reasons}"
        )
    best = search.candidates[0]
    server_pool = configured_servers(spec, best.cfg, hardware, assumed)
    seconds = replace(trainer, cfg=best.cfg).step(server_pool).total
    text = f"{layout_text(best, gpus, hardware)}, {seconds:.0f} s a step"
    if urls := best.cfg.rollout.urls:
        text += (
            f"; {len(urls)} servers of {server_pool.devices} GPUs are others': put their addresses"
            " into rollout.urls"
        )
    return Layout(values_of(best, path), text)


def with_rollout(cfg: Config, **values: object) -> Config:
    return cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update=values)})


def values_of(best: Candidate, path: str) -> dict[str, object]:
    """Return the settings in which the layout may differ from the recipe's."""
    p, model, rollout = best.cfg.parallel, best.cfg.model, best.cfg.rollout
    values: dict[str, object] = {"model.path": path, "model.recompute": model.recompute}
    values["model.fused_lm_head"] = True if model.fused_lm_head else None
    sizes = {"tp": p.tp, "pp": p.pp, "cp": p.cp, "ep": p.ep, "etp": p.expert_tp}
    values |= {f"parallel.{name}": size for name, size in sizes.items()}
    values["parallel.layers_per_stage"] = list(p.layers_per_stage) or None
    for key in SERVER_KEYS:
        value = getattr(rollout, key)
        value = list(value) if isinstance(value, tuple) else value
        is_default = value == NO_SERVERS.get(key)
        values[f"rollout.{key}"] = None if is_default else value
    return values


def layout_text(best: Candidate, gpus: int, hardware: Hardware) -> str:
    p = best.cfg.parallel
    sizes = f"tp {p.tp}, pp {p.pp}, cp {p.cp}, ep {p.ep}, etp {p.expert_tp}"
    memory = f"{best.memory.total / GIB:.1f} of {hardware.memory / GIB:.1f} GiB"
    return f"{gpus} x {hardware.name}: {sizes}; computed, not measured: {memory} a GPU"
