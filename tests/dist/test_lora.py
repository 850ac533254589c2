"""Low-rank adapters against an independent trainer, in every layout: transformers with
W + (alpha / r) B A in the place of its weights, in float64.

Gradients of A and B, their norm, and the merged weights after the two updates of a step.  B starts
at random values here: with B = 0 the first gradient of A is 0, and an error in it is not seen.
"""

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import load_hf_config
from megatron_rl.weights.hf.entries import entries
from megatron_rl.weights.hf.mapping import to_hf, to_mcore
from tests.dist.launch import run_ranks
from tests.dist.test_checkpoint import SCHEDULE, change_layout, run_parts
from tests.dist.test_referee import (
    GRADIENT_LIMIT,
    LAYOUTS,
    MODEL_KEYS,
    WEIGHT_LIMIT,
    Case,
    halves,
    samples_of,
    save,
)
from tests.families import FAMILIES, family_checkpoint
from tests.referee import (
    BETA1,
    BETA2,
    Adam,
    Outcome,
    Recipe,
    backward,
    clip_gradient,
    load_reference,
    old_pass,
    saved,
)
from tests.tiny import random_checkpoint

RANK, ALPHA = 3, 6.0
PARTS = ("self_attention.linear_", "mlp.linear_fc", "experts.linear_fc")  # shared ones too
OUTSIDE = ("embedding.word_embeddings.weight", "output_layer.weight")
MORE_LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    4: {"ep2-dp2": {"ep": 2}, "tp2-ep2-etp2": {"tp": 2, "ep": 2, "recompute": "selective"}}
}
QUICK = [
    Case("qwen3_moe", "tp2", "minirl", "R3"),
    Case("qwen3_moe", "tp2-ep2", "minirl", "R2"),
    Case("qwen3_moe", "pp2-vp2", "grpo", "none"),
    Case("qwen3_moe", "cp2", "minirl", "R3"),
    Case("deepseek_v3", "tp2", "minirl", "R3"),
    Case("glm4_moe", "pp2", "minirl", "R2"),
    Case("qwen2_moe", "ep2-allgather", "dapo", "none"),
    Case("olmoe", "dp2", "minirl", "R3"),
    Case("qwen3", "tp2", "minirl", "none"),
]


