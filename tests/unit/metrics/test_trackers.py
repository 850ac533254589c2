"""Trackers on their threads: what is sent, what fails, which run continues; TensorBoard and a
user's class for real.
"""

import html
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tensorboard import plugin_util
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_rl.config import ConfigError, TrackConfig, load_config
from megatron_rl.metrics.sinks import Sinks, read_metrics
from megatron_rl.metrics.trackers import TrackedRun, Tracker, background
from megatron_rl.metrics.trackers.background import BackgroundTracker
from megatron_rl.metrics.trackers.registry import Trackers, check_trackers
from megatron_rl.metrics.trackers.run_versions import git_revision, versions
from megatron_rl.metrics.trackers.to_tensorboard import TensorBoard, line
from megatron_rl.records.packed import StepResult

ROOT = Path(__file__).resolve().parents[3]
RESULT = StepResult(
    0, 1, {"train/loss": 0.5, "eval/heldout/avg@4": 0.25}, {"routing/flip_rate": [0.0, 0.25]}
)
ROWS = [
    {
        "prompt": "1+1=",
        "response": "2|<b>",
        "label": "2",
        "reward": 1.0,
        "response_length": 2,
        "step": 1,
    },
    {
        "prompt": "1+2=",
        "response": "2",
        "label": "3",
        "reward": 0.0,
        "response_length": 2,
        "step": 1,
    },
]


class Kept(Tracker):
    """Keeps what it gets."""

    def __init__(self, run):
        self.run, self.calls = run, []
        self.id = run.id or "new-id"
        KEPT.append(self)

    def log(self, step, metrics, per_layer):
        self.calls.append(
            (step, dict(metrics), {name: list(values) for name, values in per_layer.items()})
        )

    def samples(self, step, tables):
        self.calls.append((step, tables))

    def report(self, page):
        self.calls.append(page)

    def close(self, *, failed):
        self.calls.append(failed)


class Raises(Kept):
    def log(self, step, metrics, per_layer):
        raise OSError("no route to host http://me:passw0rd@tracker")


class CannotOpen(Tracker):
    def __init__(self, run):
        raise PermissionError("who are you?")


class Hangs(Tracker):
    released = threading.Event()

    def log(self, step, metrics, per_layer):
        Hangs.released.wait(60)


KEPT: list[Kept] = []


def track(tmp_path, *names, said=None, ids=None, **values):
    to = tuple(name if name == "tensorboard" else f"{__name__}:{name}" for name in names)
    said = [] if said is None else said
    return Trackers(TrackConfig(to=to, **values), TrackedRun("a", tmp_path), said.append, ids)


@pytest.fixture(autouse=True)
def fresh():
    KEPT.clear()
    Hangs.released.clear()
    yield
    Hangs.released.set()


def test_everything_arrives_in_order(tmp_path):
    with Sinks(tmp_path, track(tmp_path, "Kept")) as sinks:
        sinks.write(RESULT)
        sinks.track(lambda tracker: tracker.samples(1, {"Best responses": ROWS}))
        sinks.track(lambda tracker: tracker.report(tmp_path / "report.html"))
    (kept,) = KEPT
    assert kept.calls == [
        (1, RESULT.metrics, RESULT.per_layer), (1, {"Best responses": ROWS}),
        tmp_path / "report.html", False,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="a bad step"):
        with Sinks(tmp_path, track(tmp_path, "Kept")):
            raise ValueError("a bad step")
    assert KEPT[1].calls == [True], "the tracker's run has failed"


def test_failures_are_counted_said_once_and_hurt_no_other(tmp_path):
    said: list[str] = []
    trackers = track(tmp_path, "Raises", "CannotOpen", "Kept", said=said)
    with Sinks(tmp_path, trackers) as sinks:
        for _ in range(3):
            sinks.write(RESULT)
    assert len(said) == 2
    (raises,) = [line for line in said if "Raises" in line]
    assert (
        "failed: OSError('no route to host" in raises
        and "track/Raises_failures_total counts" in raises
    )
    (cannot,) = [line for line in said if "CannotOpen" in line]
    assert "cannot be opened, nothing is sent to it: PermissionError('who are you?')" in cannot
    assert trackers.failures == {"Raises": 3, "CannotOpen": 5, "Kept": 0}, (
        "3 calls; opening, 3 calls and close"
    )
    assert len(next(kept for kept in KEPT if type(kept) is Kept).calls) == 4
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


class Exits(Kept):
    def log(self, *args):
        sys.exit("a library that ends the program")


