"""Handles stand for a chunk where they were issued for it; whatever else looks like one is text."""

from __future__ import annotations

import logging

import pytest

from samkv_integrations import Engine
from samkv_integrations.errors import HandleError
from samkv_integrations.prompt import handles as handles_module
from samkv_integrations.prompt.handles import LIFETIME_S, Handles, Span, is_handle
from tests.support.handles import TYPED, issued
from tests.support.models import tiny_model

SECRET = "The vault of the bank opens with the number 7714."
PUBLIC = "The bank opens at nine and closes at four."
LOOKALIKES = [
    TYPED,
    "[[samkv:" + "a" * 31 + "]]",
    "[[samkv:" + "A" * 32 + "]]",
    "[[samkv:",
    "[[samkv",
    "xx samkv:abc]] yy",
    "0123456789abcdef]]",
    "a handle looks like [[samkv:<key>]], or [[samkv:...]]",
]


@pytest.fixture
def engine() -> Engine:
    engine = Engine(tiny_model("llama"), block_size=8)
    engine.cache_chunks([SECRET, PUBLIC])
    return engine


@pytest.mark.parametrize("text", LOOKALIKES)
def test_what_resembles_a_handle_is_text(engine: Engine, text: str) -> None:
    issued(engine, PUBLIC)  # others that are in use change nothing
    for prompt in (f"Read {text} and answer.", [{"role": "user", "content": f"Read {text}."}]):
        plain = engine.render(prompt).text
        assert text in plain
        report = engine.generate(prompt, max_new_tokens=1).report
        assert (report.context_tokens, report.chunk_misses) == (0, {})
        ids = engine.model.tokenizer(plain, add_special_tokens=isinstance(prompt, str))["input_ids"]
        assert report.prompt_tokens == len(ids)
    assert engine.count_tokens(text) == 1 + len(engine.model.tokenize(text, special=True))
    assert engine.found_in(text) == []


def test_a_key_is_no_handle(engine: Engine) -> None:
    """Keys are in the metadata of records; who knows one must not get around a filter with it."""
    typed = f"[[samkv:{engine.key_of(SECRET)}]] What is the number?"
    issued(engine, SECRET)
    assert engine.found_in(typed) == []
    report = engine.generate(typed, max_new_tokens=1).report
    assert (report.context_tokens, report.prompt_tokens) == (0, 1 + len(typed))


def test_each_is_issued_once(engine: Engine) -> None:
    first, second = issued(engine, f" {SECRET}\n"), issued(engine, SECRET)
    assert first != second and is_handle(first) and is_handle(second)
    assert engine.found_in(f"{second} {first}") == [SECRET]
    assert engine.issue_handle("never cached") is None


def test_of_another_engine_it_is_text(engine: Engine) -> None:
    other = Engine(engine.model, engine.store, block_size=8)
    assert other.found_in(issued(engine, SECRET)) == []


def test_each_piece_of_a_cut_one_is_an_error(engine: Engine) -> None:
    handle = issued(engine, SECRET)
    for at in range(1, len(handle)):
        parts = handle[:at], handle[at:]
        assert [engine.count_tokens(part) for part in parts] == [1 + len(part) for part in parts]
        raised = 0
        for part in parts:
            try:
                engine.generate(f"Read {part} Q?", max_new_tokens=1)
            except HandleError as error:
                assert "something cut" in str(error)
                raised += 1
        assert raised  # one of two halves has enough digits


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class TestLifetime:
    def test_it_ends(self, caplog: pytest.LogCaptureFixture) -> None:
        clock = Clock()
        handles = Handles(clock)
        old = handles.issue("one")
        clock.now += LIFETIME_S - 1
        young = handles.issue("two")
        assert [span.body for span in handles.find(old + young)] == ["one", "two"]
        clock.now += 1
        with caplog.at_level(logging.DEBUG):
            assert handles.find(old + young) == [Span(len(old), len(old + young), "two")]
            assert handles.find(old) == []
        (record,) = caplog.records  # it is said once
        assert record.levelname == "WARNING" and "read as text" in record.getMessage()
        assert "[[" not in record.getMessage()  # who reads a log may not read the chunk
        handles.require_whole(old[:30])  # it was never cut as far as anybody knows

    def test_forgotten_texts_are_behind_none(self) -> None:
        handles = Handles()
        issued = "".join(handles.issue(body) for body in ("one", "two", "one"))
        handles.forget(["one"])
        assert [span.body for span in handles.find(issued)] == ["two"]


def test_pieces_of_handles_that_are_no_more_are_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece was compared with every handle that had been issued."""
    monkeypatch.setattr(handles_module, "MAX_ISSUED", 3)
    now = 0.0
    handles = Handles(clock=lambda: now)
    names = [handles.issue(body)[8:-2] for body in ("dropped", "forgotten", "old", "live")]
    handles.forget({"forgotten"})
    for name in names[:2]:
        for size in (8, 20, 32):
            handles.require_whole(f"see [[samkv:{name[:size]} and {name[-size:]}]]")
    for name in names[2:]:
        for text in (f"[[samkv:{name[:8]}", f"[[samkv:{name[:31]}", f"x {name[-8:]}]]"):
            with pytest.raises(HandleError, match="cut"):
                handles.require_whole(text)
        other = "0" if name[8] != "0" else "1"
        handles.require_whole(f"[[samkv:{name[:8]}{other}")
    now = LIFETIME_S
    assert handles.find("") == []
    for name in names:
        handles.require_whole(f"[[samkv:{name[:9]} {name[-9:]}]]")
