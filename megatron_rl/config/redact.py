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
"""Least length of a value that is searched for: "1" or "true" would hide innocent text."""
VARIABLE = re.compile(
    r"(?:^|_)(?:API_?KEY|KEY|TOKEN|SECRET)(?:_|$)|APIKEY|PASSWORD|PASSWD|CREDENTIAL|AUTHORIZATION",
    re.IGNORECASE,
)
"""Names of environment variables that hold secrets."""
KEY = re.compile(
    r"(?:^|[-_])"
    r"(?:(?:api|access)[-_]?key|token|secret|password|passwd|authorization|credentials?)$",
    re.IGNORECASE,
)
"""Names of table entries and of options whose value is a secret.  Not every "key": data.prompt_key
names a column."""
TOKEN_OF_TEXT = re.compile(
    r"(?:bos|eos|pad|unk|mask|sep|cls|start|stop|end|max|min)[-_]token$", re.IGNORECASE
)
"""Names that end as a secret's does: the value is a tokenizer's token, or a number of them."""
PATTERNS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # user:password@ of a URL; a password may hold an @
        (r"(?i)(\b[a-z][a-z0-9+.-]*://)[^\s/'\"]+@", rf"\1{HIDDEN}@"),
        (
            r"(?i)([?&](?:[\w-]*token|[\w-]*key|password|secret|sig|[\w-]*signature)=)[^&\s'\"#]+",
            rf"\1{HIDDEN}",
        ),
        (
            r"(?i)(\b(?:proxy-)?authorization[\"']?\s*[:=,]\s*[\"']?)(?:[a-z]+\s+)?[^\s\"',}\]]+",
            rf"\1{HIDDEN}",
        ),
        (r"(?i)(\bx-api-key[\"']?\s*[:=,]\s*[\"']?)[^\s\"',}\]]+", rf"\1{HIDDEN}"),
        (r"(?i)(\bbearer\s+)[\w.~+/=-]{6,}", rf"\1{HIDDEN}"),
        (
            r"(--(?:[\w-]*[-_])?(?:api[-_]key|token|secret|password|passwd)[\"']?"
            r"(?:=|[\s,]+)[\"']?)[^\s\"',\]]+",
            rf"\1{HIDDEN}",
        ),
        # Hugging Face, OpenAI and others, GitHub, W&B, AWS
        (r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|wandb_v\d_)[\w-]{16,}", HIDDEN),
        (r"\bAKIA[0-9A-Z]{16}\b", HIDDEN),
    )
)

BASE64 = re.compile(r"[A-Za-z0-9+/]+=*")
Tree = TypeVar("Tree")


def is_path(value: str) -> bool:
    """Return True for the path of a file, which is no secret.  Base64 may begin with / as well."""
    return value[0] == "/" and (os.path.exists(value) or not BASE64.fullmatch(value))


class Redactor:
    """Replaces secrets by ***, and reads the values of variables when it is made.

    hidden: further environment variables that hold a secret (rollout.api_key_env).
    """

    def __init__(self, hidden: Iterable[str | None] = ()) -> None:
        variables = {name for name in os.environ if VARIABLE.search(name)} | set(
            filter(None, hidden)
        )
        values = {os.environ.get(name, "") for name in variables}
        secrets = [value for value in values if len(value) >= SHORTEST and not is_path(value)]
        # the longest first, as one secret may be part of another
        self._values = sorted(secrets, key=len, reverse=True)

    def text(self, text: str) -> str:
        """Replace every secret in a text."""
        text = self.known(text)
        for pattern, replacement in PATTERNS:
            text = pattern.sub(replacement, text)
        return text

    def known(self, text: str) -> str:
        """Replace only values of variables: in data, what else looks like a secret is none."""
        for value in self._values:
            text = text.replace(value, HIDDEN)
        return text

    def tree(self, value: Tree) -> Tree:
        """Replace every secret in nested tables and lists.

        The value of a key, or after an option, whose name is a secret's is one, too.
        """
        clean: object = value
        if isinstance(value, str):
            clean = self.text(value)
        elif isinstance(value, Mapping):
            clean = {key: self._entry(str(key), entry) for key, entry in value.items()}
        elif isinstance(value, list | tuple):
            before = ["", *value]  # ["--hf-token", "abc"]
            options = [word if str(word).startswith("--") else "" for word in before]
            clean = type(value)(map(self._entry, map(str, options), value))
        return clean  # type: ignore[return-value]  # of the same structure as `value`

    def _entry(self, key: str, value: object) -> object:
        is_secret = KEY.search(key) and not TOKEN_OF_TEXT.search(key)
        return HIDDEN if isinstance(value, str) and value and is_secret else self.tree(value)
