"""How a run starts: what it builds and checks, in which order, with what, and that everything
closes in reverse order.

All parts are stand-ins that record their calls.  With real parts: test_one_run.py and tests/e2e.
"""

import logging
import warnings
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.config import load_config
from megatron_rl.data.prompts import PromptSource
from megatron_rl.launch.heartbeats import LOADING
from megatron_rl.launch.signals import StoppedBySignal
from megatron_rl.launch.watchdog import WatchSettings
from megatron_rl.plan.hardware import HARDWARE
from megatron_rl.records import Prompt
from megatron_rl.trainer import build, services
from megatron_rl.trainer.live_rollouts import LiveRollouts
from megatron_rl.trainer.saved_rollouts import SavedRollouts
from tests.unit.trainer.recorded import Calls, Recorded

FIRST_STEP, EVALUATED, IDS = 4, 2, {"wandb": "id"}
CPU = torch.device("cpu")
PROMPTS = [Prompt(f"p{n}", "", (1, 2), "7") for n in range(3)]


def config(folder, **sections):
    base = {
        "model": {"path": "m"},
        "data": {"train": "d"},
        "run": {"num_steps": 6, "num_mini_batches": 2, "seed": 7},
    }
    base["run"]["dir"] = str(folder)
    base["rollout"] = {"api_key_env": "KEY_OF_THE_SERVERS"}
    return load_config(
        None, [], base | {name: base.get(name, {}) | keys for name, keys in sections.items()}
    )


@pytest.fixture
def start(monkeypatch, tmp_path):
    """start(rank, **settings): (what the trainer is made of, the calls, the parts)."""

    def run(rank=0, *, device="cpu", rollouts=None, fields=(), **sections):
        calls = Calls()

        @contextmanager
        def entered(name, part=None):
            calls.append((f"enter {name}", (), {}))
            yield part
            calls.append((f"leave {name}", (), {}))

        def makes(name, part):
            return lambda *args, **settings: calls.append((name, args, settings)) or part

        parallel = SimpleNamespace(rank=rank, device=torch.device(device), dp_size=3)
        status, watchdog = SimpleNamespace(urls=tuple), Recorded(calls, "watchdog")
        source = SimpleNamespace(give_memory_to_trainer="release", start=calls.note("source.start"))
        recording = SimpleNamespace(files="files", events="events")
        recording.run = lambda first, meter, is_new: entered(
            f"recording after {first}, {meter.step}, {is_new}"
        )
        step_trace = SimpleNamespace(trace="trace")
        cfg = config(tmp_path, **sections)
        cfg = cfg.model_copy(update={"megatron": SimpleNamespace(fields=fields)})
        lines = Recorded(calls, "lines")
        console = SimpleNamespace(
            log=lambda line: calls.append(("log", (line,), {})), progress="progress"
        )
        parts = {
            "quiet_libraries": None,
            "LogLines": lines,
            "prepare_gpus": ["a setting of NCCL"] if device == "cuda" else [],
            "join_job": parallel,
            "check_start": None,
            "start_recording": recording,
            "read_inputs": SimpleNamespace(lines=["an input"]),
            "Console": console,
            "Engine": SimpleNamespace(core_config="core"),
            "make_moments": None,
            "compatibility_line": "compatible",
            "make_source": source,
            "Checkpointer": "checkpointer",
            "CheckpointPolicy": "policy",
            "resume": build.StartPoint(FIRST_STEP, EVALUATED, IDS, is_new=False),
            "make_sinks": "sinks",
            "forget_steps": None,
            "Reporter": "reporter",
            "SavedBatches": "saver",
            "TokenRecorder": "tokens",
            "untested": list(fields),
        }
        for name, part in parts.items():
            is_service = name in ("start_recording", "Console")
            monkeypatch.setattr(services if is_service else build, name, makes(name, part))
        monkeypatch.setattr(
            services,
            "make_status",
            lambda cfg: calls.append(("make_status", (cfg,), {})) or entered("status", status),
        )
        monkeypatch.setattr(
            services,
            "make_watchdog",
            lambda *args: (
                calls.append(("make_watchdog", args, {})) or entered("watchdog", watchdog)
            ),
        )
        monkeypatch.setattr(
            services,
            "StepTrace",
            lambda *args: calls.append(("StepTrace", args, {})) or entered("trace", step_trace),
        )
        monkeypatch.setattr(
            build, "postpone_full_collections", makes("postpone", calls.note("collect again"))
        )
        monkeypatch.setattr(
            build, "Trainer", lambda **parts: calls.append(("yielded", (), {})) or parts
        )
        with build.start_trainer(cfg, rollouts) as made:
            pass
        return (
            made,
            calls,
            SimpleNamespace(**parts, status=status, watchdog=watchdog, cfg=cfg, parallel=parallel),
        )

    return run