def first_b(name: str, rows: int) -> torch.Tensor:
    """float32 [rows, RANK] of the whole weight with this canonical name."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(rows, RANK, generator=generator) * 0.05


def is_adapted(entry: Any, spec: Any) -> bool:
    if len(entry.hf[0][1]) != 2:
        return False
    is_outside = entry.name in OUTSIDE and not spec.tie_embeddings
    return is_outside or any(part in entry.name for part in PARTS)


def targets_of(path: Path) -> list[str]:
    tied = make_spec(load_hf_config(path)).tie_embeddings
    return ["all"] if tied else ["all", "embedding", "lm_head"]


class Folded(torch.nn.Module):
    """A and B of every target of a checkpoint, float64, in Megatron's row order, tp = 1.

    shared: the experts of a layer have one pair for each projection.
    """

    def __init__(self, path: Path, *, shared: bool) -> None:
        from megatron_rl.engine.lora import initial_a

        super().__init__()
        self.path, self.spec = path, make_spec(load_hf_config(path))
        self.start = load_file(path / "model.safetensors")
        self.entries = [e for e in entries(self.spec) if is_adapted(e, self.spec)]
        number = r"(?<=\.experts\.linear_fc[12]\.weight)\d+$"
        self.names = [re.sub(number, "", e.name) if shared else e.name for e in self.entries]
        self.a, self.b = torch.nn.ParameterList(), torch.nn.ParameterList()
        for name, entry in zip(self.names, self.entries, strict=True):
            if name in self.names[: len(self.a)]:
                first = self.names.index(name)
                self.a.append(self.a[first])
                self.b.append(self.b[first])
                continue
            rows, width = self.whole(entry, self.start).shape
            self.a.append(initial_a(name, RANK, width, seed=0).double())
            self.b.append(first_b(name, rows).double())

    def whole(self, entry: Any, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return to_mcore(entry, [tensors[name].double() for name in entry.hf_names], self.spec, 0, 1)

    @torch.no_grad()
    def fold(self) -> dict[str, torch.Tensor]:
        tensors = {name: tensor.double() for name, tensor in self.start.items()}
        for entry, a, b in zip(self.entries, self.a, self.b, strict=True):
            weight = self.whole(entry, self.start) + ALPHA / RANK * b @ a
            tensors |= dict(to_hf(entry, [weight], self.spec))
        return tensors

    def model(self) -> torch.nn.Module:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(self.path, folder, dirs_exist_ok=True)
            save_file(self.fold(), Path(folder) / "model.safetensors", {"format": "pt"})
            return load_reference(Path(folder), torch.float64)

    def take_gradients(self, weights: dict[str, torch.Tensor]) -> None:
        """Chain rule: dA = s B' dW, dB = s dW A', summed over the weights of a pair."""
        for parameter in self.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for entry, a, b in zip(self.entries, self.a, self.b, strict=True):
            gradient = ALPHA / RANK * self.whole(entry, weights)
            a.grad += b.data.T @ gradient
            b.grad += gradient @ a.data.T


def train_adapters(folded: Folded, mini_batches: list[list], recipe: Recipe) -> Outcome:
    """One step of len(mini_batches) updates; gradients by (name, factor), weights by HF name."""
    outcome = Outcome()
    model = folded.model()
    old, adam = old_pass(model, mini_batches, recipe), Adam(folded, recipe)
    for batch in mini_batches:
        backward(model, batch, old, recipe, outcome)
        folded.take_gradients(saved(model, gradients=True))
        outcome.norms.append(clip_gradient(folded, recipe.clip_grad))
        outcome.gradients.append(
            {
                f"{name} {factor}": parameter.grad.clone()
                for name, *pair in zip(folded.names, folded.a, folded.b, strict=True)
                for factor, parameter in zip("ab", pair, strict=True)
            }
        )
        adam.step()
        model = folded.model()
    outcome.weights = folded.fold()
    return outcome


def test_adapters_train_as_the_referee(tmp_path: Path) -> None:
    check_cases(tmp_path, 2, QUICK)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_in_every_layout_of_a_family(tmp_path: Path, family: str, world: int) -> None:
    from tests.dist.test_referee import every_case

    check_cases(tmp_path, world, [case for case in every_case(family, world) if is_new(case)])


def is_new(case: Case) -> bool:
    """One loss per layout: the loss does not see adapters."""
    return case.loss == "minirl"


def test_adapters_load_into_other_layouts_and_another_base_is_refused(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "moe", vocab_size=61)  # two tensor ranks pad it
    lora = {"rank": RANK, "targets": ["all", "embedding", "lm_head"]}
    targets = [{"ep": 2}, {"tp": 2, "ep": 2, "etp": 1}, {"pp": 2}]
    for name, distributed in (("plain", False), ("scattered", True)):
        optim = {"distributed": distributed}
        run_ranks(
            run_parts,
            2,
            (change_layout, checkpoint, tmp_path / name, optim, {"tp": 2}, targets, lora),
            (other_base, checkpoint, tmp_path / name, optim, lora),
        )


def other_base(checkpoint: Path, folder: Path, optim: dict[str, Any], lora: dict[str, Any]) -> None:
    """On a rank: the same shapes with one other bit in one weight of the base."""
    import torch.distributed as dist

    from megatron_rl.checkpoint.checkpointer import Checkpointer
    from megatron_rl.checkpoint.folder import CheckpointError
    from tests.dist.engines import make_engine

    changed = checkpoint.with_name(f"{folder.name}_changed")
    if dist.get_rank() == 0:
        shutil.copytree(checkpoint, changed)
        tensors = load_file(changed / "model.safetensors")
        name = next(name for name in tensors if name.endswith("q_proj.weight"))
        tensors[name].view(torch.int32)[3, 3] ^= 1
        save_file(tensors, changed / "model.safetensors", {"format": "pt"})
    dist.barrier()
    change = {"allow_changes": ["model.path"]}
    engine = make_engine(changed, lora=lora, optim=SCHEDULE | optim, checkpoint=change)
    with pytest.raises(CheckpointError, match="its adapters belong to other weights"):
        Checkpointer(engine, folder).load(folder / "step_000002")
    engine.parallel.destroy()


def check_cases(root: Path, world: int, cases: list[Case], *, shared: bool = False) -> None:
    for family in {case.family for case in cases}:
        family_checkpoint(root / family, family, num_hidden_layers=4)
    results = run_ranks(run_engines, world, root, cases, shared, timeout=3000)
    referees: dict[tuple[str, str, str], Outcome] = {}
    lines = []
    for index, case in enumerate(cases):
        key = (case.family, case.loss, case.replay)
        if key not in referees:
            path = root / case.family
            recipe = Recipe(loss=case.loss, replay=case.replay)
            folded = Folded(path, shared=shared)
            referees[key] = train_adapters(folded, halves(samples_of(path)), recipe)
        expected = referees[key]
        assert min(expected.norms) > 2 * Recipe().clip_grad, "gradient clipping is idle"
        lines += compare_gradients(case, [result[index] for result in results], expected)
        start = load_file(root / case.family / "model.safetensors")
        found = load_file(root / f"{index}.weights")
        for name, tensor in expected.weights.items():
            moved = tensor - start[name]
            error = float((found[name].double() - start[name] - moved).norm())
            if error > WEIGHT_LIMIT * float(moved.norm()) + 1e-6:
                lines.append(f"{case} {name}: weights off by {error:.2g} of {moved.norm():.2g}")
    assert not lines, "\n".join(lines)


def compare_gradients(case: Case, ranks: list[Any], expected: Outcome) -> list[str]:
    """Each rank's shard of every gradient, by where it is in the whole one."""
    lines = [
        f"{case}: gradient norm {a} instead of {b}"
        for a, b in zip(ranks[0]["norms"], expected.norms, strict=True)
        if abs(a / b - 1) > GRADIENT_LIMIT
    ]
    seen = set()
    for rank, number in ((rank, number) for rank in ranks for number in range(2)):
        for name, shard in (rank["gradients"][number] if rank["gradients"] else {}).items():
            seen.add(name)
            whole = expected.gradients[number][name]
            part = whole
            if shard["at"] is not None:
                part = padded(whole)[shard["at"]] if name.endswith("b") else whole[:, shard["at"]]
            error = (torch.tensor(shard["values"]) - part).norm() / whole.norm()
            if error > GRADIENT_LIMIT:
                lines.append(f"{case} {name}: gradient {number} off by {error:.2g}")
    if case.layout != "dp2":  # the distributed optimizer scatters gradients
        assert seen == set(expected.gradients[0])
    return lines


