"""Score one answer to a mathematical question with math-verify.  Import it only in a worker process: it can hang."""

from __future__ import annotations

import logging
import re

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns once per process that time-outs are ours to set

MAX_CHARACTERS = 16_384  # of a response's end, where its answer is: the regular expressions are slow on megabytes
PLAIN_INTEGER = re.compile(r"-?[1-9][0-9]{0,14}|0")


def score(prompt: str, response: str, label: str) -> float:
    """1.0 where the final answer in `response` equals `label`, else 0.0.

    Two plain integers are compared as text, which is what math-verify would find, a thousand times faster.  Its own
    time-outs are switched off: they need the main thread's signals, and the pool has a clock on the wall.
    """
    response, label = response.strip(), label.strip()
    if PLAIN_INTEGER.fullmatch(response) and PLAIN_INTEGER.fullmatch(label):
        return float(response == label)
    gold = parse(label, parsing_timeout=None) or parse(f"${label}$", parsing_timeout=None)
    if not gold:
        raise ValueError(f"label {label!r} is not a mathematical expression")
    return float(verify(gold, parse(response[-MAX_CHARACTERS:], parsing_timeout=None), timeout_seconds=None))
