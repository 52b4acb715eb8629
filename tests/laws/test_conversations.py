"""Laws of conversations: what stays in memory changes no answer, and no answer hangs on others.

In float32, and greedy where nothing else is said. An engine that keeps sequences is compared with
one that keeps none, or with the steps of a decoder: going on from what an answer left is the same
as decoding the next turn's tokens one after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.methods import METHODS, Method
from samkv_integrations.methods.costs import CostModel
from samkv_integrations.report import Report
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.serving.stream import Answer
from tests.support.asking import ask, next_logits
from tests.support.covering import covering
from tests.support.laws import CHUNKS, TOLERANCE, changed, engine_of, words
from tests.support.models import FAMILIES, OTHER_FAMILIES, byte_tokenizer, hf_model
from tests.support.records import RECORDS, TEXTS, builtin

ROOM = 2**26
FIRST = f"You answer.\n\n{CHUNKS[0]}\n\n{CHUNKS[1]}\n\nQ: why?\nA:"
SECOND, THIRD = "\nQ: and who was it?\nA:", f"\nRead:\n\n{CHUNKS[2]}\n\nQ: what now?\nA:"
KEEPING = [
    name for name, method in METHODS.items()
    if method.select.keeps_all and method.attend is None and method.eviction is None
]  # fmt: skip


def ask_turns(
    engine: Engine, method: Method | str, turns: list[str], **options: Any
) -> list[Answer]:
    """The answers of a conversation, whose history holds them as text."""
    said, answers = "", []
    for turn in turns:
        said += turn
        options = {"max_new_tokens": 6, "on_miss": "text", "eviction": "none", **options}
        answers.append(engine.generate(said, chunks_in(said), method=method, **options))
        said += answers[-1].text
    return answers


def chunks_in(prompt: str) -> list[str]:
    return [text for text in CHUNKS if text in prompt]


# -- the same tokens with and without -----------------------------------------------------------


@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_FAMILIES])
def test_full_prefill_goes_on_and_says_the_same(family: str) -> None:
    """From prompts and answers; windows that slide are no exception."""
    cold, warm = (engine_of(family, 16, prefix_bytes=room) for room in (0, ROOM))
    turns = [FIRST, SECOND, THIRD]
    expected, found = (ask_turns(engine, "recompute", turns) for engine in (cold, warm))
    assert [each.text for each in found] == [each.text for each in expected]
    for before, now in zip(found, found[1:], strict=False):
        assert now.report.prefix_tokens >= before.report.prompt_tokens
        assert before.report.stays
    assert all(each.report.prefix_tokens == 0 for each in expected)


@pytest.mark.parametrize(
    ("family", "name"), covering([*FAMILIES, *OTHER_FAMILIES], KEEPING, times=1)
)
def test_a_follow_up_is_the_next_steps_of_the_first_answer(family: str, name: str) -> None:
    """The pass over its new tokens, against a decoder that takes them one by one."""
    method = METHODS[name]
    engine, stepping = (engine_of(family, 8, prefix_bytes=room) for room in (ROOM, 0))
    first = engine.generate(
        FIRST, chunks_in(FIRST), method=method, max_new_tokens=6, on_miss="text", eviction="none"
    )
    followed = FIRST + first.text + SECOND
    report = ask(engine, followed, chunks_in(FIRST), method, capacity=2)
    ids = report.layout.token_ids.tolist()
    begun = ask(stepping, FIRST, chunks_in(FIRST), method, capacity=len(ids))
    assert ids[: begun.layout.n_tokens] == begun.layout.token_ids.tolist()
    steps = begun.follow(ids[begun.layout.n_tokens :])
    torch.testing.assert_close(report.first.logits, steps[-1], **TOLERANCE)
    assert report.report.prefix_tokens >= begun.layout.n_tokens


@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2"])
def test_what_a_new_question_names_is_computed_again_in_place(family: str) -> None:
    """One token after the other, each behind what is in memory before it.

    What the question quotes is shorter than a run that is taken from a cache.
    """
    method = changed("samkv-guided", matched=0, matched_again=64)
    asked = "Read.\n\n" + "\n\n".join(CHUNKS) + "\n\nQ: what?"
    engine, stepping = (engine_of(family, 8, prefix_bytes=room) for room in (ROOM, 0))
    first, held = (ask(each, asked, CHUNKS, method, capacity=90) for each in (engine, stepping))
    followed = f"{asked} {CHUNKS[0][30:44]}?"
    found = ask(engine, followed, CHUNKS, method)
    ids, n_held = found.layout.token_ids.tolist(), found.report.prefix_tokens
    positions = found.planned[-1].plan.layers[0].computed.positions.tolist()
    again = [at for at in positions if at < n_held]
    assert 16 <= len(again) <= 64 and n_held == first.layout.n_tokens
    n_context = found.report.context_tokens
    assert found.report.recompute_ratio * n_context == pytest.approx(len(again))
    decoder, n_layers = held.decoder(), engine.model.n_layers
    for at in again:
        held.cache.lengths, decoder.n_tokens = [at] * n_layers, at
        with torch.inference_mode():
            next_logits(decoder, ids[at])
    held.cache.lengths, decoder.n_tokens = [n_held] * n_layers, n_held
    with torch.inference_mode():
        steps = [next_logits(decoder, token) for token in ids[n_held:]]
    torch.testing.assert_close(found.first.logits, steps[-1], **TOLERANCE)


def conversation_of(engine: Engine, history: str, branch: str) -> str:
    """The answer to a further question, as a client that keeps the history asks it."""
    return engine.generate(f"{history}\nQuestion: {branch}\nAnswer:", max_new_tokens=16).text


@pytest.mark.parametrize("method", ["auto", "samkv-guided", "reuse", "recompute"])
def test_no_answer_of_a_conversation_depends_on_another_branch(method: str) -> None:
    """Nor on having been asked before: what is computed again goes with its answer."""
    branches = [record.question for record in RECORDS[:3]]
    expected: list[str] = []
    for order in (branches, branches[::-1], branches * 2):
        engine = Engine(builtin(), method=method, prefix_bytes=ROOM)
        engine.cache_chunks(TEXTS)
        history = "Documents:\n\n" + "\n\n".join(TEXTS) + f"\n\nQuestion: {branches[0]}\nAnswer:"
        history += engine.generate(history, max_new_tokens=8).text
        found = {each: conversation_of(engine, history, each) for each in order}
        expected = expected or [found[each] for each in branches]
        assert [found[each] for each in branches] == expected


def test_what_is_computed_again_leaves_memory_as_it_was() -> None:
    """To the last bit: the entries of the first turn are there after the second one, too."""
    engine = Engine(builtin(), method="samkv-guided", prefix_bytes=ROOM)
    engine.cache_chunks(TEXTS)
    history = (
        "Documents:\n\n" + "\n\n".join(TEXTS) + f"\n\nQuestion: {RECORDS[0].question}\nAnswer:"
    )
    first = engine.generate(history, max_new_tokens=8)
    n_tokens, n_layers = first.report.prompt_tokens, engine.model.n_layers
    (before,) = engine.sequences._sequences  # noqa: SLF001
    saved = [before.entries.of_layer(layer, n_tokens) for layer in range(n_layers)]
    saved = [(keys.clone(), values.clone()) for keys, values in saved]
    stream = engine.stream(
        f"{history}{first.text}\nQuestion: {RECORDS[2].question}\nAnswer:", max_new_tokens=8
    )
    second = "".join(stream) and stream.report
    assert second.recompute_ratio > 0 and second.prefix_tokens > n_tokens and second.ran == "prefix"
    (after,) = engine.sequences._sequences  # noqa: SLF001
    assert after is not before
    for layer, sides in enumerate(saved):
        for mine, theirs in zip(after.entries.of_layer(layer, n_tokens), sides, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", ["reuse", "epic", "samkv-guided"])
def test_a_chunk_of_a_later_turn_is_blended_behind_what_is_kept(name: str) -> None:
    """Recomputed whole, it is what decoding its tokens would have been; reused, it is not."""
    engine = engine_of("llama", 16, prefix_bytes=ROOM)
    first = engine.generate(FIRST, chunks_in(FIRST), method=name, max_new_tokens=4, eviction="none")
    prompt = FIRST + first.text + THIRD
    found = ask(engine, prompt, chunks_in(prompt), name)
    report: Report = found.report
    assert (report.found, report.reused, report.prefix_chunks) == (3, 1, 2)
    assert report.bytes_read > 0 and report.uncached_tokens < len(first.text + THIRD) + 8
    assert int(found.layout.context_positions[0]) >= report.prefix_tokens

    everything = changed("epic", first=10**6)
    kept = engine_of("llama", 16, prefix_bytes=ROOM)
    asked = ask(kept, FIRST, chunks_in(FIRST), everything, capacity=4)
    again = ask(kept, FIRST + THIRD, chunks_in(prompt), everything)
    assert again.report.prefix_tokens == asked.layout.n_tokens
    ids = again.layout.token_ids.tolist()
    stepping = ask(engine_of("llama", 16), FIRST, chunks_in(FIRST), everything, capacity=len(ids))
    steps = stepping.follow(ids[asked.layout.n_tokens :])
    torch.testing.assert_close(again.first.logits, steps[-1], **TOLERANCE)


# -- what was drawn, held to a schema, stopped or cancelled --------------------------------------


@cache
def talking(room: int) -> Engine:
    """The built-in model, which answers in words."""
    engine = Engine(builtin(), prefix_bytes=room, method="recompute")
    engine.cache_chunks(TEXTS)
    return engine


QUESTION = f"Documents:\n\n{TEXTS[0]}\n\n{TEXTS[1]}\n\n{RECORDS[0].question}\nAnswer:"
ENDS: dict[str, dict[str, Any]] = {
    "drawn": {"temperature": 1.0, "seed": 3},
    "stopped": {"stop": ["a"]},
    "held to a schema": {"json_schema": {"type": "array", "items": {"type": "string"}}},
    "cut": {"max_new_tokens": 2},
    "penalised": {"repetition_penalty": 1.3},
}  # fmt: skip


@pytest.mark.parametrize("how", ENDS)
def test_entries_hang_on_token_ids_alone(how: str) -> None:
    cold, warm = talking(0), talking(ROOM)
    warm.sequences.clear()
    first = warm.generate(QUESTION, **{"max_new_tokens": 12, **ENDS[how]})
    prompt = QUESTION + first.text + "\nQuestion: When was it started?\nAnswer:"
    found = warm.generate(prompt, max_new_tokens=12)
    assert found.text == cold.generate(prompt, max_new_tokens=12).text
    assert found.report.prefix_tokens >= first.report.prompt_tokens - 1
    assert found.report.stays


def test_of_a_cancelled_answer_stays_what_was_computed() -> None:
    warm = talking(ROOM)
    warm.sequences.clear()
    with warm.stream("Documents:\n\n[Dunlux", max_new_tokens=400) as stream:
        said = "".join(next(stream) for _ in range(30))
    prompt = f"Documents:\n\n[Dunlux{said}\nQuestion: what?\nAnswer:"
    found = warm.generate(prompt, max_new_tokens=8)
    assert found.text == talking(0).generate(prompt, max_new_tokens=8).text
    assert found.report.prefix_tokens > found.report.prompt_tokens - 20


def test_an_answer_that_the_client_changed_is_computed_from_there() -> None:
    cold, warm = talking(0), talking(ROOM)
    warm.sequences.clear()
    first = warm.generate(QUESTION, max_new_tokens=12)
    prompt = QUESTION + " Nowhere." + "\nQuestion: When was it started?\nAnswer:"
    found = warm.generate(prompt, max_new_tokens=12)
    assert found.text == cold.generate(prompt, max_new_tokens=12).text
    held = found.report.prefix_tokens
    assert first.report.prompt_tokens - 1 <= held < first.report.prompt_tokens + 8


# -- an answer depends on its own conversation only ----------------------------------------------


def others() -> Iterator[str]:
    """A hundred prompts that share chunks or beginnings with `QUESTION`."""
    for number in range(100):
        a, b = TEXTS[number % 2], TEXTS[(number + 1) % 3]
        record = RECORDS[number % 4]
        yield f"Documents:\n\n{a}\n\n{b}\n\n{number}. {record.question}\nAnswer:"


@pytest.mark.parametrize("method", ["auto", "reuse", "epic"])
def test_a_prompt_is_answered_alike_after_a_hundred_others(method: str) -> None:
    """Of any method, and also where full prefill has left its chunks in memory."""
    busy, fresh = (Engine(builtin(), prefix_bytes=ROOM, method=method) for _ in range(2))
    for engine in (busy, fresh):
        engine.cache_chunks(TEXTS[:3])
    for number, prompt in enumerate(others()):
        busy.generate(prompt, max_new_tokens=1, method=[None, "recompute", "reuse"][number % 3])
    for prompt in (QUESTION, QUESTION.replace("How many", "Which")):
        expected, found = (engine.generate(prompt, max_new_tokens=16) for engine in (fresh, busy))
        assert found.text == expected.text
        assert found.report.ran == expected.report.ran
        assert found.report.recompute_ratio == expected.report.recompute_ratio
        fresh.sequences.clear()


THINKS = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>(no thoughts){% endif %}"
)


def test_a_template_that_leaves_out_empty_thoughts_is_followed() -> None:
    """As Qwen3's does: no later prompt contains the whole earlier one."""
    tokenizer = byte_tokenizer(bos=True)
    tokenizer.chat_template = THINKS
    engine = Engine(Model(hf_model("llama"), tokenizer, "thinks"), method="reuse", block_size=8)
    engine.cache_chunks(CHUNKS)
    messages = [{"role": "user", "content": "\n\n".join(CHUNKS) + "\n\nWhy?"}]
    first = engine.generate(messages, max_new_tokens=4)
    messages += [{"role": "assistant", "content": "So."}, {"role": "user", "content": "And who?"}]
    second = engine.generate(messages, max_new_tokens=4)
    assert second.report.prefix_tokens >= first.report.prompt_tokens - len("(no thoughts)") - 1
    assert (second.report.reused, second.report.prefix_chunks) == (0, len(CHUNKS))


