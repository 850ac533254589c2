"""tools/megatron_rl_tools/doctor: each check reports FAIL or WARN for its problem, and the exit
status follows.
"""

import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch.distributed import HashStore
from transformers import PreTrainedTokenizerFast

from megatron_rl.config import load_config
from megatron_rl.models.families import make_spec
from megatron_rl.rollout.server.ports import free_port
from megatron_rl_tools.doctor import check_machine as machine
from megatron_rl_tools.doctor import check_model as model
from megatron_rl_tools.doctor import check_packages as packages
from megatron_rl_tools.doctor import check_ranks as ranks
from megatron_rl_tools.doctor import check_servers as servers
from megatron_rl_tools.doctor import check_storage as storage
from megatron_rl_tools.doctor import doctor
from megatron_rl_tools.doctor import memory_limits as limits
from megatron_rl_tools.doctor.check import GIB, Check
from megatron_rl_tools.tiny_text import make_tokenizer
from tests.plain_checkpoint import MOE, checkpoint

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """The demo's configuration with its input files in place, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / ".cache/tiny_moe-0"
    folder.parent.mkdir()
    checkpoint(folder, MOE)
    for name in ("train.jsonl", "heldout.jsonl"):
        (folder / name).write_text('{"prompt": "1 + 1", "label": "2"}\n')
    path = tmp_path / "demo.toml"
    path.write_text((ROOT / "examples/tiny_cpu/demo.toml").read_text())
    return path


def statuses(checks):
    return {check.name: check.status for check in checks}


def only(checks) -> Check:
    (check,) = checks
    assert bool(check.remedy) == (check.status != "OK")
    return check


# Complete report ----------------------------------------------------------------------------------


def examined(capsys, *arguments: str) -> dict[str, str]:
    """Name -> status of every line of a report without FAIL."""
    assert doctor.main(["--json", *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["counts"]["FAIL"] == 0
    return {
        check["name"]: check["status"]
        for section in report["sections"]
        for check in section["checks"]
    }


def test_this_environment_passes_the_quick_checks(capsys):
    found = examined(capsys, "--quick")
    for name in ("python", "torch", "megatron-core", "sglang", "combination",
    "--enable-return-routed-experts", "--sleep-on-idle",
                 "run directory"):  # fmt: skip
        assert found[name] == "OK", name
    assert not {"roll call", "reward", "disk speed"} & set(found)


@pytest.mark.slow
def test_this_environment_passes_all_checks(capsys):
    found = examined(capsys, "--build")
    assert "disk speed" in found
    for name in ("reward", "roll call", "gloo all-reduce", "gloo ping", "clocks"):
        assert found[name] == "OK", name


def test_every_problem_comes_with_a_remedy(demo, capsys):
    (demo.parent / ".cache/tiny_moe-0/train.jsonl").unlink()
    assert doctor.main(["--quick", "--config", str(demo), "--url", "http://127.0.0.1:9"]) == 1
    lines = capsys.readouterr().out.splitlines()
    failed = [index for index, line in enumerate(lines) if line.strip().startswith("FAIL")]
    assert [lines[index].split()[1] for index in failed] == ["data.train", "answer"]
    assert all("->" in lines[index + 1] for index in failed)
    assert lines[-1].endswith("2 FAIL")
    assert not list(demo.parent.glob("runs*")) and not list(demo.parent.glob(".doctor*"))


# Machine ------------------------------------------------------------------------------------------


def test_unknown_gloo_interface(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    assert machine.check_hostname().status == "FAIL"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert machine.check_hostname().status == "OK"
    addresses = {"eth0": [socket.AF_INET], "eth1": [socket.AF_INET6], "down0": [socket.AF_PACKET]}
    known = {name: [SimpleNamespace(family=kind) for kind in kinds]
             for name, kinds in addresses.items()}  # fmt: skip
    monkeypatch.setattr(machine.psutil, "net_if_addrs", lambda: known)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0,eth1")
    assert machine.check_hostname().status == "OK"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0,down0")
    check = machine.check_hostname()
    assert check.status == "FAIL" and check.remedy.startswith("down0:")


@pytest.mark.parametrize(
    ("total", "free", "status"),
    [(64 << 20, 64 << 20, "WARN"), (8 * GIB, 8 * GIB, "OK"), (8 * GIB, 1 << 20, "WARN")],
)
def test_shared_memory(monkeypatch, total, free, status):
    monkeypatch.setattr(
        machine.shutil, "disk_usage", lambda _: SimpleNamespace(total=total, free=free)
    )
    assert only([machine.check_shared_memory()]).status == status


@pytest.mark.parametrize(
    ("member", "groups", "shown"),
    [
        ("0::/", {"": ("5368709120", "2147483648")}, "4.0 GiB free of 5.0, a limit"),
        (
            "0::/a/b",
            {"a": ("4294967296", "1073741824"), "a/b": ("max", "0")},
            "4.0 GiB free of 4.0, a",
        ),
        ("0::/elsewhere", {"": ("max", "1")}, None),
        (
            "9:cpu,memory:/docker/x",
            {"memory": (str(2 << 30), str(1 << 30))},
            "2.0 GiB free of 2.0, a",
        ),
        ("9:memory:/x", {"memory/x": (str((1 << 63) - 4096), str(1 << 30))}, None),
        ("9:cpu:/x", {"x": ("4096", "0")}, None),
    ],
)
def test_the_memory_of_a_container_is_its_limit(monkeypatch, tmp_path, member, groups, shown):
    monkeypatch.setattr(limits, "CGROUPS", tmp_path)
    monkeypatch.setattr(limits, "MEMBERSHIP", tmp_path / "member")
    memory = SimpleNamespace(available=100 << 30, total=200 << 30)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: memory)
    (tmp_path / "member").write_text(f"{member}\n")
    for group, values in groups.items():
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        files = limits.FILES["memory" if "memory" in group else ""]
        (tmp_path / group / "memory.stat").write_text("anon 7\ninactive_file 1073741824\n")
        for name, value in zip(files, values, strict=True):
            (tmp_path / group / name).write_text(f"{value}\n")
    check = machine.check_memory()
    assert check.found.startswith(shown or "100.0 GiB free of 200.0")
    assert check.status == ("WARN" if shown else "OK")


@pytest.mark.parametrize(
    ("check", "soft", "status"),
    [
        (machine.check_open_files, 256, "FAIL"), (machine.check_open_files, 1024, "WARN"),
        (machine.check_open_files, 1 << 20, "OK"),
        (machine.check_processes, 1000, "WARN"), (machine.check_processes, resource.RLIM_INFINITY,
        "OK"),
        (machine.check_core_files, resource.RLIM_INFINITY, "WARN"), (machine.check_core_files, 0,
        "OK"),
        (machine.check_locked_memory, 65536, "WARN"),
        (machine.check_locked_memory, resource.RLIM_INFINITY, "OK"),
    ],
)  # fmt: skip
def test_limits(monkeypatch, tmp_path, check, soft, status):
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (soft, resource.RLIM_INFINITY))
    monkeypatch.setattr(machine, "INFINIBAND", tmp_path)
    assert only([check()]).status == status


def test_missing_gpus_fail_unless_an_image_is_built(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cases = [  # what torch is built for, GPUs of the driver, run.device = cuda, an image is built
        (None, 0, False, False, "OK"), ("13.0", 0, False, False, "WARN"), ("13.0", 8, False, False,
        "FAIL"),
        (None, 8, False, False, "FAIL"), (None, 0, True, False, "FAIL"),
        ("13.0", 0, True, False, "FAIL"), ("13.0", 8, True, True, "WARN"),
    ]  # fmt: skip
    for built_for, count, required, building, status in cases:
        monkeypatch.setattr(torch.version, "cuda", built_for)
        monkeypatch.setattr(machine, "count_gpus", lambda count=count: count)
        assert (
            only(machine.check_visible_gpus(required=required, building=building)).status == status
        )


def test_gpus_used_by_other_programs():
    free = {0: (80 * GIB, 80 * GIB), 1: (20 * GIB, 80 * GIB)}
    assert only([machine.check_gpu_memory(2, free.__getitem__)]).found.startswith(
        "GPU 1: 20.0 GiB free"
    )
    assert only([machine.check_gpu_memory(1, free.__getitem__)]).status == "OK"


def test_variables_that_turn_float32_into_tf32(monkeypatch):
    names = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
    for name in names:
        monkeypatch.setenv(name, "0")
    assert not [check for check in machine.check_machine() if check.name == "TF32"]
    for name in names:
        monkeypatch.setenv(name, "1")
    checks = [check for check in machine.check_machine() if check.name == "TF32"]
    assert [(check.status, check.found) for check in checks] == [
        ("WARN", f"{name} = 1") for name in names
    ]


# Packages -----------------------------------------------------------------------------------------

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.mark.parametrize(
    ("name", "found", "status"),
    [
        ("torch", "2.13.0+cpu", "OK"), ("torch", "2.12.1", "WARN"), ("torch", "2.5.0", "FAIL"),
        ("torch", None, "FAIL"),
        ("sglang", None, "WARN"), ("sglang", "0.5.21", "OK"), ("sglang", "0.5.23", "OK"), ("sglang",
        "0.5.22", "WARN"),
        ("sglang", "0.5.20", "WARN"), ("sglang", "0.5.10", "FAIL"),
        ("sglang", "0.5.24", "WARN"), ("megatron-core", "0.15.3", "FAIL"), ("megatron-core",
        "0.20.0", "FAIL"),
        ("megatron-core", "0.18.0", "WARN"), ("apex", "0.1", "OK"), ("apex", None, "WARN"),
    ],
)  # fmt: skip
def test_package_versions(name, found, status):
    tested = packages.STACKS[HERE].get(name)
    assert only([packages.check_package(packages.package(name), found, tested)]).status == status


def test_bad_pairs_and_untested_combinations_are_named():
    stack = {"python": f"{HERE}.1", **packages.STACKS[HERE]}
    assert statuses(packages.check_packages(stack, has_gpu=False))["combination"] == "OK"
    found = statuses(
        packages.check_packages(stack | {"tokenizers": "0.23.1", "torch": "2.12.0"}, has_gpu=True)
    )
    assert found["transformers + tokenizers"] == "FAIL" and found["sglang + torch"] == "WARN"
    assert found["combination"] == "WARN" and found["transformer-engine"] == "WARN"


def test_missing_features_of_an_old_server_are_named():
    assert (
        "session" in packages.check_sglang("0.5.20").remedy
        and "session" not in packages.check_sglang("0.5.23").remedy
    )
    assert packages.check_sglang("None", "version").status == "WARN"


def test_flags_are_read_from_definitions():
    definitions = "    sleep_on_idle: A[bool] = False\n"
    assert packages.check_flag("sleep_on_idle", definitions).status == "OK"
    assert packages.check_flag("enable_return_routed_experts", definitions).status == "FAIL"


# Configuration, tokenizer, reward -----------------------------------------------------------------


def test_good_configuration_passes(demo):
    cfg, spec, checks = model.check_model_config(demo)
    assert cfg is not None and spec is not None
    assert set(statuses(checks).values()) == {"OK"}


def test_bad_configuration_fails_with_the_configurations_own_message(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text("[optin]\nlr = 1")
    cfg, _, checks = model.check_model_config(path)
    assert cfg is None
    assert [check.status for check in checks] == ["FAIL"]
    assert "did you mean 'optim'" in checks[0].remedy


def test_port_in_use(demo):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        demo.write_text(demo.read_text().replace("[rollout]", f"[rollout]\nport = {port}"))
        assert statuses(model.check_model_config(demo)[2])["rollout.port"] == "FAIL"
    assert statuses(model.check_model_config(demo)[2])["rollout.port"] == "OK"


def test_missing_api_key(demo, monkeypatch):
    demo.write_text(
        demo.read_text().replace("[rollout]", '[rollout]\napi_key_env = "DOCTOR_TEST_KEY"')
    )
    monkeypatch.delenv("DOCTOR_TEST_KEY", raising=False)
    assert statuses(model.check_model_config(demo)[2])["rollout.api_key_env"] == "FAIL"
    monkeypatch.setenv("DOCTOR_TEST_KEY", "secret")
    assert "rollout.api_key_env" not in statuses(model.check_model_config(demo)[2])


def test_supervised_training_is_judged_by_its_rules(demo, tmp_path, monkeypatch):
    """Without a loss, replay mode and group size of its own, and on rows without labels."""
    text = """
