"""A pool per request: as many as requests were in flight at the same time, and none is lost to a failure."""

import asyncio
import contextlib

import httpx

from megatron_rl.rollout.client.transport import PoolPerRequest
from tests.fake_server import FakeServer

BODY = {"rid": "r", "input_ids": [[3, 4]], "return_routed_experts": False}


def test_pools_are_used_again_after_answers_failures_and_cancellations():
    made = []

    def make():
        made.append(httpx.AsyncHTTPTransport())
        return made[-1]

    async def requests():
        async with httpx.AsyncClient(transport=PoolPerRequest(make), timeout=5) as http:
            for _ in range(3):
                answers = await asyncio.gather(*(http.post(f"{url}/generate", json=BODY) for _ in range(4)))
                assert all(len(answer.json()) == 1 for answer in answers)
            assert len(made) == 4
            fake.script[:] = ["reset@before_headers"] * 4 + ["hang@before_headers"]
            for _ in range(4):
                with contextlib.suppress(httpx.TransportError):
                    await http.post(f"{url}/generate", json=BODY)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(http.post(f"{url}/generate", json=BODY), 0.2)
            fake.script[:] = ["ok"]
            await asyncio.gather(*(http.post(f"{url}/generate", json=BODY) for _ in range(4)))
        assert len(made) == 4

    with FakeServer("ok") as fake:
        url = fake.url
        asyncio.run(requests())
