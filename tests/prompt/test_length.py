"""A prompt that does not fit is refused before its chunks are looked for."""

from __future__ import annotations

import pytest

from samkv_integrations import Engine, MemoryStore
from samkv_integrations.errors import PromptTooLong
from samkv_integrations.runtimes.transformers.runtime import Model
from tests.support.models import tiny_model

TEXT = "The mill of Orvik was built in 1871 by two brothers, and it grinds barley. " * 20


@pytest.fixture
def engine() -> Engine:
    engine = Engine(tiny_model("llama"), MemoryStore(), method="reuse", block_size=8)
    engine.cache_chunks([TEXT])
    return engine


@pytest.mark.parametrize(
    "prompt",
    [
        "Some words, and many of them. " * 4_000,
        "[[1, 20240101]] " * 4_000,
        f"{TEXT}\n\n" * 20,
        [{"role": "user", "content": "<|end|>" * 20_000}],
    ],
    ids=["words", "like handles", "a chunk again and again", "control tokens"],
)
def test_no_chunk_is_looked_for(
    engine: Engine, prompt: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryStore, "chunk_index", None)
    with pytest.raises(PromptTooLong, match=r"exceeds the context window of 4096 of 'tiny-llama'"):
        engine.generate(prompt, max_new_tokens=1)  # type: ignore[arg-type]


def test_handles_count_at_full_size(engine: Engine) -> None:
    prompt = f"{engine.issue_handle(TEXT)} " * 300
    assert len(prompt) < 20_000
    with pytest.raises(PromptTooLong, match=r"of at least 34\d\d\d tokens .chunks at full size"):
        engine.generate(prompt, max_new_tokens=1)


def test_the_window_of_a_call_counts(engine: Engine) -> None:
    with pytest.raises(PromptTooLong, match="context window of 100 of"):
        engine.generate("a " * 1_000, max_new_tokens=1, context_window=100)


@pytest.mark.parametrize("prompt", ["a" * 5_000_000, [{"role": "user", "content": ""}] * 5_000])
def test_what_cannot_fit_is_refused_before_it_is_read(
    engine: Engine, prompt: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "tokenize_prompt", None)
    monkeypatch.setattr(Model, "render_chat", None)
    with pytest.raises(PromptTooLong, match="exceeds the context window of 4096"):
        engine.generate(prompt, max_new_tokens=1)  # type: ignore[arg-type]
    with pytest.raises(PromptTooLong, match="exceeds the context window of 10"):
        engine.count_tokens(prompt, most=10)  # type: ignore[arg-type]
