"""Routing replay in a plain megatron-core job: replay the experts that an inference engine chose.

torchrun --nproc_per_node 2 examples/replay_only/replay_only.py    (on the CPU; experts are spread
over the ranks)

Shapes: S tokens of a sequence, L MoE layers, K top-k.
"""

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.distributed import cpu
from megatron_rl.replay.layout import RankLayout
from megatron_rl.replay.manager import ReplayManager, Routes

LAYERS, EXPERTS, TOP_K, VOCABULARY = 2, 8, 2, 64


def make_model(ranks: int) -> GPTModel:
    """Your own model: nothing of megatron_rl in it."""
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=ranks, create_gloo_process_groups=False
    )
    model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=32, num_attention_heads=4, num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="none",
        expert_model_parallel_size=ranks,
        add_bias_linear=False, use_cpu_initialization=True,
    )  # fmt: skip
    return GPTModel(config, get_gpt_layer_local_spec(EXPERTS), VOCABULARY, max_sequence_length=64)


def install(model: GPTModel, ranks: int) -> tuple[ReplayManager, RankLayout]:
    """Set the overrides on the model's routers, once, after it was built.

    A router's number counts the model's MoE layers from 0, those of earlier pipeline stages
    included.
    """
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    manager = ReplayManager(list(enumerate(routers)), num_experts=EXPERTS)
    layout = RankLayout(
        manager.layers,
        tp_rank=0,
        tp_size=1,
        sequence_parallel=False,
        num_experts=EXPERTS,
        top_k=TOP_K,
        ep_size=ranks,
    )
    return manager, layout


def train_pass(
    model: GPTModel,
    manager: ReplayManager,
    layout: RankLayout,
    batches: list[torch.Tensor],
    routes: list[np.ndarray],
) -> list[float]:
    """Run forward and backward of one sequence [S] per micro-batch, and return the losses.

    routes: ids [S - 1, L, K] of each sequence, as the engine sent them.
    Raises RuntimeError unless every router consumed the routes of every micro-batch exactly once.
    """
    replayed = []
    for tokens, ids in zip(batches, routes, strict=True):
        bounds = torch.tensor([0, len(tokens)])
        # never an input of the engine
        last = torch.arange(len(tokens))[layout.router_rows(bounds)] == len(tokens) - 1
        local = torch.from_numpy(layout.local_routes([ids], bounds))  # this rank's part
        replayed.append(Routes(replay=local, live_rows=last.nonzero().flatten()))
    losses = []
    with manager.run_pass(replayed, training=True):  # its end checks that everything was consumed
        for index, tokens in enumerate(batches):
            # names the micro-batch; outside it a router call is an activation recompute
            with manager.forward(index):
                positions = torch.arange(len(tokens))
                loss = model(tokens[None], positions[None], None, labels=tokens.roll(-1)[None])[
                    0, :-1
                ].mean()
            loss.backward()
            losses.append(loss.item())
    return losses


def main() -> None:
    cpu.install_cpu()  # lets megatron-core run without a GPU; does nothing where there is one
    dist.init_process_group("gloo")
    # every rank has its own sequences
    ranks, rng = dist.get_world_size(), np.random.default_rng(dist.get_rank())
    model = make_model(ranks)
    manager, layout = install(model, ranks)
    batches = [torch.from_numpy(rng.integers(0, VOCABULARY, size)) for size in (16, 24)]
    routes = [
        rng.random((len(tokens) - 1, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K]
        for tokens in batches
    ]
    print(train_pass(model, manager, layout, batches, [ids.astype(np.uint8) for ids in routes]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
