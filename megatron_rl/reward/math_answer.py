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
from sympy import And, Expr, FiniteSet, MatrixBase, Set, Tuple, UnevaluatedExpr, Union
from sympy.core.relational import Relational

from megatron_rl.reward.failures import LabelError

# math-verify warns in every process that its timeouts are off
logging.getLogger("math_verify").setLevel(logging.ERROR)

MAX_CHARACTERS = 16_384
"""Characters of a response's end, where its answer is, that are read: the regular expressions are
slow on megabytes."""
PLAIN_INTEGER = re.compile(r"-?[1-9][0-9]{0,14}|0")
DELIMITER = re.compile(r"(?<!\\)\$|\\boxed")
"""A mark of a formula in prose; an escaped dollar is an amount of money."""
FORMULA = re.compile(r"^(?:\$\s*([^$]*?)\s*\$|\\boxed\{\s*([^{}]*?)\s*\})$")
"""A label that is one formula."""
E_NOTATION = re.compile(
    r"(?![-+]?(?!1e)[0-9]+e[-+][0-9]$)"  # 2e-1 is twice Euler's number less 1; Python writes 2e-01
    r"[-+]?[0-9]+(\.[0-9]+)?[eE][-+]?[0-9]{1,3}"
)
"""A number as programs write it, which math-verify reads as a multiple of Euler's number."""
E_NUMBER = re.compile(r"(?<![\w.^])(?:[0-9]+\.[0-9]+|1)[eE][-+]?[0-9]{1,3}(?!\w|\.[0-9])")
"""Such a number within a text; 2e+10 may be a sum there."""
NUMERAL = re.compile(r"(-?(?:[0-9.]|[0-9A-Z.]{2,}))(?:_([0-9]{1,2}))?")
"""Digits and a base, without the marks of NUMERAL_MARKS: 1010_2."""
NUMERAL_MARKS = re.compile(r"\\text|\\mathrm|\\mathbf|[{}()\s]")
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
    if is_right(gold, answer_of(response)):
        return 1.0
    # math-verify joins the boxes of a paragraph: right for a list, but a corrected answer is the
    # last one alone
    before, box, last = response.rpartition("\\boxed")
    if "\\boxed" not in before or isinstance(gold[0], Set | Tuple):
        return 0.0
    return float(is_right(gold, answer_of(box + last)))


def answer_of(response: str) -> list[object]:
    """Return the readings of the final answer: expressions and their texts."""
    answer = parse(in_digits(response), parsing_timeout=None, raise_on_error=True)
    text = answer[-1] if answer else None
    _, box, last = response.rpartition("\\boxed{")
    number = last.partition("}")[0].strip() if box else response.strip()
    if E_NOTATION.fullmatch(number) and text in (number, in_digits(number)):
        return readings_of_number(number)
    return answer


def readings_of_number(text: str) -> list[object]:
    """Return a number of E_NOTATION as its digits, and as a multiple of a power of 10: math-verify
    finds neither equal to the other for 6.02e23.
    """
    mantissa, exponent = text.lower().split("e")
    power = f"{mantissa}\\times10^{{{int(exponent)}}}"
    forms = (power, in_digits(text))
    return [reading for form in forms for reading in parse(f"${form}$", parsing_timeout=None)]


def in_digits(text: str) -> str:
    """Return the text with its numbers of E_NUMBER, or a number of E_NOTATION, in digits."""
    if E_NOTATION.fullmatch(text):
        return format(Decimal(text), "f")
    return E_NUMBER.sub(lambda number: format(Decimal(number[0]), "f"), text)


def is_right(gold: list[object], answer: list[object]) -> bool:
    """Return True where the answer equals the label.

    math-verify drops a base: a label with one is compared by digits, and by the base of an answer
    that names one.
    """
    digits, base = numeral_of(gold)
    if not base:
        return is_any_equal(gold, answer)
    answer_digits, answer_base = numeral_of(answer)
    return digits == answer_digits and answer_base in ("", base)


def numeral_of(readings: list[object]) -> tuple[str, str]:
    """Return the digits and the base of a numeral, "" for a base that is missing and for what is
    no numeral."""
    text = readings[-1] if readings else None
    if not isinstance(text, str):
        return "", ""
    plain = NUMERAL_MARKS.sub("", text.rpartition("=")[2]).strip(".").upper()
    numeral = NUMERAL.fullmatch(plain)
    return (numeral[1], numeral[2] or "") if numeral else ("", "")


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
    """Return True where a real number below SMALL in the label differs from the answer's in their
    first six digits.

    math-verify takes 1e-27 for 1.67e-27, and 2^-99 for 2^-100: it rounds decimals to six places and
    chops a difference near 0.
    """
    if label == answer:
        return False
    numbers, others = numbers_of(label), numbers_of(answer)
    if isinstance(label, FiniteSet | Union) or isinstance(answer, FiniteSet | Union):
        numbers, others = sorted(numbers), sorted(others)
    return len(numbers) == len(others) and any(map(are_small_and_differ, numbers, others))


def are_small_and_differ(first: Expr, second: Expr) -> bool:
    size = max(abs(first), abs(second))
    return bool(size < SMALL and abs(first - second) > SIX_DIGITS * size)


def numbers_of(value: object) -> list[Expr]:
    """Return the real numbers that a value consists of: itself, those of a list, set, interval or
    matrix, and the sides of equations and inequalities."""
    if isinstance(value, MatrixBase):
        return [number for entry in value.flat() for number in numbers_of(entry)]
    if isinstance(value, Set | Tuple | Relational | And):
        return [number for part in value.args for number in numbers_of(part)]
    # a percentage equals its number and its fraction
    if not isinstance(value, Expr) or not value.is_number or value.has(UnevaluatedExpr):
        return []
    number = value.evalf()
    # what is 0 without being written so, or complex, does not evaluate to a comparable number
    return [number] if number.is_comparable else []


@functools.lru_cache(maxsize=1024)  # a group's responses share their label
def gold_of(label: str) -> list[object]:
    """Return the label as math-verify reads it, as one LaTeX formula; in a GSM8K solution, the part
    after "####".

    As prose, "2\\sqrt{3}" would be read as its last plain number, 3: silently the wrong label.
    Raises LabelError when it holds no formula.
    """
    label = label.rpartition("####")[2].strip()
    if E_NOTATION.fullmatch(number := FORMULA.sub(r"\1\2", label)):
        return readings_of_number(number)
    label = in_digits(label)
    is_delimited = DELIMITER.search(label) is not None
    gold = parse(label if is_delimited else f"${label}$", parsing_timeout=None) or parse(
        label, parsing_timeout=None
    )
    if not gold:
        raise LabelError(f"label {label[:80]!r} is not a mathematical expression")
    return gold
