"""Prompt files (jsonl, parquet) -> Prompt records, and the order in which training takes them.

A row has a prompt (text or chat messages), a label (text or a number) and optionally an "id"; under
which keys: data/rows.py. Further columns are its metadata.
"""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from megatron_rl.config import DataConfig
from megatron_rl.data.rows import BrokenRow, DataError, Message, describe_broken_rows, parse_rows
from megatron_rl.records import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

__all__ = [
    "DataError",
    "PromptFile",
    "PromptSource",
    "load_prompt_files",
    "load_prompts",
    "load_tokenizer",
    "trained_on",
]


PromptState: TypeAlias = dict[str, Any]
"""Where a PromptSource is, as plain ints and a list of them."""


@dataclass(frozen=True)
class PromptFile:
    """The usable prompts of a file, in its order.

    num_long: rows dropped for their length (data.on_long_prompt = drop).
    """

    path: Path
    prompts: list[Prompt]
    num_long: int
    prompt_key: str
    label_key: str

    def line(self, config: DataConfig) -> str:
        """One line for the log."""
        text = (
            f"{len(self.prompts)} prompts of {self.path} (keys {self.prompt_key}, {self.label_key})"
        )
        rows = len(self.prompts) + self.num_long
        limit = f"data.max_prompt_tokens = {config.max_prompt_tokens}"
        return text + (
            f"; {self.num_long} of {rows} dropped, longer than {limit}" if self.num_long else ""
        )


def load_tokenizer(path: Path) -> Tokenizer:
    """The HF tokenizer of a checkpoint directory.

    ValueError when there is none or it has no end token.
    """
    if not Path(path).is_dir():
        raise ValueError(f"model.path = {path}: no such directory")
    from transformers import AutoTokenizer  # takes seconds: not for ranks that tokenize nothing

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model.path = {path}: no tokenizer could be loaded from it: {error}"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"model.path = {path}: its tokenizer has no eos token, so no response could end"
        )
    return tokenizer


def load_prompt_files(
    files: Mapping[str, tuple[Path, DataConfig]], tokenizer: Tokenizer
) -> dict[str, PromptFile]:
    """Name -> load_prompts of each file.  Raises one DataError with the errors of all files."""
    loaded, errors = {}, []
    for name, (path, config) in files.items():
        try:
            loaded[name] = load_prompts(path, config, tokenizer)
        except DataError as error:
            errors.append(str(error))
    if errors:
        raise DataError("\n".join(errors))
    return loaded


def load_prompts(path: Path, config: DataConfig, tokenizer: Tokenizer) -> PromptFile:
    """Every row of `path` as a Prompt, in file order.

    Ids are the row's "id" or "FILE:LINE"; equal ids are allowed.  Raises DataError listing the
    first broken rows with their line (jsonl) or row (parquet), counted from 1: a broken row is
    never skipped.  Prompts longer than data.max_prompt_tokens are broken, or are dropped and
    counted (data.on_long_prompt).
    """
    path = Path(path)
    if config.chat_template and tokenizer.chat_template is None:
        raise DataError(
            f"{path}: data.chat_template = true but the tokenizer has no chat template; set"
            " data.chat_template = false"
        )
    rows, errors = [], []
    for row in parse_rows(path, config):
        if isinstance(row, BrokenRow):
            errors.append(row)
        else:
            rows.append((row, prompt_text(row.messages, config, tokenizer)))
    token_ids = (
        tokenizer([text for _, text in rows], add_special_tokens=False)["input_ids"] if rows else []
    )
    prompts, num_long = [], 0
    for (row, text), tokens in zip(rows, token_ids, strict=True):
        is_long = len(tokens) > config.max_prompt_tokens and config.on_long_prompt == "drop"
        num_long += is_long
        if not is_long and (problem := token_problem(tokens, config, tokenizer)):
            errors.append(BrokenRow(row.number, problem))
        elif not is_long:
            prompts.append(Prompt(row.id, text, tuple(tokens), row.label, row.metadata))
    if errors:
        raise DataError(describe_broken_rows(path, errors))
    if not prompts:
        why = (
            f" within data.max_prompt_tokens = {config.max_prompt_tokens}; raise it"
            if num_long
            else ""
        )
        raise DataError(f"{path}: no prompts in it{why}")
    return PromptFile(path, prompts, num_long, *rows[0][0].keys)


def trained_on(train: PromptFile, sets: Mapping[str, PromptFile]) -> Iterator[str]:
    """A warning for every evaluation set that has prompts of the training file: avg@k also measures
    what was memorised.
    """
    known = {prompt.text for prompt in train.prompts}
    for name, file in sets.items():
        if count := sum(prompt.text in known for prompt in file.prompts):
            of = f"{count} of {len(file.prompts)} prompts of eval.sets.{name}, {file.path},"
            yield f"WARNING {of} are also in data.train = {train.path}"


