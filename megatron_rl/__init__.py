"""Stable RL for large MoE language models: megatron-core training, SGLang rollouts, exact routing replay.

The public API, loaded on first use (`import megatron_rl` imports no torch):

    load_config(path, overrides)
        a TOML file and "--section.key", "value", ... -> Config
    train(config)
        the complete training run, on every rank of a job
    evaluate(config, out)
        avg@k and pass@k of the checkpoint config.model.path -> results
    policy_loss(inputs, config)
        the policy loss of one micro-batch, every preset of loss.name
    ReplayManager(chunks, ...)
        records and replays the routes of megatron-core routers
    convert(source, out)
        HF checkpoint <-> Megatron distributed checkpoint

Stability: these names, their documented arguments, the settings of a configuration and the files of a run keep their
meaning within a minor version (0.2.x).  CHANGELOG.md lists the changes of the next one, which refuses a former name and
prints the new one.  Everything else is internal and may change at any time.

`train` and `evaluate` are also modules (megatron_rl/train.py is the algorithm): these modules are callable.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_rl.config import load_config
    from megatron_rl.evaluate import evaluate_checkpoint as evaluate
    from megatron_rl.loss.policy import policy_loss
    from megatron_rl.replay.manager import ReplayManager
    from megatron_rl.tools.convert.convert_hf import convert
    from megatron_rl.train import train

__version__ = "0.2.0"
__all__ = ["ReplayManager", "__version__", "convert", "evaluate", "load_config", "policy_loss", "train"]

PLACES = {
    "load_config": "megatron_rl.config",
    "policy_loss": "megatron_rl.loss.policy",
    "ReplayManager": "megatron_rl.replay.manager",
    "convert": "megatron_rl.tools.convert.convert_hf",
}
CALLED = {"train": "train", "evaluate": "evaluate_checkpoint"}
"""Callable modules of this package -> the function that a call runs."""


class CallableModule(ModuleType):
    """A module of CALLED: importing it sets the package's attribute to the module, which must work as the API's function."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return getattr(self, CALLED[self.__name__.rpartition(".")[2]])(*arguments, **options)


def __getattr__(name: str) -> Any:
    if name in CALLED:
        return import_module(f"megatron_rl.{name}")
    if name in PLACES:
        return getattr(import_module(PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
