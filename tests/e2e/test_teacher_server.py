"""A real SGLang server as a teacher: its numbers are those of transformers, and a run learns from
it.
"""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from megatron_rl.config import load_config
from megatron_rl.config.sections import Teacher
from megatron_rl.metrics.sinks import read_metrics
from megatron_rl.records import Prompt, Rollout
from megatron_rl.rollout.client.teacher_check import check_teachers, probe
from megatron_rl.rollout.client.teachers import TeacherClient
from megatron_rl.rollout.saved.saved_steps import SavedSteps
from megatron_rl.rollout.server.server_info import ServerError
from megatron_rl.rollout.time_shared_teachers import SleepingTeacher
from megatron_rl.weights.sync.servers import Servers
from tests.e2e import test_train as runs_of
from tests.e2e.reference import TINY_SPEC, hf_logprobs_and_routes, hf_model
from tests.tiny import random_checkpoint


def random_rollout(name: str, size: int, prompt: int, environment=()) -> Rollout:
    rng = np.random.default_rng(size)
    observed = sum(end - start for start, end in environment)
    sampled = size - prompt - observed
    return Rollout(
        id=name,
        tokens=rng.integers(2, 64, size),
        prompt_length=prompt,
        rollout_logprobs=np.zeros(sampled, np.float32),
        routed_experts=None,
        finish_reason="stop",
        policy_versions=np.zeros(sampled, np.int32),
        environment=environment,
    )


def assert_scored_by(checkpoint: Path, rollout: Rollout, limit: float = 1e-4) -> None:
    for sequence in rollout.sequences:
        expected, _ = hf_logprobs_and_routes(checkpoint, sequence, 1.0)
        np.testing.assert_allclose(sequence.teacher_logprobs, expected, atol=limit, rtol=0)


def test_a_real_server_scores_as_transformers(sglang_server, tiny_checkpoint, rollout_config):
    """One token, long texts, turns with observations, an episode, and the same text again, whose
    beginning is in the prefix cache.
    """
    texts = [
        random_rollout("a", 2, 1),
        random_rollout("b", 200, 5),
        random_rollout("c", 40, 8, ((12, 15), (20, 30))),
    ]
    tree = random_rollout("d", 30, 6).with_episode(earlier=(random_rollout("d/0", 20, 6),))

    async def score() -> list[Rollout]:
        teacher = TeacherClient("t", Teacher(urls=(sglang_server.url,)), rollout_config, 64)
        async with teacher.serving():
            return await asyncio.gather(*map(teacher.score, [*texts, tree, *texts]))

    scored = asyncio.run(score())
    assert any((rollout.tokens == 63).any() for rollout in texts), "the last id of the vocabulary"
    for rollout in scored:
        assert_scored_by(tiny_checkpoint, rollout)


def test_a_real_server_scores_the_same_when_it_has_its_memory_back(
    sglang_server, tiny_checkpoint, rollout_config
):
    """On the CPU it keeps its memory; what is tested are the calls, and that it serves again."""
    texts = [random_rollout("a", 40, 1), random_rollout("b", 200, 5)]
    text = texts[0].tokens.tolist()
    servers = Servers([sglang_server.url], {}, 60.0)

    def score_text() -> np.ndarray:
        with httpx.Client(base_url=sglang_server.url, timeout=60.0) as http:
            return probe(http, text, TINY_SPEC)

    async def score() -> list[Rollout]:
        teacher = TeacherClient("t", Teacher(urls=(sglang_server.url,)), rollout_config, 64)
        async with teacher.serving():
            return await asyncio.gather(*map(teacher.score, texts))

    sleeper = SleepingTeacher("t", servers, score_text)
    assert sleeper.expected is not None and len(sleeper.expected) == 39
    for _ in range(3):
        sleeper.release()
        sleeper.wake()
        for rollout in asyncio.run(score()):
            assert_scored_by(tiny_checkpoint, rollout)
    servers.close()


