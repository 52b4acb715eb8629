"""Answers that keep to a JSON schema, whatever the weights say."""

from __future__ import annotations

import builtins
import json
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
from jsonschema import validate

from samkv_integrations import Engine
from samkv_integrations.errors import InvalidOption, MissingExtra, Overloaded, TimedOut
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.serving import grammar as grammars
from samkv_integrations.serving.grammar import JsonConstraint, SchemaReader, check_json_schema
from tests.support.covering import covering
from tests.support.models import byte_tokenizer, hf_model, quoting_model, tiny_model

PROMPT = "Where was Tobias Trulman born?"
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "born": {"type": "integer", "minimum": 0, "maximum": 2100},
            "alive": {"type": "boolean"},
        },
        "required": ["name", "born", "alive"],
    },
    "references": {
        "type": "object",
        "properties": {"town": {"$ref": "#/$defs/town"}, "next": {"$ref": "#/$defs/town"}},
        "required": ["town", "next"],
        "$defs": {
            "town": {
                "type": "object",
                "properties": {"kind": {"enum": ["port", "mine"]}},
                "required": ["kind"],
            }
        },
    },
    "either": {"anyOf": [{"const": None}, {"type": "number", "minimum": 1, "maximum": 9.5}]},
    "list": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 4},
    "optional": {
        "type": "object",
        "properties": {"a": {"type": ["boolean", "null"]}, "b": {"type": "boolean"}},
    },
}  # fmt: skip


@cache
def engine(model: Callable[[], Model] = quoting_model) -> Engine:
    return Engine(model())


@pytest.mark.parametrize(
    ("name", "options"),
    covering(
        list(SCHEMAS),
        [
            {"temperature": 1.0}, {"temperature": 1.0, "top_k": 1, "repetition_penalty": 1.3},
            {"temperature": 1.5, "top_p": 0.5}, {},
        ],
        times=2,
    ),
    ids=str,
)  # fmt: skip
def test_random_weights_write_json_of_the_schema(name: str, options: dict[str, Any]) -> None:
    schema = SCHEMAS[name]
    for seed in range(2 if options else 1):
        answer = engine().generate(
            PROMPT, json_schema=schema, seed=seed, max_new_tokens=250, **options
        )
        assert answer.finish_reason == "stop"
        validate(json.loads(answer.text), schema)


def test_a_stream_is_the_same_answer() -> None:
    options: dict[str, Any] = {"json_schema": SCHEMAS["person"], "temperature": 1.0, "seed": 5}
    assert "".join(engine().stream(PROMPT, **options)) == engine().generate(PROMPT, **options).text


def test_objects_are_closed_unless_the_schema_says_otherwise() -> None:
    """By the letter of JSON Schema an object may have any other properties."""
    closed = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    texts = [
        engine().generate(PROMPT, json_schema=closed, temperature=1.0, seed=seed).text
        for seed in range(8)
    ]
    assert set(texts) == {'{"a": true}', '{"a": false}'}
    open_ = closed | {"required": ["a", "b"]}
    with pytest.raises(InvalidOption, match="required"):
        engine().generate(PROMPT, json_schema=open_)
    answer = engine().generate(PROMPT, json_schema=open_ | {"additionalProperties": {"const": 1}})
    assert ', "b": 1' in answer.text


def test_what_is_a_value_is_left_as_it_is() -> None:
    value = {"properties": {"a": 1}}
    answer = engine().generate(PROMPT, json_schema={"const": value})
    assert json.loads(answer.text) == value


def test_an_answer_that_is_cut_says_so() -> None:
    answer = engine().generate(PROMPT, json_schema=SCHEMAS["person"], max_new_tokens=8)
    assert answer.finish_reason == "length"
    assert answer.text == '{"name":'