[run]
device = "cpu"
num_steps = 2
[model]
path = ".cache/tiny_moe-0"
dtype = "float32"
[data]
train = "rows.jsonl"
[sft]
max_row_tokens = 64
"""
    path = tmp_path / "sft.toml"
    path.write_text(text)
    checks = model.check_model_config(path)[2]
    assert statuses(checks)["data.train"] == "FAIL"
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1", "response": "2"}\n')
    cfg, _, checks = model.check_model_config(path)
    assert cfg.is_sft and {check.status for check in checks} <= {"OK", "WARN"}, checks
    monkeypatch.setattr(doctor, "check_local_ranks", lambda _: [])
    parts = doctor.examine_machine(doctor.parse(["--config", str(path), "--build"]))
    assert "Reward" not in [title for title, _ in parts]


PLAIN = (
    "{% for m in messages %}{{ m['content'] }} {% if m['role'] == 'assistant' %}</s>{% endif %}{%"
    " endfor %}"
)


def tokenizer_checks(
    folder: Path,
    *,
    template: str = PLAIN,
    eos: str = "</s>",
    adds_bos: bool = False,
    more: dict | None = None,
):
    """The checks of a tokenizer of a few words."""
    words = ["<s>", "</s>", "<end>", "<unk>", "1", "+", "=", "?", "x", *("extra", "words")]
    core = Tokenizer(
        WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    )
    core.pre_tokenizer = Whitespace()
    if adds_bos:
        core.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token=eos, unk_token="<unk>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    tokenizer.chat_template = template
    checkpoint(folder, {"vocab_size": 64, "eos_token_id": 1} | (more or {}), None, None)
    tokenizer.save_pretrained(folder)
    return statuses(
        model.check_tokenizer(
            load_config(None, ["--model.path", str(folder), "--data.train", "none"])
        )
    )


def test_tokenizer(tmp_path):
    good = tokenizer_checks(tmp_path / "good")
    assert good == {"EOS": "OK", "BOS": "OK", "end of a turn": "OK", "vocabulary": "OK"}
    wrong = {
        "EOS": ("FAIL", dict(more={"eos_token_id": 2})),
        "vocabulary": ("FAIL", dict(more={"vocab_size": 5})),
        "end of a turn": ("WARN", dict(template=PLAIN.replace("</s>", "<end>"))),
        "BOS": ("WARN", dict(adds_bos=True)),
    }
    for name, (status, what) in wrong.items():
        assert tokenizer_checks(tmp_path / name.replace(" ", "_"), **what) == good | {name: status}
    assert tokenizer_checks(tmp_path / "two_ends", more={"eos_token_id": [1, 2]})["EOS"] == "OK"
    named = SimpleNamespace(eos_token="</s>", eos_token_id=1, pad_token=None)
    files = {"config.json": {"eos_token_id": 2}, "generation_config.json": {"eos_token_id": [1, 3]}}
    check = model.check_eos(named, files)
    assert check.status == "OK" and "[2, 3] end a response too" in check.found
    assert tokenizer_checks(tmp_path / "bos", template="<s>" + PLAIN, adds_bos=True)["BOS"] == "OK"
    assert (
        tokenizer_checks(tmp_path / "twice", template="<s><s>" + PLAIN, adds_bos=True)["BOS"]
        == "WARN"
    )


REWARDS = """
from megatron_rl.reward import Episode, LabelError
def good(p, r, l): return float(r == l)
def bad(p, r, l): raise KeyError("key")
def all_right(p, r, l): return 1.0
def of_answers(p, r, l): return float(f"<answer>{l}</answer>" in r)
def of_rows(episode: Episode) -> float:
    expected = ("<1 + 1>", "2", {"tests": ["a", "b"]}, "")
    if (episode.prompt, episode.label, episode.metadata, episode.source) != expected:
        raise LabelError(f"{episode}")
    return float(bool(episode.response))
