"""Prompt files (jsonl, parquet) -> Prompt records, and the order in which training takes them.

A row is {"prompt": text or chat messages, "label": text or number, optional "id"}; the keys' names are configuration.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
from transformers import AutoTokenizer

from megatron_rl.config import DataConfig
from megatron_rl.records import Prompt

MAX_ERRORS_SHOWN = 5


class DataError(ValueError):
    """Prompts that cannot be used; the message names file, line, key, what is wrong and the rule."""


def load_tokenizer(path: Path) -> Any:
    """The HF tokenizer of a checkpoint directory.  ValueError when there is none or it has no end token."""
    if not Path(path).is_dir():
        raise ValueError(f"model.path = {path}: no such directory")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path = {path}: no tokenizer could be loaded from it: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"model.path = {path}: its tokenizer has no eos token, so no response could end")
    return tokenizer


def load_prompts(path: Path, config: DataConfig, tokenizer: Any) -> list[Prompt]:
    """Every row of `path` as a Prompt, in file order.

    Ids are the row's "id" or "FILE:LINE"; equal ids are allowed.  Raises DataError listing the first broken rows
    with their line (jsonl) or row (parquet), counted from 1: a broken row stops the run, it is never skipped.
    """
    path = Path(path)
    if config.chat_template and tokenizer.chat_template is None:
        raise DataError(
            f"{path}: data.chat_template = true but the tokenizer has no chat template; set data.chat_template = false"
        )
    numbers, ids, texts, labels, errors = [], [], [], [], []
    for number, row in read_rows(path):
        try:
            if isinstance(row, DataError):
                raise row
            text = prompt_text(row, config, tokenizer)
            label = label_text(row, config.label_key)
        except DataError as error:
            errors.append(f"{path}, line {number}: {error}")
            continue
        numbers.append(number)
        ids.append(str(row.get("id", f"{path.stem}:{number}")))
        texts.append(text)
        labels.append(label)
    token_ids = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    for number, tokens in zip(numbers, token_ids, strict=True):
        if problem := token_problem(tokens, config, tokenizer):
            errors.append(f"{path}, line {number}: {problem}")
    if errors:
        more = f"\n... and {len(errors) - MAX_ERRORS_SHOWN} more" if len(errors) > MAX_ERRORS_SHOWN else ""
        raise DataError("\n".join(errors[:MAX_ERRORS_SHOWN]) + more)
    if not texts:
        raise DataError(f"{path}: no prompts in it")
    return [
        Prompt(id=id_, text=text, token_ids=tuple(tokens), label=label)
        for id_, text, tokens, label in zip(ids, texts, token_ids, labels, strict=True)
    ]


class PromptSource:
    """An endless, seeded, resumable order over `prompts`: one epoch after another, each shuffled differently.

    The same on every rank: each takes the whole list of a step and uses its share.  A prompt appears once per epoch.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool) -> None:
        if not prompts:
            raise ValueError("a PromptSource needs at least one prompt")
        self.prompts = prompts
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.position = 0
        self.returned: list[Prompt] = []
        self._order = self._order_of(0)

    def put_back(self, prompts: Sequence[Prompt]) -> None:
        """Give `prompts`, which were taken before, again, before any other."""
        self.returned = [*prompts, *self.returned]

    def take(self, n: int) -> list[Prompt]:
        """The next `n` prompts; moves on."""
        taken, self.returned = self.returned[:n], self.returned[n:]
        for _ in range(n - len(taken)):
            if self.position == len(self.prompts):
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._order_of(self.epoch)
            taken.append(self.prompts[self._order[self.position]])
            self.position += 1
        return taken

    def state_dict(self, first: Sequence[Prompt] = ()) -> dict[str, Any]:
        """Where this source is, as plain ints; `first`: prompts it shall give again, before those that were put back."""
        index = {id(prompt): number for number, prompt in enumerate(self.prompts)}
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
            "num_prompts": len(self.prompts),
            "crc32": self._fingerprint(),
            "returned": [index[id(prompt)] for prompt in (*first, *self.returned)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`.  DataError when it belongs to other prompts, another seed or another `shuffle`."""
        mine = self.state_dict()
        hint = "resume with the same data file, run.seed and data.shuffle, or use a new run directory"
        if state["num_prompts"] != mine["num_prompts"]:
            raise DataError(
                f"{mine['num_prompts']} prompts, the checkpoint was made with {state['num_prompts']}; {hint}"
            )
        for key in ("crc32", "seed", "shuffle"):
            if state[key] != mine[key]:
                raise DataError(f"data order: {key} = {mine[key]}, the checkpoint was made with {state[key]}; {hint}")
        self.epoch, self.position = state["epoch"], state["position"]
        self.returned = [self.prompts[number] for number in state.get("returned", [])]  # older checkpoints have none
        self._order = self._order_of(self.epoch)

    def _order_of(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self.prompts))
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.prompts))

    def _fingerprint(self) -> int:
        crc = 0
        for prompt in self.prompts:
            crc = zlib.crc32(f"{prompt.text}\0{prompt.label}\0".encode(), crc)
        return crc


def read_rows(path: Path) -> Iterator[tuple[int, dict | DataError]]:
    """(line or row number from 1, row or what is wrong with it); blank lines of a jsonl file are passed over."""
    if not path.is_file():
        raise DataError(f"{path}: cannot be read: {'it is a directory' if path.is_dir() else 'No such file'}")
    if path.suffix == ".parquet":
        try:
            yield from enumerate(pyarrow.parquet.read_table(path).to_pylist(), start=1)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{path}: not a parquet file: {error}") from error
    elif path.suffix in (".jsonl", ".json", ".ndjson"):
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, parse_line(line)
    else:
        raise DataError(f"{path}: unknown suffix {path.suffix!r}; prompt files are .jsonl or .parquet")


def parse_line(line: bytes) -> dict | DataError:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return DataError(f"not UTF-8: byte {line[error.start]:#04x} at column {error.start + 1}")
    except (json.JSONDecodeError, RecursionError) as error:
        return DataError(f"not JSON: {error}")
    if not isinstance(row, dict):
        return DataError(f"expected an object with keys, got {kind(row)}")
    return row


def prompt_text(row: dict, config: DataConfig, tokenizer: Any) -> str:
    """The text the model sees: rendered with the chat template, or as it is."""
    key = config.prompt_key
    prompt = required(row, key)
    is_chat = isinstance(prompt, list)
    if not isinstance(prompt, str) and not is_chat:
        raise DataError(f"{key!r} must be text or a list of chat messages, got {kind(prompt)}")
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise DataError(f"{key!r} must be text that is not empty, got {prompt!r}")
    if is_chat:
        for message in prompt:
            if not (isinstance(message, dict) and all(isinstance(message.get(k), str) for k in ("role", "content"))):
                raise DataError(f"{key!r} must be text, or chat messages {{'role': text, 'content': text}}")
        if not config.chat_template:
            raise DataError(f"{key!r} is a list of chat messages, which needs data.chat_template = true")
    if not config.chat_template:
        return prompt
    messages = prompt if is_chat else [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def label_text(row: dict, key: str) -> str:
    """The label as text; numbers are written as Python writes them."""
    label = required(row, key)
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise DataError(f"{key!r} must be text or a number, got {kind(label)}")
    if not str(label).strip():
        raise DataError(f"{key!r} must be text that is not empty, got {label!r}")
    return str(label)


def required(row: dict, key: str) -> Any:
    if key not in row:
        raise DataError(f"key {key!r} is missing; it has {list(row)}")
    return row[key]


def token_problem(tokens: Sequence[int], config: DataConfig, tokenizer: Any) -> str | None:
    """What is wrong with a tokenized prompt, or None."""
    if not tokens:
        return "prompt has no tokens"
    if len(tokens) > config.max_prompt_tokens:
        return (
            f"prompt has {len(tokens)} tokens, data.max_prompt_tokens = {config.max_prompt_tokens}; shorten it or raise "
            "the limit"
        )
    unknown = tokenizer.unk_token_id
    if unknown is not None and unknown != tokenizer.eos_token_id and unknown in tokens:
        return f"prompt holds characters the tokenizer does not know (token {tokenizer.unk_token!r})"
    return None


def kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
