"""Answers that keep to a JSON schema: llguidance rules out the tokens that would break it."""

from __future__ import annotations

import json
import math
import os
import reprlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from functools import cache
from hashlib import sha256
from threading import BoundedSemaphore
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samkv_integrations.errors import Given, InvalidOption, MissingExtra, Overloaded, TimedOut
from samkv_integrations.runtimes.base import Runtime

# One way to write JSON, that of json.dumps: where any white space is allowed, some models write
# nothing else until their tokens run out.
_LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

MAX_SCHEMA_LENGTH = 100_000
"""Characters of a schema as JSON."""

MAX_LITERAL_LENGTH = 2_000
"""Characters of one pattern, constant, value of an enumeration or name of a property. The time of a
mask grows with them, for some patterns with their square: 48,900 optional letters took 26 s."""

MAX_MULTIPLE = 100_000
"""Largest common multiple of all values of ``multipleOf``, in units of their last decimal place:
reading 99,991 takes about a second, and far larger ones take minutes and gigabytes."""

_MOST_PLACES = 20  # decimal ones, of a multiple

MOST_READING_S = 2
"""CPU seconds that llguidance may take to read a schema, its start included; most take .1. Sixteen
patterns that must all hold took more than a minute, and could not be ended."""

MOST_READING_BYTES = 1 << 30
"""Bytes of memory that llguidance may take to read a schema."""

_READ = f"""
import os, sys
try:
    # answers come first, but beside three busy threads a core the limit is reached in 20 s: a
    # schema that takes too long must not look as if the machine were busy
    os.nice(5)
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, ({MOST_READING_S}, {MOST_READING_S + 1}))
    resource.setrlimit(resource.RLIMIT_AS, ({MOST_READING_BYTES}, {MOST_READING_BYTES}))
except (AttributeError, ImportError):  # Windows: the time on the clock is the only limit
    pass
from llguidance import LLMatcher
LLMatcher.validate_grammar(sys.stdin.read())
"""

# Of one mask, in llguidance's units: with its own limits, an array of 2,000 constants takes 2.5 s
# in the model's thread; with these, .7 s.
_LEXER_FUEL, _STEP_ITEMS = 250_000, 2_000

_MOST_READ = 64  # schemas that a reader remembers
_MOST_WAITING_S = 30  # on the clock, for a place and the reading together
_places = BoundedSemaphore(4)


@cache
def _places_of(owner: str) -> BoundedSemaphore:
    """An owner's places: half of all, so that one owner cannot take those of others."""
    return BoundedSemaphore(2)


_VALUES = ("const", "enum", "default", "examples")  # their values are not schemas


def check_json_schema(schema: object) -> None:
    """Raises InvalidOption unless ``schema`` is a dict of JSON within the limits."""
    try:
        written = json.dumps(schema, allow_nan=False) if isinstance(schema, Mapping) else ""
    except (TypeError, ValueError, RecursionError):
        written = ""
    if not written:
        raise InvalidOption(
            Given("json_schema", schema),
            "; it must be a JSON schema as a dict, such as {'type': 'object'} or what "
            "model_json_schema() of a pydantic class returns",
        )
    if len(written) > MAX_SCHEMA_LENGTH:
        raise InvalidOption(
            Given("json_schema", ...),
            f" has {len(written)} characters; it must have at most {MAX_SCHEMA_LENGTH}, because "
            "larger ones take too long to read; give a simpler schema",
        )
    if len(literal := _longest_literal(schema)) > MAX_LITERAL_LENGTH:
        raise InvalidOption(
            Given("json_schema", ...),
            f" has a pattern, constant, value of an enumeration or name of {len(literal)} "
            f"characters, {reprlib.repr(literal)}; it must have at most {MAX_LITERAL_LENGTH}; "
            "leave it out, and check that part of the answer yourself",
        )
    if _common_multiple(schema) > MAX_MULTIPLE:
        raise InvalidOption(
            Given("json_schema", ...),
            ": the common multiple of all values of multipleOf must be at most "
            f"{MAX_MULTIPLE}, in units of their last decimal place; leave it out, and check "
            "that part of the answer yourself",
        )


