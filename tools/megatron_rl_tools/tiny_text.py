"""Languages of the tiny model: a tokenizer, and the transcripts of a task as its tokens.

Here: one token per character.  That of the task "chat" is in tiny_chat.py.

Shapes: B sequences of S tokens: prompt, turns that end in eos, answers to all but the last, pads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_rl_tools.tiny_tasks import Examples

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
CHARACTERS = "0123456789+-=* abcdefghijklmnopqrstuvwxyz" + ".,:;?!/()[]<>^_%&#@'"
VOCABULARY = (PAD, EOS, UNK, *CHARACTERS)


class Data(NamedTuple):
    """Transcripts as tensors."""

    tokens: torch.Tensor
    """Token ids, int64 [B, S]."""
    is_models: torch.Tensor
    """Tokens that the model writes, bool [B, S]."""
    is_judged: torch.Tensor
    """The same without its free choices, bool [B, S]."""


@dataclass(frozen=True)
class Language:
    """What the model reads and writes."""

    tokenizer: PreTrainedTokenizerFast
    """Its eos token ends a turn; its pad token fills rows."""
    encode: Callable[[Examples, str], Data]
    """(transcripts, characters that are not judged) -> the transcripts as tensors."""


def characters() -> Language:
    return Language(make_tokenizer(), encode_text)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per character; unknown characters become <unk>."""
    ids = {token: index for index, token in enumerate(VOCABULARY)}
    core = Tokenizer(models.WordLevel(ids, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )


def encode_text(examples: Examples, free: str = "") -> Data:
    """Encode the transcripts: prompt, turns with their eos, the answers to them, pads.

    free: characters that are not judged.
    """
    ids = {token: index for index, token in enumerate(VOCABULARY)}
    rows = []
    for example in examples:
        parts: list[tuple[Iterable[str], bool]] = [(example.prompt, False)]
        for turn, answer in zip_longest(example.turns, example.answers, fillvalue=""):
            parts += [((*turn, EOS), True), (answer, False)]
        rows.append([(ids[token], is_models) for part, is_models in parts for token in part])
    return as_tensors(rows, ids[PAD], [ids[token] for token in free])


def as_tensors(
    rows: Sequence[Sequence[tuple[int, bool]]], pad: int, free: Sequence[int] = ()
) -> Data:
    """Pad rows of (token id, is the model's) to the longest; tokens in `free` are not judged."""
    length = max(map(len, rows))
    padded = [[*row, *[(pad, False)] * (length - len(row))] for row in rows]
    tokens = torch.tensor([[token for token, _ in row] for row in padded])
    is_models = torch.tensor([[mine for _, mine in row] for row in padded])
    is_free = torch.isin(tokens, torch.tensor(free, dtype=torch.long))
    return Data(tokens, is_models, is_models & ~is_free)
