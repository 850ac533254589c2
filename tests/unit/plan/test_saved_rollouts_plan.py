"""The dry run of --from-rollouts refuses a folder whose rollouts the run would refuse."""

import numpy as np
import pytest

from megatron_rl.config import dump_config, load_config
from megatron_rl.models.families import make_spec
from megatron_rl.options import parse
from megatron_rl.plan.dry_run import print_report
from megatron_rl.records import Prompt, Rollout, RolloutGroup
from megatron_rl.rollout.saved.rollout_recorder import Recorder
from tests.plain_checkpoint import MOE, checkpoint


def make_group(number: int, size: int) -> RolloutGroup:
    spec = make_spec(MOE)
    routes = np.tile(np.arange(spec.top_k, dtype=np.uint8), (4, len(spec.moe_layers), 1))
    rollouts = tuple(
        Rollout(
            id=f"q{number}/{k}",
            tokens=np.array([3, 4, 5, 6, 7]),
            prompt_length=2,
            rollout_logprobs=np.full(3, -1.0, np.float32),
            routed_experts=routes,
            finish_reason="stop",
            policy_versions=np.zeros(3, np.int32),
        )
        for k in range(size)
    )
    prompt = Prompt(f"q{number}", "text", (3, 4), "2")
    return RolloutGroup(prompt, rollouts, np.zeros(size, np.float32))


@pytest.fixture
def dry_run(tmp_path, capsys, monkeypatch):
    """Run the dry run on the rollouts in `live`, which has steps 1 and 2 of 2 groups of 2."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    checkpoint(tmp_path / "moe", MOE)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1 + 1", "label": "2"}\n')
    sizes = {"num_steps": 2, "prompts_per_step": 2, "group_size": 2}
    content = {"model": {"path": "moe"}, "data": {"train": "train.jsonl"}, "run": sizes}
    cfg = load_config(None, ["--run.device", "cpu"], content)
    (tmp_path / "good.toml").write_text(dump_config(cfg))
    recorder = Recorder(tmp_path / "live", save_tensors=True)
    for step in (1, 2):
        recorder.record(step, [make_group(number, 2) for number in (0, 1)])
    (tmp_path / "live/config.toml").write_text(dump_config(cfg))

    def run(*options: str) -> tuple[int, str]:
        command = ["--dry-run", "--config", "good.toml", "--from-rollouts", "live", *options]
        status = print_report(*parse(command))
        output = capsys.readouterr()
        assert (output.out == "") == (status != 0)
        return status, output.err

    return run


def test_a_folder_with_all_steps_passes(dry_run):
    assert dry_run() == (0, "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--run.num_steps 3", "has no rollouts of step 3"),
        ("--run.prompts_per_step 4", "set run.prompts_per_step = 2"),
        ("--run.group_size 4", "set run.group_size = 2"),
    ],
)
def test_other_sizes_are_refused(dry_run, options, message):
    status, error = dry_run(*options.split())
    assert status == 2 and message in error


def test_a_folder_without_rollouts_is_refused(dry_run, tmp_path):
    for file in (tmp_path / "live/rollouts").iterdir():
        file.unlink()
    status, error = dry_run()
    assert status == 2 and "has no rollouts of step 1" in error and "it has none" in error