"""


@pytest.fixture
def checked_reward(demo, monkeypatch):
    """checked_reward(function): the check of a function of REWARDS, on one row with a column."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{demo.parent}")
    (demo.parent / "mine.py").write_text(REWARDS)
    folder = demo.parent / ".cache/tiny_moe-0"
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "<{{ messages[0]['content'] }}>"
    tokenizer.save_pretrained(folder)
    row = {"prompt": "1 + 1", "label": "2", "tests": ["a", "b"]}
    (folder / "train.jsonl").write_text(json.dumps(row))

    def check(function):
        options = ["--reward.function", function, "--data.chat_template", "true"]
        return only([model.check_reward(load_config(demo, options))])

    return check


@pytest.mark.parametrize(
    ("function", "status", "message"),
    [
        ("mine:good", "OK", "labels as responses score [1.0], empty responses [0.0]"),
        ("mine:of_answers", "OK", "labels as responses score [0.0], empty responses [0.0]"),
        ("mine:of_rows", "OK", "labels as responses score [1.0], empty responses [0.0]"),
        ("mine:all_right", "WARN", "labels as responses score [1.0], empty responses [1.0]"),
        ("mine:bad", "FAIL", "KeyError: 'key'"),
        ("nowhere:bad", "FAIL", "nowhere"),
    ],
)
def test_the_reward_function_is_called_as_in_a_run(function, status, message, checked_reward):
    check = checked_reward(function)
    assert check.status == status and message in check.found, check


