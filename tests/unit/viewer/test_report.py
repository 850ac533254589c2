"""The report of a made-up run."""

import base64
import json
import re
import shutil
from html.parser import HTMLParser

import pytest

from megatron_rl.metrics.results import series
from megatron_rl.metrics.samples import last_rollouts
from megatron_rl.metrics.sinks import Sinks
from megatron_rl.records.packed import StepResult
from megatron_rl_viewer import report_command
from megatron_rl_viewer.figure import draw_run
from megatron_rl_viewer.report import exported_rollouts, health_list, sample_tables, write_report

HOSTILE = "<script>alert('x')</script> & \x00"


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "made_up"
    with Sinks(folder) as sinks:
        sinks.write(StepResult(-1, 0, {"eval/heldout/avg@4": 0.25, "eval/heldout/pass@4": 0.5}))
        for step in range(20):
            metrics = {
                "rollout/reward_mean": step / 20, "train/entropy": 1.0,
                "train/kl_mu_pi": float("nan"),
                "routing/router_mismatch": 0.02, "routing/replayed_mismatch": 0.0, "time/step": 2.0,
                "time/update": 1.5,
            }  # fmt: skip
            sinks.write(StepResult(step, step + 1, metrics, {"routing/flip_rate": [0.01, 0.03]}))
        sinks.write(StepResult(19, 20, {"eval/heldout/avg@4": 0.75, "eval/heldout/pass@4": 0.9}))
    rows = [
        {"step": step, "prompt": f"p{k}", "response": HOSTILE if k == 1 else f"r{k}", "label": "1",
        "reward": float(k == 1),
         "response_length": 3, "finish_reason": "length" if k == 2 else "stop"}
        for step in range(20) for k in range(3)
    ]  # fmt: skip
    (folder / "rollouts.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"half a li')
    (folder / "config.toml").write_text('name = "<b>"\n')
    return folder


class Tags(HTMLParser):
    VOID = ("meta", "img", "br")

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_complete_self_contained_and_escaped(run_dir, caplog):
    page = write_report(run_dir).read_text()
    tags = Tags()
    tags.feed(page)
    assert tags.open == [] and "script" not in tags.seen and "b" in tags.seen
    assert "&lt;script&gt;" in page and "name = &quot;&lt;b&gt;&quot;" in page
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    picture = base64.b64decode(re.search(r"base64,([^\"]+)", page).group(1))
    assert picture == (run_dir / "report.png").read_bytes() and picture.startswith(b"\x89PNG")
    assert "heldout avg@4 goes from 0.250 after step 0 to 0.750 after step 20." in page
    assert "The mean reward rises from 0.075 to 0.875 over steps 1 to 20." in page
    assert "20 steps, 0.7 minutes" in page
    assert "3 (cut)" in page
    assert "1 of the last" in caplog.text  # the broken line is reported


def test_the_first_and_last_fifth(run_dir):
    page = write_report(run_dir).read_text()
    row = re.search(r"<code>rollout/reward_mean</code></td>(.*?)</tr>", page).group(1)
    assert re.findall(r'number">([^<]+)<', row) == ["0.075", "0.875", "0", "0.95"]
    assert "train/kl_mu_pi" not in page  # NaN throughout: no number to show


def test_the_names_of_an_episodes_metrics_are_shown_as_they_are(tmp_path):
    """A program that it started may have printed them."""
    with Sinks(tmp_path) as sinks:
        sinks.write(StepResult(0, 1, {"rollout/reward_mean": 0.5, f"episode/{HOSTILE}": 1.0}))
    page = write_report(tmp_path).read_text()
    assert "<script>" not in page and "episode/&lt;script&gt;alert" in page


def test_missing_routes_have_a_row_only_where_there_are_any(tmp_path):
    with Sinks(tmp_path) as sinks:
        sinks.write(
            StepResult(
                0,
                1,
                {
                    "replay/missing_route_frac": 0.0,
                    "replay/dropped_samples_total": 0.0,
                    "rollout/reward_mean": 0.0,
                },
            )
        )
        sinks.write(
            StepResult(
                1,
                2,
                {
                    "replay/missing_route_frac": 0.0,
                    "replay/dropped_samples_total": 3.0,
                    "rollout/reward_mean": 0.0,
                },
            )
        )
    page = write_report(tmp_path).read_text()
    assert "<code>replay/dropped_samples_total" in page and "<code>rollout/reward_mean" in page
    assert "<code>replay/missing_route_frac" not in page


def test_series_are_finite_and_by_finished_steps():
    results = [
        StepResult(-1, 0, {"a": 1.0}),
        StepResult(0, 1, {"a": float("nan")}),
        StepResult(1, 2, {"a": 3.0}),
    ]
    steps, values = series(results, "a")
    assert (steps.tolist(), values.tolist()) == ([0, 2], [1.0, 3.0])


def test_a_run_with_one_step_or_none_can_be_drawn(tmp_path):
    with Sinks(tmp_path / "empty") as sinks:
        sinks.write(StepResult(-1, 0, {"eval/x/avg@1": 0.5}))
    assert "No training step is finished" in write_report(tmp_path / "empty").read_text()
    figure = draw_run([], "nothing")
    assert (
        sum(
            text.get_text() == "not measured in this run"
            for axis in figure.axes
            for text in axis.texts
        )
        >= 6
    )
    with pytest.raises(ValueError, match="is this a run directory"):
        write_report(tmp_path)


def test_half_a_surrogate_pair_in_a_text_is_no_error(run_dir, tmp_path):
    """The escapes that earlier versions wrote give such a text."""
    folder = tmp_path / "escaped"
    shutil.copytree(run_dir, folder)
    lines = (folder / "rollouts.jsonl").read_text().replace(': "p', r': "\ud83d p')
    (folder / "rollouts.jsonl").write_text(lines)
    assert "? p0" in write_report(folder).read_text(encoding="utf-8")


def test_names_with_dollars_are_drawn_as_they_are(run_dir, tmp_path):
    """matplotlib reads text between two as an equation, and fails at others."""
    for name in ("lr$_$x", "a_$5_b_$"):
        with Sinks(folder := tmp_path / name) as sinks:
            sinks.write(StepResult(0, 1, {f"eval/{name}/avg@1": 0.5, f"episode/{name}": 1.0}))
        assert write_report(folder).is_file()
        report_command.main([str(folder), str(run_dir), "--out", str(tmp_path / "two.png")])


def test_the_cut_last_line_of_a_killed_run_is_left_out(run_dir, tmp_path, caplog):
    killed = tmp_path / "killed"
    shutil.copytree(run_dir, killed)
    whole = write_report(killed).read_text()
    line = '{"step": 21, "policy_version": 21, "reward/\u00e9"'.encode()
    for cut in (line, line[:-2]):
        with open(killed / "metrics.jsonl", "ab") as file:
            file.write(cut)
        assert write_report(killed).read_text() == whole
        assert "line 23 is incomplete and left out" in caplog.text
        (killed / "metrics.jsonl").write_bytes((run_dir / "metrics.jsonl").read_bytes())


def test_plot_run_compares(run_dir, tmp_path, capsys):
    report_command.main([str(run_dir)])
    assert capsys.readouterr().out.strip() == str(run_dir / "report.html")
    report_command.main([str(run_dir), str(run_dir), "--out", str(tmp_path / "two.png")])
    assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="megatron-rl report: .*is this a run directory"):
        report_command.main([str(tmp_path)])


