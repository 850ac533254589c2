"""Sections and keys of a configuration as data, for the command line, error messages and documentation."""

from __future__ import annotations

from functools import cache
from typing import Any

from megatron_rl.config.base import Section
from megatron_rl.config.config import Config

Schema = dict[str, Any]
"""JSON schema of a key: type, limits, allowed names, description."""
SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}


@cache  # pydantic builds a schema in milliseconds, and the help reads all of them
def schemas(section: str) -> dict[str, Schema]:
    """Key -> schema of one section; empty for an unknown section."""
    return SECTIONS[section].model_json_schema()["properties"] if section in SECTIONS else {}


def types_of(schema: Schema) -> set[str]:
    """JSON types of a key's values: array, object, boolean, integer, number, string, null."""
    return {each["type"] for each in schema.get("anyOf", [schema]) if "type" in each}  # older pydantic: none with const


OTHER_NAMES = {
    "learning_rate": "optim.lr",
    "adam_beta1": "optim.beta1",
    "adam_beta2": "optim.beta2",
    "max_grad_norm": "optim.clip_grad",
    "lr_scheduler": "optim.schedule",
    "warmup_steps": "optim.warmup_updates",
    "batch_size": "run.prompts_per_step",
    "train_batch_size": "run.prompts_per_step",
    "num_generations": "run.group_size",
    "n_samples_per_prompt": "run.group_size",
    "max_steps": "run.num_steps",
    "total_steps": "run.num_steps",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_response_length": "rollout.max_response_tokens",
    "max_new_tokens": "rollout.max_response_tokens",
    "max_tokens": "rollout.max_response_tokens",
    "tensor_parallel_size": "parallel.tp",
    "pipeline_parallel_size": "parallel.pp",
    "context_parallel_size": "parallel.cp",
    "expert_parallel_size": "parallel.ep",
    "model_name_or_path": "model.path",
    "save_steps": "checkpoint.every",
    "beta": "loss.kl_coef",
    "kl_loss_coef": "loss.kl_coef",
}
"""Names that other trainers give to settings of this one."""


def elsewhere(key: str) -> str:
    """Suggestion for a key that is in the wrong section, or in none, or that another trainer has: the settings it may mean."""
    places = [f"{section}.{key}" for section in SECTIONS if key in schemas(section)]
    if not places and key in OTHER_NAMES:
        places = [OTHER_NAMES[key]]
    return f"; did you mean {' or '.join(places)}?" if places else ""
