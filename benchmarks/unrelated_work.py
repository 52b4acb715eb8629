"""How long other work of a process waits while answers queue: ``asyncio.to_thread``, repeatedly.

    python -m benchmarks.unrelated_work --answers 20

The answers are asked for at once, through the engine and through LangChain's chat model, each in an
event loop of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable

from benchmarks.datasets import load
from langchain_samkv import ChatSamKV
from samkv_integrations import Engine
from samkv_integrations.figures import commit
from samkv_integrations.model import load_model
from samkv_integrations.prompt import rag_prompt

EVERY_S = 0.02


async def delays(asks: list[Callable[[], Awaitable[object]]]) -> list[float]:
    """Seconds from asking for a thread to its start, while all answers are under way."""
    answers = asyncio.gather(*(ask() for ask in asks))
    found = []
    while not answers.done():
        asked = time.perf_counter()
        found.append(await asyncio.to_thread(time.perf_counter) - asked)
        await asyncio.sleep(EVERY_S)
    await answers
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--answers", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    questions = load("long")[: args.answers]
    prompts = [str(rag_prompt(each.question, each.documents)) for each in questions]
    engine = Engine(load_model("builtin"), prefix_bytes=0)
    for each in questions:
        engine.cache_chunks(each.documents)
    chat = ChatSamKV(engine=engine, max_tokens=args.tokens)
    ways: dict[str, list[Callable[[], Awaitable[object]]]] = {
        "Engine.agenerate": [
            lambda prompt=prompt: engine.agenerate(prompt, max_new_tokens=args.tokens)
            for prompt in prompts
        ],
        "ChatSamKV.ainvoke": [lambda prompt=prompt: chat.ainvoke(prompt) for prompt in prompts],
    }
    for name, asks in ways.items():
        began = time.perf_counter()
        found = asyncio.run(delays(asks))
        row = {
            "asked": name, "answers": len(asks), "threads_asked_for": len(found),
            "seconds": round(time.perf_counter() - began, 2),
            "median_ms": round(1e3 * statistics.median(found), 2),
            "longest_ms": round(1e3 * max(found), 2), "commit": commit(),
        }  # fmt: skip
        print(json.dumps(row))


if __name__ == "__main__":
    main()
