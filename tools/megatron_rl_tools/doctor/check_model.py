"""Checks of a configuration: parsing, start-up checks, BOS and EOS of its tokenizer, a call of its
reward function.
"""

from __future__ import annotations

import operator
import os
import socket
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.config import Config, ConfigError, RewardConfig, load_rl_or_sft
from megatron_rl.data.prompt_files import train_files
from megatron_rl.data.rows import BrokenRow, parse_rows
from megatron_rl.launch.allocator import GROWING, VARIABLES, allocator_line
from megatron_rl.models.spec import ModelError, ModelSpec
from megatron_rl.plan.dry_run import model_spec
from megatron_rl.plan.grid import smallest_world
from megatron_rl.plan.preflight import Json, check_files, needs_sandbox, read_json
from megatron_rl.reward.sandbox.box import find_box
from megatron_rl.reward.scored_response import Episode
from megatron_rl_tools.doctor.check import Check, fail_if, warn_if

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTION, ANSWER = "1 + 1 = ?", "PROBE"
VERIFIED = (
    ("What is 1/2 + 1/4?", "It is \\boxed{\\frac{3}{4}}.", "0.75", 1.0),
    ("What is 1 + 1?", "\\boxed{3}", "2", 0.0),
)
"""(prompt, response, label, reward by math-verify)."""


def check_model_config(path: Path) -> tuple[Config | None, ModelSpec | None, list[Check]]:
    """Check that `path` parses, that its files exist, and that its ports and keys are available."""
    try:
        cfg = load_rl_or_sft(path, [])
    except ConfigError as error:
        return None, None, [Check("FAIL", "parse", "refused", str(error))]
    fewest = smallest_world(cfg.parallel)
    parsed = f"{cfg.loss.name}, replay {cfg.replay.mode}, N = {cfg.run.num_mini_batches}"
    ranks = f"start a multiple of {fewest}: tp x pp x cp and etp x ep x pp both divide it"
    checks = [Check("OK", "parse", parsed), Check("OK", "ranks", ranks)]
    spec: ModelSpec | None = None
    try:
        spec = model_spec(cfg.model)
        checks.append(Check("OK", "model.path", f"{cfg.model.path}, {spec.architecture}"))
        for note in check_files(cfg, spec):
            if note.startswith("model.path"):
                remedy = "copy the rest of the checkpoint there"
                checks.append(Check("WARN", "model.path", note, remedy))
        checks.append(Check("OK", "files", "prompts, weights, functions and folders exist"))
        if not cfg.is_sft and needs_sandbox(cfg.reward.function):
            checks.append(Check("OK", "sandbox", f"{find_box().mechanism}: its walls hold"))
    except ModelError as error:
        remedy = "set it to an HF checkpoint directory of a supported model"
        checks.append(Check("FAIL", "model.path", str(error), remedy))
    except ValueError as error:
        checks += [failed_check(problem) for problem in str(error).splitlines()]
    if cfg.rollout.port and not cfg.rollout.urls and not cfg.is_sft:
        checks.append(check_port(cfg.rollout.host, cfg.rollout.port))
    if cfg.run.device != "cpu":
        checks.append(check_allocator(cfg))
    key = None if cfg.is_sft else cfg.rollout.api_key_env
    if key is not None and not os.environ.get(key):
        result = f"{key} is unset or empty"
        checks.append(Check("FAIL", "rollout.api_key_env", result, f"export {key}=..."))
    return cfg, spec, checks


def failed_check(problem: str) -> Check:
    """Make a check of a message "KEY = VALUE ...; remedy"."""
    result, _, remedy = problem.rpartition("; ")
    words = problem.removeprefix("no such file: ").split()
    key = next((word for word in words if "." in word), "files")
    return Check("FAIL", key, result or problem, remedy if result else "see --dry-run")


