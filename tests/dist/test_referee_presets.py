"""Every preset through the real engine on episodes of several sequences, against the referee's
model (tests/referee.py) and the losses of tests/unit/loss/formulas.py: every gradient by its HF
name, in a second update, off policy.

Sequences of an episode lie in several micro-batches and on both replicas.  Elsewhere: `rspo`, which
needs the referee's routers (test_rspo.py), and `gspo`, whose bounds clip everything here
(test_referee.py).
"""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file

from megatron_rl.config.loss_presets import PRESETS
from megatron_rl.loss import token_keys
from tests.dist.launch import run_ranks
from tests.dist.test_referee import GRADIENT_LIMIT, samples_of, save_gradients
from tests.families import family_checkpoint, load_reference
from tests.referee import (
    Adam,
    Outcome,
    Recipe,
    Terms,
    errors,
    minirl,
    response_logprobs,
    rollout_routes,
    saved,
)
from tests.unit.loss import formulas

# some tokens are clipped; no gradient is: that would hide a factor
RECIPE = Recipe(lr=1e-4, clip_grad=1e9)
NAMES = sorted({*PRESETS} - {"rspo", "gspo"})
LAYOUTS = {
    "dp2": ({}, NAMES),
    "cp2": ({"cp": 2}, ["geo_rs", "gmpo", "icepop", "kl_cov", "seq_mis"]),
}
# of log mu around log pi_old, so that some sequences and tokens pass every filter
SPREADS = (5e-4, 0.4, 1.0)


def train(path, samples):
    """(samples with log mu near log pi_old, preset -> gradients in the second update, preset ->
    those without episodes).
    """
    model = load_reference(path, torch.float64)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        olds = {r.id: logprobs_of(model, r) for sample in samples for r in sample.rollout.sequences}
    mus = {
        name: (old + SPREADS[i % 3] * torch.randn(len(old), generator=g) + 0.7 * (i % 5 == 4))
        .clamp(max=-0.01)
        .float()
        for i, (name, old) in enumerate(olds.items())
    }
    samples = [replace(sample, rollout=with_logprobs(sample.rollout, mus)) for sample in samples]

    def terms():
        return [
            Terms(
                logprobs_of(model, r),
                olds[r.id],
                mus[r.id].double(),
                sample.advantage,
                sample.rollout.id,
            )
            for sample in samples
            for r in sample.rollout.sequences
        ]

    minirl(terms(), Outcome()).backward()
    Adam(model, RECIPE).step()
    batch = terms()
    rollouts = [r for sample in samples for r in sample.rollout.sequences]
    keys = {
        id(t.mu): token_keys(
            [r.id], torch.zeros(len(t.mu), dtype=torch.long), torch.from_numpy(r.sampled - 1), t.mu
        )
        for t, r in zip(batch, rollouts, strict=True)
    }
    with mock.patch.object(formulas, "keys_of", lambda mu: keys[id(mu)]):
        alone = [replace(t, episode=str(i)) for i, t in enumerate(batch)]
        return samples, *(
            {name: gradients(model, name, part) for name in NAMES} for part in (batch, alone)
        )


def logprobs_of(model, rollout):
    return response_logprobs(model, rollout, RECIPE.temperature, rollout_routes(rollout))[0]


def with_logprobs(rollout, mus):
    earlier = tuple(
        replace(each, rollout_logprobs=mus[each.id].numpy()) for each in rollout.episode.earlier
    )
    rollout = replace(rollout, rollout_logprobs=mus[rollout.id].numpy())
    return rollout.with_episode(earlier=earlier, digest=None)


def gradients(model, name, batch):
    model.zero_grad()
    formulas.loss(name, batch).backward(retain_graph=True)
    return saved(model, gradients=True)


def run_presets(root, samples):
    """On a rank: the gradients of each preset go to files."""
    import torch.distributed as dist

    from megatron_rl.batch.split import make_mini_batch
    from megatron_rl.config import LossConfig
    from megatron_rl.metrics.reduce import MetricSums
    from tests.dist.engines import make_engine

    dist.init_process_group("gloo")
    adam = dict(
        beta1=0.9, beta2=0.95, lr=RECIPE.lr, eps=RECIPE.eps, weight_decay=RECIPE.weight_decay
    )
    spread = {}
    for layout, (parallel, names) in LAYOUTS.items():
        engine = make_engine(
            root / "moe", parallel=parallel, optim={**adam, "clip_grad": RECIPE.clip_grad},
            loss={"name": "minirl"},
            measure=False, rollout={"temperature": RECIPE.temperature},
        )  # fmt: skip
        place = engine.parallel
        batch = make_mini_batch(
            samples[place.dp_rank :: place.dp_size],
            max_tokens=25,
            rule=engine.pack_rule,
            dp_group=place.dp_group,
        )
        spread[layout] = [part.rollout_ids for part in batch.micro_batches]
        old = engine.old_logprobs(batch, MetricSums(), replay="R3")
        engine.update(batch, old, MetricSums(), replay="R3")
        for name in names:
            engine.cfg = engine.cfg.model_copy(update={"loss": LossConfig(name=name)})
            engine.compute_gradient(batch, old, MetricSums(), replay="R3")
            save_gradients(engine, root / f"{layout}.{name}")
        place.destroy()
    dist.destroy_process_group()
    return spread


def test_every_preset_learns_from_episodes_as_the_referee(tmp_path: Path) -> None:
    family_checkpoint(tmp_path / "moe", "qwen3_moe", num_hidden_layers=4)
    samples, expected, alone = train(tmp_path / "moe", samples_of(tmp_path / "moe"))
    spread = run_ranks(run_presets, 2, tmp_path, samples, timeout=600)
    homes = [(rank, i) for rank, found in enumerate(spread) for i,
    ids in enumerate(found["dp2"]) for name in ids
             if name.startswith("r9")]  # fmt: skip
    assert len({rank for rank, _ in homes}) == 2 and len(set(homes)) == 3, (
        "spread over replicas and micro-batches"
    )
    failures = []
    for layout, (_, names) in LAYOUTS.items():
        for name in names:
            off = errors(load_file(tmp_path / f"{layout}.{name}"), expected[name])
            worst = max(off, key=off.get)
            failures += (
                [f"{layout} {name}: {worst} is off by {off[worst]:.2g}"]
                if off[worst] > GRADIENT_LIMIT
                else []
            )
    assert not failures, "\n".join(failures)
    for name in NAMES:
        assert any(tensor.abs().max() > 0 for tensor in expected[name].values()), name
        differs = max(errors(alone[name], expected[name]).values()) > 100 * GRADIENT_LIMIT
        assert differs == (PRESETS[name].aggregation != "token_mean"), (
            "episodes matter to all but token means"
        )