def test_a_run_checks_what_is_cheap_first_then_loads_the_model_and_closes_in_reverse_order(start):
    made, calls, parts = start()
    assert [name for name in calls.names if name not in ("log", "LogLines",
    "lines.catch_warnings")] == [
        "quiet_libraries", "read_inputs", "prepare_gpus", "join_job", "make_status", "enter status",
        "make_watchdog", "enter watchdog",
        "start_recording", "StepTrace", "enter trace", "Console", "check_start",
        "watchdog.enter", "Engine", "make_moments", "compatibility_line", "untested",
        "make_source", "watchdog.enter", "Checkpointer", "CheckpointPolicy",
        "resume", "make_sinks",
        "forget_steps", "Reporter", f"enter recording after {FIRST_STEP}, {FIRST_STEP - 1}, False",
        "source.start", "SavedBatches",
        "postpone", "TokenRecorder", "yielded", "collect again",
        f"leave recording after {FIRST_STEP}, {FIRST_STEP - 1}, False",
        "leave trace", "leave watchdog", "leave status",
    ]  # fmt: skip
    cfg, parallel, meter = parts.cfg, parts.parallel, made["meter"]
    hidden = {"hidden": ("KEY_OF_THE_SERVERS",)}
    assert calls.named("LogLines") == [((cfg.run.log_format,), hidden)]
    assert "lines.catch_warnings" in calls.names
    assert calls.named("read_inputs") == [((cfg,), {"is_live": True})]
    assert calls.named("make_watchdog") == [((cfg, parallel, parts.LogLines, parts.status), {})]
    assert calls.named("prepare_gpus") == [((cfg,), {"has_servers": True})]
    assert calls.named("check_start") == [((cfg, parallel), {"has_servers": True})]
    assert calls.named("Console") == [((), {"enabled": True, "lines": parts.LogLines})]
    assert calls.named("watchdog.enter") == [((LOADING,), {})] * 2
    assert calls.named("Engine") == [((cfg, parallel), {"total_updates": 12})]
    assert calls.named("make_moments") == [((parts.Engine,), {})], "before the first rollout"
    assert [args for args, _ in calls.named("log")] == [("an input",), ("compatible",)]
    console, checkpointer = parts.Console, calls.named("Checkpointer")
    assert checkpointer == [
        ((parts.Engine, cfg.run_dir / "checkpoints", console.log, "progress"), {})
    ]
    assert calls.named("CheckpointPolicy") == [(("checkpointer", "release", "events"), {})]
    assert calls.named("resume") == [((cfg, "policy", parts.make_source, console), {})]
    ((sinks_cfg, _, log, ids, first), settings), *_ = calls.named("make_sinks")
    assert (sinks_cfg, log, ids, first) == (cfg, console.log, IDS, FIRST_STEP)
    assert settings == {"is_new": False}
    assert calls.named("forget_steps") == [((cfg.run_dir, FIRST_STEP, 3), {})]
    assert calls.named("Reporter") == [((cfg, console, "sinks", parts.status), {})]
    assert calls.named("source.start") == [((FIRST_STEP,), {})]
    assert calls.named("SavedBatches") == [((cfg, parallel, console.log, "events", ""), {})]
    step_trace = made["step_trace"]
    assert made == dict(
        cfg=cfg, parallel=parallel, engine=parts.Engine, rollouts=parts.make_source,
        checkpoint_policy="policy", meter=meter, reporter="reporter", saved_batches="saver",
        tokens="tokens", recording=parts.start_recording, step_trace=step_trace,
        first_step=FIRST_STEP, evaluated=EVALUATED,
    )  # fmt: skip
    assert (meter.trace, step_trace.trace) == ("trace", "trace")
    assert meter.watchdog is parts.watchdog
    ((source_cfg, shared, inputs, engine, _, rollouts), _), *_ = calls.named("make_source")
    assert (source_cfg, inputs, engine, rollouts) == (cfg, parts.read_inputs, parts.Engine, None)
    assert shared == services.RunServices(
        parts.status, parts.watchdog, console, parts.start_recording, step_trace, meter
    )


def test_only_rank_0_writes(start):
    _, calls, _ = start(1)
    assert not {"make_status", "make_sinks", "forget_steps"} & set(calls.names)
    assert calls.named("Console")[0][1]["enabled"] is False
    assert calls.named("make_watchdog")[0][0][3] is None
    assert calls.named("Reporter")[0][0][2:] == (None, None)


