"""The law of held beginnings: an answer is the same whether an earlier prompt began so or not.

Logits of the first token and of the tokens after it, and the entries that the answer goes on with,
in float32 (see `test_limit_laws.py`): the engine that holds the beginning against one that holds
nothing. What was computed is told by the report.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from samkv_integrations.engine import Engine
from samkv_integrations.methods import METHODS, Method
from samkv_integrations.methods.eviction import EVICTIONS, get_eviction
from tests.support import asking
from tests.support.asking import Asked
from tests.support.covering import covering
from tests.support.laws import (
    CHUNKS,
    FOLLOW,
    TOLERANCE,
    WHOLE_IS_FASTER,
    assert_same_answer,
    engine_of,
)
from tests.support.models import FAMILIES, tiny_model

ROOM = 2**24
SYSTEM = "You answer briefly, and from the documents alone.\n\n"
TURNS = "User: hello\nAssistant: Good day. What do you want to know?\n"
DOCUMENTS = "\n\n-- more\n".join(CHUNKS)
EARLIER = f"{SYSTEM}{TURNS}Read:\n\n{CHUNKS[2]}\n\nQuestion: who?"
PROMPT = f"{SYSTEM}{TURNS}Read:\n\n{DOCUMENTS}\n\nQuestion: why?\nAnswer:"
N_BEFORE = len(f"{SYSTEM}{TURNS}Read:\n\n")  # one token a byte


def ask(engine: Engine, prompt: str, method: Method | str, **options: Any) -> Asked:
    """A prompt whose chunks are those of `CHUNKS` that it holds."""
    return asking.ask(engine, prompt, [c for c in CHUNKS if c in prompt], method, **options)


@cache
def engines(family: str, store_bits: int, n_cached: int) -> list[Engine]:
    """An engine that holds no beginning, and one that does; the first chunks are cached."""
    made = [engine_of(family, store_bits, prefix_bytes=room) for room in (0, ROOM)]
    for engine in made:
        engine.store.delete(*(engine.key_of(text) for text in CHUNKS[n_cached:]))
    return made


def pair(family: str, store_bits: int = 16, *, n_cached: int = len(CHUNKS)) -> list[Engine]:
    """Those engines; the second one holds the beginning of ``EARLIER``, and no other."""
    cold, warm = engines(family, store_bits, n_cached)
    warm.sequences.clear()
    ask(warm, EARLIER, "reuse")
    return [cold, warm]


def assert_same(cold: Asked, warm: Asked) -> None:
    torch.testing.assert_close(warm.first.logits, cold.first.logits, **TOLERANCE)
    torch.testing.assert_close(warm.follow(FOLLOW), cold.follow(FOLLOW), **TOLERANCE)
    same = ("kept_ratio", "context_tokens", "prompt_tokens", "bytes_read", "kv_bytes", "reused")
    for name in same:
        assert getattr(warm.report, name) == getattr(cold.report, name), name
    assert warm.report.recompute_ratio == cold.report.recompute_ratio


@pytest.mark.parametrize(
    ("family", "n_cached", "name"),
    covering(FAMILIES, [len(CHUNKS), 2], list(METHODS), times=2),
)
def test_an_answer_does_not_tell_whether_its_beginning_was_held(
    family: str, n_cached: int, name: str
) -> None:
    """With entries of few bits, and some chunks that are text."""
    cold, warm = (
        ask(engine, PROMPT, name, eviction=None) for engine in pair(family, 4, n_cached=n_cached)
    )
    assert_same(cold, warm)
    n_bos = warm.layout.n_prefix
    assert (cold.report.prefix_tokens, warm.report.prefix_tokens) == (0, N_BEFORE + n_bos)
    n_other = warm.report.prompt_tokens - warm.report.context_tokens
    assert cold.report.uncached_tokens == n_other
    assert warm.report.uncached_tokens == n_other - N_BEFORE - n_bos
    positions = warm.planned[-1].plan.layers[0].computed.positions
    assert int(positions.min()) >= N_BEFORE + n_bos, "it computes none of them"


@pytest.mark.parametrize(
    ("name", "eviction"),
    covering(list(METHODS), [n for n, rule in EVICTIONS.items() if hasattr(rule, "keeper")]),
)
def test_an_eviction_chooses_the_same(name: str, eviction: str) -> None:
    """A rule that wants the queries of all tokens gets them: nothing is taken from memory then."""
    rule = replace(get_eviction(eviction), budget_ratio=0.5)  # type: ignore[type-var]
    cold, warm = (ask(engine, PROMPT, name, eviction=rule) for engine in pair("llama"))
    assert_same(cold, warm)
    assert_same_answer(warm, warm.first.logits, cold.first.logits, cold)
    assert (warm.report.prefix_tokens > 0) == (eviction != "h2o")


@pytest.mark.parametrize("window", [8, 32, 60])
def test_a_window_that_reaches_into_the_beginning_gets_its_queries(window: int) -> None:
    """SnapKV's last entries look, and be they before the only chunk."""
    prompt = f"{SYSTEM}{CHUNKS[2]}\n\nQuestion: why?"
    after = len("\n\nQuestion: why?")
    rule = replace(get_eviction("snapkv"), window=window, budget_ratio=0.9)  # type: ignore[type-var]
    cold, warm = (ask(engine, prompt, "reuse", eviction=rule) for engine in pair("llama"))
    assert_same_answer(warm, warm.first.logits, cold.first.logits, cold)
    expected = 1 + len(SYSTEM) - max(0, window - after)
    assert warm.report.prefix_tokens == expected > 0


