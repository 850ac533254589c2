"""What LiveRollouts asks of servers, scheduler and rewards, in which order, and what it counts.

They are stand-ins that record their calls.  On real ranks and a server:
tests/dist/test_dynamic_sampling.py, test_over_sample_ranks.py, tests/e2e/test_train.py.
"""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_rl.config import load_config
from megatron_rl.config.sections.rollout import Truncation
from megatron_rl.data.prompts import PromptSource
from megatron_rl.distributed.node_ranks import NodeRanks
from megatron_rl.metrics.events import Events
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.reward.failures import KINDS
from megatron_rl.reward.pool import Rewarded, RewardPool
from megatron_rl.rollout.client.counters import CallStats
from megatron_rl.rollout.group import Group
from megatron_rl.rollout.inference import SamplingStopped
from megatron_rl.rollout.missing_routes import MissingRouteCounts
from megatron_rl.rollout.scheduler import Sampled
from megatron_rl.trainer import live_rollouts
from megatron_rl.trainer.live_rollouts import LiveRollouts
from megatron_rl.trainer.rollout_metrics import derived
from megatron_rl.trainer.step_meter import StepMeter
from megatron_rl.weights.sync.push_records import PushReport
from tests.unit.batch.rollouts import make_rollout
from tests.unit.trainer.recorded import Calls
from tests.unit.trainer.test_events_of_a_step import events_of

PROMPTS, GROUP = 2, 2
TOKENIZER = SimpleNamespace(
    eos_token_id=1, batch_decode=lambda rows, **_: [f"text of {len(row)}" for row in rows]
)
CPU = torch.device("cpu")


def make_group(name, rewards=None, *, version=3, missing=0):
    rollouts = [make_rollout(f"{name}/{k}", 2, 3 + k, layers=1) for k in range(GROUP)]
    versions = [np.full(r.response_length, version, np.int32) for r in rollouts]
    flags = [np.arange(len(r.tokens) - 1) >= len(r.tokens) - 1 - missing for r in rollouts]
    rollouts = tuple(
        replace(r, policy_versions=v, missing_routes=f if missing else None)
        for r, v, f in zip(rollouts, versions, flags, strict=True)
    )
    return RolloutGroup(Prompt(name, "", (1, 2), "7"), rollouts, rewards)