def test_a_reward_cannot_be_tried_on_rows_that_cannot_be_read(checked_reward, demo):
    train = demo.parent / ".cache/tiny_moe-0/train.jsonl"
    train.write_text('{"prompt": 1}\n')
    assert "no row of data.train can be used" in checked_reward("mine:good").found
    train.unlink()
    check = checked_reward("mine:good")
    assert check.status == "FAIL" and "train.jsonl: cannot be read" in check.found


# Disk ---------------------------------------------------------------------------------------------


def test_disk(tmp_path, demo, monkeypatch):
    monkeypatch.setattr(storage, "MOST_CHUNKS", 2)
    checks = storage.check_disk(tmp_path / "runs/new", measure=True)
    assert statuses(checks)["run directory"] == "OK" and "MB/s written" in checks[1].found
    assert not list(tmp_path.glob(".doctor*"))
    free = storage.shutil.disk_usage(tmp_path).free
    assert (
        only(storage.check_disk(tmp_path, free + GIB, "2 checkpoints", measure=False)).status
        == "WARN"
    )
    assert (
        only(storage.check_disk(tmp_path, 3 * free, "2 checkpoints", measure=False)).status
        == "FAIL"
    )
    assert only(storage.check_disk(demo / "runs", measure=True)).status == "FAIL"


