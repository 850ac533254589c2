"""Devices by their vendors' figures, and the assumptions that turn these into step times.

Numbers are per device, in bytes, seconds and FLOPs (a multiplication and an addition are two).
Rates of links are for one direction.  Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from megatron_rl.config.base import nearest
from megatron_rl.config.rules.server_gpus import MEM_FRACTION_STATIC

GIB = 1 << 30


@dataclass(frozen=True)
class Hardware:
    """One device and its links."""

    name: str
    flops: float
    """Peak FLOP/s of dense 16-bit matrix products; on a CPU of float32 ones."""
    memory: float
    """Bytes of device memory as nvidia-smi counts them: a data sheet's 141 GB are 140.4 GiB."""
    bandwidth: float
    """Bytes/s of device memory."""
    nvlink: float
    """Bytes/s to the other devices of its node."""
    network: float
    """Bytes/s to other nodes, this device's share of the node's adapters."""
    per_node: int
    """Devices that reach one another over nvlink."""
    host_memory: float = 0.0
    """Bytes of memory of the hosts of those devices; 0: not known."""
    host_bandwidth: float = 0.0
    """Bytes/s of that memory; 0: not known."""
    host_link: float = 0.0
    """Bytes/s between a device and its host; 0: not known."""
    reserve: float = 8.0 * GIB
    """Bytes of device memory that layouts leave for CUDA, nccl and fragments."""


# hosts: two Xeon 8480C (DGX H100, H200) with 8 channels of DDR5-4800 each, 8570 (DGX B200) with
# DDR5-5600, EPYC 7742 (DGX A100) with DDR4-3200; a Grace has 512 GB/s, and for each of its two GPUs
# half of NVLink-C2C's 450 GB/s one way; PCIe 5.0 x16 has 64 GB/s one way, 4.0 half of it
HARDWARE = {
    # NVIDIA A100 80GB SXM data sheet: 312 TFLOPS BF16, 2,039 GB/s, NVLink 600 GB/s both ways; DGX
    # A100: 8 x 200 Gb/s, 2 TB of host memory
    "a100": Hardware("A100-80G", 312e12, 80.0 * GIB, 2.039e12, 300e9, 25e9, 8, 2e12, 410e9, 32e9),
    # NVIDIA H100 SXM5 data sheet: 989 TFLOPS BF16 without sparsity, 3.35 TB/s, NVLink 900 GB/s both
    # ways; DGX H100: 8 x 400 Gb/s, 2 TB
    "h100": Hardware("H100-SXM", 989e12, 79.6 * GIB, 3.35e12, 450e9, 50e9, 8, 2e12, 614e9, 64e9),
    # NVIDIA H200 SXM data sheet: 989 TFLOPS BF16 without sparsity, 141 GB, 4.8 TB/s, NVLink 900
    # GB/s; DGX H200: 8 x 400 Gb/s, 2 TB
    "h200": Hardware("H200", 989e12, 140.4 * GIB, 4.8e12, 450e9, 50e9, 8, 2e12, 614e9, 64e9),
    # NVIDIA DGX B200 data sheet: 8 x 2.25 PFLOPS BF16 without sparsity, 1,440 GB and 64 TB/s,
    # NVLink 1.8 TB/s; 8 x 400 Gb/s, 2 TB
    "b200": Hardware("B200", 2250e12, 179.0 * GIB, 8.0e12, 900e9, 50e9, 8, 2e12, 717e9, 64e9),
    # NVIDIA GB200 NVL72 data sheet: 72 GPUs: 180 PFLOPS BF16 without sparsity, 13.4 TB, 576 TB/s,
    # NVLink 1.8 TB/s each; 400 Gb/s, 17 TB
    "gb200": Hardware(
        "GB200", 2500e12, 185.0 * GIB, 8.0e12, 900e9, 50e9, 72, 17e12, 18.4e12, 225e9
    ),
    # one thread of a server CPU in round numbers, without a data sheet; benchmarks/step_time.py
    # measures a row for the machine it runs on
    "cpu": Hardware("CPU thread", 80e9, 8.0 * GIB, 10e9, 2e9, 2e9, 64, reserve=0.0),
}


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of computed times and memory, besides the data sheets; `--assume NAME=VALUE`
    changes one.

    Fractions of the peak are those that large runs report.  They are not measured with this program
    on a GPU.
    """

    matrices: float = 0.55
    """Fraction of peak FLOP/s in large matrix products."""
    experts: float = 0.40
    """Fraction of peak FLOP/s in grouped products of experts."""
    attention: float = 0.45
    """Fraction of peak FLOP/s in attention."""
    bandwidth: float = 0.75
    """Fraction of memory bandwidth, outside matrix products and in decoding."""
    nvlink: float = 0.70
    """Fraction of the links' rate within a node; communication never overlaps computation."""
    network: float = 0.70
    """Fraction of the network's rate between nodes."""
    fill: float = 0.90
    """Rows of a micro-batch / run.max_tokens_per_micro_batch."""
    lockstep: float = 0.97
    """Work / (replicas x slowest) over the micro-batches that replicas run at the same time
    (results/benchmarks.md, Balancing)."""
    skew: float = 1.0
    """Rows of the experts of the fullest rank / mean over ranks, for its memory in every layer."""
    layer_seconds: float = 30e-6
    """Fixed time of a layer's forward pass, in which its kernels are launched."""
    decode_layer_seconds: float = 12e-6
    """Fixed time of a layer in decoding, with CUDA graphs."""
    collective_seconds: float = 8e-6
    """Latency of a small all-reduce within a node, times the nodes of a server.  Decoding has two
    per layer."""
    mean_prompt: float = 0.15
    """Mean prompt / data.max_prompt_tokens."""
    mean_response: float = 0.30
    """Mean response / rollout.max_response_tokens; lengths are exponential, truncated there."""
    server_memory: float = MEM_FRACTION_STATIC
    """Fraction of device memory for a server's weights and KV cache, --mem-fraction-static."""
    released: float = 2.0
    """GiB that a process keeps on a GPU after it has released its weights, cache or state: CUDA's
    context, nccl, graphs."""
    communicator: float = 0.6
    """GiB of nccl's buffers for one source of a weight sync on each GPU of a server.  By NCCL's
    source (computeBuffSizes in init.cc, device.h) a connection of a channel has 4 MiB, 4.7 MiB
    (LL128) and 0.5 MiB (LL); a ring has two in each of up to 32 channels: 0.57 GiB.  Not measured.
    """
    tensor_seconds: float = 100e-6
    """Fixed time per tensor of a weight sync on its source, which names, gathers and describes it.
    """
    server_tensor_seconds: float = 52e-6
    """Fixed time per tensor of a weight sync on the servers: 0.96 s for 18,432 expert tensors,
    measured in SGLang's search for a name's parameter."""
    disk: float = 2e9
    """Bytes/s of a shared disk (rollout.weight_sync = disk)."""


