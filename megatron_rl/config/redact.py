"""Removes secrets from what leaves the process: lines on the terminal, files of a run, trackers.

A secret is the value of an environment variable whose name looks like one, a password or token in a
URL, the value of an Authorization header or of an option such as --hf-token, and a token in a
well-known form.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

HIDDEN = "***"
SHORTEST = 8
"""Characters of a variable's value below which it is not searched for: "1" or "true" would hide
innocent text."""
VARIABLE = re.compile(
    r"(?:^|_)(?:API_?KEY|KEY|TOKEN|SECRET)(?:_|$)|APIKEY|PASSWORD|PASSWD|CREDENTIAL|AUTHORIZATION",
    re.IGNORECASE,
)
"""Names of environment variables that hold secrets."""
KEY = re.compile(
    r"(?:^|[-_])(?:api[-_]?key|access[-_]?key|token|secret|password|passwd|authorization|credentials?)$",
    re.IGNORECASE,
)
"""Names of table entries and of options whose value is a secret.  Not every "key": data.prompt_key
names a column."""
TOKEN_OF_TEXT = re.compile(
    r"(?:bos|eos|pad|unk|mask|sep|cls|start|stop|end|max|min)[-_]token$", re.IGNORECASE
)
"""Names that end as a secret's does: the value is a tokenizer's token, or a number of them."""
PATTERNS = (
    # user:password@ of a URL; a password may hold an @
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/'\"]+@", re.IGNORECASE), rf"\1{HIDDEN}@"),
    (
        re.compile(
            r"([?&](?:\w*token|\w*key|password|secret|sig|signature)=)[^&\s'\"#]+", re.IGNORECASE
        ),
        rf"\1{HIDDEN}",
    ),
    (
        re.compile(
            r"(\b(?:proxy-)?authorization[\"']?\s*[:=,]\s*[\"']?)(?:[a-z]+\s+)?[^\s\"',}\]]+",
            re.IGNORECASE,
        ),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"(\bbearer\s+)[\w.~+/=-]{6,}", re.IGNORECASE), rf"\1{HIDDEN}"),
    (
        re.compile(
            r"(--(?:[\w-]*[-_])?(?:api[-_]key|token|secret|password|passwd)[\"']?(?:=|[\s,]+)[\"']?)[^\s\"',\]]+"
        ),
        rf"\1{HIDDEN}",
    ),
    # Hugging Face, OpenAI and others, GitHub, W&B, AWS
    (
        re.compile(
            r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|wandb_v\d_)[\w-]{16,}|\bAKIA[0-9A-Z]{16}\b"
        ),
        HIDDEN,
    ),
)

Tree = TypeVar("Tree")


class Redactor:
    """names: further environment variables that hold a secret (rollout.api_key_env).  Their values
    are read now."""

    def __init__(self, names: Iterable[str | None] = ()) -> None:
        hidden = {name for name in os.environ if VARIABLE.search(name)} | {
            name for name in names if name
        }
        found = {os.environ.get(name, "") for name in hidden}
        # a file's path is no secret; the longest first: one secret may be part of another
        self._values = sorted(
            (v for v in found if len(v) >= SHORTEST and not v.startswith("/")),
            key=len,
            reverse=True,
        )

    def text(self, text: str) -> str:
        """The text with every secret replaced by ***."""
        text = self.known(text)
        for pattern, replacement in PATTERNS:
            text = pattern.sub(replacement, text)
        return text

    def known(self, text: str) -> str:
        """Without the variables' values alone: for data, in which what only looks like a secret is
        none."""
        for value in self._values:
            text = text.replace(value, HIDDEN)
        return text

    def tree(self, value: Tree) -> Tree:
        """The same for every text in nested tables and lists; also the value of a key, or after an
        option, that looks like a secret."""
        found: object = value
        if isinstance(value, str):
            found = self.text(value)
        elif isinstance(value, Mapping):
            found = {key: self._entry(str(key), each) for key, each in value.items()}
        elif isinstance(value, list | tuple):
            before = ["", *value]  # ["--hf-token", "abc"]
            found = type(value)(
                self._entry(
                    option if isinstance(option, str) and option.startswith("--") else "", each
                )
                for option, each in zip(before, value, strict=False)
            )
        return found  # type: ignore[return-value]  # of the same structure as `value`

    def _entry(self, key: str, value: object) -> object:
        is_secret = KEY.search(key) and not TOKEN_OF_TEXT.search(key)
        return HIDDEN if isinstance(value, str) and value and is_secret else self.tree(value)
