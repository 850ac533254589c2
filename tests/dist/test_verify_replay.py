"""tools/megatron_rl_tools/verify_replay/verify_replay.py on real ranks: sound layouts pass, and
every fault that is put in is caught and named."""

import contextlib
import io
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_rl.rollout.server.ports import free_port
from tests.dist.launch import run_ranks

ROOT = Path(__file__).resolve().parents[2]
FAULTS = ("offset", "layer", "order", "stale", "duplicate", "pad")
LAYOUTS = {
    "cp2": ["--cp", "2", "--recompute", "full", "--num-layers", "2"],
    "pp2": [
        "--pp",
        "2",
        "--recompute",
        "selective",
        "--layers-per-stage",
        "3,2",
        "--first-k-dense",
        "1",
    ],
    "tp2": ["--tp", "2", "--recompute", "selective", "--num-layers", "2"],
    "ep2": ["--ep", "2", "--dispatcher", "allgather", "--micro-batches", "3", "--num-layers", "2"],
    "padded": ["--format", "bshd", "--tp", "2", "--recompute", "full", "--num-layers", "2"],
}
MODES = ("R2", "R3")
EPISODE_FAULTS = ("turn", "mask", "retokenise", "forward")
EPISODES = ["--turns", "3", "--cp", "2", "--num-layers", "2"]
OF_EPISODES = [
    ("R3", None),
    ("R2", None),
    *(("R3", fault) for fault in EPISODE_FAULTS),
    ("R2", "mask"),
    ("R3", "offset"),
]


def run_tool(commands):
    """On a rank: the tool's main() for every argument list in turn -> (exit code, rank 0's report
    or None, stderr).
    """
    import torch.distributed as dist

    from megatron_rl_tools.verify_replay.verify_replay import main

    dist.init_process_group("gloo")
    results = []
    for command in commands:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([*command, "--json", "--no-reference", "--device", "cpu"])
        results.append(
            (code, json.loads(out.getvalue()) if out.getvalue() else None, err.getvalue())
        )
    dist.destroy_process_group()
    return results


