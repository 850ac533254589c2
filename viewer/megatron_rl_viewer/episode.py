"""The tree of an episode: its turns, and where its sequences part.

A turn is a span of sampled tokens, as in records.Rollout.turn_spans.  A sequence continues the last
turn of another one with which its tokens agree up to that turn's end; token ids decide it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl_viewer.pieces import Pieces

MAX_CHARACTERS = 1_000
"""The most characters of a text; its end is left out."""
MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>\s*|$)", re.DOTALL)
"""A message in the chat format of Qwen and others."""
RESULT = re.compile(r"</?tool_response>\s*")
MARKER = re.compile(r"<\|(?:im_end|endoftext)\|>")


@dataclass
class SequenceOfEpisode:
    """One sequence, as far as it was saved."""

    key: str
    meta: dict
    tokens: np.ndarray | None = None
    """int64 [S], None where the run did not save them."""
    environment: Sequence[Sequence[int]] = ()
    pieces: Pieces | None = None

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(start, end) of the sampled tokens of every turn; [] without tokens."""
        if self.tokens is None:
            return []
        places = [place for span in self.environment for place in span]
        bounds = [self.meta.get("prompt_length", 0), *places, len(self.tokens)]
        return list(zip(bounds[::2], bounds[1::2], strict=True))

    def text(self, start: int, end: int) -> str:
        """Return the text of these tokens, whose characters may be of several tokens."""
        ids = [] if self.tokens is None else self.tokens[start:end].tolist()
        known = [self.pieces.piece(token) if self.pieces else None for token in ids]
        parts = [f"<{i}>".encode() if p is None else p for i, p in zip(ids, known, strict=True)]
        return b"".join(parts).decode(errors="replace")


def episode_tree(sequences: Sequence[SequenceOfEpisode]) -> dict[str, object] | None:
    """Return {"prompt", "turns"}; None for a single turn.

    Each turn has the place of its parent in "turns", null where it follows the prompt.
    """
    counts = [len(s.spans) or int(s.meta.get("num_turns") or 1) for s in sequences]
    if sum(counts) < 2:
        return None
    first, length, text = prompt_of(sequences)
    offsets = dict(zip((s.key for s in sequences), np.cumsum([0, *counts]).tolist(), strict=False))
    turns = []
    for sequence, count in zip(sequences, counts, strict=True):
        parent, start = parent_of(sequence, sequences, offsets)
        if parent is None and agreement(first, sequence) >= length:
            start = length
        for number in range(count):
            place = offsets[sequence.key] + number
            turns.append({"parent": parent, **turn_of(sequence, number, start)})
            parent, start = place, (sequence.spans or [(0, 0)] * count)[number][1]
    return {"prompt": text, "turns": turns}


def prompt_of(
    sequences: Sequence[SequenceOfEpisode],
) -> tuple[SequenceOfEpisode, int, list[dict[str, str]]]:
    """Return the sequence that begins with the prompt of the data, its prompt's length, and its
    messages.

    It is the one with the shortest prompt of those that hold the text of the line.
    """
    prompt = str(sequences[-1].meta.get("prompt") or "")
    texts = {s.key: s.text(0, s.meta.get("prompt_length", 0)) for s in sequences}
    first = min(
        sequences, key=lambda s: (prompt not in texts[s.key], s.meta.get("prompt_length", 0))
    )
    messages = messages_of(texts[first.key]) if texts[first.key] else [said("", prompt)]
    return first, first.meta.get("prompt_length", 0), messages


def parent_of(
    sequence: SequenceOfEpisode,
    sequences: Sequence[SequenceOfEpisode],
    offsets: dict[str, int],
) -> tuple[int | None, int]:
    """Return (place in "turns", its end in tokens) of the turn that the sequence continues; None
    and 0 where it begins at the prompt.
    """
    best: tuple[int, int | None] = (0, None)
    if not sequence.spans:
        return None, 0
    for other in sequences:
        if other is sequence or not other.spans:
            continue
        limit = min(agreement(sequence, other), sequence.spans[0][0])
        for number, (_, end) in enumerate(other.spans):
            if best[0] < end <= limit:
                best = end, offsets[other.key] + number
    return best[1], best[0]


def agreement(one: SequenceOfEpisode, other: SequenceOfEpisode) -> int:
    """Return the number of tokens with which both begin."""
    if one.tokens is None or other.tokens is None:
        return 0
    length = min(len(one.tokens), len(other.tokens))
    differs = np.flatnonzero(one.tokens[:length] != other.tokens[:length])
    return int(differs[0]) if len(differs) else length


def turn_of(sequence: SequenceOfEpisode, number: int, before: int) -> dict[str, object]:
    """Return what is known of a turn; `before` is the place at which the tokens before it begin."""
    meta = sequence.meta
    seconds = entry(meta.get("turn_seconds"), number)
    environment, model = seconds if isinstance(seconds, list) and len(seconds) == 2 else [None] * 2
    turn: dict[str, object] = {
        "key": sequence.key,
        "id": meta.get("id"),
        "number": number + 1,
        "reward": entry(meta.get("turn_rewards"), number),
        "finish": entry(meta.get("turn_ends"), number),
        "environment_seconds": environment,
        "model_seconds": model,
    }
    if not sequence.spans:
        return turn
    start, end = sequence.spans[number]
    text, calls = without_calls(sequence.text(start, end))
    return turn | {
        "place": start,
        "sampled": end - start,
        "masked": start - before,
        "before": messages_of(sequence.text(before, start)),
        "text": cut(MARKER.sub("", text)),
        "calls": calls,
    }


def entry(values: object, number: int) -> object:
    return values[number] if isinstance(values, list) and number < len(values) else None


def messages_of(text: str) -> list[dict[str, str]]:
    """Return [{"role", "text"}] of a text in the chat format; of another text one with role "".

    The tokens that open the model's turn are no message.
    """
    found = [(match[1], match[2]) for match in MESSAGE.finditer(text)]
    if found and found[-1][0] == "assistant" and not found[-1][1].strip():
        found.pop()
    if not found:
        plain = MESSAGE.sub("", MARKER.sub("", text))
        return [said("", plain)] if plain.strip() else []
    return [
        said("tool", RESULT.sub("", body))
        if body.lstrip().startswith("<tool_response>")
        else said(role, body)
        for role, body in found
    ]


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "text": cut(text)}


def cut(text: str) -> str:
    text = text.strip()
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} ..."


def without_calls(text: str) -> tuple[str, list[str]]:
    """Return the text without the tool calls that can be read, and these as name(arguments)."""
    start, *parts = text.split("<tool_call>")
    calls = []
    for part in parts:
        body, _, after = part.partition("</tool_call>")
        call = shown_call(body)
        start += f"<tool_call>{part}" if call is None else after
        calls += [] if call is None else [call]
    return start, calls


def shown_call(text: str) -> str | None:
    """Return name(arguments) of the JSON of a tool call; None for another text."""
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", {})
        parts = [f"{key}={json.dumps(value)}" for key, value in arguments.items()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return cut(f"{name}({', '.join(parts)})")
