"""train.sh on two nodes of two ranks computes what one node of four does; a killed node is named,
and nothing is lost.
"""

import json
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from megatron_rl.config import dump_config, load_config
from megatron_rl.launch.exit_codes import REQUEUE, STALLED
from megatron_rl.metrics.sinks import read_metrics
from megatron_rl.rollout.server.ports import free_port
from tests.nodes import Node, make_nodes, wait_until
from tests.saved_run import make_material, sections

STEPS, EVERY = 24, 3
# seconds, on a busy machine: until the first steps; from the kill to the end of the survivor
START, DEADLINE = 240, 90


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    return make_material(tmp_path_factory.mktemp("material"), steps=STEPS)


@pytest.fixture(scope="module")
def undisturbed(material, tmp_path_factory) -> list[dict]:
    """Metrics of one node with four ranks."""
    work = tmp_path_factory.mktemp("one_node")
    with make_nodes(1) as nodes:
        launch(nodes, material, work)
        assert nodes[0].wait(START) == 0, nodes[0].text()
    return metrics(work)


@pytest.fixture
def nodes():
    with make_nodes(2) as both:
        yield both


def launch(nodes: list[Node], material: Path, work: Path, *arguments: str, **variables: str) -> int:
    """Start the run, or resume it, on these nodes; returns the port of their rendezvous."""
    port = free_port()
    for node in nodes:
        start(node, len(nodes), nodes[0].address, port, material, work, *arguments, **variables)
    return port


