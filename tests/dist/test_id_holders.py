"""What happens to an expert id between the answer of a server and the router can be read in few
files: those that hold one, seen by a profiler in a run that samples, replays and trains.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.config import dump_config, load_config
from megatron_rl.rollout.server.ports import free_port
from tests import continuous_run
from tests.faults.samples import SPEC
from tests.saved_run import make_material, sections

ROOT = Path(__file__).resolve().parents[2]
MOST = 20
"""Client 4, groups and scheduler 3, the record, trainer 2, parity check, batch 4, saved mini-batch,
engine and replay 4."""


@pytest.mark.slow
def test_an_expert_id_passes_few_files(tmp_path):
    material = make_material(tmp_path, steps=1, layers=SPEC.num_layers)
    continuous_run.make_prompts(tmp_path, 1)
    more = continuous_run.sections(tmp_path, None)
    cfg = load_config(None, [], sections(material, tmp_path, steps=1, **more))
    config, out = tmp_path / "run.toml", tmp_path / "holders.json"
    config.write_text(dump_config(cfg))
    done = subprocess.run(
        [sys.executable, "-m", "tests.id_holders", out, "--config", config],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        env=os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    holders = json.loads(out.read_text())
    path = ("rollout/client/routed_experts.py", "batch/pack.py", "replay/manager.py")
    assert holders.keys() >= set(path)
    lines = [f"{name}: {', '.join(functions)}" for name, functions in holders.items()]
    assert len(lines) <= MOST, "\n".join(lines)