@pytest.mark.parametrize("top_k", [4, 64])
def test_a_real_server_names_the_most_probable_tokens_of_transformers(
    sglang_server, tiny_checkpoint, rollout_config, top_k
):
    """64: the entire vocabulary."""
    texts = [
        random_rollout("a", 2, 1),
        random_rollout("b", 200, 5),
        random_rollout("c", 40, 8, ((12, 15), (20, 30))),
        random_rollout("b", 200, 5),  # in the prefix cache
    ]

    async def score() -> list[Rollout]:
        teacher = TeacherClient("t", Teacher(urls=(sglang_server.url,)), rollout_config, 64, top_k)
        async with teacher.serving():
            return [await teacher.score(text) for text in texts]

    for rollout in asyncio.run(score()):
        assert_scored_by(tiny_checkpoint, rollout)
        with torch.no_grad():
            logits = hf_model(tiny_checkpoint)(torch.from_numpy(rollout.tokens)[None]).logits[0]
        expected = logits.log_softmax(-1)[torch.from_numpy(rollout.sampled) - 1]
        top = rollout.teacher_top
        ids = torch.from_numpy(top.sets.ids().reshape(-1, top_k))
        found = torch.from_numpy(top.logprobs.reshape(-1, top_k))
        assert (found - expected.gather(1, ids)).abs().max() < 1e-4
        # none that is left out is more probable, but for ties
        least = expected.topk(top_k).values[:, -1:]
        assert (found >= least - 1e-4).all()


def test_the_start_check_passes_the_students_own_kind_and_refuses_others(
    sglang_server, tiny_checkpoint, tmp_path
):
    def check(path: Path, spec=TINY_SPEC) -> list[str]:
        sections = {
            "model": {"path": str(path)},
            "data": {"train": "x"},
            "teachers": {"math": {"urls": [sglang_server.url]}},
        }
        return check_teachers(
            load_config(None, [], sections), spec, [Prompt("q", "", tuple(range(3, 30)), "")]
        )

    (line,) = check(tiny_checkpoint)
    assert line.startswith(f"teacher math, {sglang_server.url}: SGLang") and "mean log-prob" in line
    assert line.endswith("WARNING not compared: tokenizer, not readable here")
    with pytest.raises(ServerError, match=r"teacher math: .* vocabulary size = 64, the"):
        check(tiny_checkpoint, replace(TINY_SPEC, vocab_size=65))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_learns_from_its_teacher(tmp_path):
    """A random student without rewards: its reverse KL to a random teacher falls, whose checkpoint
    the run serves itself.  The teacher's numbers are in the files.
    """
    material = runs_of.make_material(tmp_path / "material", num_hidden_layers=2)
    teacher = teacher_of(tmp_path / "teacher", material)
    extra = (
        "--teachers.near.path", str(teacher), "--advantage.weight", "0", "--rollout.save_tensors",
        "--optim.lr", "3e-3", "--loss.name", "minirl", "--replay.mode", "R3",
    )  # fmt: skip
    process = runs_of.start(material, tmp_path, steps=8, extra=extra)
    text = runs_of.wait_for(process, tmp_path, r"step\s+8/8", timeout=600)
    process.wait(120)
    folder = tmp_path / "runs/run"
    assert "teacher near, http" in text and (folder / "logs/teacher_near.log").exists()
    assert not runs_of.left_behind(tmp_path), "the teacher's server has ended with the run"
    steps = [step.metrics for step in read_metrics(folder / "metrics.jsonl") if step.metrics]
    kls = [step["teacher/reverse_kl"] for step in steps if "teacher/reverse_kl" in step]
    assert len(kls) == 8 and min(kls) > 0 and kls[-1] < 0.8 * kls[0], kls
    saved_cfg = load_config(
        folder / "config.toml", ["--run.name", "other", "--run.num_steps", "8"], of_a_run=True
    )
    spec = replace(TINY_SPEC, num_layers=2, moe_layers=(0, 1), vocab_size=len_of(material))
    groups = SavedSteps(folder, saved_cfg, spec).groups(0, 0, 1)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert len(rollouts) == 32
    for rollout in rollouts:
        assert_scored_by(teacher, rollout)


def teacher_of(path: Path, material: Path) -> Path:
    """Another random checkpoint with the material's tokenizer."""
    from megatron_rl_tools.tiny_text import make_tokenizer

    tokenizer = make_tokenizer()
    random_checkpoint(
        path, seed=5, num_hidden_layers=2,
        vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    tokenizer.save_pretrained(path)
    return path


def len_of(material: Path) -> int:
    return json.loads((material / "moe/config.json").read_text())["vocab_size"]