def start(
    node: Node,
    count: int,
    master: str,
    port: int,
    material: Path,
    work: Path,
    *arguments: str,
    **variables: str,
) -> None:
    more = {
        "run": {"collective_timeout_minutes": 2.0, "silence_timeout_seconds": 20.0},
        "parallel": {"ep": 4},  # every layer's tokens cross the nodes
        "replay": {"mode": "R3"},
        "checkpoint": {"every": EVERY, "export_hf": False},
    }
    config = work / "config.toml"
    config.write_text(
        dump_config(load_config(None, [], sections(material, work, steps=STEPS, **more)))
    )
    node.train(
        work, master, port, str(config), "--from-rollouts", str(material / "live"), *arguments,
        NNODES=str(count), RANKS_PER_NODE=str(4 // count), JOB_ID=work.name, **variables,
    )  # fmt: skip


def metrics(work: Path) -> list[dict]:
    """Every step's metrics and policy version but the times, exactly."""
    rows = read_metrics(work / "run/metrics.jsonl")
    assert [row.step for row in rows] == list(range(STEPS))
    return [
        {
            name: repr(value)
            for name, value in row.metrics.items()
            if not name.startswith(("time/", "perf/"))
        }
        | {"version": row.policy_version, "per_layer": repr(row.per_layer)}
        for row in rows
    ]


def steps_done(work: Path) -> int:
    path = work / "run/metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


@pytest.mark.slow
def test_two_nodes_compute_what_one_does(undisturbed, nodes, material, tmp_path):
    launch(nodes, material, tmp_path)
    for node in nodes:
        assert node.wait(START) == 0, node.text()
    assert metrics(tmp_path) == undisturbed
    assert {"train/loss", "optim/grad_norm"} <= undisturbed[0].keys()
    for node in nodes:
        logs = list(tmp_path.glob(f"logs/{tmp_path.name}/node{node.rank}/*/attempt_0/*/stderr.log"))
        assert len(logs) == 2, "one per rank"


@pytest.mark.slow
def test_when_the_network_goes_both_sides_name_each_other(nodes, material, tmp_path):
    if not nodes[0].prefix:
        pytest.skip("needs network namespaces (root)")
    launch(nodes, material, tmp_path)
    wait_until(lambda: steps_done(tmp_path) >= 3, START, nodes)
    nodes[1].cut_off()
    cut = time.monotonic()
    for node in nodes:
        assert node.wait(DEADLINE) == STALLED, node.text()
        print(f"{node.host} ended after {time.monotonic() - cut:.1f} s")
    assert "no heartbeat from ranks 2 to 3 for 20 s" in nodes[0].text()
    assert (
        "the job's store has not answered for 20 s, the node of rank 0 (node0, last in "
        in nodes[1].text()
    )


@pytest.mark.slow
def test_servers_on_one_node_and_ranks_on_the_other(nodes, material, tmp_path):
    ranks, servers = nodes
    key = {"SGLANG_API_KEY": "a key of this test"}
    servers.start(
        "serve.sh",
        tmp_path,
        str(material / "moe"),
        DEVICE="cpu",
        DTYPE="float32",
        HOST=servers.address,
        **key,
    )
    wait_until(lambda: "http://" in servers.text(), 30, [servers])
    more = {
        "run": {"name": "served", "num_steps": 2},
        "parallel": {"ep": 2},
        "replay": {"mode": "R3"},
        "rollout": {"api_key_env": "SGLANG_API_KEY", "max_response_tokens": 6},
        "reward": {"function": "tests.e2e.rewards:parity"},
    }
    config = load_config(None, [], sections(material, tmp_path, steps=2, **more))
    (tmp_path / "config.toml").write_text(dump_config(config))
    url = servers.text().split()[0]
    wait_until(lambda: answers(servers, url, key["SGLANG_API_KEY"]), START, [servers])
    ranks.train(
        tmp_path,
        ranks.address,
        free_port(),
        str(tmp_path / "config.toml"),
        RANKS_PER_NODE="2",
        ROLLOUT_URLS=url,
        **key,
    )
    assert ranks.wait(START) == 0, ranks.text()
    rows = read_metrics(tmp_path / "served/metrics.jsonl")
    assert [row.step for row in rows if "train/loss" in row.metrics] == [0, 1]
    assert all(
        row.metrics["train/logratio_abs_mean"] <= 1e-4
        for row in rows
        if "train/loss" in row.metrics
    )
    for log in tmp_path.rglob("*.log"):
        assert key["SGLANG_API_KEY"] not in log.read_text(errors="replace")
    server = psutil.Process(servers.process.pid).children(recursive=True)
    servers.process.terminate()
    assert servers.wait(30) == 128 + signal.SIGTERM
    assert server and not [
        process
        for process in server
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]


def answers(node: Node, url: str, key: str) -> bool:
    """Whether the server at `url` does, asked from its own node."""
    question = [
        "curl",
        "-sf",
        "--max-time",
        "2",
        "-H",
        f"Authorization: Bearer {key}",
        f"{url}/model_info",
    ]
    done = subprocess.run([*node.prefix, *question], capture_output=True)
    time.sleep(0.5)
    return done.returncode == 0


@pytest.mark.slow
def test_a_killed_node_is_named_and_nothing_is_lost(undisturbed, nodes, material, tmp_path):
    first, second = nodes
    port = launch(nodes, material, tmp_path, MAX_RESTARTS="1")
    wait_until(lambda: steps_done(tmp_path) >= 5, START, nodes)
    second.kill()
    killed = time.monotonic()
    wait_until(lambda: "no heartbeat from ranks 2 to 3" in first.text(), DEADLINE, [first])
    print(f"named after {time.monotonic() - killed:.1f} s")
    assert f"on {second.host}" in first.text() or not second.prefix

    # its restarted part finds the rendezvous, where the surviving node's restarted ranks wait for
    # it
    start(second, 2, first.address, port, material, tmp_path)
    wait_until(lambda: steps_done(tmp_path) >= 12, START, nodes)
    assert "resumed from" in first.text()
    first.kill()
    killed = time.monotonic()
    assert second.wait(DEADLINE) == STALLED, second.text()
    print(f"ended after {time.monotonic() - killed:.1f} s")
    assert "the node of rank 0" in second.text() or "no heartbeat from rank 0" in second.text()

    launch(nodes, material, tmp_path, "--resume", MAX_RESTARTS="1")
    wait_until(lambda: steps_done(tmp_path) >= 18, START, nodes)
    # one node is preempted: all ranks save, none is started again
    second.process.send_signal(signal.SIGUSR1)
    for node in nodes:
        assert node.wait(DEADLINE) == REQUEUE, node.text()

    launch(nodes, material, tmp_path, "--resume")
    for node in nodes:
        assert node.wait(START) == 0, node.text()
    assert metrics(tmp_path) == undisturbed
