"""Score one answer to a mathematical question with math-verify.

Import it only in a worker process: it can hang.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from decimal import Decimal

from math_verify import parse, verify
from sympy import Expr, Set, Tuple, UnevaluatedExpr

from megatron_rl.reward.failures import LabelError

# math-verify warns in every process that its timeouts are off
logging.getLogger("math_verify").setLevel(logging.ERROR)

MAX_CHARACTERS = 16_384
"""Characters of a response's end, where its answer is, that are read: the regular expressions are
slow on megabytes."""
PLAIN_INTEGER = re.compile(r"-?[1-9][0-9]{0,14}|0")
DELIMITER = re.compile(r"(?<!\\)\$|\\boxed")
"""A mark of a formula in prose; an escaped dollar is an amount of money."""
E_NOTATION = re.compile(
    r"(?![-+]?(?!1e)[0-9]+e-[0-9]$)"  # 2e-1 is twice Euler's number less 1; Python writes 2e-01
    r"[-+]?[0-9]+(\.[0-9]+)?[eE][-+]?[0-9]{1,3}"
)
"""A number as programs write it, which math-verify reads as a multiple of Euler's number."""
SMALL = 1e-3
"""Numbers below this have fewer than three digits among the six decimals that math-verify
compares."""
SIX_DIGITS = 5e-6
"""The largest relative error of rounding to six significant digits."""


def score(prompt: str, response: str, label: str) -> float:
    """Return 1.0 where the final answer in `response` equals `label`, else 0.0.

    Two plain integers are compared as text: the same result as math-verify's, a thousand times
    faster.  The timeouts of math-verify are off: they need signals in the main thread, and the pool
    has a wall-clock timeout.
    """
    response, label = response.strip(), label.strip()
    if PLAIN_INTEGER.fullmatch(response) and PLAIN_INTEGER.fullmatch(label):
        return float(response == label)
    gold, response = gold_of(label), response[-MAX_CHARACTERS:]
    if is_any_equal(gold, answer_of(response)):
        return 1.0
    # math-verify joins the boxes of a paragraph: right for a list, but a corrected answer is the
    # last one alone
    before, box, last = response.rpartition("\\boxed")
    if "\\boxed" not in before or isinstance(gold[0], Set | Tuple):
        return 0.0
    return float(is_any_equal(gold, answer_of(box + last)))


def answer_of(response: str) -> list[object]:
    """Return the readings of the final answer: an expression and its text."""
    answer = parse(without_exponent(response), parsing_timeout=None, raise_on_error=True)
    text = answer[-1] if answer else None
    if isinstance(text, str) and E_NOTATION.fullmatch(text):
        return parse(f"${without_exponent(text)}$", parsing_timeout=None, raise_on_error=True)
    return answer


def without_exponent(text: str) -> str:
    """Return a number of E_NOTATION in digits, any other text as it is."""
    return format(Decimal(text), "f") if E_NOTATION.fullmatch(text) else text


def is_any_equal(gold: list[object], answer: list[object]) -> bool:
    """Return True where one reading of the answer equals one of the label.

    Where none does and a comparison failed, raise its exception: math-verify by itself counts a
    failed comparison as a wrong answer.
    """
    failure: Exception | None = None
    for pair in itertools.product(gold, answer):
        try:
            is_equal = verify(*pair, timeout_seconds=None, raise_on_error=True)
            if is_equal and not are_different_small_numbers(*pair):
                return True
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure
    return False


def are_different_small_numbers(label: object, answer: object) -> bool:
    """Return True for two real numbers below SMALL that differ in their first six digits.

    math-verify takes 1e-27 for 1.67e-27, and 2^-99 for 2^-100: it rounds decimals to six places and
    chops a difference near 0.
    """
    if not (isinstance(label, Expr) and isinstance(answer, Expr)) or label == answer:
        return False
    # a percentage equals its number and its fraction
    if any(not number.is_number or number.has(UnevaluatedExpr) for number in (label, answer)):
        return False
    first, second = label.evalf(), answer.evalf()
    # what is 0 without being written so, or complex, does not evaluate to a comparable number
    if not (first.is_comparable and second.is_comparable):
        return False
    size = max(abs(first), abs(second))
    return bool(size < SMALL and abs(first - second) > SIX_DIGITS * size)


@functools.lru_cache(maxsize=1024)  # a group's responses share their label
def gold_of(label: str) -> list[object]:
    """Return the label as math-verify reads it, as one LaTeX formula; in a GSM8K solution, the part
    after "####".

    As prose, "2\\sqrt{3}" would be read as its last plain number, 3: silently the wrong label.
    Raises LabelError when it holds no formula.
    """
    label = without_exponent(label.rpartition("####")[2].strip())
    is_delimited = DELIMITER.search(label) is not None
    gold = parse(label if is_delimited else f"${label}$", parsing_timeout=None) or parse(
        label, parsing_timeout=None
    )
    if not gold:
        raise LabelError(f"label {label[:80]!r} is not a mathematical expression")
    return gold
