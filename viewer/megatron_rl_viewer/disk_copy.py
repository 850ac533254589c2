"""A copy of chosen rollouts that opens from disk: the page, and data.js with the answers that the
server would give.

`data.js` is `window.EXPORT = {"schema": 1, "created": ..., "responses": {PATH: JSON}}`, PATH as in
the API without "/api/".
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from megatron_rl.config.redact import Redactor
from megatron_rl_viewer import expert_loads, token_data
from megatron_rl_viewer.answer import answer_json
from megatron_rl_viewer.query import (
    GROUP_COLUMNS,
    ROLLOUT_COLUMNS,
    Query,
    describe_query,
    find_rollout,
    groups_page,
    rollout_rows,
    rollouts_page,
)
from megatron_rl_viewer.run_folder import Run, Runs
from megatron_rl_viewer.story import story

SCHEMA = 1
INDEX, DATA = "index.html", "data.js"


class ExportError(ValueError):
    """An export that cannot be made; the message names the argument and the fix."""


def write_copy(
    runs: Runs, folder: Path, static: Path, *, keys: Sequence[str] = (), query: Query | None = None
) -> Path:
    """Write the copy and return its index.html.

    keys: keys of rollouts, each taken from the first run that has it.
    query: selects rollouts of every run.
    """
    if not (static / INDEX).is_file():
        raise ExportError(f"{static}: the page is not built; in a checkout: make viewer")
    if folder.exists() and any(folder.iterdir()) and not (folder / DATA).is_file():
        raise ExportError(
            f"--export {folder}: must be a new or empty folder, or an earlier export; name"
            " another one"
        )
    for run in runs.runs:
        run.update()
    chosen = [rows_found(run, query) if query else [] for run in runs.runs]
    for key in keys:
        place, row = find_in(runs, key)
        chosen[place].append(row)
    responses: dict[str, object] = {
        "runs": [run_summary(run, number) for number, run in enumerate(runs.runs)]
    }
    for number, (run, rows) in enumerate(zip(runs.runs, chosen, strict=True)):
        for path, value in answers_of_run(run, rows).items():
            responses[f"runs/{number}/{path}"] = value
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(
        static, folder / "static", dirs_exist_ok=True, ignore=shutil.ignore_patterns(INDEX)
    )
    shutil.copy(static / INDEX, folder / INDEX)
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    content = Redactor().tree({"schema": SCHEMA, "created": created, "responses": responses})
    (folder / DATA).write_text(f"window.EXPORT = {script_json(content)};\n", encoding="ascii")
    return folder / INDEX


def script_json(value: object) -> str:
    """Return JSON for a script, which no text of a model can end ("</script>") or comment out
    ("<!--").
    """
    # ASCII: a script must not have the line separators U+2028 and U+2029 either
    return (
        answer_json(value).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    )


def rows_found(run: Run, query: Query) -> list[dict]:
    with closing(run.index.connect()) as connection:
        return rollouts_page(connection, query)["rows"]


def find_in(runs: Runs, key: str) -> tuple[int, dict]:
    """Return (number of the run, row as in a table)."""
    for number, run in enumerate(runs.runs):
        with closing(run.index.connect()) as connection:
            row = find_rollout(connection, key)
            if row is not None:
                return number, rollout_rows(connection, [row["number"]])[0]
    raise ExportError(
        f"--rollouts {key}: no such rollout; a key is STEP/FILE/ID as in the viewer's address"
    )


def run_summary(run: Run, number: int) -> dict[str, object]:
    """Return the summary without the run's path on this machine: exports are sent to others."""
    return run.summary(number) | {"path": run.name, "live": False, "indexing": None}


def answers_of_run(run: Run, rows: Sequence[dict]) -> dict[str, object]:
    """Return path below runs/N/ -> JSON."""
    keys = list(dict.fromkeys(str(row["key"]) for row in rows))
    by_key = {row["key"]: row for row in rows}
    groups = []
    with closing(run.index.connect()) as connection:
        for key in dict.fromkeys(str(row["group"]) for row in rows):
            query = Query(filters=[{"column": "key", "op": "=", "value": key}])
            groups += groups_page(connection, query)["rows"]
    steps = sorted({int(row["step"]) for row in rows})
    answers: dict[str, object] = {
        "metrics": run.metrics.table(),
        "events": run.events.since(-1),
        "config": {"text": run.config_text, "values": run.config()[0]},
        "health": run.health(),
        "story": story(run),
        "rollouts": {
            "total": len(keys),
            "columns": describe_query(ROLLOUT_COLUMNS),
            "rows": [by_key[key] for key in keys],
            "indexing": None,
        },
        "groups": {
            "total": len(groups),
            "columns": describe_query(GROUP_COLUMNS),
            "rows": groups,
            "indexing": None,
        },
        "experts": expert_loads.loads_of_steps(run, f"{steps[0]}:{steps[-1]}" if steps else ""),
    }
    return answers | {f"rollout/{key}": token_data.rollout(run, key) for key in keys}
