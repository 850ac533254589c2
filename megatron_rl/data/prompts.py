"""Prompt records from files (jsonl, parquet), and the order in which training takes them.

A row has a prompt (text or chat messages), a label (text or a number) and optionally an "id", under
the keys of data/rows.py.  Its other columns are its metadata.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from megatron_rl.config import DataConfig
from megatron_rl.data.pass_rates import PassRates
from megatron_rl.data.prompt_stream import PromptState, PromptStream
from megatron_rl.data.rows import BrokenRow, DataError, Message, describe_broken_rows, parse_rows
from megatron_rl.models.spec import ModelError
from megatron_rl.records import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

__all__ = [
    "DataError",
    "PromptFile",
    "PromptSource",
    "leaked_prompts",
    "load_prompt_files",
    "load_prompts",
    "load_tokenizer",
]  # fmt: skip

Name = TypeVar("Name")


@dataclass(frozen=True)
class PromptFile:
    """The prompts of a file."""

    path: Path
    prompts: list[Prompt]
    """The prompts that can be used, in the order of the file."""
    num_long: int
    """The number of rows dropped for their length (data.on_long_prompt = drop)."""
    prompt_key: str
    label_key: str

    def line(self, config: DataConfig) -> str:
        """Return a line about the file for the log."""
        keys = f"{self.prompt_key}, {self.label_key}"
        text = f"{len(self.prompts)} prompts of {self.path} (keys {keys})"
        if not self.num_long:
            return text
        rows = len(self.prompts) + self.num_long
        limit = f"data.max_prompt_tokens = {config.max_prompt_tokens}"
        return f"{text}; {self.num_long} of {rows} dropped, longer than {limit}"


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the HF tokenizer of a checkpoint directory.

    Raises ModelError where there is none, or where it has no end token.
    """
    if not Path(path).is_dir():
        raise ModelError(f"model.path = {path}: no such directory")
    # the import takes seconds, which ranks that tokenize nothing do not need
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.path = {path}: no tokenizer could be loaded from it: {error}"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"model.path = {path}: its tokenizer has no eos token, so no response could end"
        )
    return tokenizer


def load_prompt_files(
    files: Mapping[Name, tuple[Path, DataConfig, str]], tokenizer: Tokenizer
) -> dict[Name, PromptFile]:
    """Return {name: load_prompts(path, config, tokenizer, source)} of (path, config, source); raise
    one DataError with the errors of all files.
    """
    loaded, errors = {}, []
    for name, (path, config, source) in files.items():
        try:
            loaded[name] = load_prompts(path, config, tokenizer, source)
        except DataError as error:
            errors.append(str(error))
    if errors:
        raise DataError("\n".join(errors))
    return loaded


def load_prompts(
    path: Path, config: DataConfig, tokenizer: Tokenizer, source: str = ""
) -> PromptFile:
    """Return every row of `path` as a Prompt of `source`, in file order.

    The id is the row's "id", else "SOURCE:LINE", without a source "FILE:LINE"; equal ids are
    allowed.  Raises DataError for a file that cannot be read, and one listing the first broken rows
    with their line (jsonl) or row (parquet), counted from 1: a broken row is never skipped.  A
    prompt longer than data.max_prompt_tokens is broken, or is dropped and counted, as
    data.on_long_prompt says.
    """
    path = Path(path)
    parsed = list(parse_rows(path, config, source))  # first: a file may not be there
    check_chat_template(path, config, tokenizer)
    rows, errors = [], []
    for row in parsed:
        if isinstance(row, BrokenRow):
            errors.append(row)
        else:
            rows.append((row, prompt_text(row.messages, config, tokenizer)))
    # one call for all texts, which fast tokenizers divide over threads; an empty list is an error
    texts = [text for _, text in rows]
    token_ids = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    prompts, num_long = [], 0
    for (row, text), tokens in zip(rows, token_ids, strict=True):
        is_long = len(tokens) > config.max_prompt_tokens and config.on_long_prompt == "drop"
        num_long += is_long
        if not is_long and (problem := token_problem(tokens, config, tokenizer)):
            errors.append(BrokenRow(row.number, problem))
        elif not is_long:
            prompts.append(Prompt(row.id, text, tuple(tokens), row.label, row.metadata, source))
    if errors:
        raise DataError(describe_broken_rows(path, errors))
    if not prompts:
        limit = f" within data.max_prompt_tokens = {config.max_prompt_tokens}; raise it"
        raise DataError(f"{path}: no prompts in it{limit if num_long else ''}")
    return PromptFile(path, prompts, num_long, *rows[0][0].keys)