def test_stop_ids_end_it_when_it_is_complete_and_not_before() -> None:
    """A token of the vocabulary that a caller declared an end token would cut a string."""
    letters = engine(tiny_model).model.tokenize("abcdefghijklmnopqrstuvwxyz", special=False)
    for seed in range(6):
        answer = engine(tiny_model).generate(
            PROMPT, json_schema=SCHEMAS["list"], stop_ids=letters, temperature=1.0, seed=seed
        )
        assert answer.finish_reason == "stop"
        validate(json.loads(answer.text), SCHEMAS["list"])


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("object", "it must be a JSON schema as a dict"),
        ({"type": {1, 2}}, "it must be a JSON schema as a dict"),
        ({"type": "objekt"}, "Invalid type: objekt"),
        ({"$ref": "#/$defs/none"}, "does not exist"),
        ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: \\["uniqueItems"\\]'),
        ({"enum": []}, "Unsatisfiable"),
        ({"minimum": float("nan")}, "it must be a JSON schema as a dict"),
        ({"const": "\ud800"}, "give a simpler schema"),
        (
            {"type": "string", "pattern": "^" + "a?" * 48_900 + "$"},
            "97804 characters.*at most 2000",
        ),
        ({"const": {"description": "ab c" * 24_000}}, "at most 2000"),
        ({"enum": ["a", "b" * 2_000]}, "at most 2000"),
        ({"type": "object", "required": ["b" * 2_001]}, "at most 2000"),
        ({"type": "object", "properties": {"b" * 2_001: {}}}, "at most 2000"),
        ({"type": "integer", "multipleOf": 9_999_991}, "multipleOf must be at most 100000"),
        (
            {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9.967}], "type": "number"},
            "multipleOf must be at most 100000",
        ),
    ],
    ids=lambda value: str(value)[:80],
)
def test_schemas_that_are_refused(schema: Any, reason: str) -> None:
    with pytest.raises(InvalidOption, match=reason):
        engine().generate(PROMPT, json_schema=schema)


def test_stop_strings_are_refused_with_it() -> None:
    with pytest.raises(InvalidOption, match="stop=.*could cut the JSON"):
        engine().generate(PROMPT, json_schema=SCHEMAS["list"], stop=["]"])


def test_a_model_that_never_ends_an_answer() -> None:
    tokenizer = byte_tokenizer(bos=False)
    tokenizer.eos_token = None
    endless = Engine(Model(hf_model("qwen2", eos_token_id=None), tokenizer, "endless"))
    assert not endless.model.eos_ids
    with pytest.raises(InvalidOption, match="'endless' has no token that ends an answer"):
        endless.generate(PROMPT, json_schema=SCHEMAS["list"])
    given = endless.generate(PROMPT, json_schema=SCHEMAS["either"], stop_ids=[0])
    validate(json.loads(given.text), SCHEMAS["either"])


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "llguidance":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(MissingExtra, match=r"'.\[structured\]'"):
        engine().generate(PROMPT, json_schema=SCHEMAS["list"])
    assert engine().generate(PROMPT, max_new_tokens=2).report.completion_tokens <= 2


def test_multiples_that_are_few_enough() -> None:
    schema = {"type": "array", "items": {"type": "number", "multipleOf": 0.05}, "maxItems": 2}
    check_json_schema({**schema, "prefixItems": [{"multipleOf": 60}, {"multipleOf": 10**9}]})


@pytest.mark.parametrize("depth", [200, 900, 100_000])
def test_a_schema_that_is_nested_too_deep(depth: int) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    with pytest.raises(InvalidOption, match="schema"):
        engine().generate(PROMPT, json_schema=schema)


def test_a_schema_that_takes_too_long_to_read() -> None:
    names = {f"property-{number}": {"type": "string"} for number in range(10_000)}
    with pytest.raises(InvalidOption, match="it must have at most 100000"):
        check_json_schema({"type": "object", "properties": names})


@pytest.mark.slow  # it takes the five seconds; what is refused for its size is above
def test_a_schema_that_cannot_be_read_in_time_is_refused() -> None:
    """Sixteen patterns at once took more than a minute, in a call that nothing can end."""
    patterns = [{"type": "string", "pattern": f".*a.{{{n}}}b.*"} for n in range(16)]
    model, reader = tiny_model(), SchemaReader()
    for _ in range(2):  # the second time it is known
        with pytest.raises(InvalidOption, match="takes more than 2 s or 1 GiB to read"):
            JsonConstraint(model, {"allOf": patterns}, frozenset({2}), reader)


