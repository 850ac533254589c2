"""Generates the rows that generators.toml describes, with the package reasoning-gym."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# their scorers evaluate the answer as Python: the model's code would run on this machine
EVALUATED = {
    "binary_matrix", "countdown", "intermediate_integration", "n_queens",
    "polynomial_multiplication", "puzzle24", "simple_integration", "spiral_matrix",
    "string_insertion",
}  # fmt: skip


@dataclass(frozen=True)
class Generators:
    """The content of generators.toml."""

    seed: int
    sets: Mapping[str, int]
    """Name of a set -> number of its rows; a set begins in the stream where the one before ends."""
    settings: Mapping[str, Mapping[str, Any]]
    """Name of a generator -> its settings; `weight` is ours, the others are the package's."""


def read_generators(path: Path) -> Generators:
    """Read and check a file.  Raises ValueError or OSError with the file, the key and the fix."""
    try:
        content = tomllib.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not TOML: {error}") from None
    if more := sorted(content.keys() - {"seed", "sets", "generators"}):
        raise ValueError(f"{path}: {more[0]}: unknown; keys: seed, sets, generators")
    seed = content.get("seed", 0)
    if not is_count(seed, least=0):
        raise ValueError(f"{path}: seed = {seed!r}: must be a whole number, 0 or more")
    sets: Any = content.get("sets")
    settings: Any = content.get("generators")
    for key, value in (("sets", sets), ("generators", settings)):
        if not isinstance(value, dict) or not value:
            raise ValueError(f"{path}: [{key}] is missing or empty; it names at least one")
    for name, size in sets.items():
        if not is_count(size, least=1):
            raise ValueError(f"{path}: sets.{name} = {size!r}: must be a number of rows, 1 or more")
    if "train" not in sets:
        raise ValueError(f"{path}: sets has no train, which config.toml trains on; got {[*sets]}")
    for name, own in settings.items():
        if problem := problem_of(name, own):
            raise ValueError(f"{path}: generators.{name}: {problem}")
    return Generators(seed, sets, settings)


def problem_of(name: str, settings: object) -> str | None:
    """Return why a generator cannot be used; the package checks its own settings."""
    if name in EVALUATED:
        return "its scorer evaluates the answer as Python, on this machine; leave it out"
    if not isinstance(settings, dict):
        return f"got {settings!r}; its settings must be a table"
    weight = settings.get("weight", 1)
    if not isinstance(weight, int | float) or isinstance(weight, bool) or not weight > 0:
        return f"weight = {weight!r}: must be a number above 0"
    if taken := settings.keys() & {"seed", "size"}:
        return f"{min(taken)} is that of all generators: set seed, and sets, at the top"
    return None


def is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def rows_of_set(generators: Generators, name: str) -> Iterator[dict[str, Any]]:
    """Yield {"question", "answer", "metadata"} of a set.

    Row i of the stream has the seeds that are its own: a package's item is drawn with the sum of
    seed and i, so that sets of neighbouring seeds would be almost equal.
    """
    names = list(generators.sets)
    first = sum(generators.sets[other] for other in names[: names.index(name)])
    stream = make_stream(generators)
    for number in range(first, first + generators.sets[name]):
        yield dict(stream[number])


def make_stream(generators: Generators) -> Any:
    """Return the package's dataset of all sets.  Raises ValueError for settings it refuses."""
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec

    size = sum(generators.sets.values())
    specs = []
    for name, own in generators.settings.items():
        settings = {key: value for key, value in own.items() if key != "weight"}
        try:
            reasoning_gym.create_dataset(name, size=1, **settings)
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(f"generators.{name}: {error}") from None
        specs.append(DatasetSpec(name, own.get("weight", 1), settings))
    return reasoning_gym.create_dataset(
        "composite", size=size, seed=generators.seed, datasets=specs
    )
