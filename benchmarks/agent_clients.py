"""The rollout clients that agent_turns.py compares: ours, slime's search-r1 example and verl's
ToolAgentLoop.
"""

from __future__ import annotations

import asyncio
import sys
from argparse import Namespace
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

ANSWER_TOKENS, PROMPT_TOKENS = 128, 400
TURNS = 3
PRODUCT = "408"
"""The tool's answer."""
QUESTION = "x" * (PROMPT_TOKENS - len("user\n") - len("\nassistant\n") - 4)

Round = Callable[[int], Awaitable[Callable[[], None]]]
"""Runs so many sessions at the same time; returns their check, which is not measured."""


async def our_rollout(session: Any, prompt: Any) -> Any:
    """The user's function of an agent (agent.function)."""
    while True:
        turn = await session.generate()
        if "<tool_call>" not in turn.text:
            assert len(session.turns) == TURNS and turn.text.endswith(PRODUCT)
            return session.finish(1.0)
        session.observe([{"role": "tool", "content": PRODUCT}])


def ours(url: str, folder: Path, checkout: Path) -> Round:
    from megatron_rl.config import AgentConfig, RolloutConfig
    from megatron_rl.models.spec import ModelSizes
    from megatron_rl.records import Prompt
    from megatron_rl.rollout.agents.runner import EpisodeRunner
    from megatron_rl.rollout.client.client import RolloutClient
    from megatron_rl.rollout.client.sampling import SampleRules

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    spec = ModelSizes(
        num_layers=1, moe_layers=(), top_k=1, num_experts=1, vocab_size=len(tokenizer)
    )
    agent = AgentConfig(function=f"{Path(__file__).stem}:our_rollout", renderer="qwen3")
    runner = EpisodeRunner(agent, tokenizer, spec.vocab_size, 0)
    client = RolloutClient(
        [url],
        RolloutConfig(max_concurrency=4096),
        SampleRules(spec, want_routes=False),
        episodes=runner,
    )
    text = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    ids = tuple(tokenizer.encode(text))

    async def run(count: int) -> Callable[[], None]:
        from megatron_rl.rollout.client.sampling import Sampling
        from megatron_rl.rollout.group import Group

        groups = [Group(Prompt(str(index), text, ids, PRODUCT), 8) for index in range(count // 8)]
        sampling = Sampling(1.0, 4096, [tokenizer.eos_token_id], policy_version=0)
        # fill() without its event loop: this one measures
        filled = await client._generate(groups, sampling, len(groups), None, None)

        def check() -> None:
            rollouts = [rollout for group in filled for rollout in group.rollout_group().rollouts]
            assert len(rollouts) == count
            assert all(rollout.num_spans == TURNS for rollout in rollouts)
            assert all(rollout.response_length == TURNS * ANSWER_TOKENS for rollout in rollouts)

        return check

    return run


def slime(url: str, folder: Path, checkout: Path) -> Round:
    sys.path[:0] = [str(checkout), str(checkout / "examples/search-r1")]
    import generate_with_search as example
    from slime.utils.http_utils import init_http_client
    from slime.utils.types import Sample

    async def search(query: str) -> str:
        return PRODUCT

    example.search = search
    example.SEARCH_R1_CONFIGS["max_turns"] = TURNS
    host, port = url.removeprefix("http://").split(":")
    args = Namespace(
        partial_rollout=False,
        sglang_router_ip=host,
        sglang_router_port=port,
        hf_checkpoint=str(folder),
        sglang_server_concurrency=4096,
        rollout_num_engines=1,
        use_distributed_post=False,
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_max_response_len=4096,
        rollout_stop=None,
        rollout_stop_token_ids=None,
        rollout_skip_special_tokens=False,
        sglang_dp_size=1,
        use_rollout_routing_replay=False,
    )
    init_http_client(args)
    state = example.GenerateState(args)

    async def run(count: int) -> Callable[[], None]:
        example.SEMAPHORE = asyncio.Semaphore(256)
        samples = [Sample(index=index, prompt="x" * PROMPT_TOKENS) for index in range(count)]
        done = await asyncio.gather(
            *(example.generate(args, item, state.sampling_params.copy()) for item in samples)
        )

        def check() -> None:
            assert all(sum(sample.loss_mask) == TURNS * ANSWER_TOKENS for sample in done)
            assert all(sample.response.endswith("</answer>") for sample in done)

        return check

    return run


class VerlClient:
    """Replaces verl's LLMServerClient and its actor: sends a request, and takes from the answer
    what the actor takes.

    make_output: verl's TokenOutput.
    """

    def __init__(self, url: str, http: Any, make_output: Callable[..., Any]) -> None:
        self.url, self.http, self.make_output = url, http, make_output

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: Any, **_: Any
    ) -> Any:
        body = {
            "rid": request_id,
            "input_ids": prompt_ids,
            "sampling_params": sampling_params,
            "return_logprob": True,
        }
        async with self.http.post(f"{self.url}/generate", json=body) as answered:
            output = await answered.json()
        entries = output["meta_info"]["output_token_logprobs"]
        logprobs = [float(logprob) for logprob, _, _ in entries]
        return self.make_output(token_ids=list(output["output_ids"]), log_probs=logprobs)


def verl(url: str, folder: Path, checkout: Path) -> Round:
    sys.path.insert(0, str(checkout))
    import aiohttp
    from omegaconf import OmegaConf
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
    from verl.tools.function_tool import function_tool, get_function_tool
    from verl.utils.dataset.rl_dataset import RLHFDataset
    from verl.workers.rollout.replica import TokenOutput

    @function_tool
    async def calculate(a: int, b: int) -> str:
        """Multiplies two numbers.

        Args:
            a: the first
            b: the second
        """
        return PRODUCT

    turns = {
        "max_user_turns": None,
        "max_assistant_turns": None,
        "max_parallel_calls": 1,
        "max_tool_response_length": 256,
        "tool_response_truncate_side": "middle",
        "format": "hermes",
    }
    lengths = {"prompt_length": 1024, "response_length": 4096}
    rollout = {"multi_turn": turns, **lengths, "full_determinism": False}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)

    async def run(count: int) -> Callable[[], None]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            tools, client = (
                ToolListWrap([get_function_tool("calculate")]),
                VerlClient(url, http, TokenOutput),
            )
            data = DictConfigWrap(config.data)
            wrapped = (DictConfigWrap(config), client, tokenizer, None, RLHFDataset, data)
            loops = [
                ToolAgentLoop(*wrapped, hf_model_type="qwen3_moe", tools=tools)
                for _ in range(count)
            ]
            messages = [{"role": "user", "content": QUESTION}]
            runs = [loop.run({"max_tokens": 4096}, raw_prompt=messages) for loop in loops]
            done = await asyncio.gather(*runs)

        def check() -> None:
            assert all(sum(output.response_mask) == TURNS * ANSWER_TOKENS for output in done)

        return check

    return run


CLIENTS: dict[str, Callable[[str, Path, Path], Round]] = {
    "ours": ours,
    "slime": slime,
    "verl": verl,
}
