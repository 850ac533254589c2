"""The reward: the score that reasoning-gym's own scorer gives the answer of a response, 0 to 1.

Wrong answers may get a little: 0.01, or a share where they contain the right one.  The metrics have
the score of every generator, reward/chain_sum, and reward/unparsed, the share of answers of another
form, for which a scorer raises.
"""

from collections.abc import Callable
from functools import cache

from generate import EVALUATED

from megatron_rl.reward import Episode, LabelError, Score

# here: its import takes longer than reward.timeout_seconds allows a call on a busy machine
try:
    import reasoning_gym
except ImportError as error:
    raise ImportError(
        f"the package reasoning-gym is missing ({error}): pip install reasoning-gym"
    ) from None

UNPARSED = (
    ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError,
    ValueError,
)  # fmt: skip
"""Exceptions of scorers for an answer of another form."""


@cache
def scorer(name: str) -> Callable[[str, dict], float]:
    """Return the scorer of a generator.  Raises LabelError for one that is unknown or refused."""
    if name in EVALUATED:
        raise LabelError(f"the scorer of {name} evaluates the answer as Python, so it is not used")
    try:
        return reasoning_gym.get_score_answer_fn(name)
    except ValueError as error:
        raise LabelError(str(error)) from None


def score(episode: Episode) -> Score:
    """Score the text in the last <answer> and </answer>; without one the score is 0."""
    return scored(answer_of(episode.response), episode)


def score_bare(episode: Episode) -> Score:
    """Score the whole response where it has no <answer>: for models that write nothing else."""
    return scored(answer_of(episode.response) or episode.response.strip(), episode)


def answer_of(response: str) -> str:
    _, opened, text = response.rpartition("<answer>")
    answer, closed, _ = text.partition("</answer>")
    return answer.strip() if opened and closed else ""


def scored(answer: str, episode: Episode) -> Score:
    """Score an answer: 0 for an empty one, and for one that the scorer cannot parse."""
    metadata = episode.metadata.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("source_dataset"), str):
        raise LabelError("a row needs the column 'metadata' with 'source_dataset', a generator")
    name = metadata["source_dataset"]
    entry = {"question": episode.prompt, "answer": episode.label, "metadata": metadata}
    judge, value, is_unparsed = scorer(name), 0.0, False
    if answer:
        try:
            value = float(judge(answer, entry))
        except UNPARSED:
            is_unparsed = True
    return Score(value, {name: value, "unparsed": float(is_unparsed)})
