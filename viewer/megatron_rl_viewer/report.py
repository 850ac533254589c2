"""report.html, one self-contained page, and report.png of a finished or running run, from the files
that it wrote.
"""

from __future__ import annotations

import base64
import html
import io
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from megatron_rl.config.redact import Redactor
from megatron_rl.config.run_paths import RunFolder
from megatron_rl.metrics.health import examine_results
from megatron_rl.metrics.left_out_counts import counts_of_run
from megatron_rl.metrics.results import read_run_settings, series
from megatron_rl.metrics.samples import Row, best_and_worst, last_rollouts
from megatron_rl.metrics.sinks import read_metrics
from megatron_rl.records.packed import StepResult
from megatron_rl_viewer.figure import draw_run
from megatron_rl_viewer.metrics import LABELS, MetricsFile
from megatron_rl_viewer.report_style import STYLE
from megatron_rl_viewer.story import held_out, learned

logger = logging.getLogger(__name__)

SHOWN_CHARACTERS = 1500
USERS_METRICS = {
    "reward/": "of the reward function, mean",
    "episode/": "of the rollout function or environment, mean",
}
"""Prefix of metrics whose names users choose."""
SILENT_AT_ZERO = "replay/"
"""Prefix of metrics of errors, which are shown only if there were any."""


def write_report(run_dir: Path) -> Path:
    """Write report.html and report.png into `run_dir` and return the page's path.

    Raises ValueError if metrics.jsonl is missing or broken; rollouts and config.toml are
    optional.
    """
    run_dir = Path(run_dir)
    folder = RunFolder(run_dir)
    if not folder.metrics.is_file():
        raise ValueError(f"{run_dir}: no {folder.metrics.name}; is this a run directory?")
    results = read_metrics(folder.metrics)
    name = run_dir.resolve().name
    picture = io.BytesIO()
    draw_run(results, name).savefig(picture, format="png", dpi=110)
    replace_file(folder.picture, picture.getvalue())
    image = base64.b64encode(picture.getvalue()).decode()
    parts = [
        f"<h1>{shown_text(name)}</h1>",
        report_headline(results),
        *(f'<p class="big">{shown_text(line)}</p>' for line in story_lines(run_dir)),
        health_list(results, read_run_settings(run_dir)),
        left_out_table(results),
        (
            '<h2>Curves</h2><div class="curves"><img alt="curves of the run"'
            f' src="data:image/png;base64,{image}"></div>'
        ),
        summary_table(results),
        sample_tables(last_rollouts(run_dir), exported_rollouts(run_dir)),
    ]
    config = folder.config
    if config.is_file():
        text = shown_text(config.read_text())
        details = f"<details><summary>config.toml</summary><pre>{text}</pre></details>"
        parts.append(f"<h2>Configuration</h2>{details}")
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{shown_text(name)}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>"
    )
    path = folder.report
    # texts of a model or of the file system may have half a surrogate pair
    replace_file(path, page.encode(errors="replace"))
    return path


def replace_file(path: Path, content: bytes) -> None:
    """Write a file of the run's folder; a link that is there is replaced, not followed."""
    temporary = path.with_name(f".{path.name}")
    temporary.unlink(missing_ok=True)
    temporary.write_bytes(content)
    temporary.replace(path)


def shown_text(text: str) -> str:
    """Return the text as HTML, without secrets: in HTML they could be cut or be written in other
    characters.
    """
    return html.escape(Redactor().text(text))


def health_list(results: Sequence[StepResult], settings: Mapping[str, object]) -> str:
    """Return the findings about the run's health, in words."""
    items = []
    for finding in examine_results(results, settings):
        advice = f"<p>Try: {shown_text(finding.advice)}</p>" if finding.advice else ""
        name = f"<code>{finding.metric}</code>, " if finding.metric else ""
        title = f"<b>{shown_text(finding.title)}</b>{finding.since}"
        text = shown_text(finding.text)
        items.append(
            f'<div class="finding {finding.level}">{title}<p>{text}</p>{advice}'
            f'<p class="note">{name}{finding.guide}</p></div>'
        )
    return f"<h2>Health</h2>{''.join(items)}"


def left_out_table(results: Sequence[StepResult]) -> str:
    """Return a table of everything that was left out, replaced or repeated in all steps
    (metrics/left_out.py).
    """
    rows = []
    for count in counts_of_run(results):
        entry = count.entry
        # a tracker's class or an evaluation set may have any name
        name = f"{shown_text(entry.label)}{entry.remark}"
        text = f"{entry.text} {entry.advice}<br>" if entry.is_alarm else ""
        note = f'<span class="note"><code>{shown_text(entry.metric)}</code>, {entry.guide}</span>'
        rows.append([name, text + note, number(count.amount)])
    title = "<h2>Left out, replaced or repeated</h2>"
    if not rows:
        return f'{title}<p class="note">Nothing.</p>'
    return title + html_table(["", "", "count"], rows, numbers_from=2)


