"""A model that answers with random tokens, and remembers each answer."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from threading import Event, Lock
from typing import Any, NamedTuple

import numpy as np
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from megatron_rl.rollout.agents.chat import Chat
from tests.faults.samples import make_sample, random_routes
from tests.words import qwen_tokenizer

FORMATS = (
    "qwen3", "qwen3.5", "glm-4.5", "deepseek-v3", "kimi-k2", "minimax-m2", "llama-3", "nemotron-3",
)  # fmt: skip
TEXTS = (
    "", " ", "\n\n", "yes", "STOP here", "one STO", "P two", "<|im_end|>", "<tool_response>", "ünï",
    "\U0001f600", "\U0001f468‍\U0001f469‍\U0001f467", "a</think>b", "{\"a\": 1}",
    "  spaces  ", "<think>x", "日本",
)  # fmt: skip
"""Parts of what the model and the clients write."""


def universal_tokenizer(formats: tuple[str, ...] = FORMATS) -> PreTrainedTokenizerFast:
    """Bytes, and the special tokens of the formats: one asks for the next that is missing."""
    tokenizer = qwen_tokenizer()
    for name in formats:
        for token in special_tokens(name, tokenizer):
            tokenizer.add_tokens([AddedToken(token, special=True)])
    return tokenizer


def special_tokens(name: str, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The special tokens of a format that the tokenizer lacks."""
    added: list[str] = []
    probe = qwen_tokenizer()
    probe.add_tokens([AddedToken(token, special=True) for token in tokenizer.get_added_vocab()])
    while True:
        try:
            Chat(name, probe)
        except ValueError as error:
            quoted = str(error).split("oken ", 1)[-1].split("for ", 1)[-1].split("'")
            assert len(quoted) > 2 and quoted[1] not in added, error
            added.append(quoted[1])
            probe.add_tokens([AddedToken(quoted[1], special=True)])
        else:
            return added


class Sampled(NamedTuple):
    """An answer of the model."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: np.ndarray
    """float32, random."""
    routes: np.ndarray
    """[prompt + tokens - 1, layers, K]"""


@dataclass(eq=False)
class RandomModel:
    """`sample` is the source of a FakeServer."""

    tokenizer: PreTrainedTokenizerFast
    seed: int = 0
    """The seed of the conversation: its answers are the same in every run, but for the order of
    parallel requests."""

    def __post_init__(self) -> None:
        self.answers: dict[str, Sampled] = {}
        self.hold = False
        """Answers wait for `released`, but for the next `passing` ones."""
        self.passing = 0
        self.waiting, self.released = Event(), Event()
        self._lock, self._count = Lock(), 0

    def sample(self, body: dict[str, Any], prompt: list[int], sample_id: str) -> dict[str, Any]:
        made, sampled = self.answer(body, prompt, sample_id)
        with self._lock:
            self.answers[sample_id] = sampled
            self.passing -= 1
            waits = self.hold and self.passing < 0
        if waits:
            self.waiting.set()
            assert self.released.wait(30)
        return made

    def answer(
        self, body: dict[str, Any], prompt: list[int], sample_id: str
    ) -> tuple[dict[str, Any], Sampled]:
        """Return a server's answer to one prompt, and what is in it."""
        seed = self.seed_of(prompt, sample_id)
        draw, rng = random.Random(seed), np.random.default_rng(seed)
        params = sampling_params(body)
        ends = set(params.get("stop_token_ids") or ()) | {self.tokenizer.eos_token_id}
        tokens = self.tokens(draw)
        first = next((i for i, token in enumerate(tokens) if token in ends), None)
        tokens = [*tokens, draw.choice(sorted(ends))] if first is None else tokens[: first + 1]
        tokens = tokens[: params["max_new_tokens"]]
        routes = random_routes(rng, len(prompt) + len(tokens) - 1)
        logprobs = -rng.random(len(tokens)).astype(np.float32)
        made = make_sample(
            body, sample_id, len(prompt), np.array(tokens), logprobs.astype(float), routes
        )
        if tokens[-1] in ends:
            made["meta_info"]["finish_reason"] = {"type": "stop", "matched": tokens[-1]}
        return made, Sampled(tuple(prompt), tuple(tokens), logprobs, routes)

    def seed_of(self, prompt: list[int], sample_id: str) -> int:
        """Return the seed of one answer."""
        with self._lock:
            self._count += 1
            return zlib.crc32(f"{self.seed}/{self._count}".encode())

    def tokens(self, draw: random.Random) -> list[int]:
        """Tokens of an answer, before any end."""
        kind = draw.random()
        if kind < 0.15:
            return [draw.randrange(len(self.tokenizer)) for _ in range(draw.randrange(12))]
        text = "".join(draw.choice(TEXTS) for _ in range(draw.randrange(4)))
        if kind < 0.4:
            name = draw.choice(["search", "run", "unknown"])
            arguments = draw.choice(['{"q": "x y"}', "{}", '{"q": ', "[1]", '{ "b":1,"a" : "é" }'])
            text += f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        if draw.random() < 0.3:
            text = f"<think>\n{draw.choice(TEXTS)}\n</think>\n\n{text}"
        encode = self.tokenizer.encode
        if draw.random() < 0.5:  # letter by letter: not as the tokenizer would write it
            return [token for letter in text for token in encode(letter, add_special_tokens=False)]
        return encode(text, add_special_tokens=False)


def sampling_params(body: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters of a request's samples, which are alike."""
    params = body["sampling_params"]
    return params if isinstance(params, dict) else params[0]
