"""TransformerEngine's stand-ins: shapes, memory, kernels and complaints, against sums by hand.

Sizes: 128 rows of width 256 in bfloat16; attention has 8 heads of queries, 2 of keys, head size 64,
and 32 for values.
"""

import json
import shutil
import subprocess
import sys
from types import ModuleType

import pytest

from megatron_rl_tools.rehearse.layers import install
from megatron_rl_tools.rehearse.layers.scores import Scores
from megatron_rl_tools.rehearse.native import RehearsalError
from megatron_rl_tools.rehearse.recorder import Recorder

ROWS, WIDTH, OUT = 128, 256, 512
BF16, FP32, LEAST = 2, 4, 512  # bytes; an allocation has at least 512
X, Y, WEIGHT = ROWS * WIDTH * BF16, ROWS * OUT * BF16, OUT * WIDTH * BF16
STATISTICS = ROWS * FP32
Q, K, V = ROWS * 8 * 64 * BF16, ROWS * 2 * 64 * BF16, ROWS * 2 * 32 * BF16
ATTENDED, LOGSUMEXP = ROWS * 8 * 32 * BF16, ROWS * 8 * FP32
PAIRS = 96 * 97 // 2 + 32 * 33 // 2
RANDOM = LEAST
"""The state of cuDNN's random numbers."""


@pytest.fixture(scope="module")
def results():
    if shutil.which("g++") is None:
        pytest.skip("the pretended GPU needs g++")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.unit.tools.rehearsed_layers"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def alone(results):
    return results["1"][0]


@pytest.mark.parametrize(
    ("name", "shape", "kept", "after"),
    [
        ("norm", [64, 2, WIDTH], X + STATISTICS, X + LEAST),
        # a strided input is copied, and the copy is what backward needs; x.grad was there before
        ("norm of a view", [64, 2, 128], X + STATISTICS, 128 * BF16 + 256),
        ("linear", [64, 2, OUT], Y, WEIGHT + OUT * BF16),
        ("norm and linear", [64, 2, OUT], X + STATISTICS + Y, WEIGHT + LEAST),
        ("grouped", [ROWS, OUT], Y, X + 4 * WEIGHT),
        ("attention", [ROWS, 8 * 32], ATTENDED + LOGSUMEXP + RANDOM, Q + K + V),
        ("padded", [64, 2, 8 * 64], Q + LOGSUMEXP + RANDOM, Q + 2 * K),
        ("rope", [ROWS, 8, 64], Q + 96 * 64 * FP32 + LEAST, 0),
        # rows of two experts each, the map of rows, and the probabilities
        ("permute", [256, WIDTH], 2 * X + ROWS * 33 * FP32 + 256 * FP32, ROWS * 16 * FP32),
        ("unpermute", [ROWS, WIDTH], X + ROWS * 33 * FP32, 2 * X),
        ("sort", [ROWS, WIDTH], X + ROWS * FP32, 0),
    ],
)
def test_memory_that_forward_and_backward_leave(alone, name, shape, kept, after):
    result = alone[name]
    assert result["shapes"][0] == shape and result["dtypes"][0] == "bfloat16"
    assert (result["kept"], result["after"], result["problems"]) == (kept, after, [])


def test_peaks_of_backward(alone):
    """The norm's output is freed before its input's gradient is made; a gradient that the kernel
    adds to main_grad has one dummy tensor for all.
    """
    peaks = {name: alone[name]["backward_peak"] for name in ("norm and linear", "fused gradient")}
    # gradients of the norm's output and of the weight; then that of x, while its output is gone
    assert peaks["norm and linear"] == X + WEIGHT + LEAST
    assert alone["fused gradient"]["added"] is True
    assert peaks["fused gradient"] == X + WEIGHT
    assert alone["adam"]["state"] == alone["adam"]["peak"] == 2 * 1024 * FP32 + LEAST


def test_adam_in_16_bits(alone):
    """Two moments and the low bits of the weights, with a scale that is not used for each moment;
    for the kernel both moments in float32, of which one is rounded at a time.
    """
    state = 3 * 1024 * BF16 + 3 * LEAST
    assert alone["short adam"]["state"] == state
    assert alone["short adam"]["peak"] == state + 2 * 1024 * FP32 + 1024 * BF16


def test_a_compiled_function_is_one_kernel(alone):
    """It reads two arguments and writes its result; nothing in between is in memory."""
    size = 1024 * BF16
    assert alone["compiled"] == {
        "operations": [["compiled gated", "memory", 3 * size]], "peak": size, "shape": [1024],
    }  # fmt: skip


def test_workspaces_are_made_once(alone):
    assert alone["workspaces"] == (1 + 4) * ((32 << 20) + 1024)


