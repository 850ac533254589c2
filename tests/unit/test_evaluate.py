"""The evaluation tool with stub servers: its arguments, its metrics, and what it refuses."""

import json
import math
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_rl import evaluate
from megatron_rl.config import ConfigError, EvalConfig, RewardConfig, dump_config, load_config
from megatron_rl.metrics.console import Console
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.reward.pool import RewardPool
from megatron_rl.rollout.agents.episode import ContextFull
from megatron_rl.rollout.scoring import score_groups
from megatron_rl.rollout.server import process as server_module
from megatron_rl.rollout.server.process import Server
from megatron_rl.rollout.standalone import StandaloneSampler
from megatron_rl_tools.tiny_text import make_tokenizer
from tests.fake_server import wait_for
from tests.unit.batch.rollouts import make_rollout

NAN = math.nan


def configure(*arguments):
    """What main() makes of its arguments."""
    seen = []

    class Stop(Exception):
        pass

    def run_tool(cfg, out, console):
        seen.append((cfg, out))
        raise OSError("stop here")

    original, evaluate.run_tool = evaluate.run_tool, run_tool
    try:
        status = evaluate.main([str(argument) for argument in arguments])
    finally:
        evaluate.run_tool = original
    assert status == (1 if seen else 2)
    return seen[0] if seen else None


def test_arguments_and_overrides(tmp_path):
    cfg, out = configure(
        "--checkpoint", tmp_path / "ck", "--sets", "a=x.jsonl", "b=y=z.parquet", "--samples", 8,
        "--k", 1, 4,
        "--rollout.dtype", "float32", "--reward.function", "m:f", "--eval.temperature", "0.6",
    )  # fmt: skip
    assert {name: str(path) for name, path in cfg.eval.sets.items()} == {
        "a": "x.jsonl",
        "b": "y=z.parquet",
    }
    assert (cfg.eval.samples, cfg.eval.pass_at, cfg.eval.temperature) == (8, (1, 4), 0.6)
    assert (cfg.model.path, cfg.rollout.dtype, cfg.reward.function) == (
        tmp_path / "ck",
        "float32",
        "m:f",
    )
    assert str(out) == "runs/eval-ck"


def test_a_run_of_an_earlier_version_is_evaluated(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "config.toml").write_bytes(
        (Path(__file__).parents[1] / "fixtures/run_0_1_0/config.toml").read_bytes()
    )
    cfg, _ = configure("--run", tmp_path)
    assert (cfg.rollout.weight_sync, cfg.replay.on_missing_route) == ("disk", "live"), (
        "former names, in a file of a run"
    )
    assert (
        configure("--checkpoint", tmp_path / "hf", "--config", tmp_path / "config.toml") is None
    ), "a person's must be new"


def test_a_run_gives_its_settings_and_its_exported_model(tmp_path, capsys):
    values = {
        "model": {"path": "elsewhere"}, "data": {"train": "t.jsonl", "template": "Q: {prompt}"},
        "eval": {"sets": {"held": "h.jsonl"}, "every": 5}, "rollout": {"urls": ["http://gone:1"],
        "max_response_tokens": 7},
    }  # fmt: skip
    (tmp_path / "config.toml").write_text(dump_config(load_config(None, [], values)))
    assert configure("--run", tmp_path) is None
    assert "no exported model in it" in capsys.readouterr().err
    (tmp_path / "hf").mkdir()
    cfg, out = configure("--run", tmp_path)
    assert (cfg.model.path, out) == (tmp_path / "hf", tmp_path / "evaluation")
    assert (list(cfg.eval.sets), cfg.rollout.urls, cfg.rollout.max_response_tokens) == (
        ["held"],
        (),
        7,
    )
    assert cfg.eval_data.template == "Q: {prompt}"
    cfg, out = configure(
        "--run",
        tmp_path,
        "--sets",
        "other=o.jsonl",
        "--out",
        tmp_path / "x",
        "--rollout.urls",
        "http://a:1",
    )
    assert (list(cfg.eval.sets), cfg.rollout.urls, out) == (
        ["other"],
        ("http://a:1",),
        tmp_path / "x",
    )


