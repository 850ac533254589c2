"""The cost of a turn of an agent in the rollout client: ours, slime's search-r1 example and verl's
ToolAgentLoop.

    OMP_NUM_THREADS=1 python benchmarks/agent_turns.py [--slime DIR] [--verl DIR] [--sessions 64 \
1024] [--repeats 5] [--json]

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.agent_clients import ANSWER_TOKENS, CLIENTS, PRODUCT, TURNS

ANSWER_SECONDS = 0.1
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
TEMPLATE = """{%- for message in messages -%}
{%- if message.role == "tool" -%}
{{ "<|im_start|>user\n<tool_response>\n" + message.content + "\n</tool_response><|im_end|>\n" }}
{%- else -%}{{ "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" }}\
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|im_start|>assistant\n" }}{%- endif -%}"""
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"a": 12, "b": 34}}\n</tool_call>'


# The model: what the server answers ---------------------------------------------------------------


def make_tokenizer(folder: Path) -> None:
    """Write a tokenizer of bytes and the tokens that Qwen3's format names."""
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


def loaded_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of make_tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer(Path(folder))
        return PreTrainedTokenizerFast.from_pretrained(folder)


def make_answers(tokenizer: PreTrainedTokenizerFast) -> dict[str, list[bytes]]:
    """Return client -> the answer of each turn, all of ANSWER_TOKENS tokens, with RID in the place
    of the request's id.
    """
    ends = {"ours": (CALL, PRODUCT), "verl": (CALL, PRODUCT)}
    ends["slime"] = ("<search>12 * 34</search>", f"<answer>{PRODUCT}</answer>")
    return {
        name: [answer(tokenizer, name, end) for end in (call, call, last)]
        for name, (call, last) in ends.items()
    }


def answer(tokenizer: PreTrainedTokenizerFast, client: str, end: str) -> bytes:
    tail = tokenizer.encode(end) + ([] if client == "slime" else [tokenizer.eos_token_id])
    ids = tokenizer.encode("y") * (ANSWER_TOKENS - len(tail)) + tail
    sure = random.Random(0)
    meta = {
        "id": "RID_0" if client == "ours" else "RID",
        "finish_reason": {"type": "stop", "matched": ids[-1]},
        "completion_tokens": len(ids),
        "weight_version": "0",
        "num_retractions": 0,
        "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
        "output_token_logprobs": [[-sure.random(), token, None] for token in ids],
    }
    sample = {"text": tokenizer.decode(ids), "output_ids": ids, "meta_info": meta}
    return json.dumps([sample] if client == "ours" else sample).encode()


def serve(folder: Path) -> None:
    """Print the port, then answer; the number of a tool's answers in a request gives its turn."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    answers, mark = make_answers(tokenizer), tokenizer.convert_tokens_to_ids("<tool_response>")

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                size = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(size))
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


# Measuring ----------------------------------------------------------------------------------------


def measure(name: str, url: str, folder: Path, checkout: Path, sessions: int, profile: str) -> None:
    """Measure a client in this process, and print {"cpu": ms per turn, "block": ms}."""
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
        (await run(16))()  # loads modules and starts threads
        postpone_full_collections()  # as in our runs; this is in the peers' favour
        asyncio.events.Handle._run = timed
        await asyncio.sleep(0)  # what follows is in a callback that is measured
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
    """Return {sessions: {client: {measure: [values]}}}."""
    tables: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, server_of(Path(name)) as (folder, url):
        for count in sessions:
            table: dict[str, dict[str, list[float]]] = {}
            for _ in range(repeats):
                for client, checkout in checkouts.items():
                    if checkout is None:
                        continue
                    command = [sys.executable, __file__, "--client", client, "--url", url]
                    command += ["--folder", folder, "--checkout", checkout, "--sessions", count]
                    done = subprocess.run(
                        [*map(str, command)], stdout=subprocess.PIPE, text=True, check=True
                    )
                    for key, value in json.loads(done.stdout.splitlines()[-1]).items():
                        table.setdefault(client, {}).setdefault(key, []).append(value)
            tables[str(count)] = table
    return tables


@contextlib.contextmanager
def server_of(folder: Path) -> Iterator[tuple[Path, str]]:
    make_tokenizer(folder)
    with server(folder) as url:
        yield folder, url


def report(tables: dict[str, Any], names: list[str]) -> str:
    lines = [
        "| sessions | client | CPU ms per turn | / ours | longest block, ms |",
        "|---|---|---|---|---|",
    ]
    for count, table in tables.items():
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
        folder, checkout = Path(args.folder), Path(args.checkout)
        measure(args.client, args.url, folder, checkout, args.sessions[0], args.profile)
    else:
        checkouts = {"ours": Path(), "slime": args.slime, "verl": args.verl}
        tables = compare(checkouts, args.sessions, args.repeats)
        print(json.dumps(tables, indent=1) if args.json else report(tables, list(checkouts)))


if __name__ == "__main__":
    main()
