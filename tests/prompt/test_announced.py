"""A chunk that was retrieved, and that a prompt holds in a changed form only, is a miss."""

from __future__ import annotations

import logging
import textwrap
import threading
from collections.abc import Callable
from contextvars import copy_context

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import samkv_integrations.prompt.announced as module
from samkv_integrations import Engine, MemoryStore
from samkv_integrations.errors import ChunkNotCached
from samkv_integrations.model.quoting import RenderedPrompt
from samkv_integrations.prompt.announced import STRETCH
from samkv_integrations.prompt.split import ChunkText, PlainText
from tests.support.models import tiny_model

TEXTS = [
    "The mill of Orvik was built in 1871 by two brothers, and it grinds\nthe barley of five farms.",
    "Nombury has a harbour since the river was moved; on Sundays no ship may leave it at all.",
    "The printer of Fivane makes nine pages a minute, and is known for the noise that it makes.",
]
CHANGES: dict[str, Callable[[str], str]] = {
    "cut": lambda text: text[: len(text) * 2 // 3] + "…",
    "shortened": lambda text: textwrap.shorten(text, 64, placeholder=" [...]"),
    "without its first words": lambda text: text.split(" ", 3)[3],
    "lower case": str.lower,
    "upper case": str.upper,
    "quoted": lambda text: "> " + "\n> ".join(textwrap.wrap(text, 30)),
    "in another markup": lambda text: "**" + text.replace(" ", "** **") + "**",
    "cut, in json": lambda text: repr(text[:70]),
}
QUESTION = "\n\nWho built the mill of Orvik?"


@pytest.fixture
def engine() -> Engine:
    engine = Engine(tiny_model("llama"), MemoryStore(), method="reuse", block_size=8)
    engine.cache_chunks(TEXTS)
    return engine


def misses(engine: Engine, prompt: str, **options: object) -> dict[str, int]:
    report = engine.generate(prompt, max_new_tokens=1, **options).report  # type: ignore[arg-type]
    return dict(report.chunk_misses)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_it_is_counted_in_the_report_of_the_prompt(
    engine: Engine, change: Callable[[str], str]
) -> None:
    """It was computed as text, with hits and misses of nought."""
    engine.expect(TEXTS[:2])
    prompt = f"{TEXTS[0]}\n\n{change(TEXTS[1])}{QUESTION}"
    assert engine.found_in(prompt) == TEXTS[:1]
    assert misses(engine, prompt) == {"rewritten": 1}
    assert misses(engine, prompt) == {}  # nothing was announced for this one


def test_what_is_there_as_it_was_stored_is_no_miss(engine: Engine) -> None:
    handle = engine.issue_handle(TEXTS[1])
    for _ in range(2):
        engine.announce(TEXTS)
        prompt = f"{TEXTS[0]}\n\n{handle}\n\n{textwrap.indent(TEXTS[2], '  ')}{QUESTION}"
        assert misses(engine, prompt) == {}
    assert misses(engine, f"{TEXTS[1][:60]}{QUESTION}") == {}  # held once, no longer waited for


def test_all_that_was_announced_is_counted_if_nothing_of_it_is_there(engine: Engine) -> None:
    engine.announce(TEXTS[:2])
    assert misses(engine, f"A mill is old, a harbour new.{QUESTION}") == {"rewritten": 2}
    assert misses(engine, f"A mill is old, a harbour new.{QUESTION}") == {}


def test_a_retriever_alone_announces_nothing_for_the_next_prompt(engine: Engine) -> None:
    """Somebody may just have looked what there is, and then asks about something else."""
    engine.expect(TEXTS)
    assert misses(engine, f"How are you?{QUESTION}") == {}


def test_several_prompts_may_share_what_was_announced(engine: Engine) -> None:
    """`refine` asks about one chunk after another."""
    engine.announce(TEXTS)
    assert misses(engine, f"{TEXTS[0]}{QUESTION}") == {}
    assert misses(engine, f"{TEXTS[1].upper()}\n\nSo far: two brothers.{QUESTION}") == {
        "rewritten": 1
    }
    assert misses(engine, f"{TEXTS[2]}\n\nSo far: two brothers.{QUESTION}") == {}


def test_what_is_dropped_after_retrieval_is_no_miss(engine: Engine) -> None:
    engine.announce(TEXTS)
    assert misses(engine, f"{TEXTS[0]}{QUESTION}") == {}
    assert misses(engine, f"Nombury has a harbour, says {TEXTS[0]}{QUESTION}") == {}


def test_neighbours_that_overlap_do_not_accuse_each_other(engine: Engine) -> None:
    """An answer that quotes the one is refined by the other, which waits for its prompt."""
    shared = "The delegates then left for the capital, where the king received all of them."
    first, second = f"The treaty was signed in spring. {shared}", f"{shared} His son broke it."
    engine.cache_chunks([first, second])
    engine.announce([first, TEXTS[0], second])
    assert misses(engine, f"{first}{QUESTION}", on_miss="error") == {}
    refined = f"The answer so far: {shared.lower()}\n\n{TEXTS[0]}{QUESTION}"
    assert misses(engine, refined, on_miss="error") == {}
    assert misses(engine, f"{second[:-20]}…{QUESTION}") == {}
    engine.announce([second])
    assert misses(engine, f"Then: {shared[-30:]} {second[-18:]}") == {"rewritten": 1}


@pytest.mark.parametrize("ran_by", ["another thread", "a pool's thread"])
def test_another_request_is_not_blamed(engine: Engine, ran_by: str) -> None:
    if ran_by == "another thread":
        thread = threading.Thread(target=engine.announce, args=(TEXTS,))
        thread.start()
        thread.join()
    else:  # a pool copies the context of the request that it works for
        copy_context().run(engine.announce, TEXTS)
    assert misses(engine, f"How are you?{QUESTION}") == {}
    assert misses(engine, f"{TEXTS[0].upper()}{QUESTION}") == {"rewritten": 1}


def test_a_prompt_of_the_announcing_context_takes_it_wherever_it_runs(engine: Engine) -> None:
    engine.announce(TEXTS)
    there = copy_context()
    assert there.run(misses, engine, f"{TEXTS[0]}{QUESTION}") == {}
    assert misses(engine, f"How are you?{QUESTION}") == {}


def test_an_error_if_that_was_asked_for(engine: Engine) -> None:
    engine.announce(TEXTS)
    prompt = f"{TEXTS[0].upper()}{QUESTION}"
    for _ in range(2):  # also when it is tried again
        with pytest.raises(ChunkNotCached, match=r"'The mill of Orvik.*changed form.*SamKVPost"):
            engine.generate(prompt, on_miss="error")
    assert misses(engine, prompt, on_miss="compute") == {"rewritten": 1}


def test_texts_that_are_named_are_all_there_are(engine: Engine) -> None:
    engine.announce(TEXTS)
    report = engine.generate(TEXTS[0].upper(), (), max_new_tokens=1).report
    assert report.chunk_misses == {}


def test_a_part_that_no_question_would_quote_is_what_counts(engine: Engine) -> None:
    letters = TEXTS[0].replace(" ", "").replace("\n", "")
    for length, expected in ((STRETCH - 1, {}), (STRETCH, {"rewritten": 1})):
        for start in (0, 3, 19, 20, 21):
            engine.expect(TEXTS[:1])
            part = letters.replace(",", "")[start : start + length]
            assert misses(engine, f"- {part} -") == expected, (start, length)


def test_it_is_said_once(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, module.__name__):
        for _ in range(2):
            engine.announce(TEXTS[:2])
            misses(engine, f"{TEXTS[0].upper()}\n\n{TEXTS[1].upper()}{QUESTION}")
    record, *texts = [record for record in caplog.records if record.name == module.__name__]
    assert record.levelname == "WARNING"
    said = record.getMessage()
    assert "2 chunks were retrieved" in said and "mill" not in said
    assert "as they were stored" in said and "handle" in said
    assert [each.levelname for each in texts] == ["DEBUG"] * 4
    assert "'The mill of Orvik was built" in texts[0].getMessage()


def test_only_the_latest_are_waited_for(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PENDING", 2)
    engine.expect(TEXTS)
    assert misses(engine, "\n\n".join(map(str.upper, TEXTS))) == {"rewritten": 2}


def test_what_is_too_short_to_be_found_is_not_waited_for(engine: Engine) -> None:
    engine.announce(["a b c d e f g h i"])
    assert misses(engine, f"{QUESTION}") == {}


def test_what_was_held_before_is_looked_for_anew(engine: Engine) -> None:
    """An earlier prompt held it as it was stored; the next one holds half of it."""
    engine.announce([TEXTS[0]])
    assert misses(engine, f"Read: {TEXTS[0]} Well?") == {}
    engine.announce([TEXTS[0]])
    assert misses(engine, f"Read: {TEXTS[0][:-9]} Well?") == {"rewritten": 1}


def _is_changed(its: str, letters: str, held: str) -> bool:
    """Whether ``letters``, and not ``held``, have a stretch of ``its``, looked for one by one."""
    part = STRETCH // 2
    for at in range(0, len(its) - part + 1, part):
        if its[at : at + part] in letters:
            for start in range(max(0, at - part), max(0, min(at, len(its) - STRETCH)) + 1):
                stretch = its[start : start + STRETCH]
                if stretch in letters and stretch not in held:
                    return True
    return False


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_stretches_against_a_plain_search(data: st.DataObject) -> None:
    """Each was searched for in the prompt, and in all that had been held: minutes, of boilerplate.

    Texts are made of few pieces, so that they share stretches of every length.
    """
    piece = st.sampled_from(["abcdefgh", "ijkl", "mnopqrstuvwx", "y", "thesamewordsagain"])
    text = st.lists(piece, min_size=1, max_size=14).map("".join).filter(lambda t: len(t) >= 24)
    bodies = data.draw(st.lists(text, min_size=1, max_size=6, unique=True))
    plain = data.draw(st.lists(text, max_size=3))
    n_held = data.draw(st.integers(0, len(bodies)))
    announced = module.Announced()
    announced.add(bodies)
    assert announced.count([ChunkText(body) for body in bodies[:n_held]], "text") == 0
    letters, held = "\n".join(plain), "\n".join(bodies[:n_held])  # they are letters alone
    expected = sum(_is_changed(its, letters, held) for its in bodies[n_held:])
    pieces = [PlainText(RenderedPrompt(text)) for text in plain]
    assert announced.count(pieces, "text") == expected