def test_a_run_from_saved_rollouts_has_no_servers(start):
    _, calls, _ = start(rollouts=Path("saved"))
    assert calls.named("read_inputs")[0][1] == {"is_live": False}
    for name in ("prepare_gpus", "check_start"):
        assert calls.named(name)[0][1] == {"has_servers": False}
    assert calls.named("make_source")[0][0][-1] == Path("saved")


@pytest.mark.parametrize("rank", [0, 1])
def test_the_watchdog_and_status_json_name_the_servers(rank):
    status = None if rank else SimpleNamespace(urls=tuple)
    watchdog, inference = SimpleNamespace(), SimpleNamespace(waiting_for="waiting", urls=["a"])
    services.RunServices(status, watchdog, None, None, None, None).watch(inference)
    assert watchdog.waiting_for == "waiting", "every rank may wait for servers"
    inference.urls = ["b"]
    assert status is None or status.urls() == ["b"], "a push may replace servers"


def test_what_is_set_on_gpus_and_what_was_never_tested_is_logged(start):
    _, calls, _ = start(device="cuda", fields=("some_field", "other"))
    assert [args[0] for args, _ in calls.named("log")] == [
        "a setting of NCCL", "an input", "compatible",
        "untested with routing replay: megatron.some_field, megatron.other",
    ]  # fmt: skip


@pytest.mark.parametrize("is_live", [True, False])
@pytest.mark.parametrize("agent", [True, False])
def test_a_run_reads_its_prompts_and_those_of_its_evaluation(monkeypatch, tmp_path, is_live, agent):
    calls, train, heldout = Calls(), PROMPTS, PROMPTS[:1]

    def load(paths, tokenizer):
        calls.append(("load", (paths, tokenizer), {}))
        return {
            (key, name): SimpleNamespace(
                prompts=heldout if name else train, line=lambda data, n=name: f"line {n}"
            )
            for key, name in paths
        }

    monkeypatch.setattr(build, "load_tokenizer", lambda path: f"tokenizer of {path}")
    monkeypatch.setattr(build, "check_agent", calls.note("agent"))
    monkeypatch.setattr(build, "load_prompt_files", load)
    monkeypatch.setattr(
        build,
        "leaked_prompts",
        lambda train, files: [f"trained on {len(train[0].prompts)}, {sorted(files)}"],
    )
    sections = {"agent": {"function": "module.function"}} if agent else {}
    cfg = config(
        tmp_path, eval={"sets": {"heldout": "h.jsonl"}}, data={"shuffle": True}, **sections
    )
    inputs = build.read_inputs(cfg, is_live=is_live)
    assert calls.named("agent") == [((cfg.agent, "tokenizer of m"), {})] * (agent and is_live)
    sets = {("eval.sets", "heldout"): (cfg.eval.sets["heldout"], cfg.eval_data, "")}
    assert calls.named("load") == [
        (
            (
                {("data.train", ""): (cfg.data.train, cfg.data, "")} | (sets if is_live else {}),
                "tokenizer of m",
            ),
            {},
        )
    ]
    assert inputs.eval_sets == ({"heldout": heldout} if is_live else {})
    lines = ["line ", "line heldout"] if is_live else ["line "]
    assert inputs.lines == [*lines, f"trained on 3, {['heldout'] if is_live else []}"]
    assert inputs.tokenizer == "tokenizer of m"
    many = [replace(PROMPTS[0], id=str(n)) for n in range(50)]
    train[:] = many
    in_order = [build.read_inputs(cfg.model_copy(update={"data": data}),
    is_live=False).prompts.take(50) for data in (
        cfg.data, cfg.data.model_copy(update={"shuffle": False}))]  # fmt: skip
    assert in_order[0] == PromptSource(many, seed=7, shuffle=True).take(50) != in_order[1] == many
    del train[3:]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rank_joins_the_job_then_takes_the_run_directory(monkeypatch, tmp_path, dtype):
    calls = Calls()
    for name in ("disable_tf32", "check_trackers"):
        monkeypatch.setattr(build, name, calls.note(name))
    parallel = Recorded(calls, "parallel")
    monkeypatch.setattr(
        build,
        "make_parallel",
        lambda *args, **settings: calls.append(("join", args, settings)) or parallel,
    )
    monkeypatch.setattr(
        build, "from_rank_0", lambda make: calls.append(("rank 0", (), {})) or make()
    )

    @contextmanager
    def locked(folder):
        calls.append(("lock", (folder,), {}))
        yield
        calls.append(("unlock", (), {}))

    monkeypatch.setattr(build, "locked", locked)
    run = {"dir": str(tmp_path / "not/yet"), "name": "run", "collective_timeout_minutes": 3.0}
    cfg = config(tmp_path, model={"path": "m", "dtype": dtype}, run=run)
    for _ in range(2):  # the second time it is there
        calls.clear()
        with ExitStack() as stack:
            assert build.join_job(cfg, stack) is parallel
            assert cfg.run_dir.is_dir()
        settings = dict(device=cfg.run.device, timeout_minutes=3.0, seed=7)
        exact = [("disable_tf32", (), {})] if dtype == "float32" else []
        assert calls == [
            *exact, ("join", (cfg.parallel,), settings), ("rank 0", (), {}), ("check_trackers",
            (cfg.track,), {}),
            ("rank 0", (), {}), ("lock", (cfg.run_dir,), {}), ("unlock", (), {}),
            ("parallel.destroy", (), {}),
        ]  # fmt: skip