def leaked_prompts(train: Sequence[PromptFile], sets: Mapping[str, PromptFile]) -> Iterator[str]:
    """Yield a warning for every evaluation set that has prompts of a training file, because its
    avg@k also measures memorised answers.
    """
    for file in train:
        # by text: ids of files differ
        known = {prompt.text for prompt in file.prompts}
        for name, held_out in sets.items():
            if count := sum(prompt.text in known for prompt in held_out.prompts):
                of = f"{count} of {len(held_out.prompts)} prompts of eval.sets.{name}"
                yield f"WARNING {of}, {held_out.path}, are also in data.train = {file.path}"


class PromptSource(PromptStream):
    """A seeded order over the prompts of one file: one epoch after another, every one shuffled
    differently.  A prompt appears once per epoch, or by chance not at all (pass_rates.py).
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        shuffle: bool,
        rates: PassRates | None = None,
        key: Sequence[int] = (),
        repeats: bool = True,
    ) -> None:
        """key: further integers of the seed, by which sources of a mixture differ.

        repeats: False: there is one epoch.
        """
        if not prompts:
            raise ValueError("a PromptSource needs at least one prompt")
        super().__init__(prompts, rates)
        self.seed = seed
        self.shuffle = shuffle
        self.key, self.repeats = tuple(key), repeats
        self._start_epoch(0)

    @property
    def is_endless(self) -> bool:
        return self.repeats

    def _next(self) -> Prompt | None:
        while True:
            if self.position == len(self.prompts):
                if not self.repeats:
                    return None
                self._start_epoch(self.epoch + 1)
            number = self._order[self.position]
            self.position += 1
            if self.rates is None or self._coins[number] < self.rates.chance(number):
                return self.prompts[number]

    def state_dict(self, first: Sequence[Prompt] = ()) -> PromptState:
        state = {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
            "num_prompts": len(self.prompts),
            "crc32": self._fingerprint,
            "row_metadata_crc32": self._row_metadata_crc32,
            "order_crc32": self._order_crc32,
            "returned": self.numbers([*first, *self.returned]),
        }
        if self.rates is None:
            return state
        return state | {"pass_rates": self.rates.to_text(), "coins_crc32": self._coins_crc32}

    def load_state_dict(self, state: PromptState) -> None:
        """Continue from `state`.

        Raises DataError where it was made with other prompts, another seed or another `shuffle`, or
        where this numpy shuffles differently.
        """
        if "sources" in state:
            raise DataError(
                f"data order: data.train is one file, the checkpoint was made with"
                f" {len(state['sources'])} sources; resume with the same tables [[data.train]], or"
                " use a new run directory"
            )
        current = self.state_dict()
        of_metadata = "row_metadata_crc32"
        if "metadata_crc32" in state:  # an older checkpoint, and before these there was neither
            of_metadata = "metadata_crc32"
            current[of_metadata] = metadata_crc32(self.prompts, with_rows=False)
        for key in ("num_prompts", "crc32", of_metadata, "seed", "shuffle"):
            value = current[key]
            if state.get(key, value) != value:
                raise DataError(
                    f"data order: {key} = {value}, the checkpoint was made with {state[key]};"
                    " resume with the same data file, run.seed and data.shuffle, or use a new run"
                    " directory"
                )
        self._start_epoch(state["epoch"], state["position"])
        # older checkpoints have no "returned"
        self.returned = [self.prompts[number] for number in state.get("returned", [])]
        # a checkpoint of uniform sampling has no pass rates: all are unknown
        if self.rates is not None and "pass_rates" in state:
            self.rates.load_text(state["pass_rates"])
        # numpy does not promise the same random numbers in every version
        if self._order_crc32 != state.get("order_crc32") or (
            self.rates is not None
            and self._coins_crc32 != state.get("coins_crc32", self._coins_crc32)
        ):
            raise DataError(
                f"data order: numpy {np.__version__} shuffles epoch {self.epoch} with seed"
                f" {self.seed} into another order than the checkpoint's; resume with the numpy that"
                " wrote it"
            )

    def place(self) -> str:
        size = len(self.prompts)
        return f"epoch {self.epoch + 1} of the data, after {self.position} of {size} prompts"

    def _start_epoch(self, epoch: int, position: int = 0) -> None:
        self.epoch, self.position, size = epoch, position, len(self.prompts)
        # a generator per epoch, so that a resumed run does not compute the earlier epochs
        generator = np.random.default_rng([self.seed, epoch, *self.key])
        self._order = generator.permutation(size) if self.shuffle else np.arange(size)
        # computed here, once per epoch, because state_dict is called in every step
        self._order_crc32 = zlib.crc32(self._order.astype("<i8").tobytes())
        if self.rates is not None:
            # one number in [0, 1) for each prompt, which is drawn where its chance is larger
            self._coins = generator.random(size)
            self._coins_crc32 = zlib.crc32(self._coins.astype("<f8").tobytes())

    @cached_property
    def _fingerprint(self) -> int:
        """The CRC-32 of all prompts and labels."""
        crc = 0
        for prompt in self.prompts:
            crc = zlib.crc32(f"{prompt.text}\0{prompt.label}\0".encode(), crc)
        return crc

    @cached_property
    def _row_metadata_crc32(self) -> int:
        return metadata_crc32(self.prompts, with_rows=True)


def metadata_crc32(prompts: Sequence[Prompt], *, with_rows: bool) -> int:
    """Return the CRC-32 of the further columns, which reward functions see; 0 where there are none.

    with_rows: of the numbers of their rows, too, without which columns of another row are equal.
    """
    crc = 0
    for row, prompt in enumerate(prompts):
        if prompt.metadata:
            text = json.dumps(prompt.metadata, sort_keys=True)
            crc = zlib.crc32((f"{row}\0{text}" if with_rows else text).encode(), crc)
    return crc


def check_chat_template(path: Path, config: DataConfig, tokenizer: Tokenizer) -> None:
    """Raise DataError where the rows of `path` need a chat template and there is none."""
    if config.chat_template and tokenizer.chat_template is None:
        raise DataError(
            f"{path}: data.chat_template = true but the tokenizer has no chat template; set"
            " data.chat_template = false, or add chat_template.jinja to the folder of the model"
        )


def prompt_text(messages: Sequence[Message], config: DataConfig, tokenizer: Tokenizer) -> str:
    """Return the text that the model sees: the rendered chat, or the prompt itself."""
    if not config.chat_template:
        return messages[-1]["content"]
    return tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=True, **config.chat_template_kwargs
    )


def token_problem(tokens: Sequence[int], config: DataConfig, tokenizer: Tokenizer) -> str | None:
    """Return the reason why a tokenized prompt cannot be used, or None."""
    if not tokens:
        return "prompt has no tokens"
    if len(tokens) > config.max_prompt_tokens:
        return (
            f"prompt has {len(tokens)} tokens, data.max_prompt_tokens = {config.max_prompt_tokens};"
            " shorten it, raise the limit, or set data.on_long_prompt = drop"
        )
    # some tokenizers use one token for unknown characters and for the end of a text
    unknown = tokenizer.unk_token_id
    if unknown is not None and unknown != tokenizer.eos_token_id and unknown in tokens:
        return f"prompt has characters the tokenizer does not know (token {tokenizer.unk_token!r})"
    return None
