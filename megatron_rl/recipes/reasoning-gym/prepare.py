"""Writes data/train.jsonl and data/test.jsonl: rows {"id", "prompt", "label", "metadata"}.

    python prepare.py          # generates; needs: pip install reasoning-gym, but no network
    python prepare.py --generators laptop_generators.toml --config laptop.toml --out laptop_data

generators.toml has the generators, their difficulty and the seed.  Rows that reasoning-gym has
written elsewhere, {"question", "answer", "metadata"}: --from train=FILE test=FILE.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

from generate import read_generators, rows_of_set

from megatron_rl.recipes.prepare import Row, Source, main

try:
    from reward import scorer
except ImportError as error:
    sys.exit(f"prepare.py: {error}")


def convert(row: Row) -> Row:
    """A row is refused where the scorer does not accept the row's own answer, as JSON."""
    name = row["metadata"].get("source_dataset")
    value = scorer(name)(row["answer"], json.loads(json.dumps(row)))
    if value < 1:
        raise ValueError(f"the scorer of {name} gives its own answer {value:g}; leave {name} out")
    return {"prompt": row["question"], "label": row["answer"], "metadata": row["metadata"]}


def solution(row: Row) -> str:
    """A response that reward.py must accept: the first rows are checked with it."""
    return f"<answer>{row['label']}</answer>"


COLUMNS = {"question": str, "answer": str, "metadata": dict}


def sources(path: Path) -> dict[str, Source]:
    """Return the sets of a file such as generators.toml."""
    generators = read_generators(path)
    make = partial(Source, "reasoning-gym", "", COLUMNS, convert)
    return {name: make(generate=partial(rows_of_set, generators, name)) for name in generators.sets}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--generators", type=Path, default=Path("generators.toml"))
    arguments, others = parser.parse_known_args()
    try:
        sets = sources(arguments.generators)
    except (ValueError, OSError) as error:
        sys.exit(f"prepare.py: {error}\nprepare.py: nothing was written")
    raise SystemExit(main(sets, solution, others))
