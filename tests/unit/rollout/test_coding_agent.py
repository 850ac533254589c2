"""examples/coding_agent: its repositories, its reward, and an episode with our tools.

mini-swe-agent: test_own_environments.py.
"""

import json

import pytest

from benchmarks.coding_episodes import reply
from examples.coding_agent import agent, prepare
from examples.coding_agent.repositories import PATH, VALUES, passed_frac, repositories
from megatron_rl.reward.sandbox.box import SandboxError, find_box
from megatron_rl.reward.sandbox.workspace import Workspace
from tests.fake_server import FakeServer
from tests.unit.rollout import test_endpoint
from tests.unit.rollout.test_endpoint import TOKENIZER, chat_sample, check_every_token_once, sample


@pytest.fixture
def sandbox():
    try:
        find_box()
    except SandboxError as error:
        pytest.skip(str(error))


def values(repository, code):
    """The values of an expression x SIGN DIGIT on the arguments of the test."""
    _, sign, digit = code.split()
    return [VALUES[sign](x, int(digit)) for x in repository.arguments]


def test_each_repository_fails_one_test_until_the_right_token_is_there():
    made = repositories()
    assert len({r.task for r in made}) == len(made) > 1000
    assert made[0] == repositories.__wrapped__()[0]  # the same in every process
    for repository in made:
        right = values(repository, repository.right)
        assert repository.wrong in repository.others
        assert all(values(repository, wrong) != right for wrong in repository.others)
        assert all(str(value) in repository.tests[1] for value in right)
        assert repository.files[PATH].count(repository.wrong) == 1


def test_the_reward_is_the_share_of_the_original_tests(sandbox):
    repository = repositories()[3]
    with Workspace(repository.files) as workspace:
        assert workspace.shell("python3 test.py").endswith("[exit status 1]")
        assert passed_frac(repository, workspace) == 0.5
        workspace.create("test.py", "")  # an edited test gives nothing
        assert passed_frac(repository, workspace) == 0.5
        workspace.create(PATH, "raise SystemExit(0)")
        assert passed_frac(repository, workspace) == 0.0
        workspace.shell("rm *")
        assert passed_frac(repository, workspace) == 0.0
    with Workspace(repository.files) as workspace:
        workspace.replace(PATH, repository.wrong, repository.right)
        assert workspace.shell("python3 test.py") == ""
        assert passed_frac(repository, workspace) == 1.0
    assert passed_frac(repository, workspace) == 0.0  # closed


@pytest.mark.parametrize(
    ("number", "reward", "turns"), [(0, 0.5, 3), (1, 1.0, 3), (2, 0.5, 3), (4, 1.0, 3)]
)
def test_an_episode_is_one_sequence_with_its_reward(sandbox, monkeypatch, number, reward, turns):
    task = repositories()[number].task
    prompt = test_endpoint.Prompt("q", task, tuple(TOKENIZER.encode(task)), str(number))
    monkeypatch.setattr(test_endpoint, "PROMPT", prompt)

    def source(*arguments):
        return chat_sample(*arguments, reply)

    with FakeServer("ok", source=source) as server:
        rollout, counters = sample(server, agent.rollout, max_tokens=12_000, longest=14_000)
        check_every_token_once(server, rollout)
    assert (len(rollout.sequences), rollout.num_spans) == (1, turns)
    assert rollout.episode.reward == reward
    assert rollout.episode.metrics["solved"] == float(reward == 1)
    assert counters.tool_calls == 2 and counters.tool_errors == 0


def test_the_rows_are_disjoint_and_a_quarter_of_the_demonstrations_is_wrong(tmp_path):
    prepare.main(tmp_path)
    train, heldout, ours, minis = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout", "sft", "sft_mini")
    )
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in heldout}
    chosen = repositories()[prepare.NUM_HELDOUT :]
    for rows, form in ((ours, '"new": "{right}"'), (minis, "/{right}/' main.py")):
        right = [
            form.replace("{right}", repository.right)
            in json.dumps(row["messages"][1:]).replace('\\"', '"')
            for repository, row in zip(chosen, rows, strict=True)
        ]
        assert sum(right) == 0.75 * len(right)
