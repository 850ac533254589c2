"""megatron-core's latent attention (local layers, tp = 2) against itself at tp = 1, on the CPU:

torchrun --nproc_per_node 2 docs/upstream/latent_attention_tp.py

Prints the relative error of output and gradients against tp = 1, with and without sequence
parallelism.
"""

from importlib.metadata import version

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention as mla
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import MLATransformerConfig

torch.cuda.current_device = lambda: torch.device("cpu")  # the device of core's collective buffers
mla.HAVE_TE = False  # 0.16.1 uses placeholders for TransformerEngine's classes without it
ROWS, HIDDEN, LATENT, ROTARY = 8, 32, 16, 8


class CoreAttention(torch.nn.Module):
    """Plain attention; core's local one takes no head sizes of its own for keys and values."""

    def __init__(self, **kwargs):
        super().__init__()

    def forward(self, query, key, value, *args, **kwargs):
        out = torch.nn.functional.scaled_dot_product_attention(
            *(x.permute(1, 2, 0, 3) for x in (query, key, value))
        )
        return out.permute(2, 0, 1, 3).flatten(2)


class Norm(torch.nn.RMSNorm):
    def __init__(self, hidden_size, config, eps):
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


def run(
    tp: int,
    sequence_parallel: bool,
    attention: type = mla.MLASelfAttention,
    q_lora_rank: int | None = LATENT,
) -> dict[str, torch.Tensor]:
    """Return output and gradients of one layer, gathered over the tensor ranks; weights and input
    are the same for every tp.
    """
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    config = MLATransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, q_lora_rank=q_lora_rank,
        kv_lora_rank=LATENT, qk_head_dim=8,
        qk_pos_emb_head_dim=ROTARY, v_head_dim=8, rope_type="rope", qk_layernorm=True,
        add_bias_linear=False,
        tensor_model_parallel_size=tp, sequence_parallel=sequence_parallel and tp > 1,
        use_cpu_initialization=True,
    )  # fmt: skip
    kinds = ("q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj")
    names = [f"linear_{kind}" for kind in kinds]
    parts = mla.MLASelfAttentionSubmodules(
        **dict.fromkeys(names, ColumnParallelLinear),
        core_attention=CoreAttention, linear_proj=RowParallelLinear, kv_layernorm=Norm,
        q_layernorm=IdentityOp if q_lora_rank is None else Norm,
    )  # fmt: skip
    torch.manual_seed(0)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer = attention(config, parts, 1, AttnMaskType.causal, pg_collection=groups)
    x, direction = torch.randn(ROWS, 1, HIDDEN), torch.randn(ROWS, 1, HIDDEN)
    rank = parallel_state.get_tensor_model_parallel_rank()
    rows = slice(None)
    if config.sequence_parallel:
        rows = slice(rank * ROWS // tp, (rank + 1) * ROWS // tp)
    x = x[rows].requires_grad_()
    out, _ = layer(x, None)
    (out * direction[rows]).sum().backward()
    layer.ddp_config = DistributedDataParallelConfig()
    finalize_model_grads.__globals__["_allreduce_non_tensor_model_parallel_grads"](
        [layer], config, groups.tp
    )

    def gather(tensor):
        parts = [torch.empty_like(tensor) for _ in range(tp)]
        dist.all_gather(parts, tensor.detach().contiguous(), group=groups.tp)
        return torch.cat(parts)

    whole = gather if config.sequence_parallel else torch.Tensor.detach
    down = gather(layer.linear_kv_down_proj.weight.grad)
    parallel_state.destroy_model_parallel()
    results = {
        "output": whole(out),
        "gradient of the input": whole(x.grad),
        "gradient of linear_kv_down_proj, latent rows": down[:LATENT],
        "gradient of linear_kv_down_proj, rotary rows": down[LATENT:],
    }
    if q_lora_rank is not None:
        results["gradient of q_layernorm"] = layer.q_layernorm.weight.grad
    return results


def errors(
    measured: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Return the relative errors by name."""
    return {
        name: float((measured[name] - value).norm() / value.norm())
        for name, value in expected.items()
    }


if __name__ == "__main__":
    dist.init_process_group("gloo")
    expected = run(1, False)
    for sequence_parallel in (True, False):
        measured = run(2, sequence_parallel)
        if dist.get_rank() == 0:
            print(
                f"megatron-core {version('megatron-core')}, tp = 2, sequence_parallel ="
                f" {sequence_parallel}"
            )
            for name, error in errors(measured, expected).items():
                print(f"  {name}: relative error {error:.1e}")
    dist.destroy_process_group()
