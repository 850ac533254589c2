"""kubernetes.yaml has the images, ports and variables of slurm.sbatch, train.sh and serve.sh."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "examples/launch"
IN_IMAGE = "/opt/megatron_rl/"
"""Folder of the project in both images."""
SCRIPTS = {name: (LAUNCH / name).read_text() for name in ("train.sh", "serve.sh", "slurm.sbatch")}
OBJECTS = {
    (item["kind"], item["metadata"]["name"]): item
    for item in yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
}
SERVERS = OBJECTS["StatefulSet", "megatron-rl-servers"]["spec"]
JOB = OBJECTS["Job", "megatron-rl-train"]["spec"]
(SERVE,) = SERVERS["template"]["spec"]["containers"]
(TRAIN,) = JOB["template"]["spec"]["containers"]
(WAIT,) = JOB["template"]["spec"]["initContainers"]


def environment(container: dict) -> dict[str, str]:
    return {item["name"]: item.get("value", "") for item in container["env"]}


def default(script: str, name: str) -> str:
    """The last default of a variable in a script."""
    return re.findall(rf'"\$\{{{name}:=(.*?)\}}"', SCRIPTS[script])[-1]


def exported() -> dict[str, str]:
    """Return the variables that the shell of the ranks' container exports."""
    pairs = re.findall(r'(?:export| )\s*([A-Z_]+)=("[^"]*"|\S+)', TRAIN["command"][-1])
    return {name: value.strip('"') for name, value in pairs}


def server_ports() -> list[int]:
    variables = environment(SERVE)
    count = len(variables["SERVER_GPUS"].split(",")) // int(variables["TP_SIZE"])
    return [int(variables["PORT"]) + index for index in range(count)]


def test_every_container_has_the_image_of_the_dockerfile():
    page = (ROOT / "docs/guides/launch.md").read_text()
    (image,) = {container["image"] for container in (SERVE, TRAIN, WAIT)}
    text = (ROOT / "Dockerfile.sglang").read_text()
    build = f"docker build -f Dockerfile.sglang -t {image} ."
    assert build in text and build in page
    for file in ("Dockerfile", "Dockerfile.sglang"):
        assert f"WORKDIR {IN_IMAGE.rstrip('/')}\n" in (ROOT / file).read_text()
    named = re.findall(rf"{IN_IMAGE}(\S+)", "\n".join([*SERVE["command"], *TRAIN["command"]]))
    assert len(named) == 3 and all((ROOT / path).is_file() for path in named)
    assert (LAUNCH / "kubernetes.yaml").read_text().count("NOT RUN") == 1


def test_every_variable_is_one_that_the_script_reads():
    variables = {"train.sh": {**environment(TRAIN), **exported()}, "serve.sh": environment(SERVE)}
    key = "SGLANG_API_KEY"
    for script, names in variables.items():
        unread = [name for name in names if not re.search(rf"\b{name}\b", SCRIPTS[script])]
        assert not [name for name in unread if name != key], script
        assert key in names, "both sides have it, from the Secret"
    for container in (SERVE, TRAIN, WAIT):
        (source,) = [item["valueFrom"] for item in container["env"] if item["name"] == key]
        assert source == {"secretKeyRef": {"name": "megatron-rl", "key": "api-key"}}


def test_the_numbers_are_those_of_the_scripts():
    train, serve = exported(), environment(SERVE)
    assert train["MASTER_PORT"] == default("train.sh", "MASTER_PORT")
    assert train["RANKS_PER_NODE"] == default("train.sh", "RANKS_PER_NODE")
    for name in ("PORT", "TP_SIZE", "SERVER_GPUS"):
        assert serve[name] == default("serve.sh", name)
    assert serve["PORT"] == default("slurm.sbatch", "PORT")
    assert SERVE["command"][-1] == default("slurm.sbatch", "MODEL"), "the recipe's checkpoint"
    assert TRAIN["command"][-1].split()[-1].removeprefix(IN_IMAGE) in SCRIPTS["slurm.sbatch"]
    for container, count in ((TRAIN, int(train["RANKS_PER_NODE"])), (SERVE, 8)):
        assert container["resources"]["limits"]["nvidia.com/gpu"] == count
    (grace,) = re.findall(r"--signal=B:USR1@(\d+)", SCRIPTS["slurm.sbatch"])
    assert JOB["template"]["spec"]["terminationGracePeriodSeconds"] == int(grace)


def test_pods_are_reached_by_the_names_that_others_use():
    train = exported()
    assert (
        JOB["completionMode"] == "Indexed" and JOB["template"]["spec"]["restartPolicy"] == "Never"
    )
    assert JOB["completions"] == JOB["parallelism"] == int(train["NNODES"])
    assert train["NODE_RANK"] == "$JOB_COMPLETION_INDEX"
    service = OBJECTS["Service", "megatron-rl-train"]["spec"]
    assert JOB["template"]["spec"]["subdomain"] == "megatron-rl-train"
    assert train["MASTER_ADDR"] == "megatron-rl-train-0.megatron-rl-train"
    name = SERVERS["serviceName"]
    urls = [
        f"http://{name}-{pod}.{name}:{port}"
        for pod in range(SERVERS["replicas"])
        for port in server_ports()
    ]
    assert environment(TRAIN)["ROLLOUT_URLS"].split() == urls
    assert environment(WAIT) == environment(TRAIN), "it waits for the servers of the ranks"
    for spec, pods in ((service, JOB), (OBJECTS["Service", name]["spec"], SERVERS)):
        assert spec["clusterIP"] == "None"
        assert spec["selector"] == pods["template"]["metadata"]["labels"]


def test_ports_and_memory():
    train = [item["containerPort"] for item in TRAIN["ports"]]
    assert train == [int(exported()["MASTER_PORT"])]
    services = [OBJECTS["Service", f"megatron-rl-{part}"]["spec"] for part in ("train", "servers")]
    for container, service in ((TRAIN, services[0]), (SERVE, services[1])):
        numbers = [item["containerPort"] for item in container["ports"]]
        assert numbers == [item["port"] for item in service["ports"]]
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert [item["containerPort"] for item in SERVE["ports"]] == server_ports()
    for pods in (SERVERS, JOB):
        volumes = {item["name"]: item for item in pods["template"]["spec"]["volumes"]}
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"


@pytest.mark.parametrize("missing", [None, "30002"])
def test_the_probe_asks_every_server_with_the_key(tmp_path, missing):
    """The probe's shell on a curl that answers for all ports but one."""
    curl = tmp_path / "curl"
    curl.write_text(
        f'#!/usr/bin/env bash\necho "${{*: -1}}" >>{tmp_path}/urls\n'
        'while [[ "$1" != --config ]]; do shift; done\n'
        f'cat "$2" >>{tmp_path}/headers\n'
        f'[[ "$(tail -1 {tmp_path}/urls)" != *:{missing}/* ]]\n'
    )
    curl.chmod(0o755)
    probe = SERVE["startupProbe"]["exec"]
    assert SERVE["readinessProbe"]["exec"] == probe
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOST": "10.0.0.1", "SGLANG_API_KEY": "k"}
    status = subprocess.run(probe["command"], env=env).returncode
    assert status == (1 if missing else 0)
    asked = (tmp_path / "urls").read_text().split()
    if missing is None:
        assert asked == [f"http://10.0.0.1:{port}/model_info" for port in server_ports()]
    assert 'header = "Authorization: Bearer k"' in (tmp_path / "headers").read_text()
