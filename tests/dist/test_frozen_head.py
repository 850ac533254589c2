"""With adapters, the backward pass of the frozen LM head is one product of matrices."""

from torch.profiler import ProfilerActivity, profile

from megatron_rl_tools.gpu_check.material import check_batch, check_samples
from megatron_rl_tools.gpu_check.memory_steps import step
from tests.dist.launch import run_ranks
from tests.tiny import random_checkpoint

VOCABULARY, HIDDEN = 72, 64


def test_the_weight_is_read_once_not_once_for_each_token(tmp_path):
    base = random_checkpoint(tmp_path / "base", vocab_size=VOCABULARY, hidden_size=HIDDEN)
    (products,) = run_ranks(products_of_an_update, 1, base)
    by_head = [name for name, shapes in products if [VOCABULARY, HIDDEN] in shapes]
    batches = [shapes for name, shapes in products if name == "aten::bmm"]
    assert "aten::mm" in by_head
    # torch expands the weight to [T, V, h] where it does not fold the rows
    assert not any(shapes[1][1:] == [VOCABULARY, HIDDEN] for shapes in batches), batches


def products_of_an_update(base):
    """Names and shapes of the products of matrices in an update."""
    from tests.dist.engines import make_engine

    engine = make_engine(base, lora={"rank": 4, "targets": ["attention"]})
    batch = check_batch(engine, check_samples(engine.spec, (20, 30)))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        step(engine, batch, "R3")
    engine.parallel.destroy()
    return [
        (event.name, [list(shape) for shape in event.input_shapes])
        for event in profiled.events()
        if event.name in ("aten::mm", "aten::bmm")
    ]
