"""examples/paper_tiny: the cells are the paper's, their settings reach the configuration, the
analysis follows its rules.
"""

import json
import math
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from examples.experiments import analyse, run
from examples.experiments.analyse import Run, effects_table, stability_table
from examples.experiments.experiment import Cell
from examples.experiments.run import KEPT, cell_config
from examples.paper_tiny.cells import EXPERIMENT, OFF_POLICY, ON_POLICY, STALENESS
from megatron_rl.engine.optim import TrainingDiverged
from megatron_rl.weights.hf.fp8 import QuantizeError


def make_run(reward, *, outcome="finished", kl=None, table="n8"):
    columns = {name: [0.0] * len(reward) for name in KEPT if not name.startswith("eval")}
    columns["rollout/reward_mean"] = list(reward)
    columns["train/kl_mu_pi_k3"] = list(kl or [1e-3] * len(reward))
    data = {
        "table": table,
        "line": "r2",
        "seed": 0,
        "outcome": outcome,
        "eval": {"0": 0.3, "9": 0.5},
        "columns": columns,
    }
    return Run(json.loads(json.dumps(data)), EXPERIMENT.tables[table])


def test_the_tables_are_the_papers_and_what_it_left_out():
    in_paper = {name for name, line in OFF_POLICY.items() if line.is_papers}
    assert in_paper == {"no_clip", "r2_no_clip", "r2", "r3"} and set(OFF_POLICY) - in_paper == {
        "clip",
        "r3_no_clip",
    }
    assert len(ON_POLICY) == 6 and all(line.is_papers for line in ON_POLICY.values())
    sizes = {name: table.num_mini_batches for name, table in EXPERIMENT.tables.items()}
    assert sizes == {"on_policy": 1, "n2": 2, "n4": 4, "n8": 8, "staleness": 1}


def test_seeds_come_one_after_the_other():
    cells = list(EXPERIMENT.cells(list(EXPERIMENT.tables), [0, 1, 2]))
    assert len(cells) == len({cell.name for cell in cells}) == 84
    assert [cell.seed for cell in cells] == [0] * 28 + [1] * 28 + [2] * 28


def test_cells_that_sample_ahead_differ_from_r3_on_policy_in_k_alone():
    """k0 has the settings of on_policy-r3: what k changes is compared with a synchronous run."""
    runs = [cell_config(cell, []).model_dump() for cell in EXPERIMENT.cells(["staleness"], [1])]
    synchronous = cell_config(Cell(EXPERIMENT, "on_policy", "r3", 1), []).model_dump()
    assert [cfg["rollout"].pop("max_staleness") for cfg in runs] == [0, 1, 2, 4]
    synchronous["rollout"].pop("max_staleness")
    assert [cfg["run"].pop("name") for cfg in runs] == [f"staleness-{line}-1" for line in STALENESS]
    synchronous["run"].pop("name")
    assert runs == [synchronous] * 4


@pytest.mark.parametrize(
    "cell", EXPERIMENT.cells(list(EXPERIMENT.tables), [1]), ids=lambda cell: cell.name
)
def test_a_cells_settings_reach_the_configuration(cell):
    cfg = cell_config(cell, ["--rollout.urls", "http://127.0.0.1:1"])
    table = EXPERIMENT.tables[cell.table]
    settings, num_mini_batches, steps = (
        table.lines[cell.line].settings,
        table.num_mini_batches,
        table.num_steps,
    )
    loss, replay = settings["loss"]["name"], settings["replay"]["mode"]
    assert (cfg.loss.name, cfg.replay.mode, cfg.run.num_mini_batches, cfg.run.num_steps) == (
        loss, replay, num_mini_batches, steps,
    )  # fmt: skip
    assert (
        cfg.run.prompts_per_step // num_mini_batches
        == cell_config(Cell(EXPERIMENT, "on_policy", "minirl", 1), []).run.prompts_per_step
    )
    assert (cfg.run.seed, cfg.run.name, cfg.model.path.name) == (1, cell.name, "paper_tiny-1")
    assert cfg.data.train.parent == cfg.eval.sets["heldout"].parent == cfg.model.path
    assert (cfg.rollout.quantize, cfg.model.dtype, cfg.rollout.dtype) == (
        "fp8",
        "float32",
        "bfloat16",
    )
    switches = cfg.loss.switches
    assert (switches.weight_high, cfg.advantage.kind, cfg.run.group_size) == (5.0, "mean", 16)
    assert (
        switches.clip == "none"
        if "no_clip" in cell.line
        else (switches.clip_low, switches.clip_high) == (0.2, 0.27)
    )


def raises(error):
    def train(cfg):
        (cfg.run_dir / "metrics.jsonl").write_text(
            '{"step": 0, "eval/heldout/avg@4": 0.25}\n{"step": 1, "train/loss": 0.123456}\n'
        )
        if error is not None:
            raise error

    return train


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "finished"),
        (TrainingDiverged("3 updates in a row"), "diverged"),
        (QuantizeError("not finite"), "diverged"),
        (RuntimeError("the server is gone"), "failed"),
    ],
)
def test_how_a_cell_ends_and_what_is_kept_of_it(error, outcome, monkeypatch, tmp_path):
    monkeypatch.setattr(run, "train", raises(error))
    cfg = cell_config(Cell(EXPERIMENT, "n4", "r2", 0), ["--run.dir", str(tmp_path)])
    assert run.run_cell(cfg, 60.0)[0] == outcome
    assert str(error or "") in run.log_path(cfg).read_text()
    kept = run.result(Cell(EXPERIMENT, "n4", "r2", 0), cfg, "abc", outcome, 1.0)
    assert (kept["table"], kept["line"], kept["seed"], kept["outcome"]) == ("n4", "r2", 0, outcome)
    assert kept["eval"] == {"0": 0.25}
    assert set(kept["columns"]) == set(KEPT)
    assert kept["columns"]["train/entropy"] == [None]


