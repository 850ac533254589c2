"""One rank of a dummy step: the parts of a rehearsal (rehearse/program.py) on the real device.

    torchrun ... -m megatron_rl_tools.gpu_check.layout_rank --rehearsal FILE --device cuda
        --folder DIR

Writes DIR/rankN.json.  Weights are random; nothing is read from a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.config import Config, load_config
from megatron_rl.config.device_limits import Device
from megatron_rl.engine import provider
from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import load_hf_config
from megatron_rl_tools.rehearse.program import Program, Rehearsal
from megatron_rl_tools.rehearse.rollouts import invented_samples

SPREAD = 0.02
"""Standard deviation of the weights."""


class Meter:
    """Seconds and memory of each phase, on the device; it ends when all ranks have ended it."""

    def __init__(self, device: Device) -> None:
        self.is_gpu = device == "cuda"
        self.phase = ""
        self.memory: dict[str, dict[str, int]] = {}
        self.seconds: dict[str, float] = {}

    def begin(self, phase: str) -> None:
        self.phase = phase
        self._wait()
        if self.is_gpu:
            torch.cuda.reset_peak_memory_stats()
            self.memory[phase] = {"start": torch.cuda.memory_allocated()}
        self.seconds[phase] = -time.perf_counter()

    def end(self) -> None:
        if not self.phase:
            return
        self._wait()
        self.seconds[self.phase] += time.perf_counter()
        if self.is_gpu:
            self.memory[self.phase] |= {
                "peak": torch.cuda.max_memory_allocated(),
                "end": torch.cuda.memory_allocated(),
            }
        self.phase = ""

    def data(self) -> dict[str, Any]:
        return {"memory": self.memory, "seconds": self.seconds}

    def _wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank of gpu-check's step full-layout.")
    parser.add_argument("--rehearsal", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    rehearsal = json.loads(args.rehearsal.read_text())
    rank = int(os.environ["RANK"])
    provider.NativeProvider.load = fill  # type: ignore[method-assign]
    cfg = rehearsed_config(rehearsal, args.device, args.folder / "model")
    (lengths, *_) = [item["lengths"] for item in rehearsal["by_rank"].values()]
    meter = Meter(args.device)
    spec = make_spec(load_hf_config(cfg.model.path))
    samples = invented_samples(spec, cfg, lengths, rehearsal["rehearsed"]["turns"])
    program = Program(Rehearsal(cfg, samples))
    report = program.run(meter, rank, rehearsal["rehearsed"]["world_size"])
    result = {"rows": report.tokens, "parameters": report.num_parameters, **meter.data()}
    (args.folder / f"rank{rank}.json").write_text(json.dumps(result))


def rehearsed_config(rehearsal: dict[str, Any], device: Device, model: Path) -> Config:
    """Return the rehearsed configuration on this device, of the model in this folder."""
    sections = dict(rehearsal["rehearsed"]["config"])
    sections["run"] = {**sections["run"], "device": device}
    sections["model"] = {**sections["model"], "path": str(model)}
    return load_config(None, [], sections)


def fill(self: object, chunks: list[torch.nn.Module]) -> None:
    """Give the parameters random values: the same on every rank, as some are copies."""
    torch.manual_seed(0)
    for chunk in chunks:
        for parameter in chunk.parameters():
            torch.nn.init.normal_(parameter, std=SPREAD)


if __name__ == "__main__":
    main()
