"""Answers that leave the expected one at a near-tie."""

from __future__ import annotations

from benchmarks.near_ties import expected, noise_of
from samkv_integrations import Engine
from tests.support.records import RECORDS, builtin

PROMPT = f"Documents:\n\n{RECORDS[0].text}\n\nQuestion: {RECORDS[0].question}\nAnswer:"


def test_only_tokens_that_rounding_swaps_are_near() -> None:
    engine = Engine(builtin(), prefix_bytes=0)
    answer = expected(engine, PROMPT, "recompute", 8)
    assert answer.text == engine.generate(PROMPT, method="recompute", max_new_tokens=8).text
    gap = float(answer.logits[0, 0] - answer.logits[0, 1])
    other = engine.model.detokenize([int(answer.best[0, 1]), *answer.tokens[1:]])
    assert not answer.text.startswith(other[:1]) and gap > 0
    assert answer.is_near(other, engine, noise=gap / 2 + 1e-4)
    assert not answer.is_near(other, engine, noise=gap / 2 - 1e-4)
    assert not answer.is_near("\N{SNOWMAN}", engine, noise=gap / 2)


def test_float32_hardly_rounds() -> None:
    engine = Engine(builtin(), prefix_bytes=0)
    first = expected(engine, PROMPT, "recompute", 8)
    later = f"{PROMPT}{first.text}\n\nQuestion: Who?\nAnswer:"
    answers = [first, expected(engine, later, "recompute", 8)]
    assert noise_of(engine, [PROMPT, later], answers) < 1e-3
