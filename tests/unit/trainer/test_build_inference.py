"""What the servers of a run are asked, and what clients, reward workers and weight sync get from
the configuration.
"""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_rl.config import load_config
from megatron_rl.rollout.client.sampling import SampleRules
from megatron_rl.rollout.server.server_info import auth_headers, served_dtype
from megatron_rl.trainer import build_inference as build
from megatron_rl.weights.sync.pushed_weights import PushedWeights
from megatron_rl.weights.sync.servers import ServerAccess
from megatron_rl.weights.sync.transports import TransportSettings
from tests.unit.trainer.recorded import Calls, Recorded

SPEC = SimpleNamespace(vocab_size=8, max_positions=256)
FOUND = build.FoundServers(
    ("http://a:1",), "bfloat16", {"http://a:1": {"tp_size": 1}}, "5f0c9a1e", 250
)
HOST = object()
FP8 = {"dtype": "bfloat16", "quantize": "fp8"}


def config(*, replay=None, **rollout):
    base = {"model": {"path": "m", "dtype": "bfloat16"}, "data": {"train": "d"}, "run": {"seed": 7}}
    return load_config(
        None, [], base | {"rollout": rollout, "replay": {"mode": "R3"} | (replay or {})}
    )


def job(device="cpu", **more):
    base = dict(
        device=torch.device(device), rank=0, world_size=1, host_group=HOST, is_replica_leader=True
    )
    return SimpleNamespace(**base | more)


@pytest.fixture
def calls():
    return Calls()


@pytest.fixture
def console(calls):
    return SimpleNamespace(log=lambda line: calls.append(("log", (line,), {})))


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_every_server_is_checked_before_a_run_uses_it(monkeypatch, calls, console, ours, dtype):
    urls = ("http://a:1", "http://b:2")
    key = {"api_key_env": "KEY_OF_THE_SERVERS"}
    monkeypatch.setenv("KEY_OF_THE_SERVERS", "sesame")
    cfg = config(dtype=dtype, **({"num_servers": 2} if ours else {"urls": urls}) | key)
    headers = {"Authorization": "Bearer sesame"}
    dtypes = dict(zip(urls, ("float16", "not the first one's"), strict=True))

    def info(url, headers, **settings):
        calls.append(("info", (url, headers), settings))
        return SimpleNamespace(
            url=url,
            version="1",
            dtype=dtypes[url],
            routed_experts=url == urls[0],
            settings={"of": url},
            max_input_tokens={urls[0]: 99, urls[1]: 98}[url],
        )

    monkeypatch.setattr(build, "server_info", info)
    monkeypatch.setattr(build, "tokenizer_digest", lambda path: f"digest of {path}")
    monkeypatch.setattr(build, "new_run_name", lambda: "name")
    for name in ("server", "settings", "in_place", "sampling", "identical"):
        monkeypatch.setattr(build, f"check_{name}", calls.note(name))
    monkeypatch.setattr(build, "accepted_lines", calls.note("accepted", ["a line"]))
    monkeypatch.setattr(build, "parity_limits", calls.note("limits"))
    pool = None
    if ours:
        pool = Recorded(calls, "pool", take=urls, log_path=Path("log"))
        pool.__class__ = type("Pool", (Recorded,), {
            "__enter__": lambda self: calls.append(("enter", (), {})),
            "__exit__": lambda *_: calls.append(("exit", (), {})),
        })  # fmt: skip
    with ExitStack() as stack:
        servers = build.find_servers(cfg, SPEC, "cpu", pool, stack, console)
        assert "exit" not in calls.names
    assert calls.names[-1] == ("exit" if ours else "limits")
    assert servers == (urls, "float16", {url: {"of": url} for url in urls}, "name", 98)

    started = ["pool.log_path", "log", "enter", "pool.take"] if ours else []
    checks = ["server", "settings", "in_place", "sampling", "log"]
    assert calls.names[: len(started) + 13] == [*started, *["info"] * 2, *checks * 2, "identical"]
    lines = [args[0] for args, _ in calls.named("log")]
    assert lines == [
        *(["starting 2 SGLang server(s), log in log"] if ours else []),
        f"server {urls[0]}: SGLang 1, float16, experts yes",
        f"server {urls[1]}: SGLang 1, {dtypes[urls[1]]}, experts no", "a line",
    ]  # fmt: skip
    seconds = {"timeout": cfg.rollout.probe_seconds("cpu"), "resume": not ours}
    assert calls.named("info") == [((url, headers), seconds) for url in urls]
    asked = dict(
        want_routes=True, dtype=None if dtype == "auto" else dtype, tokenizer="digest of m"
    )
    infos = calls.named("identical")[0][0][0]
    assert [each.url for each in infos] == list(urls)
    for each, (first, second, third, fourth) in zip(
        infos, zip(*(calls.named(name) for name in checks[:4]), strict=True), strict=True
    ):
        assert first == ((each, SPEC), asked) and second == (
            (each, cfg.rollout),
            {"want_routes": True},
        )
        assert third == ((each, cfg.rollout), {})
        assert fourth == ((each.url, cfg.rollout), {"vocab_size": 8, "device": "cpu"})
    assert calls.named("accepted") == [((infos, cfg.rollout), {"want_routes": True})]
    assert calls.named("limits") == [((cfg, "float16"), {})]