PAIRS = CostModel(layer_s=0, token_s=0, pair_s=1, entry_s=0, read_s=0)
"""By which `auto` blends what has half of its tokens in memory, and no first prompt."""


def test_what_others_left_does_not_decide_whether_a_prompt_is_blended() -> None:
    engine, head = engine_of("llama", 16, prefix_bytes=ROOM), words(9, 150)
    engine.costs = PAIRS
    prompts = [f"{head}\n\n{CHUNKS[0]}\n\nQ: {question}?" for question in ("why", "who", "what")]
    ran = [engine.generate(each, CHUNKS[:1], max_new_tokens=1).report.ran for each in prompts]
    assert ran == ["recompute", "prefix", "prefix"]


def test_what_its_own_conversation_left_does() -> None:
    engine, head = engine_of("llama", 16, prefix_bytes=ROOM), words(9, 150)
    engine.costs = PAIRS
    engine.generate(head, max_new_tokens=1)
    prompt = f"{head}\n\n{CHUNKS[0]}\n\nQ: why?"
    assert engine.generate(prompt, CHUNKS[:1], max_new_tokens=1).report.ran == "samkv-guided"


LONG = [words(100, 200), words(101, 150)]
OF_LONG = f"Read:\n\n{LONG[0]}\n\n{LONG[1]}\n\nQ: who?"
NAMED = f"{OF_LONG} Yes.\nQ: what of {LONG[0][40:54]}"