def test_the_panels_of_log_ratios_show_what_was_measured():
    """By mini-batch and by flips in order, without empty groups and zeros (a logarithmic axis
    cannot show them).
    """
    results = []
    for step in range(12):
        metrics = {
            "first_order/total_p95": 0.1 + step,
            "first_order/train_infer_p95": float("nan"),
            "logratio/train_infer_std": 0.01,
        }
        for index in range(11):
            metrics[f"logratio/staleness_std/mini_batch_{index}"] = 0.01 * index
        for group, share in (("0", 0.75), ("1", 0.25), ("2_3", 0.0), ("4_7", 0.0), ("8_up", 0.0)):
            metrics[f"logratio/train_infer_std/flips_{group}"] = 0.1 if share else float("nan")
            metrics[f"logratio/share/flips_{group}"] = share
        results.append(StepResult(step, step + 1, metrics))
    panels = {axis.get_title(loc="left"): axis for axis in draw_run(results, "gauges").axes}

    def labels(title):
        (axis,) = [axis for name, axis in panels.items() if title in name]
        assert axis.get_yscale() == "log"
        return axis.get_legend_handles_labels()[1]

    assert labels("First-order error") == ["p95, pi / mu"]
    assert labels("by mini-batch") == [*map(str, range(1, 11)), "discrepancy, all"]
    assert labels("by layers that flipped") == ["0 (75 % of tokens)", "1 (25 % of tokens)"]


