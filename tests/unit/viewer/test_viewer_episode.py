"""The tree of an episode: turns with their texts and numbers, and where sequences part."""

import json
import time

import numpy as np
import pytest

from megatron_rl_viewer import token_data
from megatron_rl_viewer.episode import (
    MAX_CHARACTERS,
    SequenceOfEpisode,
    episode_tree,
    messages_of,
    without_calls,
)
from megatron_rl_viewer.run_folder import Runs
from tests.viewer_episode import ANSWER, CALL, CHECK, PROMPT, RESULT, write_agent_run

KEYS = {name: f"1/rollouts/{name.replace('/', '%2F')}" for name in ("Q0/0/0", "Q0/0/1", "Q0/0")}


def answer(folder, name, tmp_path):
    run = Runs([folder], tmp_path / "cache").runs[0]
    run.index.update()
    return token_data.rollout(run, f"1/rollouts/{name}")


@pytest.mark.parametrize("name", KEYS)
def test_every_sequence_of_an_episode_shows_its_tree(tmp_path, name):
    result = answer(write_agent_run(tmp_path / "agent"), name, tmp_path)
    assert result["episode"]["prompt"] == [{"role": "user", "text": "What is 2 * 3 + 4?"}]
    tool = [{"role": "tool", "text": "6"}]
    call = 'calculate(a=2, operator="*", b=3)'
    start, later = len(PROMPT), len(PROMPT + CALL + RESULT)
    first, second, other, check = result["episode"]["turns"]
    assert first == {
        "parent": None, "key": KEYS["Q0/0/0"], "id": "Q0/0/0", "number": 1, "reward": 0.0,
        "finish": "stop", "environment_seconds": 0.0125, "model_seconds": 1.5, "place": start,
        "sampled": len(CALL), "masked": 0, "before": [], "text": "I ask.", "calls": [call],
    }  # fmt: skip
    assert second == {
        "parent": 0, "key": KEYS["Q0/0/0"], "id": "Q0/0/0", "number": 2, "reward": 0.25,
        "finish": "stop", "environment_seconds": 0.5, "model_seconds": 2.25, "place": later,
        "sampled": len(ANSWER), "masked": len(RESULT), "before": tool,
        "text": "So <script>window.HACKED = 1</script> it is 11", "calls": [],
    }  # fmt: skip
    # its tokens are those of the first sequence up to the tool's answer
    assert other == {
        "parent": 0, "key": KEYS["Q0/0/1"], "id": "Q0/0/1", "number": 1, "reward": None,
        "finish": None, "environment_seconds": 0.1, "model_seconds": 0.75, "place": later,
        "sampled": 2, "masked": len(RESULT), "before": tool, "text": "10", "calls": [],
    }  # fmt: skip
    # another beginning: all of its prompt stands before it
    assert (check["parent"], check["masked"], check["place"]) == (None, len(CHECK), len(CHECK))
    assert check["before"] == [{"role": "system", "text": "Check: 10"}]
    assert check["environment_seconds"] is None and check["finish"] == "stop"


def test_a_response_of_one_turn_has_no_tree(tmp_path, client):
    assert answer(write_agent_run(tmp_path / "agent"), "Q0%2F1", tmp_path)["episode"] is None
    key = "/api/runs/0/rollout/4/rollouts/Q0%2F"
    assert client.get(f"{key}0").json()["episode"] is None
    assert len(client.get(f"{key}1").json()["episode"]["turns"]) == 2


def test_without_tokens_the_lines_are_shown(tmp_path):
    episode = answer(write_agent_run(tmp_path / "a", tensors=False), "Q0%2F0", tmp_path)["episode"]
    assert episode["prompt"] == [{"role": "", "text": "What is 2 * 3 + 4?"}]
    assert [turn["parent"] for turn in episode["turns"]] == [None, 0, None, None]
    assert [turn["model_seconds"] for turn in episode["turns"]] == [1.5, 2.25, 0.75, None]
    assert not any("place" in turn for turn in episode["turns"])


def test_damaged_fields_of_a_line_are_left_out(tmp_path):
    folder = write_agent_run(tmp_path / "agent")
    path = folder / "rollouts.jsonl"
    first, *others = [json.loads(line) for line in path.read_text().splitlines()]
    first |= {"turn_seconds": [1, [2.0]], "turn_rewards": [0.5], "turn_ends": "stop"}
    path.write_text("".join(json.dumps(line) + "\n" for line in (first, *others)))
    turns = answer(folder, "Q0%2F0%2F0", tmp_path)["episode"]["turns"][:2]
    assert [turn["model_seconds"] for turn in turns] == [None, None]
    assert [(turn["reward"], turn["finish"]) for turn in turns] == [(0.5, None), (None, None)]


def sequence(key, prompt_length, tokens, environment=()):
    return SequenceOfEpisode(key, {"prompt_length": prompt_length}, np.array(tokens), environment)


def test_token_ids_decide_where_sequences_part():
    """A turn that is shared in part is no parent; neither is one that ends after the beginning."""
    main = sequence("a", 2, [1, 2, 3, 4, 9, 5, 6], [(4, 5)])
    cases = {
        "after the first turn": ([1, 2, 3, 4, 8, 7], 5, 0),
        "after the second": ([1, 2, 3, 4, 9, 5, 6, 8, 7], 8, 1),
        "in the first turn": ([1, 2, 3, 8, 7], 4, None),
        "sampled the same again": ([1, 2, 3, 4], 2, None),
        "before the prompt's end": ([1, 8, 7], 2, None),
    }
    for name, (tokens, prompt_length, parent) in cases.items():
        tree = episode_tree([main, sequence("b", prompt_length, tokens)])
        assert tree["turns"][2]["parent"] == parent, name
        assert [turn["parent"] for turn in tree["turns"][:2]] == [None, 0], name


def test_texts_of_other_formats_are_plain():
    assert messages_of("tool: 6\n") == [{"role": "", "text": "tool: 6"}]
    assert messages_of("<|im_end|>\n<|im_start|>assistant\n") == messages_of("") == []
    long = messages_of("<|im_start|>user\n" + "x" * 5000)[0]
    assert long["role"] == "user" and len(long["text"]) == MAX_CHARACTERS + len(" ...")


def test_calls_that_cannot_be_read_stay_text():
    for text in (
        "<tool_call>\n{broken\n</tool_call>",
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        "<tool_call>[]</tool_call>",
        "<tool_call>" + "[" * 100_000,
        '{"name": "f"}',
    ):
        assert without_calls(text) == (text, [])
    text = (
        'a <tool_call>{"name": "f"}</tool_call> b <tool_call>{"name": "g", "arguments": {"x": "y"}}'
    )
    assert without_calls(text) == ("a  b ", ["f()", 'g(x="y")'])
    started = time.monotonic()
    without_calls("<tool_call>" * 50_000)
    assert time.monotonic() - started < 5
