"""Sections and keys as data, for the command line, error messages and documentation."""

from __future__ import annotations

from functools import cache
from typing import Any

from megatron_rl.config.base import Section
from megatron_rl.config.config import Config
from megatron_rl.config.sections import Teacher

Schema = dict[str, Any]
"""JSON schema of a key: type, limits, allowed names, description."""
SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}

TABLES: dict[str, type[Section]] = {"teachers.NAME": Teacher}
"""Tables of open sections, whose names are the user's: their keys, as in SECTIONS."""
MODELS = SECTIONS | TABLES


@cache  # pydantic builds a schema in milliseconds, and the help reads all of them
def schemas(section: str) -> dict[str, Schema]:
    """Return the schema of every key of a section; none for an unknown section."""
    if section not in MODELS:
        return {}
    schema = MODELS[section].model_json_schema()
    tables = schema.get("$defs", {})
    return {key: inlined(part, tables) for key, part in schema["properties"].items()}


def inlined(part: Any, tables: Schema) -> Any:
    """Return a part of a schema with the schemas of tables in place of references to them."""
    if isinstance(part, list):
        return [inlined(entry, tables) for entry in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        return inlined(tables[part["$ref"].rpartition("/")[2]], tables)
    return {key: inlined(entry, tables) for key, entry in part.items()}


def types_of(schema: Schema) -> set[str]:
    """Return the JSON types of a key's values, such as array, object, boolean or null."""
    # older versions of pydantic give a constant no type
    return {kind["type"] for kind in schema.get("anyOf", [schema]) if "type" in kind}


OTHER_NAMES = {
    name: setting
    for setting, names in {
        "optim.lr": "learning_rate",
        "optim.beta1": "adam_beta1",
        "optim.beta2": "adam_beta2",
        "optim.clip_grad": "max_grad_norm",
        "optim.schedule": "lr_scheduler",
        "optim.warmup_updates": "warmup_steps",
        "run.prompts_per_step": "batch_size train_batch_size",
        "run.group_size": "num_generations n_samples_per_prompt",
        "run.num_steps": "max_steps total_steps",
        "data.max_prompt_tokens": "max_prompt_length",
        "rollout.max_response_tokens": "max_response_length max_new_tokens max_tokens",
        "parallel.tp": "tensor_parallel_size",
        "parallel.pp": "pipeline_parallel_size",
        "parallel.cp": "context_parallel_size",
        "parallel.ep": "expert_parallel_size",
        "model.path": "model_name_or_path",
        "checkpoint.every": "save_steps",
        "loss.kl_coef": "beta kl_loss_coef",
    }.items()
    for name in names.split()
}
"""Names that other trainers give to settings of this one."""


def elsewhere(key: str) -> str:
    """Suggest the settings that a key of a wrong section or of another trainer may mean."""
    places = [f"{section}.{key}" for section in SECTIONS if key in schemas(section)]
    if not places and key in OTHER_NAMES:
        places = [OTHER_NAMES[key]]
    return f"; did you mean {' or '.join(places)}?" if places else ""
