"""Checks before a run of what a configuration refers to: files, functions, checkpoints and the
machine.

Imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megatron_rl.checkpoint.config_diff import check_changes, check_steps
from megatron_rl.checkpoint.folder import STATE, choose_checkpoint
from megatron_rl.config import Config
from megatron_rl.config.rules.server_rules import check_python
from megatron_rl.config.run_paths import RunFolder
from megatron_rl.data.prompt_files import eval_file, train_files
from megatron_rl.data.rows import DataError, check_rows
from megatron_rl.metrics.trackers.registry import PLACES, check_trackers
from megatron_rl.models.fit import length_problems
from megatron_rl.models.spec import ModelSpec, hub_hint
from megatron_rl.plan.functions import imports_of, problem_of
from megatron_rl.plan.host import check_parsed_server_args, disk_problems, port_problems
from megatron_rl.reward.sandbox.box import SandboxError, find_box
from megatron_rl.rollout.server.teacher_servers import checkpoint_problems

Json = dict[str, Any]
MOST_ROWS = 10_000
"""Rows of a prompt file that are checked."""
TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json",
    "tokenizer_config.json",
)  # fmt: skip
"""Files of a tokenizer; every tokenizer has one of them."""
CHAT_TEMPLATES = (
    "chat_template.jinja",
    "chat_template.json",
    "chat_templates",
    "additional_chat_templates",
)
"""Files and folders of chat templates."""
REWARD_ARGUMENTS = (
    ("prompt", "response", "label"),
    ("episode: megatron_rl.reward.Episode",),
    ("group: list[megatron_rl.reward.Episode]",),
)
"""Positional arguments of reward.function: the forms of reward/function.py."""
LOSS_ARGUMENTS = ("inputs", "config")
SANDBOX = ("megatron_rl.reward.code_tests.", "megatron_rl.reward.sandbox.")
"""Beginnings of names of modules that run programs of the model."""


def check_files(cfg: Config, spec: ModelSpec) -> list[str]:
    """Return notes on what cannot be checked here.

    Raises ValueError with one line for every problem that the start of a run would refuse.
    """
    problems = [
        *(missing_rows(cfg) if cfg.is_sft else rollout_problems(cfg, spec)),
        *tokenizer_problems(cfg),
        *weight_problems(cfg.model.path),
        *tracker_problems(cfg),
        *resume_problems(cfg),
    ]
    if not is_plan_only(cfg.model.path):
        problems += disk_problems(cfg, spec)
    if not problems:
        problems += renderer_problems(cfg)  # takes seconds, and a tokenizer without problems
    try:
        not_checked = [] if cfg.is_sft else check_parsed_server_args(cfg)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))
    return [*notes(cfg), *not_checked]


def rollout_problems(cfg: Config, spec: ModelSpec) -> Iterator[str]:
    """Yield problems of prompts, rewards and servers, which supervised training does not have."""
    yield from prompt_problems(cfg)
    yield from function_problems(cfg)
    yield from sandbox_problems(cfg)
    yield from server_problems(cfg, spec.vocab_size)
    yield from length_problems(cfg, spec)
    yield from port_problems(cfg)


def missing_rows(cfg: Config) -> Iterator[str]:
    """Yield files and folders with rows of supervised training that are missing."""
    places = {
        f"data.train.{name}".rstrip("."): file for name, file in train_files(cfg.data).items()
    }
    places |= {f"eval.sets.{name}": eval_file(cfg, name) for name in cfg.eval.sets}
    for key, (path, _, _) in places.items():
        if not path.exists():
            where = f"paths are relative to {Path.cwd()}"
            yield f"no such file: {key} = {path}: {where}; name a .jsonl or .parquet file, or a run"


def is_plan_only(path: Path) -> bool:
    """Return True for a checkpoint directory with neither tokenizer nor weights: its config.json is
    enough to plan with.
    """
    names = {file.name for file in path.iterdir()}
    return not names & set(TOKENIZERS) and not any(
        name.endswith((".safetensors", ".bin", ".pt", ".pth")) for name in names
    )


def notes(cfg: Config) -> Iterator[str]:
    """Yield what a run needs and what is not checked here."""
    if is_plan_only(cfg.model.path):
        yield (
            f"model.path = {cfg.model.path}: only config.json is there; a run needs the tokenizer"
            " and the weights too"
        )
    keys = {"rollout": cfg.rollout.api_key_env}
    keys |= {f"teachers.{name}": t.api_key_env for name, t in cfg.teachers.with_servers.items()}
    for section, key in keys.items():
        if key is not None and not os.environ.get(key):
            yield (
                f"{section}.api_key_env = {key}: that environment variable is unset or empty here;"
                " a run is refused without it"
            )
    if cfg.is_sft:
        yield "rows of data.train and eval.sets: the run reads them and refuses broken ones"
        return
    yield (
        f"prompt files: the first {MOST_ROWS:,} rows of each were read; their length in tokens is"
        " known only in the run"
    )


def prompt_problems(cfg: Config) -> Iterator[str]:
    """Yield prompt files that are missing or have wrong rows."""
    files = {f"data.train.{name}".rstrip("."): file for name, file in train_files(cfg.data).items()}
    files |= {f"eval.sets.{name}": eval_file(cfg, name) for name in cfg.eval.sets}
    for key, (path, data, _) in files.items():
        if not path.is_file():
            what = "it is a directory" if path.is_dir() else f"paths are relative to {Path.cwd()}"
            hint = hub_hint(path, " --repo-type dataset")
            yield f"no such file: {key} = {path}: {what}; name a .jsonl or .parquet file{hint}"
            continue
        try:
            check_rows(path, data, MOST_ROWS)
        except DataError as error:
            yield f"{key} = {error}"


def tracker_problems(cfg: Config) -> Iterator[str]:
    """Yield trackers that this machine lacks; classes of the user are not imported."""
    for name in cfg.track.to:
        if name in PLACES:
            try:
                check_trackers(cfg.track.model_copy(update={"to": (name,)}))
            except ValueError as error:
                yield str(error)
        elif problem := problem_of(name, ("run",)):
            yield f"track.to has {name!r}: {problem}"


def tokenizer_problems(cfg: Config) -> Iterator[str]:
    """Yield why the tokenizer cannot be loaded, end a response or render a chat."""
    path = cfg.model.path
    if is_plan_only(path):
        return
    if not any((path / name).is_file() for name in TOKENIZERS):
        yield (
            f"model.path = {path}: weights, but no tokenizer ({', '.join(TOKENIZERS[:3])}, ...);"
            " copy it there"
        )
        return
    settings = read_json(path / "tokenizer_config.json")
    special = read_json(path / "special_tokens_map.json")
    # these two classes have no default eos token, all others do
    has_no_default = settings.get("tokenizer_class") in (
        "PreTrainedTokenizerFast",
        "TokenizersBackend",
    )
    if has_no_default and not (settings.get("eos_token") or special.get("eos_token")):
        yield (
            f"model.path = {path}: its tokenizer has no eos token, so no response could end; set it"
            " in tokenizer_config.json"
        )
    has_template = settings.get("chat_template") or any(
        (path / name).exists() for name in CHAT_TEMPLATES
    )
    if cfg.data.chat_template and not has_template:
        yield (
            f"data.chat_template = true, but the tokenizer in model.path = {path} has no chat"
            " template; set data.chat_template = false, or add chat_template.jinja there"
        )


def renderer_problems(cfg: Config) -> Iterator[str]:
    """Yield why agent.renderer cannot write chats with the model's tokenizer."""
    if not cfg.agent.renderer or is_plan_only(cfg.model.path):
        return
    from megatron_rl.data.prompts import load_tokenizer  # transformers: seconds
    from megatron_rl.rollout.agents.chat import Chat

    try:
        Chat(cfg.agent.renderer, load_tokenizer(cfg.model.path), cfg.agent.history)
    except ValueError as error:
        yield str(error)


