"""Supervised training against transformers in float64: loss, gradient and evaluation, on one rank
and in layouts of two; and a run that a signal stops ends with the bits of one that it does not.
"""

import json
import os
import signal
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from megatron_rl.data.demonstrations import DemonstrationFile, make_demonstration
from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import load_hf_config
from tests.dist.launch import run_ranks
from tests.families import family_checkpoint, load_reference
from tests.referee import clip_gradient, errors, saved

CLIP = 0.5
SIZE = 8  # rows of the mini-batch
HELD_OUT = 5  # rows of evaluation: not a multiple of two replicas
LAYOUTS = {
    1: {"one": {}},
    2: {
        "dp2": {},
        "tp2-ep2": {"tp": 2, "ep": 2, "etp": 1},
        "cp2": {"cp": 2},
        "pp2": {"pp": 2},
    },
}


def rows_of(path: Path) -> list:
    """Random tokens, of which the learned ones are in one to three spans."""
    vocab_size = make_spec(load_hf_config(path)).vocab_size
    rng, rows = np.random.default_rng(3), []
    for number in range(SIZE + HELD_OUT):
        learned = rng.random(int(rng.integers(6, 14))) < 0.6
        learned[0], learned[-1] = False, True
        tokens = rng.integers(2, vocab_size, len(learned))
        rows.append(make_demonstration(f"r{number}", tokens, learned, ""))
    assert {len(row.spans) for row in rows} >= {1, 2, 3}
    return rows


def negative_logprobs(model, rows) -> torch.Tensor:
    """-log pi of all learned tokens, float64, row by row."""
    parts = []
    for row in rows:
        tokens = torch.from_numpy(row.tokens.astype(np.int64))
        logprobs = model(tokens[None], use_cache=False).logits[0].double().log_softmax(-1)
        places = [place for start, end in row.spans for place in range(start, end)]
        parts += [-logprobs[place - 1, tokens[place]] for place in places]
    return torch.stack(parts)


def run_engines(root: Path, layouts: dict) -> list[tuple[float, float, float]]:
    """On a rank, per layout: the loss of the mini-batch, the gradient's norm, the held-out loss."""
    import torch.distributed as dist

    from megatron_rl.batch.split import make_mini_batch
    from megatron_rl.metrics.reduce import MetricSums
    from megatron_rl.records.packed import Sample
    from megatron_rl.trainer.sft_rows import SftRows, SftSource, without_old_pass
    from megatron_rl.trainer.step_meter import StepMeter
    from tests.dist.engines import make_engine
    from tests.dist.test_referee import save_gradients

    dist.init_process_group("gloo")
    rows, results = rows_of(root / "model"), []
    for name, parallel in layouts.items():
        engine = make_engine(
            root / "model",
            parallel=parallel,
            optim={"clip_grad": CLIP},
            loss={"name": "sft"},
            replay="none",
            measure=False,
            run={"group_size": 1, "prompts_per_step": 4, "max_tokens_per_micro_batch": 25},
        )
        place = engine.parallel
        held_out = DemonstrationFile(root, rows[SIZE:])
        data = SftRows(engine.cfg, None, {"held_out": held_out}, [])
        evaluated = SftSource(engine.cfg, engine, StepMeter(), data).evaluate()
        batch = make_mini_batch(
            [Sample(row.rollout, 1.0) for row in rows[:SIZE]][place.dp_rank :: place.dp_size],
            max_tokens=25,
            rule=engine.pack_rule,
            dp_group=place.dp_group,
        )
        sums = MetricSums()
        engine.update(batch, without_old_pass(engine, batch), sums, replay="none")
        metrics = sums.reduce(dist.group.WORLD, place.device)
        results.append(
            (metrics["train/loss"], metrics["optim/grad_norm"], evaluated["eval/held_out/loss"])
        )
        save_gradients(engine, root / f"{name}.gradient")
        place.destroy()
    dist.destroy_process_group()
    return results


