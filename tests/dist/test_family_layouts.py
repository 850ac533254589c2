"""Families on two ranks (float32): transformers' logits and routes, and every tensor back bit by
bit, in each layout.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.dist.launch import build, run_ranks
from tests.dist.test_model import LENGTHS, run_packed
from tests.families import FAMILIES, Reference, check_same, family_checkpoint, reference

LAYOUTS = {
    "tp": {"tp": 2},
    "ep": {"ep": 2},
    "pp": {"pp": 2, "layers_per_stage": (1, 2)},
    "tp-ep": {"tp": 2, "ep": 2, "etp": 1},
}
QUICK = [
    ("deepseek_v3", "tp-ep"),
    ("deepseek_v3", "pp"),
    ("qwen2_moe", "tp"),
    ("glm4_moe", "ep"),
    ("qwen3", "pp"),
]
NOT_POSSIBLE = {("qwen3", "ep"), ("qwen3", "tp-ep"), ("olmoe", "tp"), ("olmoe", "tp-ep")}


def test_two_ranks(tmp_path: Path) -> None:
    run_cases(tmp_path, QUICK)


@pytest.mark.slow
def test_every_family_on_two_ranks(tmp_path: Path) -> None:
    every = [(name, layout) for name in FAMILIES for layout in LAYOUTS]
    run_cases(tmp_path, [case for case in every if case not in NOT_POSSIBLE])


def run_cases(root: Path, cases: list[tuple[str, str]]) -> None:
    for name in {name for name, _ in cases}:
        path = family_checkpoint(root / name, name)
        torch.save(vars(reference(path, LENGTHS)), root / f"{name}.pt")
    run_ranks(check_cases, 2, root, cases, timeout=500)


def check_cases(root: Path, cases: list[tuple[str, str]]) -> None:
    from tests.exported import export_hf

    for name, layout in cases:
        expected = Reference(**torch.load(root / f"{name}.pt", weights_only=True))
        chunks, spec, config, parallel = build(root / name, **LAYOUTS[layout])
        logits, maps = run_packed(chunks, config, parallel, torch.cat(expected.sequences))
        check_same(logits, maps, expected, slice(None), spec, f"{name} {layout}")
        exported = dict(export_hf(chunks, spec, parallel))
        original = load_file(root / name / "model.safetensors")
        assert exported.keys() == original.keys(), (name, layout)
        if parallel.rank == 0:
            different = [key for key, tensor in original.items() if not tensor.equal(exported[key])]
            assert not different, f"{name} {layout}: {different[:3]}"
        parallel.destroy()
