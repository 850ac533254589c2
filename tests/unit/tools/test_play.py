"""megatron-rl play: a person in the model's place, with the run's own prompts, agent and reward."""

import io
import json

import pytest

from megatron_rl_tools import play
from megatron_rl_tools.tiny_text import make_tokenizer

CONFIG = """
[model]
path = "{model}"
[data]
train = "{train}"
chat_template = false
[rollout]
max_response_tokens = 16
[reward]
function = "math"
[eval]
sets = {{ held = "{held}" }}
"""
GUESS = ["--agent.environment", "examples.agents.guess:Guess", "--agent.max_turns", "5"]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    root = tmp_path_factory.mktemp("play")
    make_tokenizer().save_pretrained(root / "model")
    sizes = {"vocab_size": 64, "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2}
    (root / "model" / "config.json").write_text(json.dumps(sizes | {"model_type": "qwen3_moe"}))
    files = {"train": [("12+34=", "46"), ("1+1=", "2")], "held": [("5+5=", "10")]}
    for name, rows in files.items():
        lines = [json.dumps({"prompt": prompt, "label": label}) for prompt, label in rows]
        (root / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    text = CONFIG.format(model=root / "model", train=root / "train.jsonl", held=root / "held.jsonl")
    (root / "config.toml").write_text(text)
    return root / "config.toml"


@pytest.fixture
def typed(monkeypatch, capsys, config):
    def run(text: str, *options: str) -> tuple[int, list[str], str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        status = play.main(["--config", str(config), *options])
        captured = capsys.readouterr()
        return status, captured.out.splitlines(), captured.err

    return run


def test_answers_get_the_reward_of_training(typed):
    status, lines, _ = typed("46\n3\n")
    assert status == 0
    assert lines[2:4] == ["--- prompt train:1, label 46", "12+34="]
    assert [line.partition("reward ")[2] for line in lines if "reward" in line] == [
        "1, of the reward function; turns 1, tokens 3, ended by stop",
        "0, of the reward function; turns 1, tokens 2, ended by stop",
    ]


def test_an_environment_is_played_turn_by_turn(typed):
    status, lines, _ = typed("10\n46\n", *GUESS)
    assert status == 0
    # only what is new is shown: the environment's answer, then the question again
    assert [line for line in lines if "12+34=" in line] == [
        "12+34=",
        "[at most 16 tokens]> +12+34=",
    ]
    text = "\n".join(lines)
    assert "reward 0.5, of the episode; turns 2, tokens 6, ended by stop" in text
    assert "episode/guesses 2" in text and "episode/is_done 1" in text


def test_a_turn_is_cut_where_the_models_would_be(typed):
    _, lines, _ = typed("1234567890\\\n1234567890\n", "--first", "2")
    assert any("cut after 16 tokens" in line for line in lines)
    assert any("tokens 16, ended by length" in line for line in lines)
    assert not any("--- prompt train:1" in line for line in lines)


def test_an_evaluation_set(typed):
    _, lines, _ = typed("10\n", "--set", "held")
    assert "--- prompt held:1, label 10" in lines
    assert any("reward 1, of the reward function" in line for line in lines)


def test_text_cannot_command_the_terminal():
    assert play.visible("a\x1b[2J\n\u202eb é") == "a\\x1b[2J\n\\u202eb é"


class Broken:
    def reset(self, prompt):
        raise RuntimeError("no board")

    def step(self, turn): ...


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--set", "nope"], 2, "--set nope: must be one of held, train"),
        (["--first", "9"], 2, "--first 9: must be from 1 to 2"),
        (["--agent.environment", "nowhere:Board"], 2, "agent.environment = 'nowhere:Board' cannot"),
        (["--reward.function", "nowhere:reward"], 2, "megatron-rl play: reward.function"),
        (["--agent.environment", f"{__name__}:Broken"], 1, "RuntimeError: no board"),
        (
            # it takes three texts, and raises
            ["--reward.function", "operator:setitem", "--reward.on_error", "raise"],
            1,
            "item assignment; reward.on_error = raise",
        ),
    ],
)
def test_what_is_wrong_is_named(typed, options, status, message):
    code, _, errors = typed("46\n", *options)
    assert (code, message in errors) == (status, True), errors
