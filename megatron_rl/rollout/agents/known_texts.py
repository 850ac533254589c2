"""A tokenizer that encodes a short text once."""

from __future__ import annotations

from copy import copy
from functools import lru_cache, partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


KNOWN_CHARACTERS, MAX_KNOWN = 32, 1024
"""Length and number of the texts whose tokens are cached."""
WITH_PLACES = {"add_special_tokens": False, "return_offsets_mapping": True}


class KnownTexts:
    """A tokenizer that encodes a short text once.

    Formats write the same headers before and after every message, and each time ask with one letter
    whether the tokenizer can tell where tokens lie in a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # caches of this object: as decorators they would keep every tokenizer alive
        self._known = lru_cache(MAX_KNOWN)(partial(tokenizer.encode, add_special_tokens=False))
        self._located = lru_cache(MAX_KNOWN)(partial(tokenizer, **WITH_PLACES))

    def encode(self, text: str, *, add_special_tokens: bool = True, **named: object) -> list[int]:
        if add_special_tokens or named or len(text) > KNOWN_CHARACTERS:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens, **named)
        return list(self._known(text))

    def __call__(self, text: object, **named: object) -> object:
        if named != WITH_PLACES or not isinstance(text, str) or len(text) > KNOWN_CHARACTERS:
            return self._tokenizer(text, **named)
        # a copy, as callers may change it
        return copy(self._located(text))

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)
