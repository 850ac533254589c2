"""Score one answer to a mathematical question with math-verify.  Import it only in a worker process: it can hang."""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

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
    return float(verify(gold_of(label), parse(response[-MAX_CHARACTERS:], parsing_timeout=None), timeout_seconds=None))


@functools.lru_cache(maxsize=1024)
def gold_of(label: str) -> list[Any]:
    """The label as math-verify reads it, as one LaTeX formula.  ValueError when it holds none.

    Read as prose, "2\\sqrt{3}" would be taken for its last plain number: the wrong label, and nobody would notice.
    """
    is_delimited = "$" in label or "\\boxed" in label
    gold = parse(label if is_delimited else f"${label}$", parsing_timeout=None) or parse(label, parsing_timeout=None)
    if not gold:
        raise ValueError(f"label {label[:80]!r} is not a mathematical expression")
    return gold  # type: ignore[no-any-return]
