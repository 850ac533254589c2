"""Token log-prob and entropy with both gradients: peak memory and time of torch, megatron-core,
verl, slime and ours.

    OMP_NUM_THREADS=1 python benchmarks/logprobs.py [--peers DIR...] [--repeats 7] [--device \
cpu|cuda]

One unit is one float32 [T, V].  Peak is the maximum allocated beyond the inputs, the returned
gradients included, as counted by
torch: on a CPU the running sum of the profiler's allocation records, on a GPU max_memory_allocated.
Time is forward and backward, on a CPU this process's CPU time.  The candidates alternate, the first
round is not counted, and a ratio is the median over rounds.  DIR is a source checkout of verl or
slime (or a directory with checkouts of those names).  Of each, one file is loaded and its function
called as its trainer does, on one tensor rank.  verl's needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor

from megatron_rl.config import ParallelConfig
from megatron_rl.distributed import make_parallel
from megatron_rl.engine.fused_logprobs import HeadSettings, fused_logprobs
from megatron_rl.engine.logprobs import token_logprobs

PEERS = {"verl": "verl/utils/megatron/tensor_parallel.py", "slime": "slime/utils/ppo_utils.py"}
OnLogits = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
"""(logits [T, V], labels [T]) -> log-probs [T] and, except from megatron-core, entropy [T]."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, nargs="*", default=[])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rows", type=int, default=1024, help="T")
    parser.add_argument("--columns", type=int, default=37_984, help="V: 151,936 / 4")
    parser.add_argument("--hidden", type=int, default=256, help="H of the fused form")
    parser.add_argument("--only", choices=["logits", "accuracy", "fused", "growth"], nargs="*")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    parallel = make_parallel(ParallelConfig(), device=arguments.device)
    parts = {"logits": on_logits, "accuracy": accuracy, "fused": fused, "growth": growth}
    ways = {**our_ways(arguments.columns), **peer_ways(arguments.peers)}
    for name in arguments.only or parts:
        parts[name](arguments, ways)
    parallel.destroy()


# Ways to compute it -------------------------------------------------------------------------------