def asked_of_long() -> Engine:
    engine = engine_of("llama", 8, prefix_bytes=ROOM)
    engine.cache_chunks(LONG)
    engine.generate(OF_LONG, LONG, max_new_tokens=1, method="samkv-guided")
    return engine


def test_what_was_computed_for_a_question_is_known() -> None:
    """So that no later question has it computed again."""
    engine = engine_of("llama", 8, prefix_bytes=ROOM)
    engine.cache_chunks(LONG)
    report = engine.generate(OF_LONG, LONG, max_new_tokens=1, method="samkv-guided").report
    (kept,) = engine.sequences._sequences  # noqa: SLF001
    n_computed = report.recompute_ratio * report.context_tokens
    assert int(kept.from_cache.sum()) == pytest.approx(report.context_tokens - n_computed)
    assert n_computed > 8 * len(LONG)


def test_what_an_answer_had_computed_again_is_not_taken_while_it_goes_on() -> None:
    edited, alone, among = f"{NAMED}, and why?", asked_of_long(), asked_of_long()
    with among.stream(NAMED, LONG, method="samkv-guided", max_new_tokens=200) as stream:
        assert stream.report.recompute_ratio > 0 and stream.finish_reason is None
        found, expected = (
            ask(each, edited, LONG, "samkv-guided").first.logits for each in (among, alone)
        )
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("is_chat", [False, True])
def test_the_same_question_again_is_answered_alike(is_chat: bool) -> None:
    """Regression: what a later one names was computed again the first time only."""
    engine = engine_of("llama", 8, prefix_bytes=ROOM)
    engine.cache_chunks(LONG)
    first: Any = [{"role": "user", "content": OF_LONG}] if is_chat else OF_LONG
    later: Any = NAMED
    if is_chat:
        asked = {"role": "user", "content": f"Q: what of {LONG[0][40:54]}"}
        later = [*first, {"role": "assistant", "content": "Yes."}, asked]
    for prompt in (first, later):
        once, *others = (
            engine.generate(prompt, max_new_tokens=12, method="samkv-guided") for _ in range(3)
        )
        assert {each.text for each in others} == {once.text}
        is_again = prompt is later and once.report.recompute_ratio > 0
        assert {each.report.recompute_ratio > 0 for each in others} == {is_again}
    assert is_again


