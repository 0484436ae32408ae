"""The same from a program of many tasks: `python -m examples.ask_async SCREENSHOT ...`."""

from __future__ import annotations

import asyncio
import sys

from examples.ask import QUESTIONS
from producer import AsyncClient, ProducerError
from producer.settings import Settings


async def ask(client: AsyncClient, path: str) -> None:
    """One screenshot; 5 s for everything, after which the job is taken back."""
    try:
        result = await client.decide(path, QUESTIONS, deadline_s=5, timeout_s=5)
        print(f"{path}: {result.answers['next'].choice if result.ok else result.error}")
    except ProducerError as error:
        print(f"{path}: {error}")


async def main(*paths: str) -> None:
    """Ask about all of them side by side."""
    settings = Settings.from_environment()
    async with AsyncClient(settings.redis_url, queue=settings.queue, prefix=settings.prefix) as client:
        await asyncio.gather(*(ask(client, path) for path in paths))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
