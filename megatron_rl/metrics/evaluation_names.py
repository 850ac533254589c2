"""Names of an evaluation's metrics: the program writes eval/NAME/MEASURE, the user's functions
eval/NAME/reward/METRIC and eval/NAME/episode/METRIC, where METRIC may be any name, also that of a
measure.
"""

from __future__ import annotations

import re

SCORE = r"avg@\d+|loss"
"""The measures that say how good the model is on a set, without the ends of their intervals."""


def is_of_users(metric: str) -> bool:
    """Return whether a user's function made the metric of an evaluation."""
    return re.match("eval/.+/(reward|episode)/", metric) is not None


def is_of_set(metric: str, measure: str) -> bool:
    """Return whether it is eval/NAME/MEASURE; measure: a pattern of the last part."""
    return not is_of_users(metric) and re.fullmatch(f"eval/.+/({measure})", metric) is not None
