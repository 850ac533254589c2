"""Texts of clients, which may be longer than any sequence: to encode megabytes takes seconds, in
which no episode continues.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_rl.launch.log_lines import encodable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


CHARACTERS_PER_TOKEN = 16
"""More than most texts have; a text that has more is encoded twice."""


def encoded_up_to(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    longest: int | None,
    *,
    add_special_tokens: bool = False,
) -> list[int]:
    """Return the tokens of `text`; of a text with more than `longest`, some of them, which are more
    than `longest`, too.

    longest: tokens that fit, None where that is not known.
    """
    text = encodable(text)
    start = text if longest is None else text[: CHARACTERS_PER_TOKEN * (longest + 1)]
    ids = tokenizer.encode(start, add_special_tokens=add_special_tokens)
    # a start that fits may be that of a text of long tokens
    if len(start) < len(text) and len(ids) <= (longest or 0):
        ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return ids
