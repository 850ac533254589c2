"""train.sh on two nodes of two ranks: what one node of four computes; a node that is killed is named, and nothing is lost."""

import json
import signal
import time
from pathlib import Path

import pytest

from megatron_rl.config import dump_config, load_config
from megatron_rl.metrics.sinks import read_metrics
from megatron_rl.status import REQUEUE, STALLED
from tests.dist.launch import free_port
from tests.nodes import Node, make_nodes, wait_until
from tests.saved_run import make_material, sections

STEPS, EVERY = 24, 3
START, DEADLINE = 240, 90  # seconds, on a busy machine: until the first steps; from the kill to the end of the survivor


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
    """Start the run, or go on with it, on these nodes; the port of their rendezvous."""
    port = free_port()
    for node in nodes:
        start(node, len(nodes), nodes[0].address, port, material, work, *arguments, **variables)
    return port


def start(node: Node, count: int, master: str, port: int, material: Path, work: Path, *arguments: str, **variables: str) -> None:
    more = {
        "run": {"collective_timeout_minutes": 2.0, "silence_timeout_seconds": 20.0},
        "parallel": {"ep": 4},  # every layer's tokens cross the nodes
        "replay": {"mode": "R3"},
        "checkpoint": {"every": EVERY, "export_hf": False},
    }
    config = work / "config.toml"
    config.write_text(dump_config(load_config(None, [], sections(material, work, steps=STEPS, **more))))
    node.start(
        work, master, port, str(config), "--from-rollouts", str(material / "live"), *arguments,
        NNODES=str(count), RANKS_PER_NODE=str(4 // count), JOB_ID=work.name, **variables,
    )  # fmt: skip


def metrics(work: Path) -> list[dict]:
    """Every step's metrics and policy version but the times, exactly."""
    rows = read_metrics(work / "run/metrics.jsonl")
    assert [row.step for row in rows] == list(range(STEPS))
    return [
        {name: repr(value) for name, value in row.metrics.items() if not name.startswith(("time/", "perf/"))}
        | {"version": row.policy_version, "per_layer": repr(row.per_layer)}
        for row in rows
    ]


def steps_done(work: Path) -> int:
    path = work / "run/metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return 1 + max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=-1)


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
def test_a_killed_node_is_named_and_nothing_is_lost(undisturbed, nodes, material, tmp_path):
    first, second = nodes
    port = launch(nodes, material, tmp_path, MAX_RESTARTS="1")
    wait_until(lambda: steps_done(tmp_path) >= 5, START, nodes)
    second.kill()
    killed = time.monotonic()
    wait_until(lambda: "ranks 2 to 3 not heard of" in first.text(), DEADLINE, [first])
    print(f"named after {time.monotonic() - killed:.1f} s")
    assert f"on {second.host}" in first.text() or not second.prefix

    # its restarted part finds the rendezvous, where the surviving node's restarted ranks wait for it
    start(second, 2, first.address, port, material, tmp_path)
    wait_until(lambda: steps_done(tmp_path) >= 12, START, nodes)
    assert "resumed from" in first.text()
    first.kill()
    killed = time.monotonic()
    assert second.wait(DEADLINE) == STALLED, second.text()
    print(f"ended after {time.monotonic() - killed:.1f} s")
    assert "the node of rank 0" in second.text() or "rank 0 not heard of" in second.text()

    launch(nodes, material, tmp_path, "--resume", MAX_RESTARTS="1")
    wait_until(lambda: steps_done(tmp_path) >= 18, START, nodes)
    second.process.send_signal(signal.SIGUSR1)  # one node is preempted: all ranks save, none is started again
    for node in nodes:
        assert node.wait(DEADLINE) == REQUEUE, node.text()

    launch(nodes, material, tmp_path, "--resume")
    for node in nodes:
        assert node.wait(START) == 0, node.text()
    assert metrics(tmp_path) == undisturbed