@pytest.mark.parametrize("eviction", ["quest", "streaming-llm", "snapkv"])
def test_an_eviction_chooses_among_chunks_as_if_nothing_were_in_memory(eviction: str) -> None:
    """`auto`, which computes the prompt in full, while exact entries of its chunks are there."""
    prompt, reports = "Read.\n\n" + "\n\n".join(CHUNKS) + "\n\nQ: what?", []
    for is_warm in (False, True):
        engine = engine_of("llama", 16, prefix_bytes=ROOM)
        if is_warm:
            engine.generate(prompt, CHUNKS, max_new_tokens=1, method="recompute", eviction="none")
        answer = engine.generate(prompt, CHUNKS, max_new_tokens=6, eviction=eviction)
        kept = answer.report.kept_ratio, answer.report.decode_kv_bytes
        reports.append((answer.text, *kept, answer.report.ran in ("recompute", "prefix")))
    assert reports[0] == reports[1] and reports[0][-1]


# -- deletions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["this engine", "another engine"])
def test_nothing_made_before_a_deletion_is_used_after_it(tmp_path: Any, by: str) -> None:
    engine = Engine(builtin(), ChunkStore(tmp_path / "kv"), prefix_bytes=ROOM)
    engine.cache_chunks(TEXTS[:3])
    first = engine.generate(QUESTION, max_new_tokens=8)
    followed = f"{QUESTION}{first.text}\nQuestion: When was it started?\nAnswer:"
    assert engine.generate(followed, max_new_tokens=8).report.prefix_tokens > 0
    deleting = engine
    if by == "another engine":
        deleting = Engine(builtin(), ChunkStore(tmp_path / "kv"))
    deleting.forget([TEXTS[0]])
    report = engine.generate(followed, max_new_tokens=8).report
    assert report.prefix_tokens == 0 and report.found == 1


def test_a_deletion_between_the_last_step_and_the_keeping(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(builtin(), ChunkStore(tmp_path / "kv"), prefix_bytes=ROOM)
    engine.cache_chunks(TEXTS[:3])
    keep = engine.sequences.keep

    def deleted_before(*args: Any) -> bool:
        Engine(builtin(), ChunkStore(tmp_path / "kv")).forget([TEXTS[0]])
        return keep(*args)

    with monkeypatch.context() as patch:
        patch.setattr(engine.sequences, "keep", deleted_before)
        first = engine.generate(QUESTION, max_new_tokens=8)
    followed = f"{QUESTION}{first.text}\nQuestion: When was it started?\nAnswer:"
    assert engine.generate(followed, max_new_tokens=8).report.prefix_tokens == 0
