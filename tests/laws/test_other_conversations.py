"""What others ask at the same time changes no conversation: a seeded walk over many of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from samkv_integrations import Engine
from samkv_integrations.methods.costs import CostModel
from samkv_integrations.runtimes.transformers import runtime
from samkv_integrations.runtimes.transformers.runtime import Model
from tests.support.asking import ask
from tests.support.costs import TOKENS_ONLY
from tests.support.laws import CHUNKS, WHOLE_IS_FASTER, words
from tests.support.models import byte_tokenizer, hf_model, tiny_model

ROOM = 2**26
ALL = CHUNKS + [words(100 + seed, n) for seed, n in enumerate((130, 100, 70))]
OTHERS = ("recompute", "auto", "reuse", "epic", "samkv-guided", "samkv-fusion", "cacheblend", "a3")
PAIRS = CostModel(layer_s=0, token_s=0, pair_s=1, entry_s=0, read_s=0)
QUESTIONS = ("so what?", "why is it?", "who said this to whom?", "Speak.")


def letters() -> Model:
    """A tiny model that answers in letters, so that a text has the tokens that were drawn."""
    tokenizer, hf = byte_tokenizer(bos=True), hf_model("llama")
    bias = torch.full((hf.config.vocab_size,), -1e9)
    bias[tokenizer("abcdefghijklmnopqrstuvwxyz ", add_special_tokens=False).input_ids] = 0.0
    hf.lm_head.bias = torch.nn.Parameter(bias, requires_grad=False)
    return Model(hf, tokenizer, "tiny-letters")


def turn(rng: random.Random) -> str:
    documents = "".join(f"{text}\n\n" for text in rng.sample(ALL, rng.choice((0, 0, 1, 1, 2))))
    named = rng.choice(ALL)[10 : 10 + rng.choice((0, 0, 6, 12, 22))]
    return f"\nRead:\n\n{documents}{rng.choice(QUESTIONS)} {named}\n"


def told(report: Any) -> tuple[Any, ...]:
    if report.ran in ("recompute", "prefix"):  # of which memory may have more or less
        return "whole", report.found
    return report.ran, report.recompute_ratio, report.found


@pytest.mark.parametrize("seed", range(12))
def test_a_conversation_is_answered_alike_among_others(seed: int) -> None:
    rng, model = random.Random(seed), letters()
    method = rng.choice(("auto", "reuse", "epic", "samkv-guided"))
    costs = rng.choice((TOKENS_ONLY, PAIRS, WHOLE_IS_FASTER))
    late = rng.sample(ALL, 2)  # which get their caches later
    fresh, busy = (Engine(model, block_size=8, prefix_bytes=ROOM, method=method) for _ in range(2))
    for engine in (fresh, busy):
        engine.costs = costs
        engine.cache_chunks([text for text in ALL if text not in late])
    said, coming = rng.choice(("You answer.", "You answer all that is asked of you.")), ""
    for step in range(5):
        if step == 2:
            for engine in (fresh, busy):
                engine.cache_chunks(late)
        coming = said + turn(rng)
        for _ in range(rng.randrange(5)):
            begins = coming[: rng.randrange(len(coming))] + turn(rng)
            other = rng.choice(OTHERS)
            prompt = coming if other != method and rng.random() < 0.2 else begins
            if prompt == coming or not coming.startswith(prompt):
                busy.generate(prompt, method=other, max_new_tokens=rng.choice((1, 3)))
        expected, found = (engine.generate(coming, max_new_tokens=4) for engine in (fresh, busy))
        assert (found.text, told(found.report)) == (expected.text, told(expected.report)), step
        said = coming + found.text


# -- what the walk has found -------------------------------------------------------------------


def engine_of(method: str, costs: CostModel | None = None) -> Engine:
    engine = Engine(tiny_model("llama"), block_size=8, prefix_bytes=ROOM, method=method)
    engine.costs = costs or TOKENS_ONLY
    engine.cache_chunks(CHUNKS)
    return engine


FIRST = f"Read:\n\n{CHUNKS[0]}\n\n{CHUNKS[1]}\n\nQ: who? Speak."


def test_a_conversation_goes_on_from_its_own_entries() -> None:
    """Regression: full prefill's, of another user with the same words, were longer, and taken."""
    alone, among = engine_of("reuse"), engine_of("reuse")
    for engine in (alone, among):
        engine.generate(FIRST, max_new_tokens=2)
    among.generate(FIRST, max_new_tokens=1, method="recompute")
    among.generate(f"{FIRST} Aha.\nQ: And what is this?", max_new_tokens=1, method="recompute")
    followed = f"{FIRST} Aha.\nQ: And what else was said there?"
    one, other = (engine.generate(followed, max_new_tokens=8) for engine in (alone, among))
    assert (one.text, one.report.exact_tokens) == (other.text, other.report.exact_tokens)
    assert one.report.prefix_tokens == other.report.prefix_tokens


def test_auto_decides_alike_whatever_longer_beginnings_are_there() -> None:
    """Regression: they made a follow-up look like a first prompt, and full prefill faster."""
    hello = "Hello, who are you? I am Bob, and I have a question about the ships."
    behind = f"{hello} Fine, ask.\nRead:\n\n{CHUNKS[0]}\n\n"
    alone, among = engine_of("auto", PAIRS), engine_of("auto", PAIRS)
    among.generate(f"{behind}Q: another?", max_new_tokens=1)
    for engine in (alone, among):
        engine.generate(hello, max_new_tokens=1)
    one, other = (
        engine.generate(f"{behind}Q: what?", max_new_tokens=8) for engine in (alone, among)
    )
    assert (one.text, told(one.report)) == (other.text, told(other.report))