@pytest.fixture
def live(tmp_path):
    """live(**sections): (LiveRollouts of a one-rank job, the calls of its stand-ins)."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def made(**sections):
        calls = Calls()
        rewards = iter(sections.pop("rewards", ()))
        base = {
            "run": {"prompts_per_step": PROMPTS, "group_size": GROUP},
            "model": {"path": "m"},
            "data": {"train": "d"},
        }
        base["rollout"] = {"max_response_tokens": 50, "temperature": 0.7}
        base["replay"] = {"mode": "R3"}
        cfg = load_config(
            None, [], base | {name: base.get(name, {}) | keys for name, keys in sections.items()}
        )

        def score_episodes(episodes, *, shaped, failed, is_last):
            calls.append(
                (
                    "score",
                    [[e.response for e in group] for group in episodes],
                    (shaped, failed, is_last),
                )
            )
            return [[Rewarded(next(rewards, 0.5)) for _ in group] for group in episodes]

        inference = SimpleNamespace(
            servers_have_memory=True, dtype="bfloat16", restarts=0, teacher_seconds=dict,
            give_memory_to_trainer=calls.note("release"),
            push=calls.note("push"), last_push=None,
            generate=lambda prompts, count, **settings: (
                calls.append(("generate", ([prompt.id for prompt in prompts], count), settings))
                or [make_group(prompt.id) for prompt in prompts]
            ),
        )  # fmt: skip
        rewards_pool = RewardPool(cfg.reward)
        rewards_pool.score_episodes = score_episodes
        rewards_pool.counters.update(
            {kind: number for number, kind in enumerate(KINDS, 5)}, unformatted=3, scored=20
        )
        leader = SimpleNamespace(
            client=SimpleNamespace(stop=calls.note("stop"), teachers=None,
            counters=SimpleNamespace(totals=lambda: {
                "rollout/stale_tokens_total": 30.0, "rollout/stale_samples_total": 2.0,
                "rollout/retries_total": 4.0,
            })),
            rewards=rewards_pool,
            recorder=SimpleNamespace(
                record=calls.note("record"),
                choice=SimpleNamespace(of=lambda step, count: {step} & set(range(count))),
            ),
        )  # fmt: skip
        parallel = SimpleNamespace(
            rank=0, dp_rank=0, dp_size=1, device=CPU, host_group=None, is_replica_leader=True,
            replica_leader=0,
            node=NodeRanks(dist.group.WORLD, (0,), None),
        )  # fmt: skip
        console = SimpleNamespace(
            log=calls.note("log"), progress=lambda *args: nullcontext((calls.note("advance"), args))
        )
        prompts = PromptSource(
            [Prompt(f"p{n}", "", (1, 2), "7") for n in range(9)], seed=0, shuffle=False
        )
        parts = (
            cfg,
            parallel,
            "engine",
            TOKENIZER,
            prompts,
            {},
            inference,
            leader,
            StepMeter(),
            console,
        )
        source = LiveRollouts(*parts, policy_version=3, events=Events(tmp_path / "events.jsonl"))
        source.scheduler = SimpleNamespace(
            can_take=lambda count: True,
            prepare_sync=calls.note("prepare_sync"), end_sampling=calls.note("end_sampling"),
            step_done=calls.note("step_done"),
            prompts_state=lambda: {"epoch": 0}, files=lambda *,
            is_step_done: {"is_step_done": is_step_done},
            restore=calls.note("restore", "  2 groups in flight"),
        )  # fmt: skip
        return source, calls

    yield made
    dist.destroy_process_group()


def sampled(*groups, gaps=None, seconds=2.0):
    stats = CallStats(
        seconds=seconds, tokens=100, prompt_tokens=40, cached_tokens=10, request_seconds=[1.0]
    )
    return Sampled(
        [group.prompt for group in groups], list(groups), gaps or MissingRouteCounts(), stats
    )


def metrics(source):
    return source.meter.take_sums().reduce(dist.group.WORLD, CPU)


def test_a_step_trains_on_scored_groups_of_the_scheduler(live):
    source, calls = live(rewards=[0.0, 1.0])
    scored = replace(make_group("b"), rewards=np.array([2.0, 3.0], np.float32))
    source.scheduler.take = lambda *args: (
        calls.append(("take", args, {})) or sampled(make_group("a"), scored)
    )
    first, second = source.sample(5)
    assert calls == [
        ("take", (5, 3), {}),
        ("score", [["text of 3", "text of 4"]], (True, None, True)),
    ]
    assert first.rewards.tolist() == [0.0, 1.0] and second.rewards.tolist() == [2.0, 3.0], (
        "one was scored before"
    )
    assert [rollout.response_text for rollout in first.rollouts] == ["text of 3", "text of 4"]
    times = source.meter.take_times()
    assert all(times[f"time/{stage}"] > 0 for stage in ("rollout", "reward", "split"))
    found = metrics(source)
    assert found["rollout/tokens_per_second"] == 50 and found["rollout/cache_hit_frac"] == 0.25
    assert not {"rollout/sampling_rounds", "rollout/discarded_groups_frac"} & found.keys(), (
        "metrics of batch.dynamic_sampling alone"
    )


def test_servers_that_freed_their_memory_get_the_weights_before_they_sample(live):
    source, calls = live(rollout={"weight_update": "in_place", "max_staleness": 1})
    source.scheduler.take = lambda *args: (
        calls.append(("take", args, {})) or sampled(make_group("a"), make_group("b"))
    )
    source.inference.servers_have_memory = False
    source.sample(5)
    assert calls.names == ["push", "take", "score"] and calls[0][1:] == (
        (3,),
        {"keep_requests": True},
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_counts_the_bytes_of_every_weight_sync_of_a_step(live, rank):
    source, _ = live()
    source.parallel.rank = rank
    for version, gib in ((4, 3), (5, 0.5)):
        source.inference.last_push = PushReport(1.0, int(gib * 2**30), 1, 0, (0, 0))
        source.sync_weights(version)
    assert metrics(source).get("perf/weight_sync_gib") == (3.5 if rank == 0 else None)


@pytest.mark.parametrize("servers_have_memory", [True, False])
def test_a_weight_sync_ends_sampling_first_also_where_a_signal_came(
    live, tmp_path, servers_have_memory
):
    source, calls = live()
    source.inference.servers_have_memory = servers_have_memory
    source.meter.step = 6
    source.sync_weights(4)
    source.scheduler.prepare_sync = calls.note("prepare_sync", SamplingStopped())
    source.sync_weights(5)
    names = ["prepare_sync", "push"] if servers_have_memory else ["prepare_sync"]
    assert calls.names == names * 2 and source.policy_version == 5
    pushed = [call for call in calls if call[0] == "push"]
    assert [args for _, args, _ in pushed] == [(4,), (5,)] * servers_have_memory
    assert all(settings == {"keep_requests": False} for *_, settings in pushed)
    assert (source.meter.take_times()["time/weight_sync"] > 0) == servers_have_memory
    if servers_have_memory:
        assert events_of(tmp_path / "events.jsonl") == [
            ("weight_sync", 7, f"version {version}") for version in (4, 5)
        ]


@pytest.mark.parametrize("max_tokens", [50, 500])
def test_a_start_sends_the_weights_and_checks_parity_without_the_servers_memory(
    live, monkeypatch, max_tokens
):
    source, calls = live(rollout={"max_response_tokens": max_tokens, "temperature": 0.7})

    def compare(engine, groups, cfg):
        calls.append(
            ("compare", engine, [(group.prompt.id, group.rewards.tolist()) for group in groups])
        )
        return SimpleNamespace(line=lambda limits: f"line {limits}", check=calls.note("check"))

    monkeypatch.setattr(live_rollouts, "compare", compare)
    monkeypatch.setattr(live_rollouts, "parity_limits", lambda cfg, dtype: f"limits of {dtype}")
    stages = []
    source.meter.watchdog = SimpleNamespace(enter=lambda stage, step: stages.append(stage))
    source.start(0)
    assert stages == [
        "rollout", "weight_sync", "parity check: sampling", "parity check",
    ]  # fmt: skip
    assert calls.names == ["prepare_sync", "push", "generate", "release", "compare", "log", "check"]
    assert calls.pop(0) and calls[0][1] == (3,)
    assert calls[1][1:] == (
        ([f"p{n}" for n in range(8)], live_rollouts.SAMPLES_PER_PROMPT),
        {"temperature": 0.7, "max_tokens": min(64, max_tokens), "stop_token_ids": [1],
        "id_prefix": "parity/",
         "single_turn": True},
    )  # fmt: skip
    assert calls[3][1:] == ("engine", [(f"p{n}", [0.0, 0.0]) for n in range(8)]), (
        "the probe is not scored"
    )
    assert calls[4][1] == ("line limits of bfloat16",) and calls[5][1][0] == "limits of bfloat16"
    source.inference.servers_have_memory = False
    start = len(calls)
    source.start(0)
    assert calls.names[start:][:3] == ["prepare_sync", "push", "generate"], (
        "weights come first, whoever has the memory"
    )


def test_groups_of_equal_rewards_are_replaced_by_other_prompts(live):
    source, calls = live(batch={"dynamic_sampling": True}, rewards=[1, 1, 0, 1, 0, 0, 0, 1])
    source.scheduler.take = lambda *args: sampled(make_group("a"), make_group("b"))
    more = iter("cd")
    source.scheduler.take_more = lambda *args: (
        calls.append(("more", args, {})) or sampled(make_group(next(more)))
    )
    groups = source.sample(0)
    assert [group.prompt.id for group in groups] == ["b", "d"]
    assert [args for name, args, _ in calls if name == "more"] == [(1, 3)] * 2
    found = metrics(source)
    assert found["rollout/sampling_rounds"] == 3 and found["rollout/discarded_groups_frac"] == 0.5


def test_penalties_decide_too_which_groups_are_equal(live):
    """Responses of 3 and 4 tokens cost 3 and 4: equal rewards differ, 0 and 1 do not."""
    batch = {"dynamic_sampling": True, "max_sampling_rounds": 1, "length_penalty": 4.0}
    source, _ = live(batch=batch, rollout={"max_response_tokens": 4}, rewards=[1, 1, 0, 1, 1, 1])
    source.scheduler.take = lambda *args: sampled(make_group("a"), make_group("b"))
    source.scheduler.take_more = lambda *args: sampled(make_group("c"))
    assert [group.prompt.id for group in source.sample(0)] == ["a", "c"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_missing_routes_stop_the_step_after_its_last_draw(live, dynamic):
    """The budget is of all draws together: one draw above it may be good in the end."""
    more = {"replay": {"on_missing_route": "mask_token", "missing_route_budget": 0.2}}
    source, _ = live(batch={"dynamic_sampling": dynamic}, rewards=[1, 1, 0, 1, 0, 1], **more)
    gaps = [
        MissingRouteCounts(response_rows=10, missing_response_rows=3),
        MissingRouteCounts(response_rows=10),
    ]
    source.scheduler.take = lambda *args: sampled(
        make_group("a", missing=1), make_group("b", missing=1), gaps=gaps[0]
    )
    source.scheduler.take_more = lambda *args: sampled(make_group("c"), gaps=gaps[1])
    if dynamic:
        assert (
            len(source.sample(0)) == PROMPTS
            and source.missing_routes.counts == MissingRouteCounts()
        )
        assert metrics(source)["replay/missing_rows_total"] == 3
    else:
        with pytest.raises(ValueError, match="missing_route_budget"):
            source.sample(0)


def test_the_budget_of_missing_routes_counts_every_draw_of_a_step(live):
    more = {"replay": {"on_missing_route": "mask_token", "missing_route_budget": 0.2}}
    source, calls = live(batch={"dynamic_sampling": True}, rewards=[1, 1, 0, 1, 0, 1], **more)
    gaps = MissingRouteCounts(response_rows=10, missing_response_rows=3)
    source.scheduler.take = lambda *args: sampled(
        make_group("a", missing=1), make_group("b", missing=1), gaps=gaps
    )
    source.scheduler.take_more = calls.note("more", sampled(make_group("c"), gaps=gaps))
    with pytest.raises(ValueError, match="missing_route_budget"):
        source.sample(0)
    assert len(calls.named("more")) == 1


def test_one_rank_counts_the_rounds_of_all(live):
    source, _ = live(batch={"dynamic_sampling": True}, rewards=[1, 0, 0, 1])
    source.scheduler.take = lambda *args: sampled(make_group("a"), make_group("b"))
    source.parallel.rank = 1
    assert len(source.sample(0)) == PROMPTS and "rollout/sampling_rounds" not in metrics(source)


def test_one_missing_route_stops_a_step_before_its_last_draw(live):
    source, _ = live(
        batch={"dynamic_sampling": True}, replay={"mode": "R3", "on_missing_route": "error"}
    )
    counts = MissingRouteCounts(response_rows=10, missing_response_rows=1)
    source.scheduler.take = lambda *args: sampled(make_group("a", missing=1), gaps=counts)
    source.scheduler.take_more = lambda *args: pytest.fail("nothing more is sampled")
    with pytest.raises(ValueError, match="on_missing_route = error stops the run"):
        source.sample(0)


def test_all_replicas_have_their_rewards_before_any_goes_on(live, monkeypatch):
    source, calls = live()
    monkeypatch.setattr(dist, "barrier", calls.note("barrier"))
    source.parallel.host_group = "host"
    source.score([make_group("a")], for_training=True)
    assert calls.names == ["score", "barrier"] and calls.named("barrier") == [(("host",), {})]


def test_a_draw_that_asked_no_server_has_no_throughput(live):
    source, _ = live()
    source.scheduler.take = lambda *args: replace(
        sampled(make_group("a"), make_group("b")), stats=None
    )
    source.sample(0)
    assert "rollout/tokens_per_second" not in metrics(source)


def test_complete_groups_are_scored_while_others_are_sampled(live):
    source, calls = live(rewards=[0.0, 1.0])
    rollouts = dict(enumerate(make_group("a").rollouts))
    waiting = [Group(make_group("a").prompt, len(rollouts), rollouts)]
    source.scheduler.rollout_group = Group.rollout_group
    source.score_ready([])
    source.score_ready(waiting)
    assert calls == [("score", [["text of 3", "text of 4"]], (True, None, False))]
    assert waiting[0].scored.rewards.tolist() == [0.0, 1.0]
    source.leader = None
    source.score_ready(waiting)
    assert source.score([make_group("a")], for_training=True) == [] and len(calls) == 1


@pytest.mark.parametrize("is_leader", [True, False])
def test_the_leader_alone_has_groups_and_every_rank_its_replicas_prompts(
    live, monkeypatch, is_leader
):
    source, calls = live()
    monkeypatch.setattr(live_rollouts, "share_groups", calls.note("share", ["shared"]))
    source.leader = source.leader if is_leader else None
    source.parallel.dp_rank, source.parallel.dp_size = 1, 2
    assert source.on_every_rank(["a group"], ["a", "b", "c", "d"]) == ["shared"]
    shared = (["a group"] if is_leader else None, ["b", "d"], source.parallel.node)
    assert calls == [("share", shared, {})]


def test_what_is_recorded_is_counted_and_never_older_than_allowed(live):
    source, calls = live(rollout={"max_staleness": 1})
    rewards = np.array([0.0, 1.0], np.float32)
    groups = [make_group(name, rewards, version=2) for name in "abc"]
    source.record(groups, 0)  # step 1: the tensors of group 1 are saved
    ((step, recorded), _) = calls.named("record")[0]
    assert step == 1 and recorded[1] is groups[1]
    for plain, group in zip(recorded, groups, strict=True):
        assert plain.prompt is group.prompt and plain.rewards is rewards
        assert [r.has_routes for r in plain.rollouts] == [group is groups[1]] * GROUP
    found = metrics(source)
    totals = {f"reward/{kind}_total": float(number) for number, kind in enumerate(KINDS, 5)}
    assert {name: found[name] for name in found if name.startswith("reward/")} == totals | {
        "reward/unformatted_total": 3.0,
        "reward/lost_starts_total": 0.0,
        "reward/responses_total": 20.0 + sum(totals.values()),
    }
    assert found["rollout/reward_mean"] == 0.5 and found["rollout/staleness_mean"] == 1.0
    with pytest.raises(
        RuntimeError, match=r"\['b/0', 'b/1'\] .* older than version 2 = 3 - rollout.max_staleness"
    ):
        source.record([make_group("b", np.zeros(2, np.float32), version=1)], 4)
    source.leader = None
    source.parallel.is_replica_leader = False
    source.record([make_group("b", np.zeros(2, np.float32), version=1)], 4)
    assert len(calls) == 1 and metrics(source) == {}


@pytest.mark.parametrize(("limit", "truncation"), [(None, None), (20, Truncation(0.9, -1, 0.0))])
def test_an_evaluation_has_its_own_samples_and_no_training_rewards(
    live, monkeypatch, limit, truncation
):
    settings = {"max_response_tokens": limit, "top_p": 0.9} if limit else {}
    source, calls = live(eval={"samples": 3, "temperature": 0.2} | settings)
    assert source.evaluate() == {} and not calls
    source.eval_sets = {"a": source.prompts.prompts[:2]}

    def evaluate(sets, cfg, on_error, sample, *, dp_rank, dp_size, device):
        assert (sets, cfg, on_error) == (
            source.eval_sets,
            source.cfg.eval,
            source.cfg.reward.on_error,
        )
        assert (dp_rank, dp_size, device) == (0, 1, CPU)
        return {"eval/a/avg@3": float(sum(group.rewards.sum() for group in sample(sets["a"])))}

    monkeypatch.setattr(live_rollouts, "evaluate", evaluate)
    source.inference.servers_have_memory = False
    stages = []
    source.meter.watchdog = SimpleNamespace(enter=lambda stage, step: stages.append(stage))
    assert source.evaluate() == {"eval/a/avg@3": 2.0} and stages == ["weight_sync", "evaluate"]
    assert calls.names == ["push", "end_sampling", "generate", "score"]
    _, args, settings = calls[2]
    assert args == (["p0", "p1"], 3)
    assert settings.pop("on_progress")[1] == ("evaluation: sampling", 2, "prompts")
    assert settings == {
        "temperature": 0.2, "max_tokens": limit or 50, "stop_token_ids": [1], "id_prefix": "eval/",
        "truncation": truncation, "return_sets": False,
    }  # fmt: skip
    shaped, failed, is_last = calls[3][2]
    assert not shaped and np.isnan(failed) and is_last
    source.scheduler.end_sampling = calls.note("end_sampling", SamplingStopped())
    assert source.evaluate() == {}, "a signal ended it"


def test_a_finished_step_has_the_clients_totals_and_those_of_restarted_servers(live, tmp_path):
    source, calls = live()
    source.meter.step = 4
    source.inference.restarts = 2
    source.finish_step()
    found = metrics(source)
    assert calls.names == ["step_done"]
    assert found["rollout/retries_total"] == 4 and found["rollout/server_restarts_total"] == 2
    assert derived(found)["rollout/discarded_length_mean"] == 15
    assert events_of(tmp_path / "events.jsonl") == [("server_restart", 5, "2 replaced")]
    source.leader = None
    source.finish_step()
    assert metrics(source) == {"rollout/server_restarts_total": 2}
    assert len(events_of(tmp_path / "events.jsonl")) == 1, "none was replaced since"


def test_a_checkpoint_holds_the_place_in_the_data_and_what_is_in_flight(live, tmp_path):
    source, calls = live()
    assert source.state_dict() == {"policy_version": 3, "prompts": {"epoch": 0}}
    assert [source.files(is_step_done=done)["is_step_done"] for done in (True, False)] == [
        True,
        False,
    ]
    source.prompts.take(4)
    cursor = source.prompts.state_dict()
    other, calls = live()
    lines = other.restore({"policy_version": 8, "prompts": cursor}, tmp_path, ["optim.lr"])
    assert other.policy_version == 8 and other.prompts.state_dict() == cursor
    assert calls == [("restore", (tmp_path, ["optim.lr"]), {})]
    assert lines == [
        "  policy version 8; epoch 1 of the data, after 4 of 9 prompts",
        "  2 groups in flight",
    ]
    other.scheduler.restore = calls.note("restore", "")
    assert len(other.restore({"policy_version": 8, "prompts": cursor}, tmp_path, [])) == 1
    other.stop()
    assert calls[-1] == ("stop", (), {"keep_parts": True})
    other.leader = None
    other.stop()
    other.give_memory_to_trainer()
    assert calls.names[-2:] == ["stop", "release"]