class Rates:
    """The rates that one device is assumed to reach."""

    def __init__(self, hardware: Hardware, assumed: Assumptions):
        # FLOP/s
        self.matrices = hardware.flops * assumed.matrices
        self.experts = hardware.flops * assumed.experts
        self.attention = hardware.flops * assumed.attention
        # bytes/s
        self.memory = hardware.bandwidth * assumed.bandwidth
        self.nvlink = hardware.nvlink * assumed.nvlink
        self.network = hardware.network * assumed.network
        self.per_node = hardware.per_node

    def link(self, span: int) -> float:
        """Return the bytes/s of a collective over ranks among `span` consecutive ones."""
        return self.nvlink if span <= self.per_node else self.network


def find_hardware(name: str) -> Hardware:
    """Return the row of this name.  Raises ValueError with the most similar name."""
    if name.lower() not in HARDWARE:
        raise ValueError(
            f"--gpu {name}: unknown hardware{nearest(name.lower(), list(HARDWARE))}; rows:"
            f" {', '.join(HARDWARE)}"
        )
    return HARDWARE[name.lower()]


def read_assumptions(changes: Sequence[str]) -> Assumptions:
    """Return the default assumptions with every NAME=VALUE of `changes` applied.

    Raises ValueError for an unknown name or a value that is not a positive number.
    """
    names = [field.name for field in fields(Assumptions)]
    changed = {}
    for item in changes:
        name, _, text = item.partition("=")
        if name not in names:
            known = ", ".join(names)
            raise ValueError(
                f"--assume {item}: no assumption is called {name!r}{nearest(name, names)}; they are"
                f" {known}"
            )
        try:
            changed[name] = float(text)
        except ValueError:
            changed[name] = 0.0  # refused below
        if not 0 < changed[name] < float("inf"):
            raise ValueError(f"--assume {item}: the value must be a number > 0, as in {name}=0.5")
    return replace(Assumptions(), **changed)