def test_a_cell_that_fails_has_a_file_and_is_run_again(monkeypatch, tmp_path, capsys):
    """No cell disappears: neither one that failed, nor the failures of one that finished in the
    end.
    """
    outcomes = {"n8-no_clip-0": ["timed out", "failed", "finished"], "n8-clip-0": ["diverged"]}

    @contextmanager
    def start_server(cfg):
        yield SimpleNamespace(url="http://127.0.0.1:1", process=SimpleNamespace(poll=lambda: None))

    monkeypatch.setattr(run, "make_model", lambda *_, **settings: None)
    monkeypatch.setattr(run, "start_server", start_server)
    monkeypatch.setattr(run, "run_cell", lambda cfg, seconds: (outcomes[cfg.run.name].pop(0), 7.0))
    words = "run paper_tiny --tables n8 --lines no_clip clip --seeds 0"
    monkeypatch.setattr(
        "sys.argv",
        [*words.split(), "--results", str(tmp_path), "--run.dir", str(tmp_path / "runs")],
    )
    assert [run.main() for _ in range(4)] == [1, 1, 0, 0]
    assert outcomes == {"n8-no_clip-0": [], "n8-clip-0": []}, (
        "a result is not run again, a failure is"
    )
    assert "n8-no_clip-0" in capsys.readouterr().err
    rows = analyse.unfinished_table(tmp_path).splitlines()[2:]
    assert [row.split(" | ")[:3] for row in rows] == [
        ["| n8-no_clip-0", "timed out", "7"], ["| n8-no_clip-0", "failed", "7"],
    ]  # fmt: skip


def test_a_cell_that_failed_is_in_no_mean(tmp_path):
    for seed, outcome in enumerate(["finished", "failed", "timed out"]):
        data = make_run([0.5] * 12, outcome=outcome).data | {"seed": seed}
        (tmp_path / f"n8-r2-{seed}.json").write_text(json.dumps(data))
    (runs,) = analyse.load(tmp_path, EXPERIMENT).values()
    assert [each.data["seed"] for each in runs] == [0]


def test_a_cell_that_hangs_is_stopped(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "train", lambda cfg: time.sleep(60))
    outcome, seconds = run.run_cell(
        cell_config(Cell(EXPERIMENT, "n4", "r2", 0), ["--run.dir", str(tmp_path)]), 0.5
    )
    assert outcome == "timed out" and seconds < 30


def test_a_fall_that_stays_is_a_collapse_at_its_step():
    reward = [0.5] * 10 + [0.1] * 10  # n8 smooths over two steps: 0.3 after step 11, below 0.35
    assert make_run(reward).collapse_step == 11


def test_a_fall_that_recovers_is_none():
    assert make_run([0.5] * 8 + [0.1] * 4 + [0.5] * 8).collapse_step is None
    assert make_run([0.1, 0.2, 0.3, 0.4, 0.5]).collapse_step is None
    assert make_run([0.5] * 10 + [0.4] * 10).collapse_step is None


def test_a_diverged_run_collapsed_where_it_ended():
    assert make_run([0.2, 0.5, 0.6], outcome="diverged").collapse_step == 3


def test_the_table_has_means_deviations_and_geometric_growth():
    runs = [
        make_run([0.4] * 20, kl=[1e-3] * 10 + [4e-3] * 10),
        make_run([0.6] * 20, kl=[1e-3] * 10 + [1e-3] * 10),
    ]
    (row,) = stability_table({"r2": runs}).splitlines()[2:]
    assert "| R2 | 2 | 0/2 | 0.500 +- 0.141 | 0.500 +- 0.141 | 0.500 +- 0.000 |" in row
    assert "| 1.0e-03 -> 2.5e-03 | x2.0 |" in row


def test_effects_compare_the_same_seed_only():
    def line(scores):
        runs = [make_run([score] * 20, kl=[score] * 20) for score in scores.values()]
        for each, (seed, score) in zip(runs, scores.items(), strict=True):
            each.data.update(seed=seed, eval={"0": 0.0, "20": score})
        return runs

    lines = {
        ("n8", "no_clip"): line({0: 0.1, 1: 0.3, 2: 0.9}),
        ("n8", "clip"): line({0: 0.4, 1: 0.2}),
    }
    (row,) = effects_table(EXPERIMENT, lines).splitlines()[2:]
    # sqrt(4 * 2/3)
    assert row.startswith("| clipping | n8 | 2 | +0.100 +- 0.200 | 1/2 | +0.100 +- 0.200 | x1.63 |")


def test_curves_of_different_length_are_averaged_over_those_that_run():
    steps, curves = analyse.smoothed(
        [make_run([1.0] * 4), make_run([0.0] * 2)], "rollout/reward_mean", 4
    )
    assert steps.tolist() == [1, 2, 3, 4]
    assert np.nanmean(curves, axis=0).tolist() == [0.5, 0.5, 1.0, 1.0] and math.isnan(curves[1, 2])
