"""A run of load: which prompts are sent, by whom, in which order."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch

from benchmarks import load_prompts, models, shapes
from benchmarks.datasets import load
from benchmarks.load import (
    AS_SERVED,
    Block,
    Client,
    Endpoint,
    LoadConfig,
    Pace,
    Prompt,
    Record,
    run,
)
from benchmarks.load_prompts import Prompts, Subject, WordsShape
from samkv_integrations.errors import InvalidOption
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


async def test_an_endpoint_without_methods_is_asked_for_none() -> None:
    _, requests = await sent(config(labels=(AS_SERVED,)))
    assert {method for method, _ in requests} == {None}


async def test_errors_are_records_and_the_run_goes_on() -> None:
    def reply(body: dict[str, Any]) -> Reply:
        return Reply(status=429) if body["prompt"] in ("2", "5") else Reply()

    blocks, _ = await sent(config(), reply)
    errors = [(r.label, r.index) for b in blocks for r in b.records if r.error == "429"]
    assert sorted(errors) == [("auto", 2), ("auto", 5), ("recompute", 2), ("recompute", 5)]


async def test_a_first_request_that_fails_ends_the_run_with_what_the_server_says() -> None:
    with pytest.raises(InvalidOption, match=r"\(recompute\) was not answered \(400: no 400\)"):
        await sent(config(labels=("recompute",)), lambda body: Reply(status=400))


# -- prompts ------------------------------------------------------------------------------------


def without_opening(prompt: Prompt) -> str:
    assert isinstance(prompt, str)
    found = OPENING.match(prompt)
    assert found, prompt[:40]
    return prompt[found.end() :]


@pytest.fixture(scope="module")
def words() -> models.Words:
    return models.Words(load_model("builtin", device="cpu"), seed=0)


def test_every_prompt_of_questions_begins_otherwise_and_goes_on_alike() -> None:
    questions = load()[:3]
    made = load_prompts.of_questions(questions, ["a", "b"], 4, chat=False)
    openings = [OPENING.match(str(p)) for each in made.by_label.values() for p in each]
    assert len({found[0] for found in openings if found}) == 2 * 4
    assert len({found[1] for found in openings if found}) == 1
    expected = [questions[n].prompt() for n in (0, 1, 2, 0)]
    for prompts in made.by_label.values():
        assert [without_opening(prompt) for prompt in prompts] == expected
    assert set(made.cached) == {d for question in questions for d in question.documents}
    assert len(made.cached) == len(set(made.cached))


def test_a_chat_has_the_opening_in_its_first_message() -> None:
    made = load_prompts.of_questions(load()[:1], ["a"], 1, chat=True)
    ((message,),) = made.by_label["a"]
    assert isinstance(message, dict)
    (expected,) = load()[0].prompt(chat=True)
    assert isinstance(expected, dict)
    assert message["role"] == "user"
    assert without_opening(message["content"]) == expected["content"]


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


def test_random_prompts_have_chunks_in_other_orders(words: models.Words) -> None:
    made = load_prompts.of_words(
        words, WordsShape(n_chunks=4, chunk_tokens=5), ["a"], 8, chat=False, seed=0
    )
    first = [chunks_of(prompt)[0] for prompt in made.by_label["a"]]
    assert len(set(first)) > 2
    assert {chunk for p in made.by_label["a"] for chunk in chunks_of(p)} <= set(made.cached)


def test_a_random_model_on_disk_says_as_many_texts_as_it_is_asked_for(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most ids of a large vocabulary are none of the built-in tokenizer's, so texts were empty."""
    tiny = {
        "model_type": "qwen2", "vocab_size": 9000, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    monkeypatch.setattr(shapes, "SHAPES", {"tiny": tiny})
    subject = Subject(shape="tiny", dtype="float32", device="cpu", n_chunks=2, chunk_tokens=40)
    made = subject.prepare(["auto"], 3, max_tokens=5, folder=tmp_path / "model")
    assert made.name == "tiny (random weights)"
    assert len(made.prompts.by_label["auto"]) == 3
    loaded = load_model(made.served, device="cpu")
    assert loaded.context_window > 2 * 40 + 5
    # a model of this kind is loaded with another class of tokenizer, which cut the words in two
    assert [len(loaded.tokenize(text, special=False)) for text in made.prompts.cached] == [40] * 4
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(200, 32, generator=generator)
    best = (hidden @ loaded.hf.get_output_embeddings().weight.float().T).argmax(-1).tolist()
    texts = [loaded.detokenize([token]) for token in best]
    assert all(texts) and "\N{REPLACEMENT CHARACTER}" not in "".join(texts)
    assert not loaded.eos_ids & set(best)


def test_records_of_answers_of_one_token_have_no_seconds_a_token() -> None:
    assert Record(label="m", index=0, completion_tokens=1).token_s is None
