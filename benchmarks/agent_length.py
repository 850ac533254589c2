"""The cost of a turn of an agent against the number of tokens that the episode has already.

    OMP_NUM_THREADS=1 python benchmarks/agent_length.py [--turns 100] [--repeats 3] [--routes]

One episode of many turns, each of SAMPLED sampled tokens and an observation of OBSERVED tokens: 128
thousand tokens after 100 turns.  The server is a process of its own, and so is the program that
uses the endpoint.  The ways of asking for turns:

request   the request alone: the input is written as JSON and sent, and the answer is read but not
          parsed.  No client of this protocol can cost less
tokens    session.generate(), and token ids observed
observe   session.generate(), and messages observed
list      session.generate(messages) with all messages
chat      /v1/chat/completions of the endpoint with all messages
prompts   /v1/completions of the endpoint with all token ids

--routes   48 MoE layers of 8 experts are returned for every new token
first      CPU time of the client's process per turn, all threads, mean of the turns 2 to 11
last       the same, mean of the last ten turns
slope      ms per turn and 1,000 tokens known, least squares over all turns but the first
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pybase64

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SAMPLED, OBSERVED, PROMPT = 256, 1024, 400
LAYERS, TOP_K, EXPERTS = 48, 8, 128
ROW_CHARACTERS = LAYERS * TOP_K * 4 * 4 // 3
"""Base64 characters of a row of expert ids, without padding."""
LETTER = "x"
WAYS = ("request", "tokens", "observe", "list", "chat", "prompts")


# The model ----------------------------------------------------------------------------------------


def serve(letter: int, end: int) -> None:
    """Print the port, then answer every request with SAMPLED tokens and the routes it asks for."""
    ids = [*[letter] * (SAMPLED - 1), end]
    row = np.tile(np.arange(TOP_K, dtype="<i4"), LAYERS).tobytes()
    meta = {
        "finish_reason": {"type": "stop", "matched": ids[-1]},
        "completion_tokens": len(ids),
        "weight_version": "0",
        "output_token_logprobs": [[-0.25, token, None] for token in ids],
    }
    known: dict[int, str] = {}

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                size = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
                body = orjson.loads(await reader.readexactly(size))
                sample: dict[str, Any] = {"output_ids": ids}
                sample["meta_info"] = {**meta, "id": f"{body['rid']}_0"}
                if body.get("return_routed_experts"):
                    rows = len(body["input_ids"][0]) + SAMPLED - 1
                    rows -= body.get("routed_experts_start_len", 0)
                    if rows not in known:
                        known[rows] = pybase64.b64encode(row * rows).decode()
                    sample["meta_info"]["routed_experts"] = known[rows]
                content = orjson.dumps([sample])
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content))
                writer.write(content)
                await writer.drain()

    async def listen() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0, limit=2**24)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    asyncio.run(listen())


def ask(url: str, key: str, way: str, turns: int) -> None:
    """Play the program that uses the endpoint."""
    import httpx

    headers = {"Authorization": f"Bearer {key}"}
    messages = [{"role": "user", "content": LETTER * PROMPT}]
    ids = [0] * PROMPT
    with httpx.Client(base_url=url, headers=headers, timeout=600) as client:
        for _ in range(turns):
            if way == "chat":
                answer = client.post("/chat/completions", json={"messages": messages}).json()
                observed = {"role": "user", "content": LETTER * OBSERVED}
                messages += [answer["choices"][0]["message"], observed]
            else:
                body = {"prompt": ids, "return_token_ids": True, "max_tokens": 4096}
                answer = client.post("/completions", json=body).json()
                ids += [*answer["choices"][0]["token_ids"], *[0] * OBSERVED]


# Ways of asking -----------------------------------------------------------------------------------


def rollout_of(way: str, turns: int) -> Callable[[Any, Any], Awaitable[Any]]:
    """Return the function of the agent."""

    async def rollout(session: Any, prompt: Any) -> Any:
        observed = {"role": "user", "content": LETTER * OBSERVED}
        messages = [{"role": "user", "content": LETTER * PROMPT}]
        if way in ("chat", "prompts"):
            access = await session.open_endpoint()
            command = [sys.executable, __file__, "--ask", access.base_url, "--key", access.api_key]
            command += ["--way", way, "--turns", str(turns)]
            program = await asyncio.create_subprocess_exec(*command)
            assert await program.wait() == 0
            return session.finish(1.0)
        for _ in range(turns):
            if way == "list":
                turn = await session.generate(messages)
                messages += [turn.message, observed]
                continue
            await session.generate()
            session.observe([0] * OBSERVED if way == "tokens" else [observed])
        return session.finish(1.0)

    return rollout


async def replaced(session: Any, prompt: Any) -> Any:
    """The name that the configuration needs: `measure` sets the function."""


def measure(ways: Sequence[str], turns: int, repeats: int, routes: bool, profile: str) -> str:
    """Run the episodes in this process; return the table."""
    from benchmarks.agent_turns import loaded_tokenizer
    from megatron_rl.config import AgentConfig, RolloutConfig
    from megatron_rl.models.spec import ModelSizes
    from megatron_rl.records import Prompt
    from megatron_rl.rollout.agents.branch import Branch
    from megatron_rl.rollout.agents.runner import EpisodeRunner
    from megatron_rl.rollout.client.client import RolloutClient
    from megatron_rl.rollout.client.sampling import SampleRules, Sampling
    from megatron_rl.rollout.garbage_collection import postpone_full_collections
    from megatron_rl.rollout.group import Group

    logging.disable(logging.WARNING)
    tokenizer = loaded_tokenizer()
    spec = ModelSizes(
        num_layers=LAYERS, moe_layers=tuple(range(LAYERS)), top_k=TOP_K, num_experts=EXPERTS,
        vocab_size=len(tokenizer),
    )  # fmt: skip
    clock: list[float] = []
    accept = Branch.accept

    def timed(branch: Branch, turn: Any) -> None:
        accept(branch, turn)
        clock.append(time.process_time())

    Branch.accept = timed  # type: ignore[method-assign]
    agent = AgentConfig(function=f"{Path(__file__).stem}:replaced", renderer="qwen3")
    runner = EpisodeRunner(agent, tokenizer, spec.vocab_size, 0)
    sampling = Sampling(1.0, 1 << 20, [tokenizer.eos_token_id], policy_version=0)
    text = f"<|im_start|>user\n{LETTER * PROMPT}<|im_end|>\n<|im_start|>assistant\n"

    async def run(way: str, url: str) -> list[float]:
        clock.clear()
        client = RolloutClient([url], RolloutConfig(), SampleRules(spec, routes), episodes=runner)
        if way == "request":
            await requests_alone(url, client, turns, clock)
        else:
            runner.function = rollout_of(way, turns)
            group = Group(Prompt("0", text, tuple(tokenizer.encode(text)), ""), 1)
            (filled,) = await client._generate([group], sampling, 1, None, None)
            (rollout,) = filled.rollout_group().rollouts
            assert rollout.response_length == turns * SAMPLED
            assert rollout.has_routes == routes
        return np.diff(clock).tolist()

    lines = ["| way | first, ms | last, ms | last / first | slope |", "|---|---|---|---|---|"]
    postpone_full_collections()
    with server(tokenizer.encode("y")[0], tokenizer.eos_token_id) as url:
        for way in ways:
            runs = []
            for _ in range(repeats):
                if profile:
                    import cProfile

                    profiler = cProfile.Profile(time.thread_time)
                    runs.append(profiler.runcall(asyncio.run, run(way, url)))
                    profiler.dump_stats(f"{profile}.{way}")
                else:
                    runs.append(asyncio.run(run(way, url)))
            lines.append(row(way, 1e3 * np.min(runs, 0)))
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


@contextlib.contextmanager
def server(letter: int, end: int) -> Iterator[str]:
    """Start the server; yield its URL."""
    command = [sys.executable, __file__, "--serve", str(letter), str(end)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


async def requests_alone(url: str, client: Any, turns: int, clock: list[float]) -> None:
    """Send the requests of an episode and read their answers, and nothing else."""
    from megatron_rl.rollout.client.request import connections

    async with connections(client.cfg, client._tls) as http:
        ids = [0] * PROMPT
        for turn in range(turns):
            start = len(ids) - 1 - OBSERVED if turn else 0
            body = orjson.dumps(
                {
                    "rid": str(turn),
                    "input_ids": [ids],
                    "return_logprob": True,
                    "return_routed_experts": client.rules.want_routes,
                    "routed_experts_start_len": start,
                }
            )
            async with http.post(f"{url}/generate", data=body) as answer:
                await answer.read()
            clock.append(time.process_time())
            ids += [0] * (SAMPLED + OBSERVED)


def row(way: str, cpu: np.ndarray) -> str:
    """Return the row of one way; cpu: ms of the turns 2, 3, ..."""
    known = PROMPT + (SAMPLED + OBSERVED) * np.arange(1, 1 + len(cpu))
    slope = np.polyfit(known / 1000, cpu, 1)[0]
    first, last = cpu[:10].mean(), cpu[-10:].mean()
    return f"| {way} | {first:.2f} | {last:.2f} | {last / first:.2f} | {slope:.4f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--routes", action="store_true")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--profile", default="", help="file of cProfile, one for each way")
    parser.add_argument("--serve", type=int, nargs=2, help=argparse.SUPPRESS)
    for name in ("ask", "key", "way"):
        parser.add_argument(f"--{name}", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(*args.serve)
    elif args.ask:
        ask(args.ask, args.key, args.way, args.turns)
    else:
        print(measure(args.ways, args.turns, args.repeats, args.routes, args.profile))


if __name__ == "__main__":
    main()