def exported_rollouts(run_dir: Path) -> dict[str, str]:
    """Return key of a rollout -> its link in an export (megatron-rl view --export) inside the run's
    folder.
    """
    links: dict[str, str] = {}
    for path in sorted(run_dir.glob("*/data.js")):
        try:
            text = path.read_text(encoding="ascii")
            responses = json.loads(text[text.index("{") : text.rindex("}") + 1])["responses"]
            names = [run["name"] for run in responses["runs"]]
            for place in responses:
                _, _, path_of_run = place.partition("runs/")
                number, _, key = path_of_run.partition("/rollout/")
                if key and names[int(number)] == run_dir.resolve().name:
                    links[key] = f"{path.parent.name}/index.html#/run/{number}/rollout/{key}"
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            logger.warning("%s: not an export of rollouts: %r", path, error)
    return links


def report_headline(results: Sequence[StepResult]) -> str:
    steps, seconds = series(results, "time/step")
    if not len(steps):
        return '<p class="note">No training step is finished.</p>'
    took = f", {seconds.sum() / 60:.1f} minutes"
    return (
        f'<p class="note">{steps[-1]} steps{took}; policy version {results[-1].policy_version}</p>'
    )


def story_lines(run_dir: Path) -> Iterator[str]:
    """Yield the sentences of the viewer's page about the reward and the held-out sets."""
    metrics = MetricsFile(run_dir)
    metrics.update()
    table = metrics.table()
    yield learned(table)[1]
    yield held_out(table["evaluations"])


def summary_table(results: Sequence[StepResult]) -> str:
    """Return a table of the most important metrics in the first and the last fifth of the run."""
    rows = []
    for name, label in {**LABELS, **users_metrics(results)}.items():
        _, values = series(results, name)
        if len(values) and (values.any() or not name.startswith(SILENT_AT_ZERO)):
            part = max(1, len(values) // 5)
            shown = values[:part].mean(), values[-part:].mean(), values.min(), values.max()
            # a program that an episode started may have chosen the name
            rows.append([f"{label}<br><code>{shown_text(name)}</code>", *map(number, shown)])
    head = ["", "first fifth", "last fifth", "minimum", "maximum"]
    return f"<h2>Numbers</h2>{html_table(head, rows, numbers_from=1)}" if rows else ""


def users_metrics(results: Sequence[StepResult]) -> dict[str, str]:
    """Return metric -> label for the metrics of a user's functions."""
    names = sorted(
        {name for result in results for name in result.metrics if not name.endswith("_total")}
    )
    return {
        name: label
        for name in names
        for prefix, label in USERS_METRICS.items()
        if name.startswith(prefix)
    }


def sample_tables(rows: Sequence[Row], links: Mapping[str, str]) -> str:
    """Return tables of the best and the worst responses among the last rollouts, at most one per
    prompt.

    links: see exported_rollouts.
    """
    tables, note = best_and_worst(rows)
    note = f'<p class="note">{note}</p>'
    return "".join(
        f"<h2>{title}</h2>{note}{sample_table(rows, links)}"
        for title, rows in tables.items()
        if rows
    )


def sample_table(rows: Sequence[Row], links: Mapping[str, str]) -> str:
    cells = [
        [
            text_cell(row["prompt"]),
            text_cell(row["response"]),
            text_cell(row["label"]),
            reward_cell(row),
            tokens_cell(row),
            step_cell(row, links),
        ]
        for row in rows
    ]
    head = ["prompt", "response", "label", "reward", "tokens", "step"]
    return html_table(head, cells, numbers_from=3)


def reward_cell(row: Row) -> str:
    kind = "good" if row["reward"] > 0 else "bad"
    return f'<span class="{kind}">{number(row["reward"])}</span>'


def step_cell(row: Row, links: Mapping[str, str]) -> str:
    """Return the step, as a link if an export shows the rollout token by token."""
    link = links.get(f"{row['step']}/{row['file']}/{quote(str(row.get('id', '')), safe='')}")
    return f'<a href="{shown_text(link)}">{row["step"]}</a>' if link else str(row["step"])


def tokens_cell(row: Row) -> str:
    """Return the response tokens; for an episode of several turns also the turns, their rewards and
    the environment's tokens.
    """
    text = number(row.get("response_length", math.nan))
    if row.get("finish_reason") == "length":
        text += " (cut)"
    if row.get("num_turns", 1) == 1:
        return text
    rewards = ", ".join(map(number, row.get("turn_rewards", ())))
    environment = number(row.get("environment_length", 0))
    turns = f"{number(row['num_turns'])} turns" + (f": {rewards}" if rewards else "")
    return f"{text}<br>{turns}<br>{environment} of environment"


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers_from: int) -> str:
    """Return a table of HTML cells; columns from `numbers_from` on are aligned to the right."""

    def line(tag: str, cells: Sequence[str]) -> str:
        left = "".join(f"<{tag}>{cell}</{tag}>" for cell in cells[:numbers_from])
        right = "".join(f'<{tag} class="number">{cell}</{tag}>' for cell in cells[numbers_from:])
        return f"<tr>{left}{right}</tr>"

    return f"<table>{line('th', head)}{''.join(line('td', row) for row in rows)}</table>"


def text_cell(text: object) -> str:
    shown = str(text)
    if len(shown) > SHOWN_CHARACTERS:
        shown = f"{shown[: SHOWN_CHARACTERS // 2]}\n[...]\n{shown[-SHOWN_CHARACTERS // 2 :]}"
    return f"<pre>{shown_text(shown)}</pre>"


def number(value: float) -> str:
    value = float(value)
    if not math.isfinite(value):
        return "-"
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e6 else f"{value:.3g}"
