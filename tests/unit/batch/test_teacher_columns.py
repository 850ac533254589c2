"""A teacher's log-probs from the rollout to the advantage of a token: codec, checkpoint, exchange
between replicas, packed rows, beta, term.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl.batch.codec import from_bytes, joined, to_bytes
from megatron_rl.batch.pack import pack
from megatron_rl.batch.split import make_samples
from megatron_rl.batch.teacher_weights import with_teacher_weights
from megatron_rl.batch.transfer import decode_samples, encode_samples
from megatron_rl.config import load_config
from megatron_rl.loss.teacher import with_teacher_term
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.records import Prompt, Rollout, RolloutGroup, check_episode
from megatron_rl.records.packed import Sample
from megatron_rl.records.row_sets import top_of_rows
from megatron_rl.records.teacher_scores import TeacherScores, TeacherTop
from megatron_rl.rollout.group import Group
from megatron_rl.rollout.group_files import find_groups, read_groups, write_groups
from megatron_rl.rollout.scheduler import Scheduler
from megatron_rl.trainer.rollout_metrics import count_groups, count_teachers, derived
from tests.unit.batch.rollouts import make_rollout, make_tree

URL = "http://10.0.0.2:30000"


def taught(rollout: Rollout, seed: int = 0, top_k: int = 0) -> Rollout:
    rng = np.random.default_rng([seed, len(rollout.tokens)])

    def scores(count: int) -> TeacherScores:
        logprobs = -rng.random(count).astype(np.float32) - 0.1
        if not top_k:
            return TeacherScores(logprobs)
        ids = np.array([rng.permutation(64)[:top_k] for _ in range(count)])
        return TeacherScores(logprobs, TeacherTop.of(ids, -rng.random(ids.shape) - 0.1))

    return rollout.with_teacher([scores(s.response_length) for s in rollout.sequences])


def config(data="x", **teachers):
    return load_config(
        None, [], {"model": {"path": "m"}, "data": {"train": data}, "teachers": teachers}
    )


def group_of(*rollouts, rewards=(1.0, 0.0), source="") -> RolloutGroup:
    prompt = Prompt("q", "", (3, 4), "", source=source)
    rewards = np.array(rewards[: len(rollouts)], np.float32)
    return RolloutGroup(prompt, rollouts, rewards, rewards - rewards.mean())


def same(one: Rollout, other: Rollout) -> bool:
    pairs = zip(one.sequences, other.sequences, strict=True)
    return all(
        np.array_equal(a.teacher_logprobs, b.teacher_logprobs) and same_top(a, b) for a, b in pairs
    )


def same_top(one: Rollout, other: Rollout) -> bool:
    a, b = one.teacher_top, other.teacher_top
    if a is None or b is None:
        return a is b
    ids = np.array_equal(a.sets.ids(), b.sets.ids())
    return ids and np.array_equal(a.logprobs, b.logprobs)


def test_the_numbers_are_sent_bit_for_bit_and_bound_to_an_episode():
    tree, plain, unscored = taught(make_tree("t")), taught(make_rollout("p", 3, 5)), make_tree("u")
    (tree2, plain2, unscored2), _ = from_bytes(to_bytes([tree, plain, unscored]))
    assert same(tree, tree2) and same(plain, plain2) and not unscored2.is_taught
    assert plain2.teacher_logprobs.dtype == np.float32
    # the digests of episodes without a teacher are those of before
    assert unscored.episode.digest == make_tree("u").episode.digest
    changed = replace(tree, teacher_logprobs=tree.teacher_logprobs + 1)
    with pytest.raises(ValueError, match="rollout t: digest of its 3 sequences"):
        check_episode(changed)
    with pytest.raises(ValueError, match="digest of its 3 sequences"):
        joined(tree.alone.with_episode(digest=tree.episode.digest), make_tree("t").episode.earlier)


def test_the_most_probable_tokens_are_sent_and_bound_as_well():
    tree = taught(make_tree("t"), top_k=3)
    plain = taught(make_rollout("p", 3, 5), top_k=4)
    (tree2, plain2), _ = from_bytes(to_bytes([tree, plain]))
    assert same(tree, tree2) and same(plain, plain2) and plain2.teacher_top.logprobs.size == 20
    assert tree.episode.digest != taught(make_tree("t")).episode.digest
    other = replace(tree.teacher_top, logprobs=tree.teacher_top.logprobs - 1)
    with pytest.raises(ValueError, match="rollout t: digest of its 3 sequences"):
        check_episode(replace(tree, teacher_top=other))
    cut = replace(plain.teacher_top, logprobs=plain.teacher_top.logprobs[:-1])
    for refuse in (
        lambda wrong: from_bytes(to_bytes([wrong])),
        lambda wrong: pack([Sample(wrong, 1.0, teacher_weight=1.0)]),
    ):
        with pytest.raises(ValueError, match="rollout p: 5 sets with 19 log-probs of a teacher"):
            refuse(replace(plain, teacher_top=cut))


def test_an_episode_that_was_mixed_up_is_not_scored():
    tree = make_tree("t")
    wrong = replace(tree, rollout_logprobs=tree.rollout_logprobs - 1)
    with pytest.raises(ValueError, match="rollout t: digest"):
        taught(wrong)


@pytest.mark.parametrize("change", [lambda v: v[:-1], lambda v: np.append(v, v[:1])])
def test_a_wrong_number_of_log_probs_is_refused(change):
    rollout = taught(make_rollout("p", 3, 5))
    wrong = replace(rollout, teacher_logprobs=change(rollout.teacher_logprobs))
    with pytest.raises(ValueError, match=r"rollout p: \d teacher_logprobs for 5 sampled tokens"):
        pack([Sample(wrong, 1.0)])
    with pytest.raises(ValueError, match=r"[46] log-probs of a teacher for 5 sampled tokens"):
        from_bytes(to_bytes([wrong]))


def test_a_checkpoint_has_the_numbers_and_a_resumed_run_scores_only_the_others(tmp_path):
    prompts = [Prompt(name, "", (3, 4), "") for name in ("a", "b")]
    scored, sampled = (Group(prompt, 2, teacher="math") for prompt in prompts)
    for index in range(2):
        scored.put(index, taught(make_tree(f"a/{index}", seed=index)))
        sampled.put(index, make_rollout(f"b/{index}", 2, 3 + index))
    path = tmp_path / "rollouts_00000.safetensors"
    write_groups(path, [scored, sampled], [0, 1])
    restored = read_groups(find_groups(tmp_path), prompts, [0, 1], slice(None))
    scheduler = SimpleNamespace(cfg=config(math={"urls": [URL]}), restored=restored)
    again = [Scheduler._group(scheduler, prompt) for prompt in prompts]
    assert [group.is_complete for group in again] == [True, False]
    assert again[1].is_sampled and not scheduler.restored
    assert all(same(again[0].rollouts[i], scored.rollouts[i]) for i in range(2))


def test_samples_are_exchanged_with_their_beta():
    samples = [
        Sample(taught(make_rollout("p", 3, 5)), 0.3, teacher_weight=0.1),
        Sample(make_rollout("q", 2, 4), -0.3),
    ]
    decoded = decode_samples(encode_samples(samples))
    assert [sample.teacher_weight for sample in decoded] == [0.1, 0.0]
    assert same(decoded[0].rollout, samples[0].rollout)


def test_rows_have_beta_and_log_prob_where_their_label_was_sampled_and_is_learned():
    plain = replace(make_rollout("e", 3, 6), environment=((5, 7),))
    cut = {"rollout_logprobs": plain.rollout_logprobs[:4]}
    cut["policy_versions"] = plain.policy_versions[:4]
    first = taught(replace(plain, **cut, routes_digest=None))
    others = [taught(make_rollout(name, 2, 3, seed=7)) for name in "fg"]
    samples = [
        Sample(first, 0.5, teacher_weight=0.25),
        Sample(others[0], 0.5, teacher_weight=0.25, in_loss=False),
        Sample(others[1], 0.5),
        Sample(make_rollout("h", 2, 2), 0.5),
    ]
    batch = pack(samples, [12, 6, 6, 4, 2])
    expected, betas = np.zeros(30, np.float32), np.zeros(30, np.float32)
    expected[[2, 3, 6, 7]], betas[[2, 3, 6, 7]] = first.teacher_logprobs, 0.25
    np.testing.assert_array_equal(batch.teacher_logprobs, expected)
    np.testing.assert_array_equal(batch.teacher_weights, betas)
    assert pack(samples[3:]).teacher_logprobs is None


def test_rows_have_the_most_probable_tokens_where_their_label_is_taught():
    plain = replace(make_rollout("e", 3, 6), environment=((5, 7),))
    cut = {"rollout_logprobs": plain.rollout_logprobs[:4]}
    cut["policy_versions"] = plain.policy_versions[:4]
    first = taught(replace(plain, **cut, routes_digest=None), top_k=3)
    last = taught(make_rollout("g", 2, 3), top_k=2)
    samples = [
        Sample(first, 0.5, teacher_weight=0.25),
        Sample(taught(make_rollout("f", 2, 3), top_k=3), 0.5, teacher_weight=0.25, in_loss=False),
        Sample(taught(make_rollout("i", 2, 3), top_k=3), 0.5),
        Sample(last, 0.5, teacher_weight=1.0),
    ]
    batch = pack(samples, [12, 6, 6, 6, 2])
    assert batch.teacher_tops is not None and batch.top_index is not None
    # any selection of rows, as a context rank has them
    rows = np.array([31, 7, 25, 3, 2, 14, 26, 6, 20, 0])
    top = top_of_rows(batch.teacher_tops, batch.top_index.numpy()[rows])
    expected = {2: (first, 0), 3: (first, 1), 6: (first, 2), 7: (first, 3)}
    expected |= {25: (last, 0), 26: (last, 1), 27: (last, 2)}
    for place, row in enumerate(rows.tolist()):
        mine = top.sets.rows == place
        ids, logprobs = top.sets.ids[mine].tolist(), top.logprobs[mine].tolist()
        if row not in expected:
            assert not ids and top.sets.is_empty[place]
            continue
        rollout, token = expected[row]
        k = len(ids)
        part = slice(token * k, (token + 1) * k)
        assert ids == rollout.teacher_top.sets.ids()[part].tolist()
        assert logprobs == rollout.teacher_top.logprobs[part].tolist()
    assert pack(samples[2:3]).teacher_tops is None


def test_a_masked_row_loses_its_beta():
    rollout = taught(make_rollout("r", 2, 4), top_k=3)
    missing = np.zeros(5, bool)
    missing[2] = True
    sample = Sample(replace(rollout, missing_routes=missing), 0.5, teacher_weight=1.0)
    masked = pack([sample], mask_missing_routes=True)
    assert masked.teacher_weights.tolist() == [0, 1, 0, 1, 1, 0]
    assert masked.top_index.tolist() == [-1, 0, -1, 2, 3, -1]
    assert pack([sample]).teacher_weights.tolist() == [0, 1, 1, 1, 1, 0]
    assert pack([sample]).top_index.tolist() == [-1, 0, 1, 2, 3, -1]


def test_a_beta_without_log_probs_and_a_nan_are_refused():
    rollout = make_rollout("r", 2, 4)
    with pytest.raises(ValueError, match=r"rollout r: beta = 0.5, and it has no log-probs"):
        pack([Sample(rollout, 1.0, teacher_weight=0.5)])
    values = np.array([-1, np.nan, -1, -1], np.float32)
    with pytest.raises(ValueError, match="rollout r: a log-prob of its teacher is not finite"):
        pack([Sample(rollout.with_teacher([TeacherScores(values)]), 1.0)])


def test_beta_is_that_of_source_step_and_outcome():
    rollouts = [taught(make_rollout(f"r{k}", 2, 3 + k)) for k in range(2)]
    sources = [{"name": name, "path": name} for name in ("sums", "code", "free")]
    cfg = config(
        sources,
        math={"urls": [URL], "sources": ["sums"], "beta": 1.0, "beta_end": 0.5, "beta_steps": 2},
        coder={"urls": ["http://b"], "sources": ["code"], "teach": "failures", "beta": 0.2},
        none={"sources": ["free"]},
    )
    groups = [group_of(*rollouts, source=name) for name in ("sums", "code", "free")]

    def betas(step):
        return [g.teacher_weights.tolist() for g in with_teacher_weights(groups, cfg, step)]

    assert betas(1) == [[0.75, 0.75], [0.0, pytest.approx(0.2)], [0.0, 0.0]]
    assert betas(5)[0] == [0.5, 0.5]
    samples = list(make_samples(with_teacher_weights(groups, cfg, 1)[1], False))
    assert [sample.teacher_weight for sample in samples] == [0.0, pytest.approx(0.2)]
    unscored = replace(groups[0], rollouts=(rollouts[0], make_rollout("x", 2, 3)))
    with pytest.raises(ValueError, match="rollout x: teachers.math has not scored it"):
        with_teacher_weights([unscored], cfg, 1)
    plain = config()
    assert with_teacher_weights(groups, plain, 1)[0].teacher_weights is None


def test_a_response_without_the_runs_number_of_tokens_is_refused():
    loss = {"teacher_form": "reverse", "teacher_top_k": 3}
    cfg = config(math={"urls": [URL]})
    cfg = cfg.model_copy(update={"loss": cfg.loss.model_copy(update=loss)})
    right = taught(make_tree("r"), top_k=3)
    with_teacher_weights([group_of(right)], cfg, 0)
    for other in (taught(make_tree("x")), taught(make_tree("x"), top_k=2)):
        with pytest.raises(ValueError, match=r"rollout x/0: loss.teacher_top_k = 3, and teachers"):
            with_teacher_weights([group_of(right, other)], cfg, 0)


def test_the_term_is_added_where_beta_is_and_has_no_gradient():
    samples = [
        Sample(taught(make_rollout("a", 2, 4)), 0.3, teacher_weight=0.5),
        Sample(make_rollout("b", 2, 4), 0.1),
    ]
    batch = pack(samples)
    old = torch.linspace(-3, -1, 12)
    old[8] = float("nan")  # of a token without a teacher: nothing else may become NaN
    advantages = with_teacher_term(batch, old).advantages
    expected = batch.advantages.clone()
    rows = slice(1, 5)
    teacher = torch.from_numpy(samples[0].rollout.teacher_logprobs)
    expected[rows] += 0.5 * (teacher - old[rows])
    assert torch.equal(advantages, expected) and not advantages.requires_grad
    untaught = pack(samples[1:])
    assert with_teacher_term(untaught, old[:6]) is untaught


def test_the_reverse_kl_is_counted_per_token_and_by_source():
    sources = [{"name": name, "path": name} for name in ("sums", "code")]
    cfg = config(sources, math={"urls": [URL], "sources": ["sums"]}, none={"sources": ["code"]})
    tree, plain = taught(make_tree("t")), taught(make_rollout("p", 3, 5))
    groups = [group_of(tree, plain, source="sums"), group_of(taught(plain), source="code")]
    groups = with_teacher_weights(groups, cfg, 0)
    sums = MetricSums()
    count_teachers(sums, groups, cfg)
    gaps = np.concatenate(
        [s.rollout_logprobs.astype(float) - s.teacher_logprobs for s in (*tree.sequences, plain)]
    )
    assert sums.reduce(None, "cpu") == pytest.approx({
        "teacher/reverse_kl": gaps.mean(),
        "source/sums/teacher_reverse_kl": gaps.mean(),
        "teacher/higher_frac": (gaps < 0).mean(),
        "teacher/gap_abs_max": np.abs(gaps).max(),
        "teacher/beta_mean": 1.0,  # the other source has no teacher
    })  # fmt: skip


def test_sampled_tokens_that_the_teacher_finds_most_probable_are_counted():
    rollout = make_rollout("p", 3, 4)
    tokens = rollout.tokens[rollout.sampled]
    ids = np.stack([tokens, (tokens + 1) % 64], axis=1)
    logprobs = np.array([[-0.1, -3], [-0.1, -3], [-3, -0.1], [-0.1, -3]], np.float32)
    scores = TeacherScores(logprobs[:, 0], TeacherTop.of(ids, logprobs))
    sums = MetricSums()
    count_teachers(sums, [group_of(rollout.with_teacher([scores]))], config(math={"urls": [URL]}))
    assert sums.reduce(None, "cpu")["teacher/top1_frac"] == 0.75


@pytest.mark.parametrize("has_teacher", [True, False])
def test_a_step_of_equal_rewards_teaches_something_with_a_teacher(has_teacher):
    cfg = config(**({"math": {"urls": [URL]}} if has_teacher else {}))
    group = group_of(*(taught(make_rollout(f"r{k}", 2, 3)) for k in range(2)), rewards=(1.0, 1.0))
    sums = MetricSums()
    count_groups(sums, with_teacher_weights([group], cfg, 0), version=3)
    metrics = derived(sums.reduce(None, "cpu"))
    assert metrics["rollout/zero_advantages"] == (not has_teacher)
    assert metrics["rollout/zero_advantage_groups_frac"] == (not has_teacher)