def test_turns_and_metrics_of_the_users_functions_are_shown(tmp_path):
    with Sinks(tmp_path) as sinks:
        metrics = {
            "rollout/reward_mean": 0.5,
            "rollout/turns_mean": 2.5,
            "rollout/environment_length_mean": 7.0,
        }
        own = {"episode/tool_errors": 0.25, "reward/is_right": 0.5, "reward/responses_total": 9.0}
        sinks.write(StepResult(0, 1, metrics | own))
    row = {
        "step": 1,
        "prompt": "p",
        "response": "r",
        "label": "1",
        "reward": 0.5,
        "response_length": 9,
    }
    turns = {"num_turns": 3, "turn_rewards": [0.0, 0.25, 0.25], "environment_length": 7}
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(row | turns) + "\n")
    page = write_report(tmp_path).read_text()
    assert "9<br>3 turns: 0, 0.25, 0.25<br>7 of environment" in page
    for name in (
        "rollout/turns_mean",
        "rollout/environment_length_mean",
        "episode/tool_errors",
        "reward/is_right",
    ):
        assert f"<code>{name}</code>" in page
    assert "reward/responses_total" not in page


def test_health_in_words():
    results = [
        StepResult(step, step + 1, {"rollout/reward_mean": 0.5, "first_order/total_p95": 0.01})
        for step in range(20)
    ]
    assert "Nothing stands out" in health_list(
        [StepResult(-1, 0, {"eval/x/avg@1": 0.5}), *results], {}
    )
    text = health_list(
        [*results, StepResult(20, 21, {"rollout/reward_mean": 0.5, "optim/skipped_updates": 1.0})],
        {},
    )
    assert (
        '<div class="finding bad"><b>Steps with skipped updates</b> since step 21' in text
        and "Try: Find the first step" in text
    )


def test_rollouts_that_an_export_shows_are_linked(tmp_path, caplog):
    folder = tmp_path / "run"
    folder.mkdir()
    rows = [
        {"step": 1, "id": f"Q{k}/0", "prompt": f"p{k}", "response": "r", "label": "1", "reward": k}
        for k in range(2)
    ]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "href" not in sample_tables(last_rollouts(folder), exported_rollouts(folder))
    content = {"responses": {"runs": [{"name": "other"}, {"name": "run"}],
    "runs/0/rollout/1/rollouts/Q0%2F0": {},
                             "runs/1/rollout/1/rollouts/Q1%2F0": {},
                             "runs/1/rollouts": {}}}  # fmt: skip
    for name, text in (
        ("export", f"window.EXPORT = {json.dumps(content)};\n"),
        ("broken", "window.EXPORT = {"),
    ):
        (folder / name).mkdir()
        (folder / name / "data.js").write_text(text)
    links = re.findall(
        r'<a href="([^"]*)">1</a>', sample_tables(last_rollouts(folder), exported_rollouts(folder))
    )
    assert links == ["export/index.html#/run/1/rollout/1/rollouts/Q1%2F0"]
    assert "broken/data.js: not an export" in caplog.text


def test_a_link_in_the_folder_is_replaced_and_not_followed(run_dir, tmp_path):
    (tmp_path / "other").write_text("mine")
    for name in ("report.html", "report.png"):
        (run_dir / name).unlink(missing_ok=True)
        (run_dir / name).symlink_to(tmp_path / "other")
    write_report(run_dir)
    assert (tmp_path / "other").read_text() == "mine"
    assert not (run_dir / "report.html").is_symlink()


def test_secrets_are_hidden_and_the_page_stays_whole(run_dir, monkeypatch):
    """A text that ends like a header must not swallow the markup after it; & is written &amp;."""
    monkeypatch.setenv("WANDB_API_KEY", "a&b<secret>")
    row = {"step": 19, "prompt": "Authorization:", "response": "it is a&b<secret>", "label": "1"}
    more = {"reward": 5.0, "response_length": 3, "finish_reason": "stop"}
    lines = (run_dir / "rollouts.jsonl").read_text().rpartition("\n")[0]
    (run_dir / "rollouts.jsonl").write_text(f"{lines}\n{json.dumps(row | more)}\n")
    page = write_report(run_dir).read_text()
    assert "Authorization:</pre>" in page and "a&amp;b" not in page
    assert page.count("<pre>") == page.count("</pre>")