def check_allocator(cfg: Config) -> Check:
    """Say how torch allocates GPU memory in ranks; warn of growing segments that servers map."""
    line = allocator_line(cfg, os.environ, has_servers=not cfg.is_sft)
    is_growing = any(GROWING in os.environ.get(name, "") for name in VARIABLES)
    remedy = "untested with rollout.weight_sync = colocated, which shares memory: unset it"
    is_shared = cfg.rollout.weight_sync == "colocated"
    return warn_if(is_growing and is_shared, "allocator", line, remedy)


def check_port(host: str, port: int) -> Check:
    try:
        with socket.create_server((host, port)):
            return Check("OK", "rollout.port", f"{host}:{port} is free")
    except OSError as error:
        remedy = "use another port, or 0 for a free one"
        return Check("FAIL", "rollout.port", f"{host}:{port}: {error.strerror}", remedy)


# Tokenizer ----------------------------------------------------------------------------------------


def check_tokenizer(cfg: Config) -> list[Check]:
    """Check BOS, EOS and vocabulary as a run uses them: data.chat_template renders prompts, and the
    EOS token ends responses.
    """
    from megatron_rl.data.prompts import load_tokenizer  # imports transformers, which takes seconds

    path = cfg.model.path
    try:
        tokenizer = load_tokenizer(path)
    except ValueError as error:
        return [Check("FAIL", "tokenizer", str(error), "copy it from the model's source")]
    files = {name: read_json(path / name) for name in ("config.json", "generation_config.json")}
    checks = [check_eos(tokenizer, files), check_bos(tokenizer, cfg)]
    if cfg.data.chat_template and tokenizer.chat_template is not None:
        checks.append(check_end_of_turn(tokenizer, cfg))
    size = files["config.json"].get("vocab_size", 0)
    result = f"{len(tokenizer):,} tokens, the model has {size:,}"
    remedy = "the tokenizer is another model's: copy the right one to model.path"
    return [*checks, fail_if(0 < size < len(tokenizer), "vocabulary", result, remedy)]


def check_eos(tokenizer: PreTrainedTokenizerBase, files: dict[str, Json]) -> Check:
    """Check that the model's files name the tokenizer's EOS; servers end a response at it and at
    every EOS of these files.
    """
    eos = tokenizer.eos_token_id
    pad = "" if tokenizer.pad_token is None else f", pad {tokenizer.pad_token!r}"
    result = f"{tokenizer.eos_token!r} = {eos}{pad}"
    ids = list[int]()
    for content in files.values():
        value = content.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    if ids and eos not in ids:
        remedy = "no file of the model ends there: correct eos_token in tokenizer_config.json"
        names = " and ".join(files)
        return Check("FAIL", "EOS", f"{result}; {names}: {sorted(set(ids))}", remedy)
    more = sorted(set(ids) - {eos})
    return Check("OK", "EOS", f"{result}; {more} end a response too" if more else result)


def check_bos(tokenizer: PreTrainedTokenizerBase, cfg: Config) -> Check:
    """Check that the template writes the BOS once: prompts are tokenised without special tokens."""
    bos = tokenizer.bos_token_id
    ids = tokenizer(prompt_of(tokenizer, cfg), add_special_tokens=False)["input_ids"]
    adds = bos is not None and tokenizer("x")["input_ids"][:1] == [bos]
    if bos is not None and ids[:2] == [bos, bos]:
        result = f"{tokenizer.bos_token!r} twice at the start of a prompt"
        return Check("WARN", "BOS", result, "remove one from the template")
    if adds and ids[:1] != [bos]:
        result = f"{tokenizer.bos_token!r} starts texts of this tokenizer, but not prompts"
        where = "the chat template" if cfg.data.chat_template else "data.template"
        remedy = f"write it at the start of {where}, if the model was trained with it"
        return Check("WARN", "BOS", result, remedy)
    if bos is None:
        return Check("OK", "BOS", "none")
    use = "once" if ids[:1] == [bos] else "unused"
    return Check("OK", "BOS", f"{tokenizer.bos_token!r}, {use}")


