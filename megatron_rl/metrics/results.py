"""The results of a run for readers: one metric over its steps, its evaluations, its settings.

Steps are counted as finished ones: the result of the step with index s is at s + 1, an evaluation
after n finished steps at n.
"""

from __future__ import annotations

import logging
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from megatron_rl.config.run_paths import RunFolder
from megatron_rl.metrics.evaluation_names import is_of_set
from megatron_rl.records.packed import StepResult

logger = logging.getLogger(__name__)

Results: TypeAlias = Sequence[StepResult]


def series(results: Results, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (finished steps, values) of a metric, where its value is finite."""
    points = [
        (result.step + 1, result.metrics[name]) for result in results if name in result.metrics
    ]
    points = [(step, value) for step, value in points if math.isfinite(value)]
    return np.array([step for step, _ in points]), np.array([value for _, value in points])


def evaluations(results: Results, measure: str = r"avg@\d+") -> list[str]:
    """Return the names of the metrics of evaluation sets that are a `measure`, a pattern."""
    names = {name for result in results for name in result.metrics}
    return sorted(name for name in names if is_of_set(name, measure))


def read_run_settings(run_dir: Path) -> dict[str, object]:
    """Return the run's config.toml as {"section.key": value}.

    It is {} where there is no such file, and, after a warning, where it cannot be read.
    """
    path = RunFolder(run_dir).config
    try:
        sections = tomllib.loads(path.read_text())
        return {
            f"{section}.{key}": value
            for section, keys in sections.items()
            for key, value in keys.items()
        }
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError) as error:
        logger.warning("%s: not a configuration: %s", path, error)
        return {}