LONG = {"type": "array", "minItems": 2000, "items": {"const": "ab c" * 490}}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^((ab c){500} ){500}$"}, LONG,
        {"type": "object", "properties": {"a": {"type": "boolean"}, "b": LONG},
         "required": ["a", "b"]},
        {"type": "string", "pattern": "^" + "a?" * 990 + "$"},
    ],
    ids=["repeated pattern", "constants", "constants later", "optional letters"],
)  # fmt: skip
def test_a_short_schema_of_long_texts_is_given_up_soon(schema: dict[str, Any]) -> None:
    """Its masks took seconds each, in the model's thread."""
    asked = engine()
    form = JsonConstraint(asked.model, schema, asked.model.eos_ids, SchemaReader())
    with pytest.raises(InvalidOption, match="give a simpler schema"):
        token_ids = list[int]()
        for _ in range(100):
            allowed = form.allowed(asked.model.n_vocabulary, token_ids)
            token_ids.append(int(allowed.argmax()))


def test_a_text_without_choice_is_found_once() -> None:
    """Its tokens are those that masks, one by one, would allow."""
    value = ["The ferry takes twelve minutes."] * 10
    model = engine().model
    form = JsonConstraint(model, {"const": value}, model.eos_ids, SchemaReader())
    token_ids = list[int]()
    for _ in range(100):
        (allowed,) = form.allowed(model.n_vocabulary, token_ids).nonzero()[0].tolist()
        bias = form._matcher.compute_logit_bias()  # noqa: SLF001
        assert [token for token, byte in enumerate(bias) if byte] == [allowed]
        token_ids.append(allowed)
    answer = engine().generate(PROMPT, json_schema={"const": value}, max_new_tokens=500)
    assert json.loads(answer.text) == value


def test_a_timeout_holds_while_a_schema_is_read() -> None:
    patterns = [{"type": "string", "pattern": f".*a.{{{n}}}b2.*"} for n in range(16)]
    with pytest.raises(TimedOut, match="not read within the timeout"):
        engine().generate(PROMPT, json_schema={"allOf": patterns}, timeout=0.3)


def test_an_owner_has_half_of_the_places(monkeypatch: pytest.MonkeyPatch) -> None:
    held, begun = threading.Event(), threading.Semaphore(0)

    def hold(grammar: str, ends: float) -> bool:
        begun.release()
        return grammar == "quick" or held.wait(60)

    monkeypatch.setattr(grammars, "_is_read", hold)
    reader, until = SchemaReader(), time.perf_counter() + 60
    with ThreadPoolExecutor(6) as threads:
        waiting = [threads.submit(reader.check, f"slow {n}", "many", until) for n in range(6)]
        assert all(begun.acquire(timeout=60) for _ in range(2))
        reader.check("quick", "few", until)
        assert begun.acquire(timeout=60) and not begun.acquire(timeout=0.1)  # no third of many
        held.set()
        for each in waiting:
            each.result(60)


def test_a_namespace_does_not_learn_what_another_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[str]()
    monkeypatch.setattr(grammars, "_is_read", lambda grammar, ends: not read.append(grammar))
    one, other = Engine(quoting_model()), Engine(quoting_model())  # a server has one for each
    for asked in (one, one, other, other):
        asked.generate(PROMPT, json_schema=SCHEMAS["either"], max_new_tokens=2)
    assert len(read) == 2


def test_a_killed_reader_says_nothing_of_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, killed = SchemaReader(), subprocess.CompletedProcess[bytes]([], -9)
    with monkeypatch.context() as once:
        once.setattr(subprocess, "run", lambda *_, **__: killed)
        with pytest.raises(Overloaded, match=r"was killed \(signal 9\); ask again"):
            reader.check("quick")
    reader.check("quick")


def test_thousands_of_tiny_multiples_are_refused_at_once() -> None:
    many = [{"type": "number", "multipleOf": n * 1e-300} for n in range(1, 1800)]
    with pytest.raises(InvalidOption, match="multipleOf must be at most 100000"):
        check_json_schema({"anyOf": many})
