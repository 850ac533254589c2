"""The cost of a turn of an agent in the rollout client: ours, slime's search-r1 example and verl's
ToolAgentLoop.

    OMP_NUM_THREADS=1 python benchmarks/agent_turns.py [--slime DIR] [--verl DIR] [--sessions 64 1024] [--repeats 5] [--json]

DIR is a source checkout, or an unpacked wheel; its code is imported unchanged, so this Python must
have what it imports.  A peer without DIR is reported as not run.

All clients talk to the same server, a process of its own that answers after ANSWER_SECONDS with the
same number of tokens and log-probs.  A session has three turns: two calls of a tool that answers at
once, and a final answer.  One token is one character. All sessions of a round are open at the same
time.  Every client runs in its own process, alternating with the others:

ours   RolloutClient and EpisodeRunner, from the prompt's tokens to the Rollout; messages by the
       qwen3 renderer.
slime  generate() of examples/search-r1 with slime's own post(), GenerateState and Sample.  Text in,
       text out; `search` answers at once.
verl   ToolAgentLoop.run (tool parser hermes, token builder qwen3).  It sends requests through two
       Ray calls a turn, to an actor with the engine; here they are POSTs by aiohttp to the same
       server, which is in its favour.

cpu     CPU time of the client's process per turn, all threads
block   the longest CPU time of one callback in the event loop's thread: nothing else of the loop
        runs meanwhile
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import random
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

ANSWER_SECONDS, ANSWER_TOKENS, PROMPT_TOKENS = 0.1, 128, 400
TURNS = 3
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
TEMPLATE = """{%- for message in messages -%}
{%- if message.role == "tool" -%}
{{ "<|im_start|>user\n<tool_response>\n" + message.content + "\n</tool_response><|im_end|>\n" }}
{%- else -%}{{ "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|im_start|>assistant\n" }}{%- endif -%}"""
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"a": 12, "b": 34}}\n</tool_call>'
FOUND = "408"
QUESTION = "x" * (PROMPT_TOKENS - len("user\n") - len("\nassistant\n") - 4)

Round = Callable[[int], Awaitable[Callable[[], None]]]
"""Runs so many sessions at the same time; returns what checks them, which is not measured."""


# The model: what the server answers ---------------------------------------------------------------


def make_tokenizer(folder: Path) -> None:
    """Bytes, and the tokens that Qwen3's format names."""
    core = Tokenizer(BPE({letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    core.pre_tokenizer, core.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    core.add_tokens([AddedToken(token, special=False) for token in TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))


def make_answers(tokenizer: PreTrainedTokenizerFast) -> dict[str, list[bytes]]:
    """Client -> the answer of each turn, with RID where the request's id belongs; all of
    ANSWER_TOKENS tokens.
    """
    ends = {"ours": (CALL, FOUND), "verl": (CALL, FOUND)}
    ends["slime"] = ("<search>12 * 34</search>", f"<answer>{FOUND}</answer>")
    return {
        name: [answer(tokenizer, name, end) for end in (call, call, last)]
        for name, (call, last) in ends.items()
    }


def answer(tokenizer: PreTrainedTokenizerFast, client: str, end: str) -> bytes:
    tail = tokenizer.encode(end) + ([] if client == "slime" else [tokenizer.eos_token_id])
    ids = tokenizer.encode("y") * (ANSWER_TOKENS - len(tail)) + tail
    sure = random.Random(0)
    meta = {
        "id": "RID_0" if client == "ours" else "RID", "finish_reason": {"type": "stop",
        "matched": ids[-1]},
        "completion_tokens": len(ids), "weight_version": "0", "num_retractions": 0,
        "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
        "output_token_logprobs": [[-sure.random(), token, None] for token in ids],
    }  # fmt: skip
    sample = {"text": tokenizer.decode(ids), "output_ids": ids, "meta_info": meta}
    return json.dumps([sample] if client == "ours" else sample).encode()


def serve(folder: Path) -> None:
    """Print the port, then answer; the turn is known from how often a tool has answered in the
    request.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    answers, mark = make_answers(tokenizer), tokenizer.convert_tokens_to_ids("<tool_response>")

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                body = json.loads(
                    await reader.readexactly(
                        int(head.split(b"content-length:")[1].split(b"\r\n")[0])
                    )
                )
                if "text" in body:
                    client, turn = "slime", body["text"].count("<information>")
                else:
                    ids, client = body["input_ids"], "verl"
                    if isinstance(ids[0], list):
                        (ids,), client = ids, "ours"
                    turn = ids.count(mark)
                content = answers[client][turn].replace(b"RID", body.get("rid", "").encode())
                await asyncio.sleep(ANSWER_SECONDS)
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length:"
                    b" %d\r\n\r\n" % len(content)
                )
                writer.write(content)

    async def listen() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0, limit=2**24, backlog=4096)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    asyncio.run(listen())


# The clients --------------------------------------------------------------------------------------


async def our_rollout(session: Any, prompt: Any) -> Any:
    """What a user writes: agent.function."""
    while True:
        turn = await session.generate()
        if "<tool_call>" not in turn.text:
            assert len(session.turns) == TURNS and turn.text.endswith(FOUND)
            return session.finish(1.0)
        session.observe([{"role": "tool", "content": FOUND}])


def ours(url: str, folder: Path, checkout: Path) -> Round:
    from megatron_rl.config import AgentConfig, RolloutConfig
    from megatron_rl.models.spec import ModelSizes
    from megatron_rl.records import Prompt
    from megatron_rl.rollout.agents.runner import EpisodeRunner
    from megatron_rl.rollout.client.client import RolloutClient

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    spec = ModelSizes(
        num_layers=1, moe_layers=(), top_k=1, num_experts=1, vocab_size=len(tokenizer)
    )
    agent = AgentConfig(function=f"{Path(__file__).stem}:our_rollout", renderer="qwen3")
    runner = EpisodeRunner(agent, tokenizer, spec.vocab_size, 0)
    client = RolloutClient(
        [url], RolloutConfig(max_concurrency=4096), spec=spec, want_routes=False, episodes=runner
    )
    text = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    ids = tuple(tokenizer.encode(text))

    async def run(sessions: int) -> Callable[[], None]:
        from megatron_rl.rollout.client.sampling import Sampling
        from megatron_rl.rollout.group import Group

        groups = [Group(Prompt(str(index), text, ids, FOUND), 8) for index in range(sessions // 8)]
        sampling = Sampling(1.0, 4096, [tokenizer.eos_token_id], policy_version=0)
        # fill() without a loop of its own
        filled = await client._generate(groups, sampling, len(groups), None, None)

        def check() -> None:
            rollouts = [rollout for group in filled for rollout in group.closed().rollouts]
            assert len(rollouts) == sessions and all(
                rollout.num_turns == TURNS for rollout in rollouts
            )
            assert all(rollout.response_length == TURNS * ANSWER_TOKENS for rollout in rollouts)

        return check

    return run


def slime(url: str, folder: Path, checkout: Path) -> Round:
    sys.path[:0] = [str(checkout), str(checkout / "examples/search-r1")]
    import generate_with_search as example
    from slime.utils.http_utils import init_http_client
    from slime.utils.types import Sample

    async def search(query: str) -> str:
        return FOUND

    example.search = search
    example.SEARCH_R1_CONFIGS["max_turns"] = TURNS
    host, port = url.removeprefix("http://").split(":")
    args = Namespace(
        partial_rollout=False, sglang_router_ip=host, sglang_router_port=port,
        hf_checkpoint=str(folder),
        sglang_server_concurrency=4096, rollout_num_engines=1, use_distributed_post=False,
        rollout_temperature=1.0,
        rollout_top_p=1.0, rollout_top_k=-1, rollout_max_response_len=4096, rollout_stop=None,
        rollout_stop_token_ids=None, rollout_skip_special_tokens=False, sglang_dp_size=1,
        use_rollout_routing_replay=False,
    )  # fmt: skip
    init_http_client(args)
    state = example.GenerateState(args)

    async def run(sessions: int) -> Callable[[], None]:
        example.SEMAPHORE = asyncio.Semaphore(256)
        samples = [Sample(index=index, prompt="x" * PROMPT_TOKENS) for index in range(sessions)]
        done = await asyncio.gather(
            *(example.generate(args, each, state.sampling_params.copy()) for each in samples)
        )

        def check() -> None:
            assert all(sum(sample.loss_mask) == TURNS * ANSWER_TOKENS for sample in done)
            assert all(sample.response.endswith("</answer>") for sample in done)

        return check

    return run


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
        return FOUND

    turns = {
        "max_user_turns": None, "max_assistant_turns": None, "max_parallel_calls": 1,
        "max_tool_response_length": 256,
        "tool_response_truncate_side": "middle", "format": "hermes",
    }  # fmt: skip
    rollout = {
        "multi_turn": turns,
        "prompt_length": 1024,
        "response_length": 4096,
        "full_determinism": False,
    }
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)

    class Client:
        """In place of LLMServerClient and the actor: the request and what the actor takes from the
        answer.
        """

        def __init__(self, http: aiohttp.ClientSession) -> None:
            self.http = http

        async def generate(
            self, request_id: str, *, prompt_ids: list[int], sampling_params: Any, **_: Any
        ) -> Any:
            body = {
                "rid": request_id,
                "input_ids": prompt_ids,
                "sampling_params": sampling_params,
                "return_logprob": True,
            }
            async with self.http.post(f"{url}/generate", json=body) as answered:
                output = await answered.json()
            logprobs = [
                float(logprob) for logprob, _, _ in output["meta_info"]["output_token_logprobs"]
            ]
            return TokenOutput(token_ids=list(output["output_ids"]), log_probs=logprobs)

    async def run(sessions: int) -> Callable[[], None]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            tools = ToolListWrap([get_function_tool("calculate")])
            wrapped = (
                DictConfigWrap(config),
                Client(http),
                tokenizer,
                None,
                RLHFDataset,
                DictConfigWrap(config.data),
            )
            loops = [
                ToolAgentLoop(*wrapped, hf_model_type="qwen3_moe", tools=tools)
                for _ in range(sessions)
            ]
            messages = [{"role": "user", "content": QUESTION}]
            done = await asyncio.gather(
                *(loop.run({"max_tokens": 4096}, raw_prompt=messages) for loop in loops)
            )

        def check() -> None:
            assert all(sum(output.response_mask) == TURNS * ANSWER_TOKENS for output in done)

        return check

    return run


CLIENTS: dict[str, Callable[[str, Path, Path], Round]] = {
    "ours": ours,
    "slime": slime,
    "verl": verl,
}


# Measuring ----------------------------------------------------------------------------------------


def measure(name: str, url: str, folder: Path, checkout: Path, sessions: int, profile: str) -> None:
    """In a process of its own: print {"cpu": ms per turn, "block": ms}."""
    from megatron_rl.rollout.garbage_collection import postpone_full_collections

    logging.disable(logging.WARNING)
    run = CLIENTS[name](url, folder, checkout)
    longest = [0.0]
    original = asyncio.events.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        begin = time.thread_time()
        original(handle)
        longest[0] = max(longest[0], time.thread_time() - begin)

    async def both() -> float:
        (await run(16))()  # loads modules, starts threads
        postpone_full_collections()  # as a run of ours does; in the peers' favour
        asyncio.events.Handle._run = timed
        begin = time.process_time()
        check = await run(sessions)
        seconds = time.process_time() - begin
        asyncio.events.Handle._run = original
        check()
        return seconds

    if profile:
        import cProfile

        profiler = cProfile.Profile(time.thread_time)
        seconds = profiler.runcall(asyncio.run, both())
        profiler.dump_stats(profile)
    else:
        seconds = asyncio.run(both())
    print(json.dumps({"cpu": 1e3 * seconds / (sessions * TURNS), "block": 1e3 * longest[0]}))


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    with subprocess.Popen(
        [sys.executable, __file__, "--serve", folder], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def compare(checkouts: dict[str, Path | None], sessions: list[int], repeats: int) -> dict[str, Any]:
    """{sessions: {client: {measure: [values]}}}"""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, server_of(Path(name)) as (folder, url):
        for count in sessions:
            table: dict[str, dict[str, list[float]]] = {}
            for _ in range(repeats):
                for client, checkout in checkouts.items():
                    if checkout is None:
                        continue
                    command = [
                        sys.executable,
                        __file__,
                        "--client",
                        client,
                        "--url",
                        url,
                        "--folder",
                        folder,
                    ]
                    command += ["--checkout", checkout, "--sessions", count]
                    done = subprocess.run(
                        [*map(str, command)], stdout=subprocess.PIPE, text=True, check=True
                    )
                    for key, value in json.loads(done.stdout.splitlines()[-1]).items():
                        table.setdefault(client, {}).setdefault(key, []).append(value)
            found[str(count)] = table
    return found


@contextlib.contextmanager
def server_of(folder: Path) -> Iterator[tuple[Path, str]]:
    make_tokenizer(folder)
    with server(folder) as url:
        yield folder, url


def report(found: dict[str, Any], names: list[str]) -> str:
    lines = [
        "| sessions | client | CPU ms per turn | / ours | longest block, ms |",
        "|---|---|---|---|---|",
    ]
    for count, table in found.items():
        for name in names:
            if name not in table:
                lines.append(f"| {count} | {name} | not run | | |")
                continue
            cpu, block = table[name]["cpu"], table[name]["block"]
            ratio = min(cpu) / min(table["ours"]["cpu"])
            lines.append(
                f"| {count} | {name} | {min(cpu):.2f} ({statistics.median(cpu):.2f}) | {ratio:.2f} "
                f"| {min(block):.1f} ({statistics.median(block):.1f}) |"
            )
    return "\n".join([*lines, "", "Minimum (median)."])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slime", type=Path, metavar="DIR")
    parser.add_argument("--verl", type=Path, metavar="DIR")
    parser.add_argument("--sessions", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--client", choices=CLIENTS, help=argparse.SUPPRESS)
    for name in ("url", "folder", "checkout", "profile"):
        parser.add_argument(f"--{name}", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
    elif args.client:
        measure(
            args.client,
            args.url,
            Path(args.folder),
            Path(args.checkout),
            args.sessions[0],
            args.profile,
        )
    else:
        checkouts = {"ours": Path(), "slime": args.slime, "verl": args.verl}
        found = compare(checkouts, args.sessions, args.repeats)
        print(json.dumps(found, indent=1) if args.json else report(found, list(checkouts)))


if __name__ == "__main__":
    main()
