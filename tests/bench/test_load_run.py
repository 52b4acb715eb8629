"""A run of load: which prompts are sent, by whom, in which order."""

from __future__ import annotations

from collections import Counter
from typing import Any

from benchmarks.load import Block, Client, Endpoint, LoadConfig, Pace, run
from benchmarks.load_prompts import Prompts
from tests.support.openai_endpoint import Reply, openai_endpoint


def config(**changes: Any) -> LoadConfig:
    fields: dict[str, Any] = {
        "labels": ("auto", "recompute"), "paces": (Pace(concurrency=2),), "requests": 6,
        "rounds": 3,
    }  # fmt: skip
    return LoadConfig(**{**fields, **changes})


def prompts_of(config: LoadConfig) -> Prompts:
    numbers = range(config.n_prompts)
    return Prompts(cached=(), by_label={name: [f"{n}" for n in numbers] for name in config.labels})


async def sent(
    settings: LoadConfig, reply: Any = lambda body: Reply()
) -> tuple[list[Block], list[tuple[str | None, int]]]:
    """The blocks of a run, and (method, prompt) of each request that the server was sent."""
    with openai_endpoint(reply) as server:
        async with Client(Endpoint(url=server.url, model="m")) as client:
            blocks = await run(settings, client, prompts_of(settings))
    bodies = server.bodies("completions")
    return blocks, [(b["samkv"]["method"] if "samkv" in b else None, int(b["prompt"]))
                    for b in bodies]  # fmt: skip


async def test_methods_take_turns_on_the_same_prompts_and_every_second_round_backwards() -> None:
    blocks, requests = await sent(config())
    assert requests[:2] == [("auto", 0), ("recompute", 0)]  # warm up, and do not count
    assert [(b.round, b.label, sorted(r.index for r in b.records)) for b in blocks] == [
        (0, "auto", [1, 2]), (0, "recompute", [1, 2]),
        (1, "recompute", [3, 4]), (1, "auto", [3, 4]),
        (2, "auto", [5, 6]), (2, "recompute", [5, 6]),
    ]  # fmt: skip
    # a block is over before the next one begins, also for the server
    assert [method for method, _ in requests[2:]] == [b.label for b in blocks for _ in b.records]


async def test_no_prompt_is_sent_twice_by_a_method_whatever_the_paces() -> None:
    paces = (Pace(concurrency=1), Pace(concurrency=3), Pace(rate=1e6))
    settings = config(paces=paces, requests=7, rounds=2)
    blocks, requests = await sent(settings)
    assert set(Counter(requests).values()) == {1}
    assert len(requests) == 2 * settings.n_prompts == 2 * (3 * 7 + 1)
    assert list(dict.fromkeys(block.pace for block in blocks)) == list(paces)
    assert [len(block.records) for block in blocks if block.label == "auto"] == [3, 4] * 3
