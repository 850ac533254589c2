"""Stable RL for large MoE language models: megatron-core training, SGLang rollouts, exact routing
replay.

The public API (docs/reference; `import megatron_rl` imports no torch):

    megatron_rl.load_config(path, overrides)
        a TOML file and "--section.key", "value", ... -> Config
    megatron_rl.train.train(config)
        the complete training run, on every rank of a job; megatron_rl/train.py is the algorithm
    megatron_rl.evaluate.evaluate_checkpoint(config, out)
        avg@k and pass@k of the checkpoint config.model.path -> results
    megatron_rl.policy_loss(inputs, config)
        the policy loss of one micro-batch, every preset of loss.name
    megatron_rl.ReplayManager(chunks, ...)
        records and replays the routes of megatron-core routers
    megatron_rl_tools.convert.convert_hf.convert(source, out)
        HF checkpoint <-> Megatron distributed checkpoint

Stability: these names, their documented arguments, the settings of a configuration and the files of
a run keep their meaning within a minor version (0.3.x).  CHANGELOG.md lists the changes of the next
one, which refuses a former name and prints the new one.  Everything else is internal and may change
at any time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_rl.config import load_config
    from megatron_rl.loss.policy import policy_loss
    from megatron_rl.replay.manager import ReplayManager

__version__ = "0.3.0"
__all__ = ["ReplayManager", "__version__", "load_config", "policy_loss"]

PLACES = {
    "load_config": "megatron_rl.config",
    "policy_loss": "megatron_rl.loss.policy",
    "ReplayManager": "megatron_rl.replay.manager",
}
MOVED = {"convert": "megatron_rl_tools.convert.convert_hf"}
"""Names of version 0.2 -> the module that has them."""


def __getattr__(name: str) -> Any:
    if name in PLACES:
        return getattr(import_module(PLACES[name]), name)
    fix = f"; it was moved: from {MOVED[name]} import {name}" if name in MOVED else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{fix}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