class PromptSource:
    """An endless, seeded, resumable order over `prompts`: one epoch after another, each shuffled
    differently.

    The same on every rank: each takes all prompts of a step and uses its share.  A prompt appears
    once per epoch.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool) -> None:
        if not prompts:
            raise ValueError("a PromptSource needs at least one prompt")
        self.prompts = prompts
        self.seed = seed
        self.shuffle = shuffle
        self.returned: list[Prompt] = []
        self._start_epoch(0)

    def take(self, n: int) -> list[Prompt]:
        """The next `n` prompts."""
        taken, self.returned = self.returned[:n], self.returned[n:]
        for _ in range(n - len(taken)):
            if self.position == len(self.prompts):
                self._start_epoch(self.epoch + 1)
            taken.append(self.prompts[self._order[self.position]])
            self.position += 1
        return taken

    def peek(self, n: int) -> list[int]:
        """Numbers of the prompts that take(n) would return."""
        # take() replaces attributes and changes none in place
        return self.numbers(copy.copy(self).take(n))

    def numbers(self, prompts: Sequence[Prompt]) -> list[int]:
        """Indices of taken prompts in `self.prompts`: the same in every run on the same data."""
        if not prompts:  # as in most steps: saves an index of perhaps a million prompts
            return []
        index = {id(prompt): number for number, prompt in enumerate(self.prompts)}
        return [index[id(prompt)] for prompt in prompts]

    def state_dict(self, first: Sequence[Prompt] = ()) -> PromptState:
        """`first`: taken prompts, to be taken again before any other."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
            "num_prompts": len(self.prompts),
            "crc32": self._fingerprint,
            "metadata_crc32": self._metadata_crc32,
            "order_crc32": self._order_crc32,
            "returned": self.numbers([*first, *self.returned]),
        }

    def load_state_dict(self, state: PromptState) -> None:
        """Continue from `state`.

        Raises DataError when it was made with other prompts, another seed or another `shuffle`.
        """
        mine = self.state_dict()
        hint = (
            "resume with the same data file, run.seed and data.shuffle, or use a new run directory"
        )
        for key in ("num_prompts", "crc32", "metadata_crc32", "seed", "shuffle"):
            if state.get(key, mine[key]) != mine[key]:  # older checkpoints have no metadata_crc32
                raise DataError(
                    f"data order: {key} = {mine[key]}, the checkpoint was made with {state[key]};"
                    f" {hint}"
                )
        self._start_epoch(state["epoch"], state["position"])
        # older checkpoints have none
        self.returned = [self.prompts[number] for number in state.get("returned", [])]
        if self._order_crc32 != state.get("order_crc32"):  # numpy versions may permute differently
            raise DataError(
                f"data order: numpy {np.__version__} shuffles epoch {self.epoch} with seed"
                f" {self.seed} into another order than the checkpoint's; resume with the numpy that"
                " wrote it"
            )

    def _start_epoch(self, epoch: int, position: int = 0) -> None:
        self.epoch, self.position, size = epoch, position, len(self.prompts)
        # a new generator per epoch: a resumed run need not replay the earlier ones
        self._order = (
            np.random.default_rng([self.seed, epoch]).permutation(size)
            if self.shuffle
            else np.arange(size)
        )
        # here: state_dict is called in every step
        self._order_crc32 = zlib.crc32(self._order.astype("<i8").tobytes())

    @cached_property
    def _fingerprint(self) -> int:
        """CRC-32 of all prompts and labels."""
        crc = 0
        for prompt in self.prompts:
            crc = zlib.crc32(f"{prompt.text}\0{prompt.label}\0".encode(), crc)
        return crc

    @cached_property
    def _metadata_crc32(self) -> int:
        """CRC-32 of the further columns, which reward functions see; 0 without any."""
        crc = 0
        for prompt in self.prompts:
            if prompt.metadata:
                crc = zlib.crc32(json.dumps(prompt.metadata, sort_keys=True).encode(), crc)
        return crc


def prompt_text(messages: Sequence[Message], config: DataConfig, tokenizer: Tokenizer) -> str:
    """The text the model sees: rendered with the chat template, or the prompt unchanged."""
    if not config.chat_template:
        return messages[-1]["content"]
    return tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=True, **config.chat_template_kwargs
    )


def token_problem(tokens: Sequence[int], config: DataConfig, tokenizer: Tokenizer) -> str | None:
    """What is wrong with a tokenized prompt, or None."""
    if not tokens:
        return "prompt has no tokens"
    if len(tokens) > config.max_prompt_tokens:
        return (
            f"prompt has {len(tokens)} tokens, data.max_prompt_tokens = {config.max_prompt_tokens};"
            " shorten it, raise the limit, or set data.on_long_prompt = drop"
        )
    unknown = tokenizer.unk_token_id
    if unknown is not None and unknown != tokenizer.eos_token_id and unknown in tokens:
        return f"prompt has characters the tokenizer does not know (token {tokenizer.unk_token!r})"
    return None
