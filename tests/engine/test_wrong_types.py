"""What is given in another type is an error of ours that names it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from samkv_integrations import Engine
from samkv_integrations.errors import InvalidOption
from samkv_integrations.prompt import rag_prompt
from tests.support.models import tiny_model
from tests.support.tested_runtime import of_transformers_alone

WRONG: list[tuple[Callable[[Engine], Any], str]] = [
    (lambda e: e.generate("x", stop_ids=None), "stop_ids=None; it must be a list of token ids"),
    (lambda e: e.generate("x", stop_ids=5), "stop_ids=5; it must be a list of token ids"),
    (lambda e: e.generate("x", stop=None), "stop=None; it must be a list"),
    (lambda e: e.generate(None), "prompt=None; it must be a string, or a list of chat messages"),
    (lambda e: e.generate([]), "prompt=[]; it must be a string"),
    (lambda e: e.generate(["x"]), "message 'x' of the prompt; it must be a mapping of role"),
    (lambda e: e.generate([{"role": "user"}]), "message {'role': 'user'} of the prompt"),
    (lambda e: e.generate("x", [None]), "chunks holds None; each item must be a string"),
    (lambda e: e.generate("x", temperature=float("inf")), "temperature=inf; it must be 0 (greedy)"),
    (lambda e: e.generate("x", repetition_penalty=float("inf")), "repetition_penalty=inf; it must"),
    (lambda e: e.found_in(None), "prompt=None; it must be a string"),
    (lambda e: e.count_tokens(None), "prompt=None; it must be a string"),
    (lambda e: e.announce(None), "chunks=None; it must be a list of strings"),
    (lambda e: e.announce([None]), "chunks holds None; each item must be a string"),
    (lambda e: e.cache_chunks(None), "chunks=None; it must be a list of strings"),
    (
        lambda e: e.delete("0" * 32),
        "one text was given for keys ('00000000000000000000000000000000')",
    ),
    (lambda e: e.delete([5]), "keys holds 5; each item must be a string"),
    (lambda e: e.delete(None), "keys=None; it must be a list of strings"),
    (lambda e: Engine("builtin"), "model='builtin'; it must be a Model: Engine.from_pretrained"),
    (lambda e: Engine(e.model, prefix_bytes="many"), "prefix_bytes='many'; it must be a number of"),
    (lambda e: Engine(e.model, prefix_bytes=-1), "prefix_bytes=-1; it must be a number of bytes"),
    (lambda e: Engine(e.model, prefix_text=5), "prefix_text=5; it must be a string"),
    (lambda e: Engine(e.model, prefix_text=None), "prefix_text=None; it must be a string"),
    (lambda e: rag_prompt(None, ["x"]), "question=None; it must be a string"),
    (lambda e: rag_prompt("q", None), "documents=None; it must be a list of strings"),
    (lambda e: rag_prompt("q", [5]), "documents holds 5; each item must be a string"),
    (lambda e: rag_prompt("q", "text"), "one text was given for documents ('text'); put it into"),
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny_model(), method="recompute")


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_types(engine: Engine, call: Callable[[Engine], Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=re.escape(message)):
        call(engine)


@of_transformers_alone
def test_a_model_of_transformers_is_no_runtime(engine: Engine) -> None:
    with pytest.raises(
        InvalidOption, match=r"and Model\(model, tokenizer, name\) what transformers"
    ):
        Engine(engine.model.hf)


def test_texts_that_can_be_looked_at_once_only(engine: Engine) -> None:
    """The check used them up, and nothing was cached."""
    keys = engine.cache_chunks(text for text in ("The first chunk.", "The second chunk."))  # type: ignore[arg-type]
    assert len(keys) == 2