def test_what_was_text_for_another_is_a_chunk_in_a_follow_up() -> None:
    """Regression: entries of a document were taken that another had asked about as text."""
    hello, text = "Hello, who are you? Speak.", words(100, 130)
    reports = []
    for is_among in (False, True):
        engine = engine_of("reuse")
        engine.generate(hello, max_new_tokens=1)
        if is_among:
            engine.generate(f"{hello} Fine.\nRead:\n\n{text}\n\nWhy?", max_new_tokens=1)
        engine.cache_chunks([text])  # which makes what is there no older
        engine.generate(hello, max_new_tokens=1)
        asked = engine.generate(f"{hello} Fine.\nRead:\n\n{text}\n\nQ: who?", max_new_tokens=8)
        reports.append((asked.text, told(asked.report), asked.report.reused))
    assert reports[0] == reports[1]


def test_a_question_that_goes_on_from_anothers_is_no_follow_up() -> None:
    """Where a template ends no message: Regression: it took what was blended for the shorter."""
    tokenizer = byte_tokenizer(bos=True)
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}User: {{ m['content'] }}"
        "{% else %}\nAssistant: {{ m['content'] }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}\nAssistant:{% endif %}"
    )
    engine = Engine(Model(hf_model("llama"), tokenizer, "x"), prefix_bytes=ROOM, method="reuse")
    engine.cache_chunks(CHUNKS)
    short = f"Read the documents:\n\n{CHUNKS[0]}\n\n{CHUNKS[1]}\n\nWho is John"
    engine.generate([{"role": "user", "content": short}], max_new_tokens=1)
    longer = [{"role": "user", "content": f"{short} and where is he?"}]
    report = engine.generate(longer, max_new_tokens=1).report
    assert (report.ran, report.reused, report.prefix_chunks) == ("reuse", 2, 0)


LONG = [words(100, 200), words(101, 150)]
OF_LONG = f"Read:\n\n{LONG[0]}\n\n{LONG[1]}\n\nQ: who? Speak."


@pytest.mark.parametrize("answered", [" Yes.", f" It says: {LONG[1][20:60]} and so on."])
def test_an_edited_second_question_goes_on_behind_the_first(answered: str) -> None:
    """Regression: a second question that had chunks computed again took the first one's place.

    Nor does it take what was computed again for the other second question.
    """
    alone, among = engine_of("samkv-guided"), engine_of("samkv-guided")
    for engine in (alone, among):
        engine.cache_chunks(LONG)
        n_first = engine.generate(OF_LONG, max_new_tokens=1).report.prompt_tokens
    named = f"{OF_LONG}{answered}\nQ: what of {LONG[0][40:54]}?"
    assert among.generate(named, max_new_tokens=1).report.recompute_ratio > 0
    edited = f"{OF_LONG}{answered}\nQ: and why?"
    one, other = (ask(engine, edited, LONG, "samkv-guided") for engine in (alone, among))
    assert one.report.prefix_tokens == other.report.prefix_tokens >= n_first
    torch.testing.assert_close(one.first.logits, other.first.logits, rtol=2e-4, atol=2e-4)


def test_nothing_stays_of_an_answer_that_ran_through_a_change_of_the_model() -> None:
    """Regression: an adapter that was merged and taken out again left its entries under the old
    digest."""
    model = letters()
    weight = model.hf.model.layers[0].self_attn.k_proj.weight
    before, other = weight.detach().clone(), torch.randn(weight.shape)
    engine = Engine(model, prefix_bytes=ROOM, method="recompute")
    prompt = "Hello there, you are a good boat."
    with engine.stream(prompt, max_new_tokens=160, draft=0) as stream:
        said = "".join(next(stream) for _ in range(3))
        with torch.no_grad():
            weight.add_(other)
        said += "".join(next(stream) for _ in range(30))
        with torch.no_grad():
            weight.copy_(before)
        engine.generate("Something else is asked", max_new_tokens=1)
        said += "".join(stream)
        assert not stream.report.stays
    cold = Engine(model, prefix_bytes=0, method="recompute")
    torch.testing.assert_close(
        engine.logits(prompt + said), cold.logits(prompt + said), rtol=2e-4, atol=2e-4
    )


def bytes_held(engine: Engine) -> int:
    tensors = [
        side for each in engine.sequences._sequences  # noqa: SLF001
        for side in (*each.entries.keys, *each.entries.values)  # type: ignore[attr-defined]
    ]  # fmt: skip
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


@pytest.mark.parametrize("how", ["too long", "failed", "forced"])
def test_what_grew_beyond_the_budget_is_held_no_longer(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the prompt stayed under its first size, with the tensors of the whole answer."""
    engine, prompt = Engine(letters(), prefix_bytes=300_000, method="recompute"), "Hello there, you"
    decode, n_steps = runtime.decode, 0

    def failing(*args: Any) -> Any:
        nonlocal n_steps
        n_steps += 1
        if n_steps == 700:
            raise RuntimeError("a step fails")
        return decode(*args)

    if how == "forced":
        engine.logits(prompt, follow=[70 + at % 60 for at in range(700)])
    elif how == "failed":
        monkeypatch.setattr(runtime, "decode", failing)
        with pytest.raises(RuntimeError, match="a step fails"):
            engine.generate(prompt, max_new_tokens=900, draft=0)
        engine.scheduler.run(lambda _: None)
    else:
        assert not engine.generate(prompt, max_new_tokens=900, draft=0).report.stays
    assert bytes_held(engine) <= 300_000