@pytest.mark.parametrize("save_tensors", [False, True])
def test_rollouts_come_from_servers_or_from_a_run(monkeypatch, tmp_path, save_tensors):
    calls = Calls()
    cfg = config(tmp_path, rollout={"save_tensors": save_tensors})
    parallel = SimpleNamespace(rank=0, dp_rank=0, dp_size=1)
    engine, meter = SimpleNamespace(parallel=parallel, spec="spec"), Recorded(calls, "meter")
    inputs = build.Inputs("tokenizer", "prompts", {"heldout": PROMPTS}, [])
    recording = SimpleNamespace(events="events", recorder=calls.note("recorder", "the recorder"))
    shared = Recorded(calls, "services")
    shared.meter, shared.console, shared.recording = meter, "console", recording
    arguments = (cfg, shared, inputs, engine, "stack")
    saved = build.make_source(*arguments, Path("saved"))
    recorder = "the recorder" if save_tensors else None
    assert saved == SavedRollouts(
        cfg, parallel, "spec", "prompts", Path("saved"), meter, "console", "tokenizer", recorder, 0
    )
    assert calls == [("recorder", (cfg, parallel), {})] * save_tensors
    calls.clear()
    monkeypatch.setattr(build, "make_inference", calls.note("inference", ("inference", "leader")))
    monkeypatch.setattr(LiveRollouts, "__post_init__", lambda self: None)
    live = build.make_source(*arguments, None)
    assert live == LiveRollouts(
        cfg, parallel, engine, "tokenizer", "prompts", {"heldout": PROMPTS}, "inference", "leader",
        meter, "console", 0,
        "events",
    )  # fmt: skip
    assert calls == [
        ("meter.enter", ("starting or finding servers",), {}),
        ("inference", (cfg, shared, engine, "tokenizer", "stack", None), {}),
        ("services.watch", ("inference",), {}),
    ]


def test_teachers_are_found_in_a_stage_of_their_own_and_their_addresses_used(monkeypatch, tmp_path):
    calls = Calls()
    cfg = config(tmp_path, teachers={"math": {"path": "t"}})
    found = cfg.model_copy(update={"teachers": cfg.teachers.at({"math": ("http://a:1",)})})
    engine = SimpleNamespace(parallel="parallel", spec="spec")
    inputs = build.Inputs("tokenizer", SimpleNamespace(prompts=PROMPTS), {}, [])
    shared = Recorded(calls, "services")
    shared.meter, shared.console = Recorded(calls, "meter"), "console"
    shared.recording = SimpleNamespace(events="events")
    monkeypatch.setattr(build, "find_teachers", calls.note("teachers", (found, "turns")))
    monkeypatch.setattr(build, "make_inference", calls.note("inference", ("inference", "leader")))
    monkeypatch.setattr(LiveRollouts, "__post_init__", lambda self: None)
    live = build.make_source(cfg, shared, inputs, engine, "stack", None)
    assert live.cfg == found and [name for name, _, _ in calls] == [
        "meter.enter", "teachers", "meter.enter", "inference", "services.watch",
    ]  # fmt: skip
    assert calls[1][1] == (cfg, engine, PROMPTS, "stack", "console")
    assert [calls[place][1][0] for place in (0, 2, 3)] == [
        "starting or finding teachers", "starting or finding servers", found,
    ]  # fmt: skip
    assert calls[3][1][-1] == "turns"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("has_servers", [True, False])
