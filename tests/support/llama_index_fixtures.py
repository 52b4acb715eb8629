"""What tests of LlamaIndex ask for by name; a plugin of pytest, so that each may list it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_index.core
import pytest
from llama_index.core import Settings
from llama_index.core.llms.mock import MockLLM

from samkv_integrations.prompt.quoting import RenderedPrompt
from tests.support.asked import listen
from tests.support.llama_index_corpus import Corpus, ingest


@pytest.fixture(scope="module")
def no_other_model() -> Iterator[None]:
    """LlamaIndex makes a remote model wherever it was given none: none of that here."""
    Settings.llm = MockLLM()
    yield
    Settings.llm = None


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """For tests that only read it."""
    return ingest(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def own_corpus(tmp_path: Path) -> Corpus:
    """For tests that break it."""
    return ingest(tmp_path)


@pytest.fixture
def tokenizer_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Settings.tokenizer` is a global of LlamaIndex, which its splitters go by."""
    monkeypatch.setattr(llama_index.core, "global_tokenizer", llama_index.core.global_tokenizer)


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every prompt that an engine is given, one that was rendered already as its text."""
    seen: list[Any] = []

    def told(prompt: Any, *_: Any, **options: Any) -> None:
        seen.append(prompt.text if isinstance(prompt, RenderedPrompt) else prompt)

    listen(monkeypatch, told)
    return seen