def our_ways(columns: int) -> dict[str, OnLogits]:
    def torch_plain(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        logp = logits.float().log_softmax(-1)
        return logp.gather(1, labels[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)

    # edits a float32 input: the clone is needed
    def core(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        return (
            -tensor_parallel.vocab_parallel_cross_entropy(
                logits.clone()[None], labels[None]
            ).squeeze(0),
        )

    def ours(overwrite: bool) -> OnLogits:
        return lambda logits, labels: token_logprobs(
            logits, labels, vocab_size=columns, overwrite=overwrite
        )[:2]

    return {
        "torch": torch_plain,
        "megatron-core (no entropy)": core,
        "ours": ours(False),
        "ours, overwriting": ours(True),
    }


def peer_ways(places: list[Path]) -> dict[str, OnLogits]:
    """Return the peers' functions, each called as its trainer calls it; prints a line for a missing
    one.
    """
    ways: dict[str, OnLogits] = {}
    for name, file in PEERS.items():
        files = [
            path
            for place in places
            for path in (place / file, place / name / file)
            if path.is_file()
        ]
        if not files:
            print(f"{name}: no {file} under --peers, not measured")
            continue
        module = load_module(f"peer_{name}", files[0])
        ways[name] = verl_way(module) if name == "verl" else slime_way(module)
    return ways


def load_module(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def verl_way(module: Any) -> OnLogits:
    def run(
        logits: Tensor, labels: Tensor
    ) -> tuple[Tensor, ...]:  # as its Megatron engine: a copy for the cross entropy
        copy = logits.clone()
        entropy = module.vocab_parallel_entropy(logits)
        return module.vocab_parallel_log_probs_from_logits(copy[None], labels[None]).squeeze(
            0
        ), entropy

    return run


def slime_way(module: Any) -> OnLogits:
    function, group = module._VocabParallelLogProbEntropy, dist.group.WORLD

    def run(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        logprobs, entropy = function.apply(logits, labels, None, group, True, True)
        return logprobs.squeeze(-1), entropy

    return run


# Measurements -------------------------------------------------------------------------------------


def on_logits(arguments: argparse.Namespace, ways: dict[str, OnLogits]) -> None:
    rows, columns, device = arguments.rows, arguments.columns, torch.device(arguments.device)
    unit = 4 * rows * columns
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        logits = (3 * torch.randn(rows, columns)).to(device, dtype)
        labels = torch.randint(0, columns, (rows,)).to(device)
        weights = [torch.randn(rows).to(device) for _ in range(2)]

        peaks, calls, leaf = {}, {}, logits.clone().requires_grad_()
        for name, way in ways.items():
            calls[name] = partial(logits_call, way, leaf, labels, weights)
            calls[name]()  # compiles what a peer compiles
            leaf.data.copy_(logits)
            peaks[name] = peak(calls[name], device) / unit
            leaf.data.copy_(logits)
        times = take_turns(calls, arguments.repeats, device, partial(leaf.data.copy_, logits))
        title = f"logits {str(dtype)[6:]} [{rows}, {columns}], one unit = {unit / 2**20:.0f} MiB"
        table(title, peaks, times, [name for name in PEERS if name in ways] or ["torch"])


def logits_call(way: OnLogits, logits: Tensor, labels: Tensor, weights: list[Tensor]) -> Any:
    outputs = way(logits, labels)
    return torch.autograd.grad(outputs, logits, weights[: len(outputs)])


def fused(arguments: argparse.Namespace, ways: dict[str, OnLogits]) -> None:
    """Measure with the LM head: three matrix products around each way on logits, and the fused
    form's four.
    """
    rows, columns, device = arguments.rows, arguments.columns, torch.device(arguments.device)
    for dtype in (torch.float32, torch.bfloat16):
        hidden, head, labels, weights = make_head(arguments, rows, dtype)
        names = [name for name in ("torch", *PEERS, "ours, overwriting") if name in ways]
        inputs = (hidden, head, labels, weights)
        runs: dict[str, Callable[[], Any]] = {
            f"LM head, then {name}": partial(head_call, ways[name], *inputs) for name in names
        }
        runs |= {"ours, fused": partial(fused_call, *inputs, False)}
        runs |= {"ours, fused, into main_grad": partial(fused_call, *inputs, True)}
        unit = 4 * rows * columns
        for run in runs.values():
            run()
        peaks = {name: peak(run, device) / unit for name, run in runs.items()}
        times = take_turns(runs, arguments.repeats, device)
        title = (
            f"hidden {str(dtype)[6:]} [{rows}, {arguments.hidden}], head [{columns},"
            f" {arguments.hidden}]"
        )
        table(title, peaks, times, ["LM head, then ours, overwriting"])


def growth(arguments: argparse.Namespace, ways: dict[str, OnLogits]) -> None:
    """Return the peak of the fused form over T."""
    print(f"\nfused form, H = {arguments.hidden}, peak by rows: MiB (units)")
    device = torch.device(arguments.device)
    for into_main_grad in (False, True):
        cells = []
        for rows in (1024, 4096, 8192):
            hidden, head, labels, weights = make_head(arguments, rows, torch.float32)

            most = peak(partial(fused_call, hidden, head, labels, weights, into_main_grad), device)
            cells.append(
                f"T = {rows}: {most / 2**20:.0f} ({most / (4 * rows * arguments.columns):.3f})"
            )
        print(
            f"- {'d weight into main_grad' if into_main_grad else 'd weight a tensor of its own'}:"
            f" {', '.join(cells)}"
        )


def fused_call(
    hidden: Tensor, head: Tensor, labels: Tensor, weights: list[Tensor], into_main_grad: bool
) -> Any:
    settings = HeadSettings(vocab_size=len(head), into_main_grad=into_main_grad)
    outputs = fused_logprobs(hidden, head, labels, None, settings)[:2]
    return torch.autograd.grad(outputs, [hidden, head], weights, allow_unused=True)


def head_call(
    way: OnLogits, hidden: Tensor, head: Tensor, labels: Tensor, weights: list[Tensor]
) -> Any:
    """Run three matrix products and a way on logits."""
    return torch.autograd.grad(way(hidden @ head.t(), labels), [hidden, head], weights)


def make_head(
    arguments: argparse.Namespace, rows: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    torch.manual_seed(0)
    hidden = torch.randn(rows, arguments.hidden).to(arguments.device, dtype).requires_grad_()
    head = (3 * arguments.hidden**-0.5 * torch.randn(arguments.columns, arguments.hidden)).to(
        arguments.device, dtype
    )
    vars(head.requires_grad_())["main_grad"] = torch.zeros_like(head, dtype=torch.float32)
    labels = torch.randint(0, arguments.columns, (rows,)).to(arguments.device)
    return hidden, head, labels, [torch.randn(rows).to(arguments.device) for _ in range(2)]


def accuracy(arguments: argparse.Namespace, ways: dict[str, OnLogits]) -> None:
    """Compare with float64 on 256 rows: largest error of log-prob and entropy, relative error of
    the gradient, edited logits.
    """
    rows, columns = 256, arguments.columns
    print(f"\naccuracy against float64, {rows} rows\n")
    print(
        "| logits | way | log-prob | entropy | gradient, relative | logits as before"
        " |\n|---|---|---|---|---|---|"
    )
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        logits = (3 * torch.randn(rows, columns)).to(arguments.device, dtype)
        labels = torch.randint(0, columns, (rows,)).to(arguments.device)
        weights = [torch.randn(rows, dtype=torch.float64).to(arguments.device) for _ in range(2)]
        exact = logits.double().requires_grad_()
        logp = exact.log_softmax(-1)
        expected = (logp.gather(1, labels[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1))
        for name, way in ways.items():
            leaf = logits.clone().requires_grad_()
            got = way(leaf, labels)
            errors = [
                f"{float((a.double() - b).abs().max()):.1e}"
                for a, b in zip(got, expected, strict=False)
            ]
            gradient = weights[: len(got)]
            (grad,) = torch.autograd.grad(
                got, leaf, [w.to(a.dtype) for w, a in zip(gradient, got, strict=True)]
            )
            (expected_grad,) = torch.autograd.grad(
                expected[: len(got)], exact, gradient, retain_graph=True
            )
            relative = float((grad.double() - expected_grad).norm() / expected_grad.norm())
            same = (
                "yes"
                if torch.equal(leaf, logits)
                else "no, as asked"
                if "overwriting" in name
                else "no"
            )
            entropy = errors[1] if len(errors) > 1 else "-"
            print(
                f"| {str(dtype)[6:]} | {name} | {errors[0]} | {entropy} | {relative:.1e} | {same} |"
            )


# Measuring ----------------------------------------------------------------------------------------


def peak(run: Callable[[], Any], device: torch.device) -> int:
    """Return the most bytes allocated at one time within `run`, beyond those before."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    now = most = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def take_turns(
    runs: dict[str, Callable[[], Any]],
    repeats: int,
    device: torch.device,
    between: Callable[[], Any] = lambda: None,
) -> dict[str, list[float]]:
    """Return the seconds of each way in each turn; `between` runs before each, uncounted."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            between()
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = clock()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn:
                times[name].append(clock() - start)
    return times


def table(
    title: str, peaks: dict[str, float], times: dict[str, list[float]], baselines: list[str]
) -> None:
    """Return a table, with ratios to the fastest of `baselines`."""
    best = min(baselines, key=lambda name: statistics.median(times[name]))
    print(
        f"\n{title}\n\n| way | peak, units | least ms | time / {best} (median) |\n|---|---|---|---|"
    )
    for name, seconds in times.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, times[best], strict=True))
        print(f"| {name} | {peaks[name]:.2f} | {1e3 * min(seconds):.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
