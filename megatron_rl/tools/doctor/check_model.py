"""A configuration: that it parses and would start, its tokenizer's BOS and EOS, one call of its reward function."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from megatron_rl.config import Config, ConfigError, RewardConfig, load_config
from megatron_rl.data.rows import BrokenRow, parse_rows
from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import ModelError, ModelSpec, load_hf_config
from megatron_rl.plan.grid import smallest_world
from megatron_rl.plan.preflight import check_files
from megatron_rl.tools.doctor.check import Check

QUESTION, ANSWER = "1 + 1 = ?", "PROBE"
VERIFIED = (
    ("What is 1/2 + 1/4?", "It is \\boxed{\\frac{3}{4}}.", "0.75", 1.0),
    ("What is 1 + 1?", "\\boxed{3}", "2", 0.0),
)
"""(prompt, response, label, reward by math-verify)"""


def check_config(path: Path) -> tuple[Config | None, ModelSpec | None, list[Check]]:
    """Whether `path` parses, what it names exists, and what it needs can be had here."""
    try:
        cfg = load_config(path, [])
    except ConfigError as error:
        return None, None, [Check("FAIL", "parse", "refused", str(error))]
    fewest = smallest_world(cfg.parallel)
    checks = [
        Check("OK", "parse", f"{cfg.loss.name}, replay {cfg.replay.mode}, N = {cfg.run.num_mini_batches}"),
        Check(
            "OK", "ranks", f"start a multiple of {fewest}: the layout's tp x pp x cp and etp x ep x pp both divide it"
        ),
    ]
    spec: ModelSpec | None = None
    try:
        spec = make_spec(load_hf_config(cfg.model.path))
        checks.append(Check("OK", "model.path", f"{cfg.model.path}, {spec.architecture}"))
        for note in check_files(cfg, spec):
            if note.startswith("model.path"):
                checks.append(Check("WARN", "model.path", note, "copy the rest of the checkpoint there"))
        checks.append(Check("OK", "files", "prompts, weights, functions and folders are there"))
    except ModelError as error:
        checks.append(Check("FAIL", "model.path", str(error), "give an HF checkpoint directory of a supported model"))
    except ValueError as error:
        checks += [Check("FAIL", *said(problem)) for problem in str(error).splitlines()]
    if cfg.rollout.port and not cfg.rollout.urls:
        checks.append(check_port(cfg.rollout.host, cfg.rollout.port))
    key = cfg.rollout.api_key_env
    if key is not None and not os.environ.get(key):
        checks.append(Check("FAIL", "rollout.api_key_env", f"{key} is unset or empty", f"export {key}=..."))
    return cfg, spec, checks


def said(problem: str) -> tuple[str, str, str]:
    """(key, what is wrong, remedy) of a message "KEY = VALUE ...; remedy"."""
    what, _, remedy = problem.rpartition("; ")
    key = next((word for word in problem.removeprefix("no such file: ").split() if "." in word), "files")
    return key, what or problem, remedy if what else "see --dry-run"


def check_port(host: str, port: int) -> Check:
    try:
        with socket.create_server((host, port)):
            return Check("OK", "rollout.port", f"{host}:{port} is free")
    except OSError as error:
        return Check(
            "FAIL", "rollout.port", f"{host}:{port}: {error.strerror}", "use another port, or 0 for a free one"
        )


# Tokenizer ----------------------------------------------------------------------------------------------------------


def check_tokenizer(cfg: Config) -> list[Check]:
    """BOS, EOS and sizes, as a run will use them: prompts rendered by data.chat_template, responses ended by the EOS token."""
    from megatron_rl.data.prompts import load_tokenizer  # transformers, seconds

    path = cfg.model.path
    try:
        tokenizer = load_tokenizer(path)
    except ValueError as error:
        return [Check("FAIL", "tokenizer", str(error), "copy it from the model's source")]
    model = read(path / "config.json")
    generation = read(path / "generation_config.json")
    checks = [
        check_eos(tokenizer, {"config.json": model, "generation_config.json": generation}),
        check_bos(tokenizer, cfg),
    ]
    if cfg.data.chat_template and tokenizer.chat_template is not None:
        checks.append(check_end_of_turn(tokenizer, cfg))
    size = model.get("vocab_size", 0)
    if size and len(tokenizer) > size:
        found = f"{len(tokenizer):,} tokens, the model has {size:,}"
        checks.append(
            Check("FAIL", "vocabulary", found, "the tokenizer is another model's: copy the right one to model.path")
        )
    else:
        checks.append(Check("OK", "vocabulary", f"{len(tokenizer):,} tokens of the model's {size:,}"))
    return checks


def read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def check_eos(tokenizer: Any, files: dict[str, dict[str, Any]]) -> Check:
    """A response ends with the tokenizer's EOS; what the model's own files call the end should be the same."""
    eos = tokenizer.eos_token_id
    found = f"{tokenizer.eos_token!r} = {eos}" + (
        "" if tokenizer.pad_token is None else f", pad {tokenizer.pad_token!r}"
    )
    for name, content in files.items():
        theirs = content.get("eos_token_id")
        ids = theirs if isinstance(theirs, list) else [] if theirs is None else [theirs]
        if ids and eos not in ids:
            remedy = "a response would not end where the model ends it: set eos_token in tokenizer_config.json to the right one"
            return Check("FAIL", "EOS", f"{found}; {name}: {theirs}", remedy)
        if len(ids) > 1:
            more = [each for each in ids if each != eos]
            return Check(
                "WARN", "EOS", f"{found}; {name} has {more} too", "those end no response here: see that samples end"
            )
    return Check("OK", "EOS", found)


def check_bos(tokenizer: Any, cfg: Config) -> Check:
    """Prompts are tokenised without special tokens: a BOS is there where the template writes it, once."""
    bos = tokenizer.bos_token_id
    ids = tokenizer(prompt_of(tokenizer, cfg), add_special_tokens=False)["input_ids"]
    adds = bos is not None and tokenizer("x")["input_ids"][:1] == [bos]
    if bos is not None and ids[:2] == [bos, bos]:
        return Check(
            "WARN", "BOS", f"{tokenizer.bos_token!r} twice at the start of a prompt", "remove one from the template"
        )
    if adds and ids[:1] != [bos]:
        found = f"{tokenizer.bos_token!r} is what this tokenizer begins texts with, prompts begin without it"
        where = "the chat template" if cfg.data.chat_template else "data.template"
        return Check("WARN", "BOS", found, f"write it at the start of {where}, if the model was trained with it")
    return Check(
        "OK", "BOS", "none" if bos is None else f"{tokenizer.bos_token!r}, {'once' if ids[:1] == [bos] else 'unused'}"
    )


def prompt_of(tokenizer: Any, cfg: Config) -> str:
    """A prompt as a run renders it."""
    from megatron_rl.data.prompts import prompt_text

    text = cfg.data.template.replace("{prompt}", QUESTION)
    return prompt_text([{"role": "user", "content": text}], cfg.data, tokenizer)


def check_end_of_turn(tokenizer: Any, cfg: Config) -> Check:
    """What the template writes after an answer is what the model learned to end with."""
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, **cfg.data.chat_template_kwargs)
    ending = text.rpartition(ANSWER)[2]
    if not ending.strip() or tokenizer.eos_token in ending:
        return Check("OK", "end of a turn", repr(ending))
    found = f"the chat template ends an answer with {ending!r}, EOS is {tokenizer.eos_token!r}"
    return Check(
        "WARN", "end of a turn", found, "responses may run to their limit: set eos_token to the one that ends a turn"
    )


# Reward -------------------------------------------------------------------------------------------------------------


def check_reward(cfg: Config | None) -> Check:
    """The reward function in a worker process of its own, as a run calls it; math-verify on answers that are known."""
    from megatron_rl.reward.pool import RewardError, RewardPool

    config = (cfg.reward if cfg else RewardConfig()).model_copy(update={"num_workers": 1, "on_error": "raise"})
    name = f"reward.function = {config.function}"
    items = list(VERIFIED) if cfg is None or config.function == "math" else rows_of(cfg)
    start = time.monotonic()
    try:
        with RewardPool(config, hidden_env=cfg.rollout.api_key_env if cfg else None) as pool:
            started = time.monotonic()
            rewards = pool.score([item[:3] for item in items], shaped=False).tolist()
    except (RewardError, OSError) as error:
        return Check(
            "FAIL", "reward", f"{name}: {error}", "mend the function; docs/guides/reward.md says how it is called"
        )
    seconds = f"{started - start:.1f} s to start, {time.monotonic() - started:.2f} s for {len(items)}"
    if config.function != "math":
        return Check("OK", "reward", f"{name}: labels as responses score {rewards}; {seconds}")
    if rewards != [item[3] for item in items]:
        wrong = f"{name}: rewards {rewards}, expected {[item[3] for item in items]}"
        return Check("FAIL", "reward", wrong, "pip install math-verify==0.9.0")
    return Check("OK", "reward", f"{name}: math-verify tells a right answer from a wrong one; {seconds}")


def rows_of(cfg: Config) -> list[tuple[str, str, str, float]]:
    """The first two rows of the training file, their labels as responses."""
    found = []
    for row in parse_rows(cfg.data.train, cfg.data):
        if not isinstance(row, BrokenRow):
            found.append((row.messages[-1]["content"], row.label, row.label, 0.0))
        if len(found) == 2:
            break
    return found