def test_loss_and_gradient_are_those_of_transformers(tmp_path: Path) -> None:
    family_checkpoint(tmp_path / "model", "qwen3_moe", num_hidden_layers=4)
    rows = rows_of(tmp_path / "model")
    model = load_reference(tmp_path / "model", torch.float64)
    loss = negative_logprobs(model, rows[:SIZE]).mean()
    held_out = float(negative_logprobs(model, rows[SIZE:]).mean().detach())
    model.zero_grad()
    loss.backward()
    norm = clip_gradient(model, CLIP)
    expected = saved(model, gradients=True)
    assert norm > 2 * CLIP, "gradient clipping is idle"
    for world, layouts in LAYOUTS.items():
        results = run_ranks(run_engines, world, tmp_path, layouts)
        for name, (value, found_norm, found_held_out) in zip(layouts, results[0], strict=True):
            assert abs(value / float(loss.detach()) - 1) < 1e-6, name
            assert abs(found_held_out / held_out - 1) < 1e-6, name
            assert abs(found_norm / norm - 1) < 1e-4, name
            off = errors(load_file(tmp_path / f"{name}.gradient"), expected)
            print(name, value, max(off.values()))
            assert max(off.values()) < 1e-4, (name, max(off, key=lambda tensor: off[tensor]))


STEPS = 4


def train_here(cfg, stop_at=None) -> bool:
    """Train on this rank; return whether a signal after the report of step `stop_at` ended it."""
    import torch.distributed as dist

    from megatron_rl.launch.signals import StoppedBySignal
    from megatron_rl.sft import sft
    from megatron_rl.trainer.trainer import Trainer

    report = Trainer.report

    def report_and_kill(self, step, *args):
        if stop_at == step and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return report(self, step, *args)

    Trainer.report = report_and_kill
    try:
        sft(cfg)
    except StoppedBySignal:
        return True
    finally:
        Trainer.report = report
    return False


def compare_runs(material: Path, work: Path) -> None:
    """Two sources by weight, two mini-batches a step, evaluation in every step."""
    import torch.distributed as dist

    from megatron_rl.checkpoint.manifest import read_manifest
    from megatron_rl.config import load_config
    from megatron_rl.config.rules.sft_rules import DEFAULTS
    from tests.saved_run import sections

    dist.init_process_group("gloo")
    train = [
        {"name": "sums", "path": str(material / "sums.jsonl"), "weight": 3.0},
        {"name": "words", "path": str(material / "words.jsonl")},
    ]
    for way in ("complete", "stopped"):
        settings = sections(
            material,
            work / way,
            steps=STEPS,
            run={"num_mini_batches": 2, "group_size": 1, "seed": 7},
            data={"train": train, "chat_template": False},
        ) | {"eval": {"sets": {"held_out": str(material / "held_out.jsonl")}, "every": 1}}
        cfg = load_config(None, [], settings, defaults=DEFAULTS)
        is_cut = way == "stopped"
        assert train_here(cfg, 1 if is_cut else None) == is_cut
        if is_cut:
            assert not train_here(cfg)
    if dist.get_rank() == 0:
        ends = [work / way / "run" for way in ("complete", "stopped")]
        assert (ends[1] / "checkpoints/step_000002").exists()
        assert lines_of(ends[0]) == lines_of(ends[1])
        files = [read_manifest(end / f"checkpoints/step_{STEPS:06d}").files for end in ends]
        same = [name for name in files[0] if name.endswith((".distcp", ".safetensors"))]
        assert len(same) >= 4 and [files[0][n] for n in same] == [files[1][n] for n in same]
    dist.barrier()
    dist.destroy_process_group()


def lines_of(run: Path) -> list[dict]:
    """Metrics of every step and evaluation, without times; checked."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in rows]
    steps = [row for row in rows if "sft/loss" in row]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    held_out = [row["eval/held_out/loss"] for row in rows if "eval/held_out/loss" in row]
    assert len(held_out) == STEPS + 1 and held_out[-1] < held_out[0]
    assert all(row["sft/tokens"] > 0 and row["source/sums/epochs"] > 0 for row in steps)
    assert not any(k.startswith(("logratio/", "train/ratio", "train/is_")) for k in steps[0])
    return rows


def test_a_stopped_run_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    from tests.saved_run import make_material

    material = make_material(tmp_path / "material", steps=1)
    sums = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(13)]
    words = [{"prompt": word, "response": f"{word} {word}"} for word in ("ab", "cde", "f")]
    for name, rows in {"sums": sums, "words": words, "held_out": sums[:5]}.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (material / f"{name}.jsonl").write_text(lines)
    run_ranks(compare_runs, 2, material, tmp_path / "work")
