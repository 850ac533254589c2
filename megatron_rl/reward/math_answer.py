"""Score one answer to a mathematical question with math-verify.  Import it only in a worker process: it can hang."""

from __future__ import annotations

import functools
import itertools
import logging
import re
from typing import Any

from math_verify import parse, verify

from megatron_rl.reward.failures import LabelError

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
    gold = gold_of(label)
    return float(is_any_equal(gold, parse(response[-MAX_CHARACTERS:], parsing_timeout=None, raise_on_error=True)))


def is_any_equal(gold: list[Any], answer: list[Any]) -> bool:
    """Whether one reading of the answer equals one of the label.  Where none does and a comparison failed, its exception:
    left to itself math-verify takes a failure for a difference."""
    failure: Exception | None = None
    for pair in itertools.product(gold, answer):
        try:
            if verify(*pair, timeout_seconds=None, raise_on_error=True):
                return True
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure
    return False


@functools.lru_cache(maxsize=1024)
def gold_of(label: str) -> list[Any]:
    """The label as math-verify reads it, as one LaTeX formula; of GSM8K's solutions what follows "####".

    Raises LabelError when it holds no formula.
    Read as prose, "2\\sqrt{3}" would be taken for its last plain number: the wrong label, and nobody would notice.
    """
    label = label.rpartition("####")[2].strip()
    is_delimited = "$" in label or "\\boxed" in label
    gold = parse(label if is_delimited else f"${label}$", parsing_timeout=None) or parse(label, parsing_timeout=None)
    if not gold:
        raise LabelError(f"label {label[:80]!r} is not a mathematical expression")
    return gold
