"""Requests of many choices on a real worker, and one token that somebody else wants."""

from __future__ import annotations

import asyncio
import re

from helpers.serving.server import Server, eventually

REQUESTS, CHOICES = 4, 128


async def test_a_token_of_another_tenant_comes_before_many_choices_end(tiny: Server) -> None:
    """Ahead of it are eight times as many choices as the worker has batch rows, each of 500 steps."""
    client, model = tiny.async_client, tiny.model
    ended: list[str] = []

    async def complete(tenant: str, **options: int) -> None:
        await client.completions.create(
            model=model,
            prompt="hello",
            extra_body={"ignore_eos": True, **options},
            extra_headers={"X-Headrace-Tenant": tenant},
        )
        ended.append(tenant)

    many = {"n": CHOICES, "max_tokens": 500}
    greedy = [asyncio.create_task(complete("greedy", **many)) for _ in range(REQUESTS)]
    try:
        await asyncio.to_thread(eventually, lambda: all_in_flight(tiny), tiny.tail)
        await complete("modest", max_tokens=1)
        assert ended == ["modest"]
    finally:
        for task in greedy:
            task.cancel()
        await asyncio.gather(*greedy, return_exceptions=True)
        await client.close()
    await asyncio.to_thread(tiny.wait_idle)


def all_in_flight(server: Server) -> bool:
    """The router has taken all choices, and the worker has no batch row left."""
    [streams] = re.findall(rb"^headrace_streams (\d+)$", server.get("/metrics").body, re.MULTILINE)
    [worker] = server.workers().values()
    return (
        int(streams) == REQUESTS * CHOICES and worker["running"] == worker["capacity"]["sequences"]
    )