def run_engines(root: Path, cases: list[Case], shared: bool) -> list[dict[str, Any]]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = [run_engine(root, index, case, shared) for index, case in enumerate(cases)]
    dist.destroy_process_group()
    return found


def run_engine(root: Path, index: int, case: Case, shared: bool) -> dict[str, Any]:
    import torch.distributed as dist

    from megatron_rl.batch.split import make_mini_batch
    from megatron_rl.metrics.reduce import MetricSums
    from megatron_rl.plan.memory import trained_parameters
    from tests.dist.engines import make_engine

    recipe = Recipe(loss=case.loss, replay=case.replay)
    world = dist.get_world_size()
    layout = dict((LAYOUTS[world] | MORE_LAYOUTS.get(world, {}))[case.layout])
    optim = layout.pop("optim", {})
    model = {key: layout.pop(key) for key in MODEL_KEYS if key in layout}
    adam = dict(
        beta1=BETA1, beta2=BETA2, lr=recipe.lr, eps=recipe.eps, weight_decay=recipe.weight_decay
    )
    engine = make_engine(
        root / case.family,
        parallel=layout,
        model=model,
        optim={**adam, "clip_grad": recipe.clip_grad, **optim},
        loss={"name": case.loss},
        lora={
            "rank": RANK,
            "alpha": ALPHA,
            "targets": targets_of(root / case.family),
            "shared_pairs": shared,
        },
        replay=case.replay,
        measure=case.family != "qwen3",
        rollout={"temperature": recipe.temperature},
    )
    set_b(engine)
    place = engine.parallel
    trained = [p.numel() for chunk in engine.chunks for p in chunk.parameters() if p.requires_grad]
    assert sum(trained) == trained_parameters(engine.spec, engine.cfg, place.pp_rank).total
    batches = [
        make_mini_batch(
            half[place.dp_rank :: place.dp_size],
            max_tokens=25,
            rule=engine.pack_rule,
            dp_group=place.dp_group,
        )
        for half in halves(samples_of(root / case.family))
    ]
    old = [engine.old_logprobs(batch, MetricSums(), replay=case.replay) for batch in batches]
    norms, gradients = [], []
    for batch, its_old in zip(batches, old, strict=True):
        sums = MetricSums()
        engine.update(batch, its_old, sums, replay=case.replay)
        norms.append(sums.reduce(dist.group.WORLD, place.device)["optim/grad_norm"])
        if not engine.cfg.optim.distributed:
            gradients.append(dict(shards(engine)))
    save(engine, root / f"{index}.weights")
    check_copies(engine)
    place.destroy()
    return {"norms": norms, "gradients": gradients}