@pytest.mark.parametrize("name", METHODS)
def test_a_chunk_behind_the_text_that_it_was_cached_after_stays_exact(name: str) -> None:
    """The beginning is then what chunks were prefilled after."""
    engines = [
        Engine(
            tiny_model("llama"), block_size=8, store_bits=16, prefix_bytes=room,
            prefix_text=SYSTEM,
        )
        for room in (0, ROOM)
    ]  # fmt: skip
    asked = []
    for engine in engines:
        engine.costs = WHOLE_IS_FASTER
        engine.cache_chunks(CHUNKS)
        ask(engine, f"{SYSTEM}{CHUNKS[1]} Who?", "reuse")
        asked.append(ask(engine, f"{SYSTEM}{DOCUMENTS}\n\nQuestion: why?", name))
    cold, warm = asked
    assert_same(cold, warm)
    assert cold.layout.exact.tolist() == warm.layout.exact.tolist() == [True] + [False] * 4
    assert warm.report.prefix_tokens == 1 + len(SYSTEM)


@pytest.mark.parametrize(
    ("family", "name"), covering(FAMILIES, ["auto", "samkv-fusion", "ape", "recompute"])
)
def test_a_conversation_without_documents_goes_on_from_its_last_turn(
    family: str, name: str
) -> None:
    """And computes no token of it twice, but those of the answer."""
    turns = [SYSTEM + TURNS, "User: And then?\nAssistant:", " Nothing.\nUser: why?\nAssistant:"]
    cold, warm = pair(family)
    warm.sequences.clear()
    said, n_before = "", 0
    for turn in turns:
        said += turn
        before, now = (ask(engine, said, name, eviction=None) for engine in (cold, warm))
        assert_same(before, now)
        assert (now.report.prefix_tokens, now.report.found) == (n_before, 0)
        n_before = now.report.prompt_tokens
        assert now.report.uncached_tokens == n_before - now.report.prefix_tokens
    again = ask(warm, said, name, eviction=None)
    assert again.report.uncached_tokens == 1  # the last one gives the logits


@pytest.mark.parametrize(
    ("before", "eviction", "name"),
    covering(list(METHODS), [None, "h2o"], ["reuse", "samkv-fusion", "ape", "samkv-guided"]),
)
def test_whichever_method_left_it(before: str, eviction: str | None, name: str) -> None:
    cold, warm = engines("qwen3", 16, len(CHUNKS))
    warm.sequences.clear()
    ask(warm, EARLIER, before, eviction=eviction)
    mine, theirs = (ask(engine, PROMPT, name) for engine in (warm, cold))
    assert_same(theirs, mine)
    assert mine.report.prefix_tokens >= N_BEFORE


def test_a_part_of_a_held_beginning_serves() -> None:
    """Another conversation behind the same system prompt."""
    other: dict[str, Any] = {"method": "reuse", "eviction": "none"}
    for engine, n_held in zip(pair("llama"), (0, 1 + len(SYSTEM)), strict=True):
        asked = ask(engine, f"{SYSTEM}Read:\n\n{DOCUMENTS}\n\nWhy?", **other)
        assert asked.report.prefix_tokens == n_held


def test_a_missed_chunk_ends_a_beginning_too() -> None:
    """For a method that uses caches: any later prompt may find one there."""
    engine = pair("llama", n_cached=0)[1]
    ask(engine, PROMPT, "reuse")
    engine.cache_chunks(CHUNKS)
    asked = ask(engine, PROMPT.replace("why", "who"), "reuse")
    assert asked.report.prefix_tokens == N_BEFORE + 1
    engine.store.delete(*map(engine.key_of, CHUNKS))


def test_forgetting_a_text_forgets_every_beginning() -> None:
    """The text may stand in one as text."""
    engine = engine_of("llama", 16, prefix_bytes=ROOM)
    ask(engine, PROMPT, "reuse")
    engine.forget([CHUNKS[4]])
    assert ask(engine, PROMPT, "reuse").report.prefix_tokens == 0


def test_with_no_room_nothing_is_held() -> None:
    engine = engine_of("llama", 16)
    for _ in range(2):
        assert ask(engine, PROMPT, "reuse").report.prefix_tokens == 0
