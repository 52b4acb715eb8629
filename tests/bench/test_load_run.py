"""A run of load: which prompts are sent, by whom, in which order."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from benchmarks import load_prompts, models
from benchmarks.load import (
    Block,
    Client,
    Endpoint,
    LoadConfig,
    Pace,
    Prompt,
    run,
)
from benchmarks.load_prompts import Prompts, WordsShape
from samkv_integrations.model.loading import load_model
from tests.support.openai_endpoint import Reply, openai_endpoint

OPENING = re.compile(r"Request (\d{6})-(\d{6})\.\n\n")


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


# -- methods in turns ---------------------------------------------------------------------------


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


async def test_errors_are_records_and_the_run_goes_on() -> None:
    def reply(body: dict[str, Any]) -> Reply:
        return Reply(status=429) if body["prompt"] in ("2", "5") else Reply()

    blocks, _ = await sent(config(), reply)
    errors = [(r.label, r.index) for b in blocks for r in b.records if r.error == "429"]
    assert sorted(errors) == [("auto", 2), ("auto", 5), ("recompute", 2), ("recompute", 5)]


# -- prompts ------------------------------------------------------------------------------------


def without_opening(prompt: Prompt) -> str:
    assert isinstance(prompt, str)
    found = OPENING.match(prompt)
    assert found, prompt[:40]
    return prompt[found.end() :]


@pytest.fixture(scope="module")
def words() -> models.Words:
    return models.Words(load_model("builtin", device="cpu"), seed=0)


def chunks_of(prompt: Prompt) -> list[str]:
    return without_opening(prompt).split("\n\n")[1:-1]


def test_random_prompts_are_the_same_for_all_methods_but_for_fresh_chunks(
    words: models.Words,
) -> None:
    shape = WordsShape(n_chunks=4, chunk_tokens=10, warm_share=0.5)
    made = load_prompts.of_words(words, shape, ["a", "b"], 6, chat=False, seed=0)
    assert len(made.cached) == 4
    fresh = []
    for one, other in zip(made.by_label["a"], made.by_label["b"], strict=True):
        of_one, of_other = chunks_of(one), chunks_of(other)
        assert len(of_one) == len(of_other) == 4
        assert [words.count(chunk) for chunk in of_one] == [10] * 4
        warm = [chunk in made.cached for chunk in of_one]
        assert warm == [chunk in made.cached for chunk in of_other] and sum(warm) == 2
        assert [c for c in of_one if c in made.cached] == [c for c in of_other if c in made.cached]
        assert without_opening(one).split("Question:")[1] == str(other).split("Question:")[1]
        fresh += [chunk for chunk in (*of_one, *of_other) if chunk not in made.cached]
    assert len(fresh) == len(set(fresh)) == 2 * 2 * 6  # which nobody can have cached before