class JsonConstraint:
    """Masks every token that would break the schema; end tokens are allowed once it is complete.

    It follows one answer, from its first token. A `TokenMask`.

    model: its tokenizer is read once, about 1 s for a vocabulary of 100,000.
    schema: a JSON schema. Objects have their properties in its order, and no others unless
        ``additionalProperties`` says so.
    end_ids: tokens that end the answer.
    reader, owner, until: see `SchemaReader.check`.

    Raises:
        InvalidOption: the schema is not valid, cannot be fulfilled, or needs what cannot be decided
            token by token (``not``, ``uniqueItems``, ...).
        MissingExtra: llguidance is not installed.
        Overloaded, TimedOut: the schema was not read in time.
    """

    def __init__(
        self,
        model: Runtime,
        schema: Mapping[str, Any],
        end_ids: frozenset[int],
        reader: SchemaReader,
        owner: str = "",
        until: float | None = None,
    ) -> None:
        check_json_schema(schema)
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError as error:
            raise MissingExtra.of("llguidance", "structured") from error
        if not end_ids:
            raise InvalidOption(
                Given("json_schema", ...),
                f": {model.name!r} has no token that ends an answer; give stop_ids",
            )
        try:
            written = json.dumps(_closed(schema))
            grammar = LLMatcher.grammar_from_json_schema(written, overrides=_LAYOUT)
        except (ValueError, RecursionError) as error:  # half characters, or nested too deep
            raise _not_simple(error) from error
        reader.check(grammar, owner, until)
        limits = LLParserLimits(initial_lexer_fuel=_LEXER_FUEL, step_max_items=_STEP_ITEMS)
        vocabulary = model.mask_vocabulary(end_ids)
        self._matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        if self._matcher.is_error():
            raise InvalidOption(
                Given("json_schema", ...),
                f": {self._error}; change the schema, or leave that part out and check it in the "
                "answer yourself",
            )
        self._n_seen = 0
        self._forced: list[int] = []  # the next tokens, where the schema leaves no choice

    @property
    def _error(self) -> str:
        """What is wrong, without the state of the parser."""
        return self._matcher.get_error().partition("\n<state>")[0].strip()

    def allowed(self, n_vocabulary: int, token_ids: Sequence[int]) -> NDArray[np.bool_]:
        """(n_vocabulary,) which tokens may follow. token_ids: of the answer so far.

        Raises InvalidOption if llguidance gives up on the schema.
        """
        taken = list(token_ids[self._n_seen :])
        self._n_seen = len(token_ids)
        self._matcher.consume_tokens(taken)
        del self._forced[: len(taken)]
        if not self._forced:  # several tokens at once, because finding them one by one takes long
            self._forced = self._matcher.compute_ff_tokens()
        if self._forced:
            allowed = np.zeros(n_vocabulary, np.bool_)
            allowed[self._forced[0]] = True
        else:  # a byte for each token, 0 if it is ruled out
            bias = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8)
            allowed = bias[:n_vocabulary] > 0
        if self._matcher.is_error():
            raise _not_simple(self._error)
        return allowed


