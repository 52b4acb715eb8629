"""A prompt that cannot fit is refused before it is tokenised, and what costs time is bounded."""

from __future__ import annotations

import re

import pytest

from samkv_integrations import Engine, MemoryStore
from samkv_integrations.errors import PromptTooLong
from samkv_integrations.model.model import Model
from tests.support.models import tiny_model

TEXT = "The mill of Orvik was built in 1871 by two brothers, and it grinds barley. " * 20


@pytest.fixture
def engine() -> Engine:
    engine = Engine(tiny_model("llama"), MemoryStore(), method="reuse", block_size=8)
    engine.cache_chunks([TEXT])
    return engine


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Characters of each text that is tokenised."""
    sizes: list[int] = []
    tokenize = Model.tokenize

    def counted(self: Model, text: str, *, special: bool) -> list[int]:
        sizes.append(len(text))
        return tokenize(self, text, special=special)

    monkeypatch.setattr(Model, "tokenize", counted)
    return sizes


@pytest.mark.parametrize(
    "prompt",
    [
        "Some words, and many of them. " * 170_000,
        "[[1, 20240101]] " * 30_000,
        f"{TEXT}\n\n" * 200,
        [{"role": "user", "content": "<|end|>" * 40_000}],
    ],
    ids=["words", "like handles", "a chunk again and again", "control tokens"],
)
def test_nothing_of_it_is_tokenised(engine: Engine, prompt: object, tokenised: list[int]) -> None:
    with pytest.raises(PromptTooLong, match=r"exceeds the context window of 4096 of 'tiny-llama'"):
        engine.generate(prompt, max_new_tokens=1)  # type: ignore[arg-type]
    assert sum(tokenised) < 10_000


def test_handles_count_at_full_size(engine: Engine, tokenised: list[int]) -> None:
    prompt = f"{engine.issue_handle(TEXT)} " * 300
    assert len(prompt) < 20_000
    tokenised.clear()
    with pytest.raises(PromptTooLong, match=r"of at least \d+ tokens .chunks at full size") as said:
        engine.generate(prompt, max_new_tokens=1)
    at_least = int(re.findall(r"at least (\d+)", str(said.value))[0])
    assert 4096 < at_least <= 300 * (len(TEXT) + 1)
    assert sum(tokenised) <= 300 * len(TEXT)  # to ask whether it is kept


def test_the_window_of_a_call_counts(engine: Engine, tokenised: list[int]) -> None:
    with pytest.raises(PromptTooLong, match="context window of 100 of"):
        engine.generate("a " * 100_000, max_new_tokens=1, context_window=100)
    assert sum(tokenised) < 10_000