def test_bytes_of_checkpoints(demo):
    """Weights in 2 bytes, two moments and a copy in 4 each; the last `keep_last` and one that is
    being written.
    """
    spec = make_spec(MOE)
    whole = storage.full_model(spec)
    elements = whole.dense + whole.experts
    one = elements * (2 + 8 + 4)
    cfg = load_config(
        demo,
        [
            "--run.num_steps",
            "100",
            "--checkpoint.every",
            "10",
            "--checkpoint.keep_last",
            "0",
            "--model.dtype",
            "bfloat16",
        ],
    )
    assert storage.kept_bytes(cfg, spec)[0] == 10 * one + 2 * elements
    few = load_config(demo, ["--run.num_steps", "100", "--checkpoint.every", "10",
    "--checkpoint.keep_last", "2",
                             "--checkpoint.no_export_hf", "--model.dtype", "bfloat16"])  # fmt: skip
    assert storage.kept_bytes(few, spec)[0] == 3 * one
    # 20, 40, 60, 80 and 100 by period, the best, the last two, and one being written
    options = ["--checkpoint.keep_every", "20", "--checkpoint.best_metric", "rollout/reward_mean"]
    more = load_config(
        demo,
        [
            "--run.num_steps", "100", "--checkpoint.every", "10", "--checkpoint.keep_last", "2",
            "--checkpoint.no_export_hf", "--model.dtype", "bfloat16", *options,
        ],
    )  # fmt: skip
    assert storage.kept_bytes(more, spec)[0] == 9 * one


# Servers and ranks --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ahead", "status"), [(0.0, "OK"), (90.0, "WARN"), (-90.0, "WARN"), (None, "WARN")]
)
def test_clock_of_a_server(ahead, status):
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response_only(200)
            if ahead is not None:
                self.send_header("Date", formatdate(time.time() + ahead, usegmt=True))
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        check = only([servers.check_clock(f"http://127.0.0.1:{server.server_port}")])
        thread.join()
    assert check.status == status
    assert ahead is None or ("ahead" in check.found) == (ahead > 0) or not ahead


def test_slow_peers_and_wrong_clocks_are_named():
    peers = [ranks.Peer(rank, f"node{rank}", 1e-4, 1e9, 0.001) for rank in range(1, 8)]
    assert set(statuses(ranks.check_peers("gloo", peers)).values()) == {"OK"}
    slow = ranks.Peer(8, "node8", 2e-4, 2e8, -3.0)
    found = [check for check in ranks.check_peers("gloo", [*peers, slow]) if check.status == "WARN"]
    assert len(found) == 1 and "rank 8 on node8" in found[0].found
    assert ranks.check_clocks(peers).status == "OK"
    assert "rank 8 on node8" in only([ranks.check_clocks([*peers, slow])]).found


def test_roll_call_names_missing_ranks():
    store = HashStore()
    assert (
        ranks.roll_call(store, 1, 4, deadline=9.0)
        == []
        == ranks.roll_call(store, 3, 4, deadline=9.0)
    )
    assert ranks.roll_call(store, 0, 4, deadline=0.3) == [2]
    ranks.roll_call(store, 2, 4, deadline=9.0)
    assert ranks.roll_call(store, 0, 4, deadline=0.3) == [] and len(ranks.hosts(store, 4)) == 4


@pytest.mark.slow
def test_a_missing_rank_is_named():
    """Two of three ranks start: rank 0 names the missing one within its deadline, and the other
    exits.
    """
    env = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "3",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-m", "megatron_rl.cli", "doctor", "--ranks", "--deadline", "6"]
    started = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=env | {"RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    first, second = (process.communicate(timeout=120)[0] for process in started)
    assert "2 of 3 connected within 6 s; missing: 2" in first and started[0].returncode == 1
    assert not second.strip() and started[1].returncode == 0