class SchemaReader:
    """Reads the schemas of one namespace, each in a process, because only a process can be ended.

    It remembers the latest ones. Each namespace has its own reader: a shared one would tell, by the
    time that a schema takes, that another namespace has used it.
    """

    def __init__(self) -> None:
        self._is_quick: dict[bytes, bool] = {}  # by the digest of the grammar, latest last

    def check(self, grammar: str, owner: str = "", until: float | None = None) -> None:
        """Check that a grammar of llguidance can be read within the limits.

        owner: who asks; each may read two at once, of four. until: when the caller's timeout ends
        (`time.perf_counter`); None without one.

        Raises:
            InvalidOption: the grammar cannot be read within the limits.
            TimedOut: it was not read within the caller's timeout.
            Overloaded: it was not read in time, because the machine is busy.
        """
        digest = sha256(grammar.encode()).digest()
        latest = time.perf_counter() + _MOST_WAITING_S
        ends = latest if until is None else min(until, latest)
        if (is_quick := self._is_quick.get(digest)) is None:
            try:
                with _place(_places_of(owner), ends), _place(_places, ends):
                    if (is_quick := self._is_quick.get(digest)) is None:  # else read meanwhile
                        is_quick = _is_read(grammar, ends)
            except subprocess.TimeoutExpired as error:
                if ends == until:
                    raise TimedOut(
                        "json_schema was not read within the timeout; give more, or a simpler "
                        "schema"
                    ) from error
                raise Overloaded(
                    f"json_schema was not read within {_MOST_WAITING_S} s, because the server is "
                    "busy; ask again later"
                ) from error
        self._is_quick.pop(digest, None)
        self._is_quick[digest] = is_quick
        for oldest in list(self._is_quick)[:-_MOST_READ]:
            self._is_quick.pop(oldest, None)
        if not is_quick:
            raise InvalidOption(
                Given("json_schema", ...),
                f" takes more than {MOST_READING_S} s or {MOST_READING_BYTES >> 30} GiB to read; "
                "give fewer patterns, fewer alternatives or smaller numbers",
            )


def _not_simple(why: object) -> InvalidOption:
    return InvalidOption(Given("json_schema", ...), f": {why}; give a simpler schema")


@contextmanager
def _place(places: BoundedSemaphore, ends: float) -> Iterator[None]:
    """Hold a place. Raises TimeoutExpired if none is free by ``ends``."""
    left = max(0.0, ends - time.perf_counter())
    if not places.acquire(timeout=left):
        raise subprocess.TimeoutExpired("a place", left)
    try:
        yield
    finally:
        places.release()


def _is_read(grammar: str, ends: float) -> bool:
    """Whether a process reads the grammar within the limits.

    Raises TimeoutExpired at ``ends``, and Overloaded if something else has ended the process.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", _READ], input=grammar.encode(), capture_output=True,
        timeout=max(0.0, ends - time.perf_counter()), check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    own_limits = (-getattr(signal, "SIGXCPU", 0), -signal.SIGABRT)  # of time and of memory
    if done.returncode < 0 and done.returncode not in own_limits:
        raise Overloaded(
            f"the process that read json_schema was killed (signal {-done.returncode}); ask again"
        )
    return done.returncode == 0


def _objects(schema: object) -> Iterator[Mapping[Any, Any]]:
    """All objects in the JSON of a schema, itself included."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, Mapping):
            yield part
            left += part.values()
        elif isinstance(part, list | tuple):
            left += part


def _longest_literal(schema: object) -> str:
    """The longest name, pattern or value, as JSON, that text of an answer is compared with."""
    literals = [""]
    for part in _objects(schema):
        literals += map(str, part)
        literals += (json.dumps(part[name]) for name in ("const", "pattern") if name in part)
        for name in ("enum", "required"):
            if isinstance(part.get(name), list | tuple):
                literals += map(json.dumps, part[name])
    return max(literals, key=len)


def _common_multiple(schema: object) -> int:
    """The least common multiple of all values of ``multipleOf``, without their trailing zeros."""
    given = (part.get("multipleOf") for part in _objects(schema))
    values = [Decimal(str(value)) for value in given if type(value) in (int, float) and value]
    places = max([0, *(-int(value.as_tuple().exponent) for value in values)])
    if places > _MOST_PLACES:
        return MAX_MULTIPLE + 1
    multiple = 1
    for value in values:
        multiple = math.lcm(multiple, int(value * 10**places) or 1)
        while multiple % 10 == 0:
            multiple //= 10
        if multiple > MAX_MULTIPLE:  # thousands of huge ones would take seconds
            break
    return multiple


def _closed(schema: Any) -> Any:  # noqa: ANN401
    """The schema, whose objects have no properties but those that it names, if it names any.

    JSON Schema allows others by default, but the caller has no use for them.
    """
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {name: value if name in _VALUES else _closed(value) for name, value in schema.items()}
    # the parts of an allOf name the properties together
    if isinstance(schema.get("properties"), Mapping) and "allOf" not in schema:
        closed.setdefault("additionalProperties", False)
    return closed