def test_kernels(alone):
    gemm = 2 * ROWS * WIDTH * OUT
    for name, kernel in (("linear", "linear"), ("grouped", "grouped linear")):
        assert alone[name]["kernels"] == [
            [kernel, "gemm", gemm],
            [f"{kernel} dgrad", "gemm", gemm],
            [f"{kernel} wgrad", "gemm", gemm],
        ]
    # scores have the head size of queries, outputs that of values
    forward, backward = 2 * PAIRS * 8 * (64 + 32), 2 * PAIRS * 8 * (3 * 64 + 2 * 32)
    assert alone["attention"]["kernels"] == [
        ["attention", "attention", forward],
        ["attention backward", "attention", backward],
    ]
    seen = sum(min(row + 1, 16) for length in (96, 32) for row in range(length))
    assert alone["window"]["kernels"][0][2] == 2 * seen * 8 * (64 + 32)
    assert [kernel for kernel, *_ in alone["sort"]["kernels"]] == [
        "chunk sort map", "chunk sort", "chunk sort",
    ]  # fmt: skip
    assert alone["gemm"] == {"TN": [128, 16], "NN": [128, 256], "NT": [16, 256]}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("host bounds", ["cu_seqlens is on cpu", "needs int32 cu_seqlens"]),
        ("longest as a tensor", ["an int max_seqlen"]),
        ("host sizes", ["split_sizes of moe_sort_chunks", "sorted_index of moe_sort_chunks"]),
        ("float32 input", ["an input in torch.float32"]),
        ("splits", ["129 rows in m_splits, not 128"]),
    ],
)
def test_what_transformer_engine_refuses(alone, name, words):
    problems = alone[name]["problems"]
    assert len(problems) == len(words)
    for word, problem in zip(words, problems, strict=True):
        assert word in problem


@pytest.mark.parametrize("size", [2, 4])
def test_tensor_ranks(results, size):
    """Under sequence parallelism a rank saves its rows only, and gathers them again in backward."""
    for rank in results[str(size)]:
        column, row = rank["column"], rank["row"]
        assert column["shapes"] == [[32 * size, 2, OUT // size]]
        part = 64 * WIDTH * BF16
        assert column["kept"] == part + LEAST + 64 * OUT * BF16
        assert column["calls"] == ["all_gather", "all_gather", "reduce_scatter"]
        assert row["shapes"] == [[64 // size, 2, OUT]]
        assert row["calls"] == ["reduce_scatter", "all_gather"]


@pytest.mark.parametrize("size", [2, 4])
def test_ring(results, size):
    """The ring does all of a sequence's scores, as many on every rank, and keeps the keys and
    values that arrived last.
    """
    head = ROWS // size * 64 * BF16
    flops = 0
    for rank in results[str(size)]:
        ring = rank["ring"]
        small = size + 2 + 2 * size  # random states and bounds
        assert ring["kept"] == (8 + 2 * 2 + 8 * FP32 / 64 / BF16) * head + small * LEAST
        assert ring["after"] >= (8 + 2 * 2) * head
        assert len(ring["calls"]) == 2 * (size - 1) + 2 * size
        forward = [flops for name, _, flops in ring["kernels"] if name == "attention"]
        backward = [flops for name, _, flops in ring["kernels"] if name == "attention backward"]
        assert len(forward) == len(backward) == size
        assert sum(backward) * 2 == sum(forward) * 5
        flops += sum(forward)
    assert flops == 2 * PAIRS * 8 * 128


def test_core_builds_its_layers_on_the_stand_ins(results):
    assert results["core"] == dict.fromkeys(results["core"], True)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [None, (3, 0), (0, 2), (-1, 4), (100, 100)])
def test_pairs_are_counted(is_causal, window):
    left, right = window or (-1, -1)
    expected = sum(
        (left < 0 or query - key <= left)
        and (right < 0 or key - query <= right)
        and not (is_causal and key > query)
        for length in (1, 7, 12)
        for query in range(length)
        for key in range(length)
    )
    assert Scores((1, 7, 12), is_causal=is_causal, window=window).pairs() == expected


@pytest.mark.parametrize("size", [2, 3, 4])
def test_tiles_of_all_ranks_are_all_pairs(size):
    scores = Scores((4 * size, 24 * size), is_causal=True)
    total = 0
    for rank in range(size):
        sections = ["diagonal"] + ["lower"] * rank + ["upper"] * (size - rank - 1)
        total += sum(scores.tile(size, section) for section in sections)
    assert total == scores.pairs()


def test_install_after_core_is_refused(monkeypatch):
    name = "megatron.core.extensions.transformer_engine"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(RehearsalError, match="before TransformerEngine's stand-in"):
        install(Recorder())
