"""Scores a response: exact match, as SQuAD's own evaluation compares answers."""

import re
import string

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
ARTICLES = re.compile(r"\b(a|an|the)\b")


def score(prompt: str, response: str, label: str) -> float:
    """1 where the last <answer> is one of the right answers, which are the lines of `label`."""
    given = ANSWER.findall(response)
    right = {plain(line) for line in label.splitlines()}
    return float(bool(given) and plain(given[-1]) in right)


def plain(text: str) -> str:
    """Return the text without case, punctuation, articles and further white space."""
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(ARTICLES.sub(" ", kept).split())
