"""Answers that keep to a JSON schema: tokens that would break it are ruled out, by llguidance."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessor

from samkv_integrations.errors import InvalidOption, MissingExtra
from samkv_integrations.model.model import Model

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# One way to write JSON, that of json.dumps: where any white space is allowed, some models write
# nothing else until their tokens run out.
_LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

MAX_SCHEMA_LENGTH = 100_000
"""Characters of a schema as JSON."""

MAX_MULTIPLE = 100_000
"""Largest common multiple of all values of ``multipleOf``, in units of their last decimal place:
reading 99,991 takes about a second, and far larger ones take minutes and gigabytes."""

_VALUES = ("const", "enum", "default", "examples")  # what is in them is no schema


def check_json_schema(schema: object) -> None:
    """Raises InvalidOption if ``schema`` is no dict of JSON; whether it is a schema, see below."""
    written = ""
    try:
        written = json.dumps(schema, allow_nan=False)
        is_json = isinstance(schema, Mapping)
    except (TypeError, ValueError, RecursionError):
        is_json = False
    if not is_json:
        raise InvalidOption(
            f"json_schema={reprlib.repr(schema)}; it must be a JSON schema as a dict, such as "
            "{'type': 'object'} or what model_json_schema() of a pydantic class returns"
        )
    if len(written) > MAX_SCHEMA_LENGTH:
        raise InvalidOption(
            f"json_schema of {len(written)} characters; it may have {MAX_SCHEMA_LENGTH}, as larger "
            "ones take too long to read"
        )
    if _common_multiple(schema) > MAX_MULTIPLE:
        raise InvalidOption(
            f"json_schema: the values of multipleOf have a common multiple of more than "
            f"{MAX_MULTIPLE}, in units of their last decimal place; leave it out, and check that "
            "part when the answer is there"
        )


class JsonConstraint(LogitsProcessor):
    """Leaves in the draw what continues JSON of a schema; end tokens once it is complete.

    It follows one answer, from its first token.

    model: its tokenizer is read once, about 1 s for a vocabulary of 100,000.
    schema: a JSON schema. Objects have their properties in its order, and no others unless
        ``additionalProperties`` says so.
    end_ids: tokens that end the answer.

    Raises:
        InvalidOption: the schema is none, cannot be fulfilled, or asks for what cannot be decided
            token by token (``not``, ``uniqueItems``, ...).
        MissingExtra: llguidance is not installed.
    """

    def __init__(self, model: Model, schema: Mapping[str, Any], end_ids: frozenset[int]) -> None:
        check_json_schema(schema)
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise MissingExtra.of("llguidance", "structured") from error
        if not end_ids:
            raise InvalidOption(
                f"json_schema: {model.name!r} has no token that ends an answer; give stop_ids"
            )
        try:
            written = json.dumps(_closed(schema))
            grammar = LLMatcher.grammar_from_json_schema(written, overrides=_LAYOUT)
        except (ValueError, RecursionError) as error:  # half characters, or nested too deep
            raise InvalidOption(f"json_schema: {error}; give a simpler schema") from error
        self._matcher = LLMatcher(_tokenizer(model, end_ids), grammar, log_level=0)
        if self._matcher.is_error():
            raise InvalidOption(
                f"json_schema: {self._error}; change the schema, or check "
                "that part of it when the answer is there"
            )
        self._n_seen: int | None = None

    @classmethod
    def of(
        cls, model: Model, schema: Mapping[str, Any] | None, end_ids: frozenset[int]
    ) -> JsonConstraint | None:
        """The constraint of an answer; None for one that is free."""
        return None if schema is None else cls(model, schema, end_ids)

    @property
    def _error(self) -> str:
        """What is wrong, without the state of the parser."""
        return self._matcher.get_error().partition("\n<state>")[0].strip()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(1, prompt and answer so far) ids and (1, vocabulary) logits -> those that may follow."""
        if self._n_seen is not None:
            self._matcher.consume_tokens(input_ids[0, self._n_seen :].tolist())
        self._n_seen = input_ids.shape[1]
        bias = bytearray(self._matcher.compute_logit_bias())  # one byte a token, 0 for ruled out
        if self._matcher.is_error():
            raise InvalidOption(f"json_schema: {self._error}; give a simpler schema")
        allowed = torch.frombuffer(bias, dtype=torch.uint8).to(scores.device) > 0
        return scores.masked_fill(~allowed[: scores.shape[-1]], float("-inf"))


def _common_multiple(schema: object) -> int:
    """The least common multiple of all values of ``multipleOf``, without their trailing zeros."""
    values = [Fraction(str(value)) for value in _multiples(schema)]
    scale = 10 ** max((_n_decimals(value) for value in values), default=0)
    multiple = math.lcm(*(int(value * scale) or 1 for value in values))
    while multiple % 10 == 0:
        multiple //= 10
    return multiple


def _n_decimals(value: Fraction) -> int:
    return next((n for n in range(400) if (value * 10**n).denominator == 1), 0)


def _multiples(schema: object) -> Iterator[int | float]:
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, Mapping):
            value = part.get("multipleOf")
            if isinstance(value, int | float) and value:
                yield value
            left += part.values()
        elif isinstance(part, list | tuple):
            left += part


def _closed(schema: Any) -> Any:  # noqa: ANN401
    """The schema, whose objects have no properties but those that it names, if it names any.

    By the letter of JSON Schema they might have others, which whoever asked has no use for.
    """
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {name: value if name in _VALUES else _closed(value) for name, value in schema.items()}
    # parts of an allOf say together which there are
    if isinstance(schema.get("properties"), Mapping) and "allOf" not in schema:
        closed.setdefault("additionalProperties", False)
    return closed


def _tokenizer(model: Model, end_ids: frozenset[int]) -> LLTokenizer:
    """The model's tokenizer as llguidance needs it; made once for each set of end tokens."""
    import llguidance.hf

    found: LLTokenizer | None = model.constraint_tokenizers.get(end_ids)
    if found is None:
        found = llguidance.hf.from_tokenizer(
            model.tokenizer, n_vocab=model.config.vocab_size, eos_token=sorted(end_ids)
        )
        model.constraint_tokenizers[end_ids] = found
    return found
