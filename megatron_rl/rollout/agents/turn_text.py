"""The text of a turn, as it follows the text before it.

Decoders of SentencePiece tokenizers (Mixtral, Llama 2) leave out the space with which a text
begins.  Decoded alone, a turn would lose the one before its first word: prompt and answer would
read "The capital isParis".
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPACE = "\u2581"
"""A space in a token of SentencePiece."""
FIRST_TOKENS = 2048
"""Tokens of which some begin with a space: the most frequent ones come first."""


def text_of_turn(
    tokenizer: PreTrainedTokenizerBase, token_ids: np.ndarray, *, skip_special_tokens: bool
) -> str:
    """Return the text of `token_ids` (int [n]) after other text."""
    first = token_before(tokenizer)
    if first is None:
        return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
    # of an array `decode` does not check the type of each token
    whole = np.concatenate([[first], token_ids]).astype(np.int64)
    text = tokenizer.decode(whole, skip_special_tokens=skip_special_tokens)
    return text[len(tokenizer.decode([first])) :]


@lru_cache(maxsize=4)
def token_before(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return a token to decode before a turn, None where the tokenizer needs none."""
    tokens = tokenizer.convert_ids_to_tokens(range(min(len(tokenizer), FIRST_TOKENS)))
    # a space and a letter, as a token of spaces alone keeps all but one
    for number, token in enumerate(tokens):
        if len(token) > 1 and token[0] == SPACE != token[1]:
            return None if tokenizer.decode([number]).startswith(" ") else number
    return None
