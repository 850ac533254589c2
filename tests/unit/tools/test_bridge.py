"""Megatron-Bridge and the own converter agree on every tensor, in both directions; what Bridge does
not support is refused.

BRIDGE_PYTHON (environment): an interpreter that can import megatron.bridge and this project's
requirements (docs/guides/checkpoints.md);
without it, or megatron.bridge beside the project, these tests are skipped.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatron_rl_tools.convert.convert_hf import main
from tests.families import FAMILIES, family_checkpoint

pytestmark = pytest.mark.slow

EVERY_LAYER = {"mlp_only_layers": []}  # Bridge's Qwen3-MoE knows no dense layers in between
DEEPSEEK = tuple(name for name in FAMILIES if name.startswith("deepseek"))
AGREE = ("qwen3_moe", "qwen3", "olmoe", "glm4_moe", "moonlight", *DEEPSEEK)
UNKNOWN = {
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "no mapping for decoder.layers.1",
}
RUN = "import json, sys; from megatron_rl_tools.convert.convert_hf import main; "
RUN += "print([main(line) for line in json.loads(sys.argv[1])])"


def bridge(commands: list[list[str]]) -> subprocess.CompletedProcess[str]:
    """Run these commands of convert_hf with Bridge's interpreter, in one process; its last line has
    their exit statuses.
    """
    found = importlib.util.find_spec("megatron.bridge") is not None
    python = os.environ.get("BRIDGE_PYTHON", sys.executable if found else "")
    if (
        not python
        or subprocess.run(
            [python, "-c", "import importlib.metadata as m; m.version('megatron-bridge')"]
        ).returncode
    ):
        pytest.skip(f"BRIDGE_PYTHON = {python!r} must name a Python that has megatron-bridge")
    lines = json.dumps([[*command, "--backend", "bridge"] for command in commands])
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    return subprocess.run(
        [python, "-c", RUN, lines], env=environment, capture_output=True, text=True, timeout=500
    )


def to_megatron(hf: Path, out: Path) -> list[str]:
    return ["hf-to-megatron", "--hf", str(hf), "--out", str(out)]


def to_hf(megatron: Path, config: Path, out: Path) -> list[str]:
    return [
        "megatron-to-hf",
        "--megatron",
        str(megatron),
        "--config",
        str(config),
        "--out",
        str(out),
    ]


def test_bridge_and_own_agree_on_every_tensor(tmp_path: Path) -> None:
    commands = []
    for name in AGREE:
        folder = tmp_path / name
        hf = family_checkpoint(folder / "hf", name, **(EVERY_LAYER if name == "qwen3_moe" else {}))
        assert main(to_megatron(hf, folder / "own")) == 0
        commands += [to_megatron(hf, folder / "bridge"), to_hf(folder / "own", hf, folder / "back")]
    done = bridge(commands)
    assert done.stdout.splitlines()[-1:] == [str([0] * len(commands))], (
        done.stdout[-2000:] + done.stderr[-2000:]
    )
    for name in AGREE:
        folder = tmp_path / name
        assert main(["verify", str(folder / "bridge"), str(folder / "own")]) == 0, name
        back, original = (
            load_file(folder / "back" / "model.safetensors"),
            load_file(folder / "hf" / "model.safetensors"),
        )
        assert back.keys() == original.keys(), name
        assert [key for key, tensor in original.items() if not tensor.equal(back[key])] == [], name


def test_what_bridge_does_not_support_is_refused_in_one_line(tmp_path: Path) -> None:
    commands = [
        to_megatron(family_checkpoint(tmp_path / name, name), tmp_path / f"{name}.out")
        for name in UNKNOWN
    ]
    done = bridge(commands)
    assert done.stdout.splitlines()[-1:] == [str([2] * len(commands))], (
        done.stdout[-2000:] + done.stderr[-2000:]
    )
    lines = [
        line
        for line in done.stderr.splitlines()
        if line.startswith("megatron-rl convert: --backend bridge")
    ]
    assert [text in line for text, line in zip(UNKNOWN.values(), lines, strict=True)] == [
        True
    ] * len(UNKNOWN), lines
    assert set(UNKNOWN) | set(AGREE) == set(FAMILIES)
    assert not list(tmp_path.glob("*.out"))