def prompt_of(tokenizer: PreTrainedTokenizerBase, cfg: Config) -> str:
    """Return a prompt as a run renders it."""
    from megatron_rl.data.prompts import prompt_text

    text = cfg.data.template.replace("{prompt}", QUESTION)
    return prompt_text([{"role": "user", "content": text}], cfg.data, tokenizer)


def check_end_of_turn(tokenizer: PreTrainedTokenizerBase, cfg: Config) -> Check:
    """Check that the template's text after an answer, with which the model was trained to end, has
    the EOS.
    """
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, **cfg.data.chat_template_kwargs)
    ending = text.rpartition(ANSWER)[2]
    is_other = bool(ending.strip()) and tokenizer.eos_token not in ending
    result = f"the chat template ends an answer with {ending!r}, EOS is {tokenizer.eos_token!r}"
    remedy = "responses may run to their limit: set eos_token to the one that ends a turn"
    return warn_if(is_other, "end of a turn", result, remedy)


# Reward -------------------------------------------------------------------------------------------


def check_reward(cfg: Config | None) -> Check:
    """Call the reward function in a worker process, as in a run: on known answers for math, else on
    the labels of the first rows as responses, and on empty responses to the same rows.
    """
    from megatron_rl.reward.pool import RewardError, RewardPool

    config = cfg.reward if cfg else RewardConfig()
    config = config.model_copy(update={"num_workers": 1, "on_error": "raise"})
    name = f"reward.function = {config.function}"
    start = time.monotonic()
    try:
        if cfg is None or config.function == "math":
            episodes = [Episode(*item[:3]) for item in VERIFIED]
        else:
            episodes = labels_as_responses(cfg)
            episodes += [replace(episode, response="") for episode in episodes]
        with RewardPool(config, hidden_env=cfg.key_variables if cfg else ()) as pool:
            started = time.monotonic()
            scored = pool.score_episodes([[episode] for episode in episodes], shaped=False)
    except (RewardError, OSError, ValueError) as error:
        remedy = "fix the function; see docs/guides/data_and_reward.md"
        return Check("FAIL", "reward", f"{name}: {error}", remedy)
    rewards = [rewarded.reward for (rewarded,) in scored]
    scoring = time.monotonic() - started
    seconds = f"{started - start:.1f} s to start, {scoring:.2f} s for {len(rewards)}"
    if config.function == "math":
        expected = [item[3] for item in VERIFIED]
        result = f"{name}: rewards of known answers {rewards}, expected {expected}; {seconds}"
        return fail_if(rewards != expected, "reward", result, "pip install math-verify==0.9.0")
    labels, empty = rewards[: len(rewards) // 2], rewards[len(rewards) // 2 :]
    result = f"{name}: labels as responses score {labels}, empty responses {empty}; {seconds}"
    # both may be 0: a label need not be a complete response
    is_blind = max(empty) > 0 and all(map(operator.ge, empty, labels))
    remedy = "an empty response must not be rewarded as a label is: correct the function"
    return warn_if(is_blind, "reward", result, remedy)


def labels_as_responses(cfg: Config) -> list[Episode]:
    """Return the first two rows of every training file as a run scores them, with their labels as
    responses.

    Raises ValueError where a file or the tokenizer cannot be read, or no row can be used.
    """
    from megatron_rl.data.prompts import load_tokenizer, prompt_text

    tokenizer, episodes = load_tokenizer(cfg.model.path), list[Episode]()
    for path, config, source in train_files(cfg.data).values():
        parsed = parse_rows(path, config, source)
        usable = (row for row in parsed if not isinstance(row, BrokenRow))
        for row in islice(usable, 2):
            text = prompt_text(row.messages, config, tokenizer)
            episodes.append(
                Episode(text, row.label, row.label, metadata=row.metadata, source=source)
            )
    if not episodes:
        raise ValueError("no row of data.train can be used")
    return episodes