def test_what_concerns_gpus_is_checked_on_rank_0_alone(monkeypatch, tmp_path, device, has_servers):
    calls, cfg = Calls(), config(tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for name in ("check_can_release", "check_layout", "check_leaders", "check_core", "check_gpus"):
        monkeypatch.setattr(build, name, calls.note(name))
    monkeypatch.setattr(build, "provider_spec", lambda model, device: (model, device))
    monkeypatch.setattr(build, "this_machine", lambda parallel: "this machine")
    monkeypatch.setattr(
        build, "from_rank_0", lambda check: calls.append(("rank 0", (), {})) or check()
    )
    parallel = SimpleNamespace(device=torch.device(device), world_size=4)
    spec = (cfg.model, parallel.device)
    build.check_start(cfg, parallel, has_servers=has_servers)
    gpus = ("check_gpus", (spec, cfg, 4, "this machine"), {"has_servers": has_servers})
    assert calls == [
        ("check_can_release", (cfg, device), {}), ("check_layout", (spec,
        cfg, 4), {}),
        *([("check_leaders", (cfg, 4, 2), {})] if has_servers else []),
        ("check_core", (spec, cfg), {}), *([("rank 0", (), {}), gpus] if device == "cuda" else []),
    ]  # fmt: skip


@pytest.mark.parametrize("has_driver", [True, False])
@pytest.mark.parametrize("local", ["4", None])
def test_this_machine_has_the_gpus_that_its_driver_counts(monkeypatch, tmp_path, has_driver, local):
    """torch counts those of CUDA_VISIBLE_DEVICES, and servers of the run may have others."""
    for n in range(8):
        (tmp_path / "proc/driver/nvidia/gpus" / str(n)).mkdir(parents=True)
    monkeypatch.setattr(
        build, "Path", lambda path: Path(f"{tmp_path if has_driver else '/nowhere'}{path}")
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    device = SimpleNamespace(name="a GPU", total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setattr(build.psutil, "virtual_memory", lambda: SimpleNamespace(total=9 << 30))
    machine = build.this_machine(SimpleNamespace(device=torch.device("cuda")))
    assert machine.hardware == replace(
        HARDWARE["h100"], name="a GPU", memory=float(80 << 30), host_memory=float(9 << 30)
    )
    assert (machine.ranks, machine.gpus) == (int(local or 1), 8 if has_driver else 2)


def test_a_run_tells_of_its_state_and_its_stalls(monkeypatch, tmp_path):
    calls, cfg = (
        Calls(),
        config(
            tmp_path, run={"dir": str(tmp_path), "num_steps": 6, "silence_timeout_seconds": 77.0}
        ),
    )
    monkeypatch.setattr(
        services, "StatusWriter", calls.note("status", lambda: Recorded(calls, "made"))
    )
    status = services.make_status(cfg)
    settings = dict(hidden=("KEY_OF_THE_SERVERS",), stopped=(StoppedBySignal,))
    assert calls == [("status", (cfg.run_dir, 6), settings)]
    parallel = SimpleNamespace(store=lambda: "store", rank=1, world_size=2)
    monkeypatch.setattr(services, "Watchdog", calls.note("dog", lambda: SimpleNamespace()))
    assert vars(services.make_watchdog(cfg, parallel, "lines")) == {}
    watchdog = services.make_watchdog(cfg, parallel, "lines", status)
    settings = WatchSettings(cfg.stage_seconds, 77.0, cfg.run_dir, agreed=(StoppedBySignal,))
    assert calls.named("dog") == [(("store", 1, 2, settings), {"lines": "lines"})] * 2
    watchdog.on_heartbeats("beats")
    watchdog.on_verdict("rank 1 is silent")
    assert calls[-2:] == [
        ("made.beats", ("beats",), {}),
        ("made.close", ("failed", "rank 1 is silent"), {}),
    ]


def test_libraries_are_quiet_and_the_code_of_users_is_not(caplog):
    names = ("megatron", "torch", "transformers")
    levels = {name: logging.getLogger(name).level for name in (*names, "httpx")}
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("default")
            build.quiet_libraries()
            for name in (*names, "megatronic", "user"):
                warnings.warn_explicit(
                    f"of {name}", UserWarning, "file.py", 1, module=f"{name}.part"
                )
                logging.getLogger(f"{name}.part").warning("logged by %s", name)
        assert [str(each.message) for each in seen] == ["of megatronic", "of user"]
        assert [record.name for record in caplog.records] == ["megatronic.part", "user.part"]
        assert not logging.getLogger("httpx").isEnabledFor(logging.INFO)
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