def test_a_run_that_keeps_its_best_checkpoint_is_evaluated_on_other_sets(tmp_path):
    values = {
        "model": {"path": "elsewhere"}, "data": {"train": "t.jsonl"},
        "eval": {"sets": {"held": "h.jsonl"}, "every": 5},
        "checkpoint": {"every": 5, "keep_last": 2, "best_metric": "eval/held/avg@4"},
    }  # fmt: skip
    (tmp_path / "config.toml").write_text(dump_config(load_config(None, [], values)))
    (tmp_path / "hf").mkdir()
    for arguments in (["--sets", "other=o.jsonl"], ["--samples", 8]):
        assert configure("--run", tmp_path, *arguments) is not None


def test_the_base_of_an_adapter_is_not_evaluated_in_its_place(tmp_path, capsys):
    """No adapter is loaded: the settings of a run with lora.path need merged weights."""
    config = tmp_path / "run.toml"
    config.write_text(
        f'[model]\npath = "{tmp_path}/base"\n[data]\ntrain = "t.jsonl"\n[lora]\nrank = 4\n'
        'path = "peft"\n'
    )
    arguments = ["--config", config, "--sets", "a=b.jsonl"]
    assert configure("--checkpoint", tmp_path / "base", *arguments) is None
    refusal = " ".join(capsys.readouterr().err.split())
    assert "lora.path = peft" in refusal and "merged with --checkpoint" in refusal
    cfg, _ = configure("--checkpoint", tmp_path / "merged", *arguments)
    assert cfg.model.path == tmp_path / "merged"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sets", "x.jsonl"], "--sets x.jsonl: must be NAME=FILE"),
        (["--sets", "h=a.jsonl", "g=c", "h=b.jsonl"], "--sets h=a.jsonl h=b.jsonl: two files"),
        ([], "--sets: no evaluation set"),
        (["--sets", "a=b", "--samples", "2", "--k", "4"], "pass@k needs at least k samples"),
        (["--sets", "a=b", "--eval.temperature", "0"], "set samples = 1"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(tmp_path, capsys, arguments, words):
    try:
        assert configure("--checkpoint", tmp_path, *arguments) is None
    except SystemExit as stopped:
        assert stopped.code == 2
    assert words in " ".join(capsys.readouterr().err.replace("\u2502", " ").split())


def test_files_and_checkpoint_are_checked_before_a_server_starts(tmp_path, capsys):
    assert evaluate.main(["--checkpoint", str(tmp_path / "none"), "--sets", "a=b.jsonl"]) == 2
    assert "no such directory" in capsys.readouterr().err
    make_tokenizer().save_pretrained(tmp_path / "moe")
    (tmp_path / "bad.jsonl").write_text('{"problem": "1+1=", "answer": "2"}\n{"problem": "1+1="}\n')
    arguments = [
        "--checkpoint",
        tmp_path / "moe",
        "--sets",
        f"a={tmp_path}/bad.jsonl",
        f"b={tmp_path}/none.jsonl",
    ]
    options = ["--data.no_chat_template", "--out", tmp_path / "out"]
    assert evaluate.main([str(argument) for argument in arguments + options]) == 2
    error = capsys.readouterr().err
    assert (
        "bad.jsonl, line 2: key 'answer' is missing" in error
        and "none.jsonl: cannot be read" in error
    )
    # its tokenizer has no chat template, which is another error, and not that of this file
    assert evaluate.main([str(argument) for argument in [*arguments[:3], arguments[4]]]) == 2
    error = capsys.readouterr().err
    assert "none.jsonl: cannot be read" in error and "chat_template" not in error


def table(rewards):
    return np.stack(
        [np.array(rewards), np.full(np.shape(rewards), 3.0), np.eye(*np.shape(rewards))], axis=-1
    )


def test_the_metrics_of_a_set():
    config = EvalConfig(samples=4, pass_at=(2,))
    rewards = [[1, 0, 0, 0], [1, 1, 1, 1], [0, NAN, 0, 0]]
    found = evaluate.summarize("s", table(rewards), config, on_error=0.0)
    assert found["eval/s/avg@4"] == pytest.approx(5 / 12) and found[
        "eval/s/pass@4"
    ] == pytest.approx(2 / 3)
    assert found["eval/s/pass@2"] == pytest.approx((0.5 + 1 + 0) / 3)
    assert (
        found["eval/s/failed_frac"] == pytest.approx(1 / 12)
        and found["eval/s/response_length_mean"] == 3
    )
    assert found["eval/s/truncated_frac"] == pytest.approx(3 / 12)
    for name in ("avg@4", "pass@2", "pass@4"):
        assert (
            0
            <= found[f"eval/s/{name}_low"]
            < found[f"eval/s/{name}"]
            < found[f"eval/s/{name}_high"]
            <= 1
        )
    assert evaluate.summarize("s", table(rewards), config, on_error=1.0)["eval/s/pass@4"] == 1.0
    dropped = evaluate.summarize("s", table(rewards), config, on_error="drop")
    assert (
        dropped["eval/s/avg@4"] == pytest.approx((0.25 + 1 + 0) / 3)
        and dropped["eval/s/pass@4"] == 1.0
    )


def test_the_table_for_people():
    metrics = evaluate.summarize(
        "s", table([[1, 0], [NAN, NAN]]), EvalConfig(samples=2), on_error="drop"
    )
    values = evaluate.values_of_set("s", metrics)
    lines = evaluate.table_of(
        {"sets": {"s": {"num_prompts": 2} | values, "longer": {"num_prompts": 2} | values}}
    ).splitlines()
    assert len(lines) == 3 and lines[0].split() == [
        "set",
        "prompts",
        "avg@2",
        "pass@2",
        "tokens",
        "truncated",
        "failed",
    ]
    assert lines[1].split()[:3] == ["s", "2", "0.500"] and lines[1].split()[-1] == "0.500"
    nothing = evaluate.summarize("s", table([[NAN, NAN]]), EvalConfig(samples=2), on_error="drop")
    assert (
        np.isnan(nothing["eval/s/avg@2"])
        and evaluate.with_interval(None, None, None) == "none scored"
    )


def test_results_of_one_prompt_are_json_and_have_no_interval():
    """A reward outside [0, 1] has none with one prompt."""
    metrics = evaluate.summarize("s", table([[2.5]]), EvalConfig(samples=1), on_error="drop")
    values = json.loads(json.dumps(evaluate.values_of_set("s", metrics), allow_nan=False))
    assert (values["avg@1"], values["avg@1_low"], values["avg@1_high"]) == (2.5, None, None)
    line = evaluate.table_of({"sets": {"s": {"num_prompts": 1} | values}}).splitlines()[1]
    assert line.split()[:4] == ["s", "1", "2.500", "2.500"]


def test_evaluation_scores_the_task_alone_and_marks_failures():
    tokenizer = make_tokenizer()
    texts = ["ok", "raise", "no"]
    prompt = Prompt("q", "1", tuple(tokenizer("1")["input_ids"]), "7")
    rollouts = tuple(
        make_rollout(f"q/{k}", 1, 2, seed=k, routes=False) for k, _ in enumerate(texts)
    )
    with RewardPool(
        RewardConfig(format_pattern="nowhere", format_penalty=5.0, on_error=-9.0)
    ) as pool:
        (group,) = score_groups(
            [RolloutGroup(prompt, rollouts)], pool, tokenizer, for_training=False
        )
    assert set(group.rewards.tolist()) <= {0.0, 1.0}, "no format penalty"
    assert all(rollout.response_text for rollout in group.rollouts)
    with RewardPool(
        RewardConfig(function="tests.unit.reward.functions:by_response", on_error=-9.0)
    ) as pool:
        scores = pool.score([("p", text, "ok") for text in texts], shaped=False, failed=NAN)
    np.testing.assert_array_equal(scores, [1, NAN, 0])


def test_a_line_of_responses_is_json_whatever_a_model_wrote():
    prompt = Prompt("q", "1", (1,), "7")
    rollout = make_rollout("q/0", 1, 2, routes=False)
    group = RolloutGroup(
        prompt, (replace(rollout, response_text="\ud800\x00\u2028"),), np.array([NAN], np.float32)
    )
    (line,) = evaluate.lines_of_set("s", group)
    assert (
        json.loads(json.dumps(line).encode("ascii"))["response"] == "\ud800\x00\u2028"
        and line["reward"] is None
    )


def test_errors_have_a_status(tmp_path):
    with pytest.raises(ConfigError):
        evaluate.named_file("=x")


# With servers -------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A checkpoint whose servers are stub processes (tests/stub_server.py)."""

    def command(model, rollout, *, port, weight_version, **rest):
        options = ["--host", rollout.host, "--port", str(port), "--weight-version", weight_version]
        return [sys.executable, "-m", "tests.stub_server", *options]

    monkeypatch.setattr(server_module, "server_command", command)
    make_tokenizer().save_pretrained(tmp_path / "moe")
    config = {
        "vocab_size": 64,
        "num_hidden_layers": 3,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "dtype": "float32",
    }
    (tmp_path / "moe/config.json").write_text(json.dumps(config))
    rows = [{"problem": f"{n}+1=", "answer": n + 1} for n in range(6)]
    (tmp_path / "aime.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "moe"


def arguments(checkpoint, *more):
    folder = checkpoint.parent
    given = [
        "--checkpoint",
        checkpoint,
        "--sets",
        f"aime={folder}/aime.jsonl",
        "--samples",
        3,
        "--k",
        1,
        "--out",
        folder / "out",
    ]
    given += [
        "--data.no_chat_template",
        "--run.device",
        "cpu",
        "--reward.function",
        "tests.e2e.rewards:parity",
        *more,
    ]
    return [str(argument) for argument in given]


def test_results_are_those_of_the_responses(checkpoint, capsys):
    assert evaluate.main(arguments(checkpoint)) == 0, capsys.readouterr().err
    printed, out = capsys.readouterr().out, checkpoint.parent / "out"
    results = json.loads((out / "results.json").read_text())
    responses = [json.loads(line) for line in (out / "responses.jsonl").read_text().splitlines()]
    found = results["sets"]["aime"]
    assert len(responses) == 18 and [line["label"] for line in responses[::3]] == [
        str(n + 1) for n in range(6)
    ]
    assert all(line["reward"] == sum(map(ord, line["response"])) % 2 for line in responses)
    assert (
        found["avg@3"]
        == pytest.approx(np.mean([line["reward"] for line in responses]))
        == pytest.approx(found["pass@1"])
    )
    assert f"{found['avg@3']:.3f} [{found['avg@3_low']:.3f}, {found['avg@3_high']:.3f}]" in printed
    assert found["failures"] == dict.fromkeys(found["failures"], 0) and results["settings"][
        "reward"
    ].endswith("parity")
    assert load_config(out / "config.toml").eval.samples == 3


@pytest.mark.slow
def test_a_server_that_dies_is_replaced_and_the_set_is_finished(checkpoint, monkeypatch):
    monkeypatch.setenv("STUB_SECONDS", "0.3")
    said = []
    cfg = load_config(None, ["--rollout.max_retries", "1", "--eval.samples", "2"], {
        "model": {"path": checkpoint}, "data": {"train": "none"},
        "eval": {"sets": {"a": "a.jsonl"}}, "run": {"device": "cpu"},
    })  # fmt: skip
    console = Console(enabled=False)
    console.log = said.append
    prompts = [Prompt(f"q{n}", "", (5, 9, 2 + n), "") for n in range(5)]
    with StandaloneSampler(
        cfg, make_tokenizer(), log_dir=checkpoint.parent, console=console
    ) as sampler:
        (slot,) = sampler.server_pool.slots
        first: Server = slot.server

        def kill_while_it_samples():
            wait_for(lambda: "generating" in first.log_path.read_text(), 20)
            first.process.kill()

        killer = threading.Thread(target=kill_while_it_samples)
        killer.start()
        groups = sampler.sample("a", prompts)
        killer.join()
        assert slot.server is not first
    assert [group.prompt for group in groups] == prompts and all(
        len(group.rollouts) == 2 for group in groups
    )
    assert any(f"{first.url} died; its part is sampled again" in line for line in said), said


async def continues_with_less(session, prompt):
    """It is an agent that shortens its history where the context is full."""
    await session.generate(max_tokens=5)
    session.observe([9] * 30)
    with pytest.raises(ContextFull, match="the servers' max_req_input_len = 30 are used up"):
        await session.generate(max_tokens=5)
    await session.branch(prompt.token_ids).generate(max_tokens=5)
    return session.finish(1.0)


def test_an_agent_knows_the_context_of_the_servers(checkpoint, capsys):
    agent = ["--agent.function", f"{__name__}:continues_with_less"]
    assert evaluate.main(arguments(checkpoint, *agent)) == 0, capsys.readouterr().err
    results = json.loads((checkpoint.parent / "out/results.json").read_text())
    assert results["sets"]["aime"]["avg@3"] == 1.0


def test_servers_must_name_their_weights_by_a_number(checkpoint, monkeypatch, capsys):
    started = []
    original = server_module.spawn
    monkeypatch.setattr(server_module, "spawn", lambda command, *rest,
    **more: started.append(command) or original(
        [*command[:-1], "default"], *rest, **more))  # fmt: skip
    assert evaluate.main(arguments(checkpoint)) == 1
    assert (
        "weight version 'default': must be an integer" in capsys.readouterr().err
        and len(started) == 1
    )
