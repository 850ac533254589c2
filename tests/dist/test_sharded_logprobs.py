"""Log-probs over real ranks: vocabulary shards against one rank, and an engine with the fused LM
head against one without.
"""

import tempfile
from pathlib import Path

import pytest

from tests.dist.launch import run_ranks
from tests.tiny import random_checkpoint

# (real, padded): of 4 ranks, none, one partly and two wholly padding
VOCABULARIES = ((64, 64), (61, 64), (40, 64))


def compare_shards():
    """On one of four ranks: TP4 and TP2 (twice) against the entire vocabulary on this rank; largest
    differences.
    """
    import torch.distributed as dist

    import megatron_rl.distributed  # noqa: F401  (CPU support first)

    dist.init_process_group("gloo")
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    worst = {}
    for group in (dist.group.WORLD, pairs[dist.get_rank() // 2]):
        for vocab, padded in VOCABULARIES:
            for sets in (False, True):
                worst[group.size(), vocab, "logits", sets] = compare_logits(
                    group, vocab, padded, sets
                )
            for sequence_parallel in (False, True):
                for sets in (False, True):
                    worst[group.size(), vocab, "fused", sequence_parallel, sets] = compare_fused(
                        group, vocab, padded, sequence_parallel, sets
                    )
    dist.destroy_process_group()
    return worst


def make_labels(vocab, padded, size, rows):
    """Random labels, with the first and the last of every shard among them."""
    import torch

    labels = torch.randint(0, vocab, (rows,))
    borders = [
        label
        for i in range(size)
        for label in (i * padded // size, (i + 1) * padded // size - 1)
        if label < vocab
    ]
    labels[: len(borders)] = torch.tensor(borders)
    return labels


def make_sets(labels, vocab):
    """Sets of 1 to 4 ids, on one shard or over all; every fifth row has none."""
    import numpy as np

    from megatron_rl.records.row_sets import sets_of_tokens
    from megatron_rl.records.token_sets import TokenSets

    sizes = np.arange(len(labels)) % 4 + 1
    steps = [vocab // 4 if row % 2 else 1 for row in range(len(labels))]
    ids = [
        (labels.tolist()[row] + step * steps[row]) % vocab
        for row, size in enumerate(sizes)
        for step in range(size)
    ]
    tokens = np.where(np.arange(len(labels)) % 5 == 4, -1, np.arange(len(labels)))
    return sets_of_tokens([TokenSets.of(sizes, np.array(ids))], tokens)


def difference(got, expected):
    """Largest, relative to values above one: a float32 log-prob of -25 has a rounding error of
    2e-6.
    """
    return float(((got - expected).abs() / expected.abs().clamp(min=1.0)).max())


def compare_logits(group, vocab, padded, sets):
    import torch

    from megatron_rl.engine import shards
    from megatron_rl.engine.logprobs import token_logprobs

    torch.manual_seed(0)
    shards.BLOCK_BYTES["cpu"] = 7 * 4 * padded // group.size()  # seven rows at a time
    rank, size, rows = group.rank(), group.size(), 24
    columns = slice(rank * padded // size, (rank + 1) * padded // size)
    labels, weights = make_labels(vocab, padded, size, rows), [torch.randn(rows), torch.randn(rows)]
    logits = 5 * torch.randn(rows, padded)
    whole, mine = logits.clone().requires_grad_(), logits[:, columns].clone().requires_grad_()
    kept = make_sets(labels, vocab) if sets else None
    expected = token_logprobs(whole, labels, kept, vocab_size=vocab, temperature=0.9, top=kept)
    got = token_logprobs(
        mine, labels, kept, vocab_size=vocab, temperature=0.9, tp_group=group, top=kept
    )
    differentiate(expected, weights)
    differentiate(got, weights)
    pairs = [*used(got, expected), (mine.grad, whole.grad[:, columns])]
    return [difference(a, b) for a, b in pairs]


def differentiate(outputs, weights):
    """Backward from log-probs and entropies and, with sets, from the log-probs of their ids."""
    import torch

    parts = [*outputs[:2]]
    if outputs.top is not None:
        parts.append(outputs.top)
        weights = [*weights, torch.linspace(-1, 1, len(outputs.top))]
    torch.autograd.backward(parts, weights)


def used(got, expected):
    """The outputs in pairs; the last three are None without sets."""
    return [(a, b) for a, b in zip(got, expected, strict=True) if b is not None]


def compare_fused(group, vocab, padded, sequence_parallel, sets):
    import torch

    from megatron_rl.engine.fused_logprobs import HeadSettings, fused_logprobs

    torch.manual_seed(0)
    rank, size, sequences, rows = group.rank(), group.size(), 2, 12
    columns, part = slice(rank * padded // size, (rank + 1) * padded // size), slice(None)
    if sequence_parallel:
        part = slice(rank * rows // size, (rank + 1) * rows // size)
    labels = make_labels(vocab, padded, size, sequences * rows)
    weights = [torch.randn(sequences * rows), torch.randn(sequences * rows)]
    hidden, head = torch.randn(sequences, rows, 16), torch.randn(padded, 16)
    whole, whole_head = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    mine, my_head = hidden[:, part].clone().requires_grad_(), head[columns].clone().requires_grad_()
    kept = make_sets(labels, vocab) if sets else None
    plain = HeadSettings(vocab_size=vocab)
    expected = fused_logprobs(whole, whole_head, labels, kept, plain, kept)
    got = fused_logprobs(
        mine,
        my_head,
        labels,
        kept,
        HeadSettings(
            vocab_size=vocab, tp_group=group, sequence_parallel=sequence_parallel, chunk_rows=5
        ),
        kept,
    )
    differentiate(expected, weights)
    differentiate(got, weights)
    pairs = [
        *used(got, expected),
        (mine.grad, whole.grad[:, part]),
        (my_head.grad, whole_head.grad[columns]),
    ]
    return [difference(a, b) for a, b in pairs]


def test_shards_of_the_vocabulary_equal_one_rank():
    for worst in run_ranks(compare_shards, 4):
        assert len(worst) == 2 * len(VOCABULARIES) * 6
        for case, differences_ in worst.items():
            values = differences_[: 5 if case[-1] else 2]
            gradients = differences_[len(values) :]
            assert len(gradients) == (2 if "fused" in case else 1)
            assert max(values) <= 1e-6, (case, values)
            # d hidden: a sum of sums
            assert max(gradients) <= (3e-6 if "fused" in case else 1e-6), (case, gradients)


LAYOUTS = {
    "tp1": {"ep": 2},
    "tp2_sp": {"tp": 2},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
}


@pytest.fixture(scope="module")
def checkpoints():
    with tempfile.TemporaryDirectory() as folder:
        yield [
            random_checkpoint(
                Path(folder) / f"tied_{tied}", vocab_size=61, tie_word_embeddings=tied
            )
            for tied in (False, True)
        ]


def compare_engines(checkpoints):
    """On one of two ranks: {case: differences of old log-probs, metrics, gradients, updates} of the
    two forms.

    The untied checkpoint's tokens have kept sets.
    """
    import torch.distributed as dist

    from megatron_rl.engine import fused_logprobs

    # a handful of rows: every micro-batch takes several chunks
    fused_logprobs.CHUNK_BYTES["cpu"] = 5 * 64 * 4
    dist.init_process_group("gloo")
    found = {}
    for tied, checkpoint in enumerate(checkpoints):
        for name, layout in LAYOUTS.items():
            for dtype in ("float32", "bfloat16") if name == "tp2_sp" else ("float32",):
                plain, fused = (
                    one_update(checkpoint, layout, dtype, fused, sets=not tied)
                    for fused in (False, True)
                )
                found[name, tied, dtype] = differences(plain, fused)
    dist.destroy_process_group()
    return found


def one_update(checkpoint, layout, dtype, fused, sets):
    import torch
    import torch.distributed as dist

    from megatron_rl.metrics.reduce import MetricSums
    from tests.dist.engines import make_engine, random_batch

    engine = make_engine(
        checkpoint,
        parallel=layout,
        model={"fused_lm_head": fused, "dtype": dtype},
        # smooth steps, far above rounding
        optim={"lr": 100.0, "eps": 1e-2, "distributed": layout == LAYOUTS["tp1"]},
    )
    if engine.parallel.is_last_stage:
        x = torch.zeros(2, 3)
        assert not fused or engine.chunks[-1].output_layer(x)[0] is x
    parameters = [parameter for chunk in engine.chunks for parameter in chunk.parameters()]
    before = [parameter.detach().clone() for parameter in parameters]
    sums = MetricSums()
    batch = random_batch(engine, with_sets=sets)
    if sets and dtype == "float32":
        check_old_logprobs(engine, batch)
    old = engine.old_logprobs(batch, sums, replay="R3")
    engine.update(batch, old, sums, replay="R3")
    metrics = sums.reduce(dist.group.WORLD, engine.parallel.device)
    gradients = [parameter.main_grad.clone() for parameter in parameters]
    updates = [
        parameter.detach() - start for parameter, start in zip(parameters, before, strict=True)
    ]
    engine.parallel.destroy()
    return torch.cat(old.logprobs) if old.logprobs else torch.zeros(0), metrics, gradients, updates


def check_old_logprobs(engine, batch):
    """log pi~(y) of the layout against log pi of every id of the set, one pass each with it as the
    label, on the same rows.
    """
    from dataclasses import replace

    import torch

    from megatron_rl.metrics.reduce import MetricSums
    from megatron_rl.records.row_sets import sets_of_tokens

    def old_logprobs(micro_batches):
        given = replace(batch, micro_batches=tuple(micro_batches))
        return engine.old_logprobs(given, MetricSums(), replay="R3").logprobs

    got, whole = old_logprobs(batch.micro_batches), []
    for slot in range(3):  # the i-th id of each set, else its first again
        parts = []
        for part in batch.micro_batches:
            kept = sets_of_tokens(part.sampling_masks, part.set_index.numpy())
            first, sizes = (
                torch.from_numpy(kept.offsets[:-1]),
                torch.from_numpy(kept.offsets).diff(),
            )
            place = first + torch.where(sizes > slot, slot, 0)
            labels = torch.where(
                sizes > 0, kept.ids[place.clamp(max=len(kept.ids) - 1)], part.labels
            )
            parts.append(replace(part, labels=labels, sampling_masks=None, set_index=None))
        whole.append([old_logprobs(parts), parts])
    plain = old_logprobs(
        [replace(part, sampling_masks=None, set_index=None) for part in batch.micro_batches]
    )
    for index, part in enumerate(batch.micro_batches if got else ()):
        rows = engine.layout.model_rows(part.cu_seqlens)
        kept = sets_of_tokens(part.sampling_masks, part.set_index.numpy())
        sizes = torch.from_numpy(kept.offsets).diff()[rows]
        slots = torch.stack([logprobs[index] for logprobs, _ in whole])
        used = torch.arange(3)[:, None] < sizes
        mass = torch.where(used, slots.double(), float("-inf")).logsumexp(0)
        expected = torch.where(sizes > 0, plain[index].double() - mass, plain[index].double())
        assert float((got[index].double() - expected).abs().max()) <= 5e-6
    if got:
        assert max(float((a - b).abs().max()) for a, b in zip(got, plain, strict=True)) > 0.1, (
            "the sets have an effect"
        )


def differences(plain, fused):
    """Largest absolute difference of log-probs; of metrics, gradients and updates relative to the
    largest of their kind.
    """

    def relative(a, b):
        return max(
            float((x - y).abs().max() / max(float(x.abs().max()), 1e-30))
            for x, y in zip(a, b, strict=True)
        )

    kept = [name for name in ("train/kept_entropy", "train/kept_mass") if name in plain[1]]
    names = ["optim/grad_norm", "train/entropy", "train/loss", *kept]
    metrics = [[result[1][name] for name in names] for result in (plain, fused)]
    worst = max(abs(a - b) / abs(a) for a, b in zip(*metrics, strict=True))
    assert metrics[0][0] > 0 and any(float(update.abs().max()) > 0 for update in plain[3])
    logprobs = float((plain[0] - fused[0]).abs().max()) if len(plain[0]) else 0.0
    return logprobs, worst, relative(plain[2], fused[2]), relative(plain[3], fused[3])


def test_the_fused_lm_head_trains_the_same(checkpoints):
    for found in run_ranks(compare_engines, 2, checkpoints, timeout=500):
        assert len(found) == 2 * (len(LAYOUTS) + 1)
        for case, measured in found.items():
            limits = (1e-5,) * 4 if case[2] == "float32" else (1e-3, 1e-3, 2e-2, 3e-2)
            assert all(value <= limit for value, limit in zip(measured, limits, strict=True)), (
                case,
                measured,
            )