@pytest.mark.parametrize(("device", "seconds"), [("cpu", 900.0), ("cuda", 1200.0)])
def test_servers_of_a_run_have_its_settings_and_the_time_that_their_device_needs(
    monkeypatch, calls, device, seconds
):
    cfg, console = config(num_servers=2), SimpleNamespace(log=print)
    monkeypatch.setattr(build, "ServerPool", calls.note("pool"))
    build.make_server_pool(cfg, job(device), console)
    rollout = cfg.rollout.model_copy(update={"start_timeout_seconds": seconds})
    assert cfg.start_seconds(device) == seconds
    settings = dict(
        device=device, log_dir=cfg.run_dir / "logs", seed=7, want_routes=True, log=print
    )
    assert calls == [("pool", (cfg.model.path, rollout), settings)]


@pytest.mark.parametrize("missing", ["error", "drop_sample"])
def test_a_leader_samples_scores_and_records_as_configured(monkeypatch, calls, missing):
    cfg = config(replay={"on_missing_route": missing}, api_key_env="KEY_OF_THE_SERVERS")
    monkeypatch.setattr(build, "RolloutClient", calls.note("client", SimpleNamespace))
    monkeypatch.setattr(build, "make_runner", calls.note("runner", "episodes"))
    pool = ExitStack()
    pool.callback(calls.note("closed"))
    monkeypatch.setattr(build, "RewardPool", calls.note("rewards", lambda: pool))
    recording, parallel = Recorded(calls, "recording", recorder="the recorder"), job()
    services = SimpleNamespace(recording=recording, trace="trace")
    with ExitStack() as stack:
        leader = build.make_leader(cfg, parallel, SPEC, "tokenizer", FOUND, stack, services)
        assert "closed" not in calls.names
    assert leader.rewards is pool and leader.recorder == "the recorder"
    assert leader.client.trace == pool.trace == "trace"
    rules = SampleRules(SPEC, True, drop_missing_routes=missing == "drop_sample", by_adapter=False)
    settings = dict(episodes="episodes", run=FOUND.run, teachers=None)
    assert calls == [
        ("runner", (cfg, "tokenizer", 8, 250), {}),
        ("client", (FOUND.urls, cfg.rollout, rules), settings),
        ("rewards", (cfg.reward,), {"hidden_env": ("KEY_OF_THE_SERVERS",)}), ("recording.recorder",
        (cfg, parallel), {}),
        ("closed", (), {}),
    ]  # fmt: skip


@pytest.fixture
def pushed(monkeypatch, calls):
    """pushed(cfg, parallel, server_pool) -> how a WeightPusher was made: the servers, the weights,
    the transport, and its keywords.  It is closed when the run ends.
    """
    monkeypatch.setattr(build.Ranks, "of", lambda parallel: f"ranks of {parallel.world_size}")
    monkeypatch.setattr(
        build, "WeightPusher", calls.note("pusher", lambda: Recorded(calls, "made"))
    )

    def make(cfg, parallel, server_pool=None, servers=FOUND):
        calls.clear()
        with ExitStack() as stack:
            build.make_pusher(cfg, parallel, servers, server_pool, stack)
            assert calls.names == ["pusher"]
        assert calls.names == ["pusher", "made.close"]
        return calls.named("pusher")[0]

    return make