def positions(engine: Any, adapter: Any) -> list[int]:
    """Which rows of B (columns of A, where W is cut by columns) of the whole this rank has: the
    mapping is given numbers in the place of weights.  -1: a row of padding.
    """
    entry = adapter.entry
    group = engine.parallel.etp_group if entry.rule.is_expert else engine.parallel.tp_group
    hf, start = [], 1  # padding is 0
    for _, shape in entry.hf:
        hf.append(torch.arange(start, start + shape[0] * shape[1]).view(shape))
        start += hf[-1].numel()
    whole = to_mcore(entry, hf, engine.spec, 0, 1)
    shard = to_mcore(entry, hf, engine.spec, group.rank(), group.size())
    if entry.rule.kind == "row":
        whole, shard = whole.T, shard.T
    place = {number: index for index, number in enumerate(whole[:, 0].tolist())}
    return [place.get(number, -1) for number in shard[:, 0].tolist()]


def padded(whole: torch.Tensor) -> torch.Tensor:
    """Rows of padding, at index -1, have neither values nor gradients."""
    return torch.cat([whole, whole.new_zeros(1, whole.shape[1])])


@torch.no_grad()
def set_b(engine: Any) -> None:
    for adapter in engine.adapters.all:
        entry = adapter.entry
        whole = first_b(entry.name, sum(shape[0] for _, shape in entry.hf))
        if entry.rule.kind != "row":
            whole = padded(whole)[positions(engine, adapter)]
        adapter.b.copy_(whole)
    # an optimizer with copies of its own takes them from the parameters
    for optimizer in engine.optimizer.core.chained_optimizers:
        optimizer.reload_model_params()


def shards(engine: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for adapter in engine.adapters.all:
        cut = "a" if adapter.entry.rule.kind == "row" else "b"
        for factor, parameter in (("a", adapter.a), ("b", adapter.b)):
            values = parameter.main_grad.double().tolist()
            at = positions(engine, adapter) if factor == cut else None
            yield f"{adapter.entry.name} {factor}", {"values": values, "at": at}


def test_a_run_starts_as_its_base_and_copies_stay_equal(tmp_path: Path) -> None:
    run_ranks(compare_with_base, 2, random_checkpoint(tmp_path / "moe"))


def compare_with_base(checkpoint: Path) -> None:
    """On a rank: log-probs and export before the first update, and those of the reference policy
    after five, are bit-identical to a model without adapters; common factors to the other ranks'.
    """
    import torch.distributed as dist

    from megatron_rl.metrics.reduce import MetricSums
    from tests.dist.engines import make_engine, random_batch
    from tests.dist.test_engine import one_update

    dist.init_process_group("gloo")
    fused = {"fused_lm_head": True}
    lora = {"rank": RANK, "rslora": True, "targets": ["all", "embedding", "lm_head"]}
    for parallel, model in (({"tp": 2}, {}), ({}, {"recompute": "full"}), ({"tp": 2}, fused)):
        found = {}
        for rank in (0, RANK):
            engine = make_engine(
                checkpoint,
                parallel=parallel,
                model=model,
                lora=lora if rank else {},
                loss={"kl_coef": 0.1},
            )
            first = engine.old_logprobs(random_batch(engine), MetricSums(), replay="R3")
            weights = {n: t.clone() for n, t in engine.export() if t is not None}
            found[rank] = first.logprobs, weights
            if rank:
                for seed in range(5):
                    one_update(engine, random_batch(engine, seed=seed))
                again = engine.old_logprobs(random_batch(engine), MetricSums(), replay="R3")
                assert not again.logprobs[0].equal(first.logprobs[0]), "the adapters learned"
                for ours, theirs in zip(again.reference, found[0][0], strict=True):
                    assert ours.equal(theirs)
                check_copies(engine)
            engine.parallel.destroy()
        for ours, theirs in zip(found[RANK][0], found[0][0], strict=True):
            assert ours.equal(theirs)
        assert all(tensor.equal(found[0][1][name]) for name, tensor in found[RANK][1].items())
    dist.destroy_process_group()


def check_copies(engine: Any) -> None:
    """Every factor is bit-equal on all ranks that have the same part of it."""
    import torch.distributed as dist

    parallel = engine.parallel
    for adapter in engine.adapters.all:
        rule = adapter.entry.rule
        replicas = parallel.expert_dp_group if rule.is_expert else parallel.dp_cp_group
        whole = parallel.tp_group if rule.kind == "replicated" else None
        for factor, common in ((adapter.a, adapter.summed_a), (adapter.b, adapter.summed_b)):
            assert factor.abs().max() > 0
            for group in filter(None, (common, replicas, whole)):
                copies = [torch.empty_like(factor) for _ in range(group.size())]
                dist.all_gather(copies, factor.detach(), group=group)
                assert all(copy.equal(factor) for copy in copies)
