"""What the trainer writes about every token (rollout.save_tensors) is what it computed, in every
layout.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.dist.launch import run_ranks
from tests.tiny import random_checkpoint

LAYOUTS = {"tp2": {"tp": 2}, "cp2": {"cp": 2}, "pp2": {"pp": 2}, "ep2": {"ep": 2}, "dp2": {}}
MORE_LAYOUTS = {
    "tp2 pp2": {"tp": 2, "pp": 2},
    "tp2 dp2": {"tp": 2},
    "cp2 pp2 vp2": {"cp": 2, "pp": 2, "vp": 2},
    "tp2 cp2": {"tp": 2, "cp": 2},
    "ep4": {"ep": 4},
    "tp2 ep2 etp1": {"tp": 2, "ep": 2, "etp": 1},
}
# every flag somewhere
LOSS = {"clip_low": 0.002, "clip_high": 0.002, "weight_high": 1.001, "entropy_coef": 0.01}
NUM_BATCHES = 2


def take(index, sample):
    """Every second episode is written, and the last one is left out of the loss."""
    return dataclasses.replace(
        sample, save_tokens=index % 2 == 0, in_loss=index != 2, sampled_by=index % 2
    )


def train_step(checkpoint, layout, folder, *, look=None):
    """Two mini-batches of one step with the recorder; look: also called with what each update is
    computed from.
    """
    from megatron_rl.batch.split import batch_without_routes
    from megatron_rl.metrics.file_writer import FileWriter
    from megatron_rl.metrics.reduce import MetricSums
    from megatron_rl.trainer.recording.token_recorder import TokenRecorder
    from tests.dist.engines import make_engine, random_batch

    rollout = {"top_p": 0.9, "top_k": 40, "save_tensors": 0.5}
    engine = make_engine(checkpoint, parallel=layout, rollout=rollout, loss=LOSS)
    run = engine.cfg.run.model_copy(update={"dir": folder, "name": "run"})
    cfg = engine.cfg.model_copy(update={"run": run})
    cfg.run_dir.mkdir(parents=True, exist_ok=True)
    files = FileWriter(print)
    recorder = TokenRecorder(cfg, engine, files)
    batches = [
        dataclasses.replace(
            random_batch(
                engine, num_sequences=12, seed=seed, with_sets=True, episodes=True, change=take
            ),
            index=seed,
        )
        for seed in range(NUM_BATCHES)
    ]
    batches = [renamed(batch) for batch in batches]
    passes = []
    for batch in batches:
        with recorder.old_pass(batch_without_routes(batch)):
            passes.append(engine.old_logprobs(batch, MetricSums(), replay="R3"))
    for batch, old in zip(batches, passes, strict=True):
        sums, observe = MetricSums(), recorder.observer(batch.index, old.mismatch)
        seen = both(observe, look, batch) if look else observe
        norm = engine.compute_gradient(batch, old, sums, replay="R3", observe=seen)
        engine.apply_gradient(norm, batch, sums)
    recorder.finish(3)
    files.close()
    assert files.failed == 0
    engine.parallel.destroy()
    return cfg.run_dir


def renamed(batch):
    """Ids are unique in a step."""
    samples = tuple(
        tuple(
            dataclasses.replace(
                each,
                rollout=dataclasses.replace(each.rollout, id=f"{batch.index}-{each.rollout.id}"),
            )
            for each in part
        )
        for part in batch.samples
    )
    return dataclasses.replace(batch, samples=samples)


def both(observe, look, batch):
    def call(tokens):
        observe(tokens)
        look(batch, tokens)

    return call


def record_layouts(checkpoint, folder, layouts):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for name, layout in layouts.items():
        train_step(checkpoint, layout, Path(folder) / name)
    dist.destroy_process_group()


def record_alone(checkpoint, folder):
    """On one rank: {id: what the model computed}, taken without the recorder: rows are sequences
    end to end there.
    """
    import torch.distributed as dist

    from megatron_rl.replay.manager import ReplayManager

    dist.init_process_group("gloo")
    # [mini-batch][micro-batch][layer]: (ids [T, K], scores [T, E]) of every router call of the old
    # passes
    chosen = []
    found = {}
    decide, run_pass = ReplayManager.decide, ReplayManager.run_pass

    def watched_pass(self, routes, *, training, record=False, router_hook=None):
        if not training:
            chosen.append([[None] * 4 for _ in routes])
        return run_pass(self, routes, training=training, record=record, router_hook=router_hook)

    def watched(self, layer, scores, live_topk):
        if not self._pass.training:
            chosen[-1][self._pass.micro_batch][layer] = (
                live_topk(None)[1].numpy(),
                scores.detach().numpy(),
            )
        return decide(self, layer, scores, live_topk)

    def look(batch, tokens):
        part = batch.micro_batches[tokens.index]
        for sample, start in zip(
            batch.samples[tokens.index], part.cu_seqlens.tolist(), strict=False
        ):
            rollout = sample.rollout
            rows, predicts = (
                slice(start, start + len(rollout.tokens) - 1),
                start + rollout.sampled - 1,
            )
            routers = chosen[batch.index][tokens.index]
            found[rollout.id] = {
                "old_logprobs": tokens.old_logprobs[predicts].numpy(),
                "logprobs": tokens.logprobs[predicts].numpy()[None],
                "entropy": tokens.entropy[predicts].numpy(),
                "own_experts": np.stack([ids[rows] for ids, _ in routers], axis=1),
                "scores": np.stack([scores[rows] for _, scores in routers], axis=1),
                "rollout": rollout,
                "sample": sample,
                "batch": batch,
                "loss_of_batch": float(tokens.shares.sum()),
                "alone": part.num_tokens == len(rollout.tokens),
            }

    ReplayManager.decide, ReplayManager.run_pass = watched, watched_pass
    try:
        run_dir = train_step(checkpoint, {}, Path(folder) / "alone", look=look)
    finally:
        ReplayManager.decide, ReplayManager.run_pass = decide, run_pass
    check_recomputed(run_dir, found)
    dist.destroy_process_group()
    return {
        name: {key: value for key, value in each.items() if isinstance(value, np.ndarray)}
        | of_rollout(each)
        for name, each in found.items()
    }


def of_rollout(each):
    rollout, sample = each["rollout"], each["sample"]
    return {
        "routed_experts": np.array(rollout.routed_experts),
        "mu": rollout.rollout_logprobs,
        "saved": sample.save_tokens,
        "in_loss": sample.in_loss,
        "sampled_by": sample.sampled_by,
    }


def check_recomputed(run_dir, found):
    """weight, ratio, flags and loss follow from the written log-probs, the rollout's and the
    advantage.
    """
    import torch

    from megatron_rl.config import load_config
    from megatron_rl.loss import LossInputs, Sequences, policy_loss, token_shares
    from megatron_rl.trainer.recording.token_files import Flag

    config = load_config(
        None, [], {"model": {"path": "x"}, "data": {"train": "x"}, "loss": LOSS}
    ).loss
    written = load_file(run_dir / "trained/step_000003.safetensors")
    all_flags = 0
    for name, each in found.items():
        if not each["sample"].save_tokens:
            continue
        own = {
            kind: torch.from_numpy(written[f"{name}:{kind}"])
            for kind in ("old_logprobs", "logprobs", "entropy")
        }
        size, in_loss = len(own["entropy"]), each["sample"].in_loss
        mask = torch.full((size,), in_loss)
        lengths = torch.full((size,), each["sample"].length)
        sequences = Sequences(torch.zeros(size, dtype=torch.int64), 1, lengths)
        mu = torch.from_numpy(each["rollout"].rollout_logprobs)
        advantages = torch.full((size,), written[f"{name}:advantage"][0])
        inputs = LossInputs(
            own["logprobs"][0], own["old_logprobs"], mu, advantages, mask, sequences,
            entropy=own["entropy"],
        )  # fmt: skip
        loss = policy_loss(inputs, config)
        batch = each["batch"]
        counts = {
            "num_responses": batch.num_responses,
            "num_response_tokens": batch.num_response_tokens,
        }
        shares = config.scale * token_shares(loss, sequences, config, **counts)
        flags = (
            loss.clipped_high * Flag.CLIPPED_HIGH
            | loss.clipped_low * Flag.CLIPPED_LOW
            | loss.bounded * Flag.BOUNDED
        )
        flags |= int(not in_loss) * Flag.LEFT_OUT
        assert np.array_equal(written[f"{name}:flags"], flags.numpy()), name
        assert np.array_equal(
            written[f"{name}:weight"], torch.where(mask, loss.weight, 0.0).numpy()
        ), name
        np.testing.assert_allclose(
            written[f"{name}:loss"], shares.numpy(), rtol=1e-6, atol=0, err_msg=name
        )
        np.testing.assert_allclose(
            written[f"{name}:ratio"], loss.ratio.numpy(), rtol=1e-6, err_msg=name
        )
        all_flags |= int(np.bitwise_or.reduce(written[f"{name}:flags"]))
    expected = Flag.CLIPPED_HIGH | Flag.CLIPPED_LOW | Flag.BOUNDED | Flag.LEFT_OUT
    assert all_flags == expected, f"the test must meet every flag of this loss: {all_flags}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("token_data") / "moe")


@pytest.fixture(scope="module")
def computed(checkpoint):
    [found] = run_ranks(record_alone, 1, checkpoint, checkpoint.parent)
    check_files(checkpoint.parent / "alone/run", found, exact=True)
    return found


def check_files(run_dir, computed, *, exact):
    """Every written value is the one computed on one rank; every trained sequence has a line."""
    written, lines = {}, {}
    for path in run_dir.glob("trained/*.safetensors"):
        written |= load_file(path)
    for path in run_dir.glob("trained/*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            assert line["id"] not in lines, "each sequence has one line"
            lines[line["id"]] = line
            if line["tensors"]:
                assert f"{line['id']}:logprobs" in load_file(run_dir / line["tensors"])
    assert lines.keys() == computed.keys()
    assert {name.rsplit(":", 1)[0] for name in written} == {
        name for name in computed if computed[name]["saved"]
    }
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 2e-5}
    for name, each in computed.items():
        line = lines[name]
        check_line(line, name, each)
        if not each["saved"]:
            assert line["tensors"] is None
            continue
        own = {
            key.rsplit(":", 1)[1]: value
            for key, value in written.items()
            if key.rsplit(":", 1)[0] == name
        }
        for kind in ("old_logprobs", "logprobs", "entropy"):
            assert own[kind].shape == each[kind].shape and own[kind].dtype == np.float32
            np.testing.assert_allclose(own[kind], each[kind], **tolerance, err_msg=f"{name}:{kind}")
        assert np.array_equal(own["own_experts"], each["own_experts"]), name
        sets = [np.sort(ids, axis=2) for ids in (each["own_experts"], each["routed_experts"])]
        flips = (sets[0] != sets[1]).any(2)
        unpacked = np.unpackbits(own["flips"], axis=1, count=flips.shape[1], bitorder="little")
        assert np.array_equal(unpacked, flips), name
        ranked = -np.sort(-each["scores"], axis=2)
        margins = ranked[:, :, 1] - ranked[:, :, 2]  # top-2 of 8
        np.testing.assert_allclose(own["margin"].astype(np.float32), margins, rtol=2e-3, atol=1e-4)
        assert line["flip_frac"] == pytest.approx(flips.mean(), abs=1e-12)


def check_line(line, name, each):
    assert line["schema"] == 1 and line["step"] == 3 and line["mini_batch"] == int(name[0])
    assert line["sampled_by"] == ("rollouts.dp1" if each["sampled_by"] else "rollouts")
    gap = each["old_logprobs"].astype(np.float64) - each["mu"]
    stale = each["logprobs"][0].astype(np.float64) - each["old_logprobs"]
    if not each["in_loss"]:
        assert (
            line["kl"] is line["weight_mean"] is line["max_log_ratio"] is None and line["loss"] == 0
        )
        return
    assert line["kl"] == pytest.approx(-gap.mean(), abs=2e-5) and line["loss"] != 0
    assert line["kl_k3"] == pytest.approx((np.expm1(gap) - gap).mean(), rel=1e-3, abs=2e-5)
    assert line["max_log_ratio"] == pytest.approx(np.abs(gap).max(), abs=2e-5)
    assert line["max_staleness"] == pytest.approx(np.abs(stale).max(), abs=4e-5)
    assert line["entropy_mean"] == pytest.approx(each["entropy"].mean(), abs=2e-5)


def test_every_written_value_is_the_one_of_one_rank(checkpoint, computed):
    run_ranks(record_layouts, 2, checkpoint, checkpoint.parent, LAYOUTS)
    for name in LAYOUTS:
        check_files(checkpoint.parent / name / "run", computed, exact=False)


@pytest.mark.slow
def test_every_written_value_is_the_one_of_one_rank_on_four(checkpoint, computed):
    run_ranks(record_layouts, 4, checkpoint, checkpoint.parent, MORE_LAYOUTS)
    for name in MORE_LAYOUTS:
        check_files(checkpoint.parent / name / "run", computed, exact=False)