def test_a_weight_sync_has_every_setting(monkeypatch, pushed):
    monkeypatch.setenv("KEY_OF_THE_SERVERS", "sesame")
    keys = dict(
        weight_sync="disk",
        weight_sync_bucket_mb=33,
        weight_sync_timeout_seconds=44.0,
    )
    keys["verify_push"] = "version"
    cfg = config(api_key_env="KEY_OF_THE_SERVERS", **keys)
    assert pushed(cfg, job()) == (
        (
            ServerAccess(FOUND.urls, 44.0, auth_headers(cfg.rollout), FOUND.settings),
            PushedWeights(cfg.model.path, torch.bfloat16, fp8_keep=None),
            TransportSettings(
                "disk", 33, torch.device("cpu"), disk_dir=cfg.run_dir / "weights", places=None
            ),
        ),
        {"verify_every": 0, "ranks": "ranks of 1", "run": FOUND.run},
    )
    assert auth_headers(cfg.rollout) == {"Authorization": "Bearer sesame"}
    cfg = config(verify_push="checksum", verify_push_every=5, **FP8)
    (_, weights, _), keywords = pushed(cfg, job())
    assert (keywords["verify_every"], weights.dtype) == (5, torch.bfloat16)
    assert weights.fp8_keep == config(**FP8).rollout.quantize_keep is not None


def test_weights_are_sent_in_the_dtype_of_the_servers_not_of_the_training(pushed):
    for dtype in ("auto", "float32"):
        cfg = config(dtype=dtype)
        (_, weights, _), _ = pushed(cfg, job(), servers=FOUND._replace(dtype="float32"))
        assert (cfg.model.dtype, weights.dtype) == ("bfloat16", torch.float32)


@pytest.mark.parametrize(
    ("reported", "config_json", "served"),
    [
        ("float32", None, "float32"),
        ("auto", '{"dtype": "bfloat16"}', "bfloat16"),
        ("auto", '{"torch_dtype": "float32"}', "float16"),  # as SGLang's auto serves it
        ("auto", "{}", "float16"),
        ("auto", None, "float16"),
    ],
)
def test_a_server_that_reports_no_dtype_has_that_of_the_checkpoint(
    tmp_path, reported, config_json, served
):
    if config_json is not None:
        (tmp_path / "config.json").write_text(config_json)
    assert served_dtype(reported, tmp_path) == served


def test_on_gpus_each_servers_ranks_have_a_place(monkeypatch, pushed):
    monkeypatch.setattr(
        build, "devices_of_server", lambda rollout, index, environment: [index, index + 4]
    )
    cfg, pool = config(num_servers=2), SimpleNamespace(index=lambda url: int(url[-1]))
    (_, _, sending), _ = pushed(cfg, job("cuda"), pool)
    assert sending.places("http://a:1") == [torch.device("cuda", 1), torch.device("cuda", 5)]
    for arguments in ((job("cuda"),), (job(), pool)):
        (_, _, sending), _ = pushed(cfg, *arguments)
        assert sending.places is None


