"""Adam's step count and the random generators, without an engine."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core import tensor_parallel
from safetensors.torch import load, save

import megatron_rl.distributed  # noqa: F401  (CPU support first)
from megatron_rl.checkpoint.state import (
    adam_step,
    fill_moments,
    load_state,
    rng_state,
    set_adam_step,
    set_rng_state,
    sharded_state,
)
from tests.dist.test_checkpoint import all_rng


def engine_of(*optimizers):
    """An engine with these torch optimizers; None: this rank has no parameter of its kind."""
    inner = [SimpleNamespace(optimizer=optimizer) for optimizer in optimizers]
    return SimpleNamespace(
        optimizer=SimpleNamespace(core=SimpleNamespace(chained_optimizers=inner))
    )


def adam(*steps):
    """torch's Adam, with a parameter for each of these step counts."""
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in steps]
    optimizer = torch.optim.AdamW(parameters or [torch.zeros(1)])
    for parameter, step in zip(parameters, steps, strict=True):
        optimizer.state[parameter] = {"exp_avg": torch.zeros(1), "step": torch.tensor(float(step))}
    return optimizer


def fused(**group):
    """A fused optimizer counts in its groups, of which some ranks have an empty one."""
    groups = [{"params": ["weight"], **group}, {"params": [], "step": 9}, {"params": ["bias"]}]
    return SimpleNamespace(state={"weight": {"exp_avg": 0}}, param_groups=groups)


def test_adams_step_count_is_one_number_or_an_error():
    assert adam_step(engine_of(adam(3, 3), None, adam(3))) == 3.0
    assert adam_step(engine_of(fused(step=5))) == 5.0
    assert adam_step(engine_of(None)) == adam_step(engine_of(adam())) == 0.0
    message = r"^Adam has made \[3\.0, 4\.0\] updates, must be the same number for every parameter$"
    for optimizers in ([adam(3, 4)], [adam(3), fused(step=4)]):
        with pytest.raises(ValueError, match=message):
            adam_step(engine_of(*optimizers))


def test_adams_step_count_is_set_where_the_optimizer_counts():
    plain, other = adam(1, 2), fused(step=1)
    for optimizer in (plain, other):
        set_adam_step(optimizer, 7.0)
    assert adam_step(engine_of(plain, other)) == 7.0
    steps = [entry["step"] for entry in plain.state.values()]
    assert [step.dtype for step in steps] == [torch.float32] * 2
    assert steps[0].data_ptr() != steps[1].data_ptr(), "Adam increments them in place"
    assert [(group["step"], type(group["step"])) for group in other.param_groups] == [(7, int)] * 3
    assert other.state == {"weight": {"exp_avg": 0}}


def test_an_optimizer_without_parameters_saves_and_loads_nothing():
    engine = engine_of(None)
    engine.chunks = []
    state = sharded_state(engine)
    assert state == {"optimizer": {"0": {}}}
    load_state(engine, state, adam_step=3.0)


def test_an_optimizer_before_its_first_update_has_moments_of_zero():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))])
    fill_moments(optimizer)
    (state,) = optimizer.state.values()
    assert {name: value.tolist() for name, value in state.items()} == {
        "exp_avg": [0] * 3, "exp_avg_sq": [0] * 3, "step": 0,
    }  # fmt: skip


@pytest.fixture
def tracker():
    """megatron-core's generators, with one of our own."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    before = tracker.get_states()
    tracker.reset()
    tracker.add("test", 5)
    yield tracker
    tracker.reset()
    tracker.set_states(before)


def test_every_generator_continues_from_its_state(tracker):
    """Also where Python and NumPy have the second number of a normal pair, which is a double, in
    store.
    """
    for _ in range(2):
        state = rng_state()
        stored = {name: value.clone() for name, value in state.items()}
        draws = all_rng()
        assert all(value.equal(stored[name]) for name, value in state.items()), (
            "drawing changes nothing that was saved"
        )
        all_rng()
        all_rng()
        set_rng_state(load(save(state)))
        assert all_rng() == draws and len(draws) == 5


def test_the_generator_of_a_gpu_is_saved_too(tracker, monkeypatch):
    on_cpu, restored = rng_state(), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.tensor([1, 2]))
    monkeypatch.setattr(torch.cuda, "set_rng_state", restored.append)
    state = rng_state()
    assert state.keys() - on_cpu.keys() == {"cuda"} and state["cuda"].tolist() == [1, 2]
    set_rng_state(state)
    assert restored == [state["cuda"]]
    message = (
        "^random generators cuda are only in the checkpoint or only here; resume on the same kind"
        " of device$"
    )
    with pytest.raises(ValueError, match=message):
        set_rng_state(on_cpu)
