"""Slots for adapters: options of servers that a run starts, and servers without enough slots."""

from types import SimpleNamespace

import pytest

from megatron_rl.config import load_config
from megatron_rl.config.rules.adapter_rules import SLOT_MODULES
from megatron_rl.rollout.server.adapter_slots import check_slots, max_age, slot_options
from megatron_rl.rollout.server.server_info import AdapterSlots, ServerError, check_settings

BASE = ["--model.path", "unused", "--data.train", "unused", "--lora.rank", "8"]
BASE += ["--lora.targets", "attention"]
ADAPTER = [*BASE, "--rollout.weight_sync", "adapter"]
AHEAD = [
    "--rollout.max_staleness",
    "2",
    "--rollout.weight_update",
    "in_place",
    "--loss.name",
    "tis",
]
SLOTS = AdapterSlots(True, 8, SLOT_MODULES, 8, None)


def config(*options: str):
    return load_config(None, [*ADAPTER, *options])


def test_a_server_has_a_slot_for_each_version_that_requests_may_name():
    assert slot_options(load_config(None, BASE), "cpu") == ()
    cpu = slot_options(config(), "cpu")
    assert cpu[:3] == ("--enable-lora", "--max-lora-rank", "8")
    assert cpu[3:8] == ("--lora-target-modules", *SLOT_MODULES)
    assert cpu[8:] == ("--max-loras-per-batch", "2", "--lora-backend", "torch_native")
    ahead = config(*AHEAD)
    # during a sync: the new version, the one before it, and two older ones
    assert max_age(ahead) == 3 and slot_options(ahead, "cuda")[8:] == ("--max-loras-per-batch", "4")


@pytest.mark.parametrize(
    ("slots", "problem"),
    [
        (AdapterSlots(), "enable_lora is off"),
        (SLOTS._replace(max_lora_rank=4), "max_lora_rank = 4: must be at least 8"),
        (SLOTS._replace(max_loras_per_batch=3), "max_loras_per_batch = 3: must be at least 4"),
        (SLOTS._replace(max_loaded_loras=4), "max_loaded_loras = 4: must be at least 5"),
        (SLOTS._replace(lora_target_modules=["q_proj"]), r"lora_target_modules = \['q_proj'\]"),
        (SLOTS._replace(lora_target_modules=["all"]), "must be .'q_proj', 'k_proj'"),
    ],
)
def test_a_server_that_cannot_hold_the_adapters_is_refused(slots, problem):
    cfg = config(*AHEAD)
    with pytest.raises(ServerError, match=f"server http://a cannot hold.*{problem}.*; start it wi"):
        check_slots(SimpleNamespace(url="http://a", slots=slots), cfg)
    check_slots(SimpleNamespace(url="http://a", slots=SLOTS), cfg)
    check_slots(SimpleNamespace(url="http://a", slots=slots), load_config(None, BASE))


def test_slots_are_unproven_where_no_adapter_is_sent():
    info = SimpleNamespace(url="http://a", settings={"enable_lora": True, "lora_paths": []})
    check_settings(info, config().rollout, want_routes=True)
    for rollout, gets_weights in (
        (config().rollout, False),  # an evaluation would sample the base
        (load_config(None, BASE).rollout, True),
    ):
        with pytest.raises(ServerError, match="enable_lora = true is unproven"):
            check_settings(info, rollout, want_routes=True, gets_weights=gets_weights)