def test_one_that_exits_is_counted(tmp_path):
    """The exception ends threads in silence."""
    said: list[str] = []
    trackers = track(tmp_path, "Exits", said=said)
    with Sinks(tmp_path, trackers) as sinks:
        for _ in range(3):
            sinks.write(RESULT)
    assert trackers.failures == {"Exits": 3} and "a library that ends" in said[0]


def test_one_that_hangs_neither_slows_training_nor_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "QUEUE_SIZE", 4)
    said: list[str] = []
    trackers = track(tmp_path, "Hangs", said=said, close_seconds=0.2)
    started = time.monotonic()
    with Sinks(tmp_path, trackers) as sinks:
        for _ in range(20):
            sinks.write(RESULT)
    assert time.monotonic() - started < 30
    assert trackers.failures["Hangs"] >= 15 and len(said) == 1 and "does not keep up" in said[0]


def test_a_process_ends_although_a_tracker_hangs(tmp_path):
    code = (
        "import time; from pathlib import Path\nfrom megatron_rl.metrics.trackers import Tracker;"
        " from megatron_rl.metrics.trackers.background import *\nclass Hangs(Tracker):\n    def"
        " close(self, *, failed): time.sleep(600)\nimport atexit; atexit.register(time.sleep, 600) "
        " # as packages do\nt = BackgroundTracker('Hangs', lambda: Hangs(None), print);"
        " t.close(failed=False, seconds=0.2); print('end'); exit_if_tracker_hangs(7)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 7, done.stderr
    assert "is not closed after track.close_seconds = 0.2" in done.stdout and done.stdout.endswith(
        "end\n"
    )


def test_a_run_continues_that_of_its_folder_then_that_of_its_checkpoint(tmp_path):
    name = f"{__name__}:Kept"
    for folder, ids, expected in (
        ("a", {}, ""),
        ("a", {name: "checkpoint"}, "new-id"),
        ("b", {name: "checkpoint"}, "checkpoint"),
    ):
        (tmp_path / folder).mkdir(exist_ok=True)
        trackers = track(tmp_path / folder, "Kept", ids=ids)
        trackers.close(failed=False)
        assert KEPT[-1].run.id == expected
        assert (
            trackers.ids
            == json.loads((tmp_path / folder / "trackers.json").read_text())
            == {name: expected or "new-id"}
        )
    (tmp_path / "a" / "trackers.json").write_text('{"damaged')
    track(tmp_path / "a", "Kept").close(failed=False)
    assert KEPT[-1].run.id == ""


def test_tensorboard_shows_the_steps_after_a_checkpoint_once(tmp_path):
    """The first process got to step 5; the second continues after step 2, and has come to step
    3.
    """
    assert losses_shown(tmp_path, (0, range(1, 6)), (2, [3])) == [(1, 0.1), (2, 0.2), (3, 2.3)]


def test_tensorboard_shows_the_steps_of_a_run_that_starts_again_once(tmp_path):
    """The first process was killed at step 3, before its first checkpoint; the second has come to
    step 2.
    """
    assert losses_shown(tmp_path, (0, [1, 2, 3]), (0, [1, 2])) == [(1, 0.1), (2, 0.2)]


def losses_shown(folder, *processes):
    """(step, value) of each loss; processes: finished steps at the start, and the steps sent."""
    for first, steps in processes:
        tracker = TensorBoard(TrackedRun("a", folder, first_step=first))
        for step in steps:
            tracker.log(step, {"train/loss": first + step / 10}, {})
        tracker.close(failed=False)
        time.sleep(1.1)  # the names of event files have seconds, and are read in their order
    board = EventAccumulator(str(folder / "tensorboard")).Reload()
    return [(event.step, round(event.value, 3)) for event in board.Scalars("train/loss")]


def test_tensorboard_has_the_same_values(tmp_path):
    with Sinks(tmp_path, track(tmp_path, "tensorboard")) as sinks:
        for step in range(3):
            sinks.write(
                StepResult(
                    step, step, {"train/loss": step / 4}, {"routing/flip_rate": [0.5, step / 8]}
                )
            )
        sinks.track(lambda tracker: tracker.samples(3, {"Best responses": ROWS}))
    board = EventAccumulator(
        str(tmp_path / "tensorboard"), {"scalars": 0, "histograms": 0, "tensors": 0}
    ).Reload()
    assert [(e.step, e.value) for e in board.Scalars("train/loss")] == [
        (1, 0.0),
        (2, 0.25),
        (3, 0.5),
    ]
    assert [e.value for e in board.Scalars("routing/flip_rate/layer_01")] == [0.0, 0.125, 0.25]
    profiles = [event.histogram_value for event in board.Histograms("routing/flip_rate")]
    assert [profile.bucket for profile in profiles] == [[0.5, 0.0], [0.5, 0.125], [0.5, 0.25]]
    assert profiles[0].bucket_limit == [0.5, 1.5] and (profiles[0].min, profiles[0].max) == (
        -0.5,
        1.5,
    )
    (samples,) = board.Tensors("samples/Best responses/text_summary")
    table = samples.tensor_proto.string_val[0].decode().splitlines()
    assert table[0] == "| prompt | response | label | reward | response_length | step |"
    assert table[2] == "| 1+1= | 2&#124;&lt;b&gt; | 2 | 1.0 | 2 | 1 |"


def test_tensorboard_shows_a_text_as_it_is():
    """As its own renderer shows it."""
    text = (
        r"![x](http://a.example/b.png) [l](http://a) **b** $x_1*y*z$ \(a\) `c` <i>d</i> &amp; '1"
        r" | 2'"
    )
    page = plugin_util.markdown_to_safe_html(
        f"| response |\n| --- |\n{line([text + chr(13) + '| two'])}"
    )
    assert page.count("<td>") == 1 and not re.search("<(?:img|a|em|strong|code|i)[ >]", page)
    assert html.unescape(page.split("<td>")[1].split("</td>")[0]) == f"{text}<br>| two"


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (
            ["--track.to", "wandbb"],
            "track.to has 'wandbb': must be a tracker, or package.module:Class; did you mean"
            " 'wandb'?",
        ),
        (["--track.to", "wandb", "wandb"], "track.to = ['wandb', 'wandb'] has one twice"),
        (["--track.entity", "us"], "track.entity = 'us' has no effect without wandb in track.to"),
        (["--track.mode", "ofline"], "track.mode = 'ofline': must be 'online' or 'offline'"),
    ],
)
def test_bad_values_are_refused_when_the_configuration_is_read(values, problem):
    with pytest.raises(ConfigError) as error:
        load_config(None, ["--model.path", "m", "--data.train", "t", *values])
    assert problem in str(error.value)