def read_json(path: Path) -> Json:
    """Return the JSON object in a file; {} where there is none, or the file is broken.

    A broken file is reported with its reason when it is loaded.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def weight_problems(path: Path) -> Iterator[str]:
    """Yield weights that are missing or truncated."""
    if is_plan_only(path):
        return
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict):
            yield f"{index}: holds no weight_map; download it again"
            return
        files = [path / name for name in sorted(set(names.values()))]
    else:
        files = sorted(path.glob("*.safetensors"))
    absent = [file.name for file in files if not file.is_file()]
    if not files:
        yield (
            f"model.path = {path}: no safetensors files there; download them, or convert other"
            " weights to safetensors"
        )
    if absent:
        yield f"{index}: names files that are not there: {', '.join(absent)}; download them"
    for file in files:
        if file.name not in absent:
            try:
                # reads the header and compares it with the file's size
                safe_open(file, framework="numpy")
            except SafetensorError as error:
                yield f"{file}: not a complete safetensors file: {error}; download it again"


def function_problems(cfg: Config) -> Iterator[str]:
    """Yield functions of the user that cannot be loaded or called."""
    functions = (
        ("reward.function", cfg.reward.function, REWARD_ARGUMENTS),
        ("loss.name", cfg.loss.name, (LOSS_ARGUMENTS,)),
    )
    for key, name, calls in functions:
        if ":" in name and (problem := problem_of(name, *calls)):
            yield f"{key} = {name!r} cannot be loaded: {problem}"
    if cfg.agent.name:
        # imports transformers: seconds
        from megatron_rl.rollout.agents.rollout_function import load_function

        try:
            load_function(cfg.agent)
        except ValueError as error:
            yield str(error)


def sandbox_problems(cfg: Config) -> Iterator[str]:
    """Yield why the programs that the reward function runs would be refused on this machine."""
    if needs_sandbox(cfg.reward.function):
        try:
            find_box()
        except SandboxError as error:
            yield f"reward.function = {cfg.reward.function!r}: {error}"


def needs_sandbox(function: str) -> bool:
    """Return True for a function whose module imports one of SANDBOX.

    A module that imports it through another is refused when the workers start, before a step is
    trained.
    """
    parts = (f"{name}." for name in imports_of(function)) if ":" in function else ()
    return any(name.startswith(SANDBOX) for name in parts)


def server_problems(cfg: Config, vocab_size: int) -> Iterator[str]:
    """Yield why the run cannot start servers with rollout.python, or a teacher's server."""
    yield from checkpoint_problems(cfg, vocab_size)
    if not cfg.rollout.urls:
        try:
            check_python(cfg.rollout)
        except ValueError as error:
            yield str(error)


def resume_problems(cfg: Config) -> Iterator[str]:
    """Yield why a run cannot be resumed: there is no checkpoint although one is required, its
    settings differ, or it has too many finished steps.
    """
    try:
        path = choose_checkpoint(RunFolder(cfg.run_dir).checkpoints, cfg.checkpoint)
        if path is not None:
            state = json.loads((Path(path) / STATE).read_text())
            check_changes(state["config"], cfg, path)
            check_steps(state["step"], cfg, path)
    except OSError as error:
        yield (
            f"{error.filename}: cannot be read: {error.strerror}; choose another checkpoint with"
            " checkpoint.load"
        )
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        yield (
            f"{path}/{STATE}: not the state of a checkpoint: {error!r}; choose another with"
            " checkpoint.load"
        )
    except ValueError as error:  # of the checks above, with a complete message
        yield str(error)


def resumed_step(cfg: Config) -> int:
    """Return the number of steps in the checkpoint that the run continues from; 0 without one.

    resume_problems must have passed.
    """
    path = choose_checkpoint(RunFolder(cfg.run_dir).checkpoints, cfg.checkpoint)
    return 0 if path is None else int(json.loads((Path(path) / STATE).read_text())["step"])