@pytest.mark.parametrize(
    ("world_size", "local", "is_refused"), [(2, 2, False), (2, 1, True), (1, 1, False)]
)
def test_colocated_ranks_without_gpus_are_all_on_one_machine(
    monkeypatch, pushed, world_size, local, is_refused
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    parallel = job(world_size=world_size)
    for way in ("distributed", "disk"):
        (_, _, sending), _ = pushed(config(weight_sync=way), parallel)
        assert sending.transport == way
    if is_refused:
        with pytest.raises(
            ValueError, match="colocated with 2 training ranks, 1 of them on this machine"
        ):
            pushed(config(weight_sync="colocated"), parallel)
    else:
        pushed(config(weight_sync="colocated"), parallel)


@pytest.fixture
def asked(monkeypatch, calls):
    """asked(cfg, parallel): (Inference, leader, calls); parts are stand-ins."""
    memory = Recorded(calls, "memory")
    engine = SimpleNamespace(spec=SPEC, offload=memory, export_parts=calls.note("export"))
    for name, result in (
        ("length_problems", []), ("queue_problems", []), ("make_server_pool", "pool"),
        ("find_servers", FOUND),
        ("make_leader", SimpleNamespace(client="client")), ("make_pusher", "pusher"),
    ):  # fmt: skip
        monkeypatch.setattr(build, name, calls.note(name, lambda result=result: result))
    monkeypatch.setattr(
        build, "from_rank_0", lambda make, group: calls.append(("rank 0", (group,), {})) or make()
    )
    monkeypatch.setattr(build, "max_sources", lambda cfg, parallel: 5)
    monkeypatch.setattr(dist, "barrier", calls.note("barrier"))

    class Inference(SimpleNamespace):
        stop, give_memory_to_trainer = calls.note("stop"), calls.note("release")

    monkeypatch.setattr(
        build, "Inference", lambda export, **settings: Inference(export=export, **settings)
    )

    def make(cfg, parallel):
        calls.clear()
        with ExitStack() as stack:
            engine.parallel = parallel
            services = SimpleNamespace(console=SimpleNamespace(log=print))
            made = build.make_inference(cfg, services, engine, "tokenizer", stack)
            assert calls.names[-1] == "release"
        assert calls.names[-1] == "stop"
        return made

    return make, memory


@pytest.mark.parametrize(("rank", "urls"), [(0, ()), (1, ()), (0, ("http://a:1",))])
def test_rank_0_starts_servers_where_none_are_named(asked, calls, rank, urls):
    make, _ = asked
    cfg, parallel = config(urls=urls), job(rank=rank, is_replica_leader=rank == 0)
    inference, leader = make(cfg, parallel)
    pool = "pool" if rank == 0 and not urls else None
    started, led = ["make_server_pool"] * (pool is not None), ["make_leader"] * (rank == 0)
    assert calls.names == [
        "length_problems", *started, "rank 0", "find_servers", *led, "make_pusher", "release",
        "stop",
    ]  # fmt: skip
    assert calls.named("rank 0") == [((HOST,), {})]
    assert calls.named("find_servers")[0][0][:4] == (cfg, SPEC, "cpu", pool)
    assert calls.named("make_pusher")[0][0][:4] == (cfg, parallel, FOUND, pool)
    assert (leader is not None) == (inference.client == "client") == (rank == 0)
    inference.export()
    assert calls.named("export") == [((5,), {})]
    expected = dict(
        pusher="pusher", server_pool=pool, urls=FOUND.urls, log=print, dtype=FOUND.dtype, group=HOST
    )
    assert expected.items() <= vars(inference).items() and inference.memory is None
    assert isinstance(inference.export, partial)


def test_the_trainer_leaves_the_gpus_to_servers_that_start(asked, calls):
    make, memory = asked
    cfg = config()
    cfg = cfg.model_copy(
        update={"rollout": cfg.rollout.model_copy(update={"release_memory": True})}
    )
    inference, _ = make(cfg, job())
    assert inference.memory is memory and calls.named("barrier") == [((HOST,), {})]
    assert calls.names[2:6] == ["memory.free_training", "memory.free_weights", "barrier", "rank 0"]


@pytest.mark.parametrize(("local", "share"), [("2", 0.5), (None, 0.25)])
def test_rollouts_that_wait_must_fit_the_smallest_machine_of_the_job(
    monkeypatch, asked, calls, local, share
):
    """Of 4 ranks; memory of another machine is smaller than that of this one."""

    def all_reduce(tensor, operation, group):
        assert operation == dist.ReduceOp.MIN and group is HOST and tensor.item() == 300
        tensor.fill_(200)

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(build.psutil, "virtual_memory", lambda: SimpleNamespace(total=300))
    make, _ = asked
    cfg = config(max_staleness=1)
    make(cfg, job(world_size=4))
    assert calls.named("queue_problems") == [((cfg, SPEC, share, 200), {})]
    monkeypatch.setattr(build, "length_problems", lambda cfg, spec: ["too long"])
    monkeypatch.setattr(build, "queue_problems", lambda *_: ["too many"])
    with pytest.raises(ValueError, match=r"^too long\ntoo many$"):
        make(cfg, job(world_size=4))
    monkeypatch.setattr(
        dist, "all_reduce", lambda *_: pytest.fail("without steps ahead nothing waits")
    )
    with pytest.raises(ValueError, match=r"^too long$"):
        make(config(), job(world_size=4))