def test_what_is_missing_here_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ValueError,
        match=r"""\"mlflow\", whose package is not installed; .*: pip install '.\[mlflow\]', or"""
        " remove it",
    ):
        check_trackers(TrackConfig(to=("mlflow",)))
    with pytest.raises(ValueError, match="No module named 'nowhere'"):
        check_trackers(TrackConfig(to=("nowhere:Class",)))
    with pytest.raises(ValueError, match="has no attribute 'Nothing'"):
        check_trackers(TrackConfig(to=(f"{__name__}:Nothing",)))
    with pytest.raises(
        ValueError, match="must be a subclass of megatron_rl.metrics.trackers.Tracker"
    ):
        check_trackers(TrackConfig(to=("json:JSONDecoder",)))
    monkeypatch.undo()
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/space")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(ValueError, match="TRACKIO_SPACE_ID sends its values over the network"):
        check_trackers(TrackConfig(to=("trackio",), mode="offline"))


def test_versions_and_revisions(tmp_path):
    found = versions()
    assert (
        found["python"].startswith("3.")
        and {"megatron_rl", "torch", "megatron-core"} <= found.keys()
    )
    assert git_revision(tmp_path) == ""

    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *who, *arguments],
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "one")
    assert git_revision(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "file").write_text("2")
    assert git_revision(tmp_path) == git("rev-parse", "HEAD") + "+changes"


def test_the_example_of_the_guide(tmp_path, monkeypatch):
    """docs/guides/look_at_a_run.md: a tracker of one's own in ten lines."""
    page = (ROOT / "docs/guides/look_at_a_run.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    (tmp_path / "my_tracker.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    cfg = TrackConfig(to=("my_tracker:Lines",))
    check_trackers(cfg)
    with Sinks(tmp_path, Trackers(cfg, TrackedRun("a", tmp_path), print)) as sinks:
        sinks.write(RESULT)
    assert (
        tmp_path / "lines.tsv"
    ).read_text() == "1\ttrain/loss\t0.5\n1\teval/heldout/avg@4\t0.25\n"


def test_a_call_returns_at_once():
    gate = threading.Event()
    tracker = BackgroundTracker(
        "slow", lambda: gate.wait(60) and Tracker(TrackedRun("a", Path())), print
    )
    started = time.monotonic()
    for _ in range(100):
        tracker.put(lambda each: None)
    assert time.monotonic() - started < 30
    gate.set()
    tracker.close(failed=False, seconds=5)
    assert tracker.failures == 0