def torchrun(*arguments: str, ranks: int) -> tuple[int, dict]:
    """The tool as a user starts it -> exit code, report."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
    command += [
        "--master_port",
        str(free_port()),
        "-m",
        "megatron_rl.cli",
        "verify-replay",
        "--json",
        "--device",
        "cpu",
        *arguments,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def failed(report: dict) -> list[str]:
    return [check["name"] for check in report["checks"] if not check["passed"]]


def covering() -> list[tuple[str, str, str]]:
    """Every fault in one of the layouts, in one of the modes; the rest is slow."""
    names = itertools.cycle(LAYOUTS)
    return [
        (layout, mode, fault) for layout, mode, fault in zip(names, itertools.cycle(MODES), FAULTS)
    ]


SOUND = [(layout, mode, None) for layout in LAYOUTS for mode in MODES]
BROKEN = covering()
OTHER_BROKEN = [case for case in itertools.product(LAYOUTS, MODES, FAULTS) if case not in BROKEN]


def run_cases(cases) -> dict:
    """(layout, mode, fault or None) -> what every rank returned; all in one pair of processes."""
    commands = [
        [
            *{**LAYOUTS, "episodes": EPISODES}[layout],
            "--mode",
            mode,
            *(["--break", fault] if fault else []),
        ]
        for layout, mode, fault in cases
    ]
    ranks = run_ranks(run_tool, 2, commands, timeout=500)
    return {case: [rank[index] for rank in ranks] for index, case in enumerate(cases)}


@pytest.fixture(scope="module")
def reports():
    return run_cases([*SOUND, *BROKEN, *(("episodes", *case) for case in OF_EPISODES)])


@pytest.mark.parametrize(("layout", "mode"), [case[:2] for case in SOUND])
def test_a_sound_layout_passes(reports, layout, mode):
    (code, report, _), (other_code, silent, _) = reports[layout, mode, None]
    assert (code, other_code, report["passed"], silent) == (0, 0, True, None), report
    names = [check["name"] for check in report["checks"]]
    assert ("(a) update recompute" in names) == ("--recompute" in LAYOUTS[layout])
    assert ("(a) old-logprob forward" in names) == (mode == "R3")
    assert "(b) replay of a live pass" in names


@pytest.mark.parametrize(("layout", "mode", "fault"), BROKEN)
def test_every_fault_is_caught_and_named(reports, layout, mode, fault):
    check_caught(reports[layout, mode, fault], layout, mode, fault)


@pytest.mark.parametrize(("mode", "fault"), OF_EPISODES)
def test_episodes_of_three_turns_and_their_faults(reports, mode, fault):
    """Over two ranks of context parallelism; the routes of a wrong forward show where routers
    consume them.
    """
    (code, report, stderr), _ = reports["episodes", mode, fault]
    assert report is not None, stderr
    assert "3 turns each" in "\n".join(report["setup"])
    if fault is None:
        assert (code, failed(report)) == (0, [])
        (check,) = [each for each in report["checks"] if each["name"] == "(a) tokens and mask"]
        assert check["detail"] == "8 episodes, 24 requests, 8 of them with a prefix in the cache"
        return
    assert (code, report["hint"].split(":")[0]) == (1, fault), report
    of_routes = {"(a) old-logprob forward", "(a) update forward"}
    assert ("(a) tokens and mask" in failed(report)) == (fault in ("turn", "mask", "retokenise"))
    assert (of_routes <= set(failed(report))) == (fault in ("turn", "forward", "offset"))


@pytest.mark.slow
def test_every_fault_is_caught_in_every_layout_and_mode():
    for case, ranks in run_cases(OTHER_BROKEN).items():
        check_caught(ranks, *case)


def check_caught(ranks, layout, mode, fault) -> None:
    (code, report, stderr), (other_code, _, _) = ranks
    assert report is not None, stderr
    assert (code, other_code, report["passed"]) == (1, 0, False)  # rank 0 gives the verdict
    assert report["hint"].split(":")[0] == fault, report
    assert "(a) update forward" in failed(report)
    assert ("(a) update recompute" in failed(report)) == ("--recompute" in LAYOUTS[layout])
    if mode == "R3" and fault != "offset":  # rows that move by one reach the pads too, or not
        assert ("(a) pads" in failed(report)) == (fault == "pad")
    first = next(check["detail"] for check in report["checks"] if not check["passed"])
    assert all(
        word in first for word in ("rollout", "position", "MoE layer", "given", "consumed", "rank")
    )


@pytest.mark.parametrize(
    ("form", "name"),
    [("thd", "packed (thd)"), pytest.param("bshd", "padded (bshd)", marks=pytest.mark.slow)],
)
def test_under_torchrun_the_layout_is_compared_with_one_rank(form, name):
    """The one rank packs its sequences: so a padded layout that passes also proves that both
    formats train equally.
    """
    code, report = torchrun(
        "--cp", "2", "--ep", "2", "--etp", "1", "--topk", "3", "--format", form, ranks=2
    )
    assert (code, failed(report)) == (0, [])
    assert name in "\n".join(report["setup"])
    names = [check["name"] for check in report["checks"]]
    assert [name for name in names if name.startswith("(c)")] == [
        "(c) log-probs, one rank",
        "(c) loss, one rank",
        "(c) gradients, one rank",
    ]


@pytest.mark.slow
def test_under_torchrun_a_fault_on_one_rank_ends_the_job_with_an_error():
    code, report = torchrun("--tp", "2", "--break", "duplicate", ranks=2)
    assert code != 0
    assert report["hint"].startswith("duplicate")
    assert {"(c) log-probs, one rank", "(c) gradients, one rank"} <= set(failed(report))


@pytest.mark.slow
def test_a_users_configuration_is_proven_with_a_cut_down_model(tmp_path):
    """48 layers, 128 experts, top-8 as in the TOML's checkpoint; its pp and recompute are taken
    over.
    """
    from megatron_rl_tools.verify_replay.random_checkpoint import small_config

    hf = small_config(num_layers=48, num_experts=128, top_k=8, first_k_dense=3, tp=1, etp=1)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(
        json.dumps({**hf, "hidden_size": 2048, "vocab_size": 151936})
    )
    toml = (
        f'[model]\npath = "{tmp_path}/model"\nrecompute = "full"\n[data]\ntrain ='
        ' "x"\n[parallel]\npp = 2\n'
    )
    (tmp_path / "my.toml").write_text(toml)
    code, report = torchrun(
        "--model", str(tmp_path / "my.toml"), "--shrink", "--mode", "R2", ranks=2
    )
    assert (code, failed(report)) == (0, [])
    text = "\n".join(report["setup"])
    assert "6 layers (3 dense), 128 experts, top-8" in text
    assert "pp2" in text and "recompute full" in text


@pytest.mark.slow
def test_a_model_that_plan_knows_is_proven_by_its_name():
    code, report = torchrun("--model", "qwen3-30b-a3b", "--shrink", "--no-reference", ranks=1)
    assert (code, failed(report)) == (0, [])
    assert "4 layers (0 dense), 128 experts, top-8" in report["setup"][0]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--tp", "2"], "must divide the number of ranks, 1"),
        (["--experts", "6", "--topk", "6"], "--topk 6"),
        (["--first-k-dense", "4"], "--first-k-dense 4"),
        (["--break", "order", "--micro-batches", "1"], "no rank has room"),
        (["--turns", "0"], "--turns 0: at least 1"),
        (["--break", "mask"], "--break mask needs an episode of several turns: add --turns 3"),
        (["--break", "forward", "--turns", "3", "--mode", "R2"], "has no effect with --mode R2"),
        (["--model", "nowhere"], "no such file or directory, nor one of olmoe-1b-7b"),
        (
            ["--model", "qwen3-30b-a3b"],
            "add --shrink: its complete weights would have to be written here",
        ),
        (
            ["--pp", "2", "--vp", "2", "--micro-batches", "3"],
            "needs a multiple of pp; use 4, or --vp 1",
        ),
        (["--layers-per-stage", "2,2"], "must name 1 stages"),
        (
            ["--layers-per-stage", "5", "--num-layers", "4"],
            "adds up to 5, the model's num_hidden_layers is 4",
        ),
        (["--layers-per-stage", "2,,2"], "--layers-per-stage: invalid"),
        (
            ["--router", "sigmoid-groups", "--topk", "3"],
            "--router sigmoid-groups: 32 experts, top-3: needs an even top-k",
        ),
    ],
)
def test_invalid_arguments_are_refused(arguments, reason, capsys):
    from megatron_rl_tools.verify_replay.verify_replay import main

    try:
        code = main([*arguments, "--device", "cpu"])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.slow
def test_interleaved_uneven_stages_under_every_recompute_mode():
    """vp2 with stages of 2, 1, 2 and 2 layers, the first dense; block recompute runs the first
    layer of each chunk again.
    """
    layout = ["--pp", "2", "--vp", "2", "--layers-per-stage", "2,1,2,2", "--first-k-dense", "1"]
    modes = ["none", "full", "block", "selective"]
    commands = [
        [*layout, "--recompute", mode, "--micro-batches", count]
        for mode in modes
        for count in ("2", "4")
    ]
    for command, (code, report, stderr) in zip(
        commands, run_ranks(run_tool, 2, commands)[0], strict=True
    ):
        assert (code, report and failed(report)) == (0, []), (command, stderr, report)
        given, again = (
            next(
                (
                    check["detail"]
                    for check in report["checks"]
                    if check["name"] == f"(a) update {name}"
                ),
                "0 routes",
            )
            for name in ("forward", "recompute")
        )
        layers = {"none": 0, "full": 6, "block": 3, "selective": 6}[command[-3]]
        assert int(again.split()[0]) * 6 == int(given.split()[0]) * layers


def test_gradients_that_differ_are_named():
    from megatron_rl_tools.verify_replay.outcome_checks import compare_gradients

    reference = {"a": torch.ones(4), "b": torch.full((4,), 1e-3), "zero": torch.zeros(2)}
    assert compare_gradients(
        {name: tensor.clone() for name, tensor in reference.items()}, reference
    ).passed
    for name, wrong in {"a": 1.001, "b": 1.001e-3, "zero": 1e-3, "nan": float("nan")}.items():
        other = {key: tensor.clone() for key, tensor in reference.items()}
        other["a" if name == "nan" else name][1] = wrong
        check = compare_gradients(other, reference)
        assert (
            not check.passed
            and "1 of 3 tensors differ; largest relative difference" in check.detail
        )
        assert f"in {'a' if name == 'nan' else name} " in check.detail


def test_a_route_consumed_twice_or_never_is_a_failure():
    from megatron_rl_tools.verify_replay.router_hooks import Expected, Seen, check_consumed

    given = {("r", position, 0): (position, 9) for position in range(3)}
    expected = Expected(given, {}, {"r": (0, 0)})
    rows = [
        Seen(("r", position), 0, "forward", (position, 9), (0, 1), 0, 0, position)
        for position in range(3)
    ]
    assert check_consumed("x", rows, expected, 2).passed
    for broken, text in ((rows[:2], "0 times"), ([*rows, rows[1]], "2 times")):
        check = check_consumed("x", broken, expected, 2)
        assert not check.passed and text in check.detail
