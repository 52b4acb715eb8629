"""The options of an engine, and of one answer, each declared once."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack, get_args

from samkv_integrations.cache.quantise import check_store_bits
from samkv_integrations.errors import InvalidOption, UnknownOption
from samkv_integrations.eviction import Eviction, get_eviction
from samkv_integrations.methods import Method, get_method
from samkv_integrations.model.constraint import check_json_schema
from samkv_integrations.model.model import Model
from samkv_integrations.model.sampling import OPTIONS, Sampling, SamplingOptions
from samkv_integrations.prompt.resolve import OnMiss
from samkv_integrations.prompt.text import check_text

PrefixPolicy = Literal["documents", "bos", "none"]

DOCUMENTS_BEFORE = (
    "[Lake Varen]\nLake Varen is a lake in the north of the country. It is about twelve kilometres "
    "long and is fed by three rivers.\n\n[Anna Holm]\nAnna Holm (born 4 May 1931) was a writer and "
    "teacher. She published nine novels and two collections of poems.\n\n"
)
"""Two made-up documents that each chunk is prefilled after, so that its entries are those of one
document of several; their own entries are dropped. They halve what `reuse` loses on short chunks of
SmolLM2 (docs/results/real_model.md)."""


class EngineOptions(TypedDict, total=False):
    """What an engine can be told beside its model and its store; see `Engine`."""

    method: str | Method | None
    eviction: str | Eviction | None
    block_size: int | Literal["auto"]
    prefix: PrefixPolicy
    prefix_text: str
    store_bits: int | None
    prefix_bytes: int


class AnswerOptions(SamplingOptions, total=False):
    """Options of `Engine.generate` and `Engine.stream`: those of sampling, and these.

    method, eviction: in place of the engine's for this answer; ``eviction="none"`` for none.
    context_window: tokens that prompt and answer may have together, if fewer than the model's.
    stop, stop_ids: strings and token ids that end the answer and are no part of it.
    json_schema: a JSON schema, which the answer keeps to; see `JsonConstraint`. One that reaches
        max_new_tokens is cut, and its finish_reason is ``length``. Needs the extra ``structured``.
    timeout: seconds after which an answer that is not complete ends with TimedOut; None for no end
        of patience. It counts from the call, waiting for other answers included.
    on_miss: what to do for a chunk without a usable cache: ``compute`` (as a chunk, and keep it;
        ``auto`` only where that does not take longer than full prefill, ``recompute`` never),
        ``text`` (compute it with the rest of the prompt, keep nothing), ``error``. What turns out
        damaged only while it is read is computed as ``text`` by both of them.
    """

    method: str | Method | None
    eviction: str | Eviction | None
    context_window: int | None
    stop: Sequence[str]
    stop_ids: Collection[int]
    json_schema: Mapping[str, Any] | None
    timeout: float | None
    on_miss: OnMiss


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """`AnswerOptions`, checked as far as they can be without a model. None is the engine's own."""

    sampling: Sampling
    method: Method | None = None
    eviction: str | Eviction | None = None
    context_window: int | None = None
    stop: Sequence[str] = ()
    stop_ids: Collection[int] = ()
    json_schema: Mapping[str, Any] | None = None
    timeout: float | None = None
    on_miss: OnMiss = "compute"

    @classmethod
    def of(cls, **options: Unpack[AnswerOptions]) -> AnswerSettings:
        """From keyword arguments. Raises InvalidOption or UnknownOption for what is wrong."""
        given: dict[str, Any] = dict(options)
        sampling = {name: given.pop(name) for name in OPTIONS if name in given}
        for name in given.keys() - AnswerOptions.__annotations__.keys():
            raise UnknownOption.among("option of an answer", name, AnswerOptions.__annotations__)
        if given.get("method") is not None:
            given["method"] = get_method(given["method"])
        return cls(sampling=Sampling(**sampling), **given)

    def __post_init__(self) -> None:
        get_eviction(self.eviction)
        window = self.context_window
        if window is not None and (type(window) is not int or window < 1):
            raise InvalidOption(
                f"context_window={window!r}; it must be a whole number of at least 1"
            )
        check_stop(self.stop)
        check_timeout(self.timeout)
        if self.json_schema is not None:
            check_json_schema(self.json_schema)
            if self.stop:
                raise InvalidOption(
                    f"stop={self.stop!r} with json_schema: a stop string could cut the JSON, which "
                    "ends by itself; leave out either"
                )
        check_on_miss(self.on_miss)


def check_given_bits(store_bits: int | None) -> None:
    """Raises InvalidOption if caches cannot have so many bits; None is the engine's choice."""
    if store_bits is not None:
        check_store_bits(store_bits)


def check_stop(stop: Collection[object]) -> None:
    """Raises InvalidOption if these are no stop strings: an empty one would end every answer."""
    is_list = isinstance(stop, Collection) and not isinstance(stop, str)
    if not is_list or any(not isinstance(text, str) or not text for text in stop):
        raise InvalidOption(f"stop={stop!r}; it must be a list of non-empty strings")


def check_timeout(timeout: Any) -> None:  # noqa: ANN401
    """Raises InvalidOption if this is no time that one could wait."""
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and 0 < timeout < math.inf):
        raise InvalidOption(f"timeout={timeout!r}; it must be above 0 seconds, or None")


def check_tokens(name: str, ids: Sequence[int], model: Model) -> None:
    """Raises InvalidOption if one of ``ids`` is no token of the model."""
    n_known = model.config.vocab_size
    if unknown := [token for token in ids if not 0 <= token < n_known]:
        raise InvalidOption(
            f"{name} holds {unknown[0]}, which is no token; {model.name!r} has {n_known}, counted "
            "from 0"
        )


def check_parts(model: object, store: object, prefix: str, prefix_text: object) -> None:
    """Raises InvalidOption for what is nearly an argument of an engine."""
    if not isinstance(model, Model):
        raise InvalidOption(
            f"model={model!r} is no Model; Engine.from_pretrained takes a name or a folder, and "
            "Model(model, tokenizer, name) what transformers has loaded"
        )
    if isinstance(store, str | os.PathLike):
        raise InvalidOption(f"store={store!r} is no store; give ChunkStore({str(store)!r})")
    if prefix not in get_args(PrefixPolicy):
        raise InvalidOption(f"prefix={prefix!r}; allowed: {', '.join(get_args(PrefixPolicy))}")
    check_text("prefix_text", prefix_text)


def prefix_ids(model: Model, prefix: PrefixPolicy, prefix_text: str) -> tuple[int, ...]:
    """Token ids of what chunks are prefilled after."""
    if prefix_text:
        text_ids = model.tokenize(prefix_text, special=True)
    else:
        text_ids = model.tokenize(DOCUMENTS_BEFORE if prefix == "documents" else "", special=False)
    return (*(() if prefix == "none" or model.bos_id is None else (model.bos_id,)), *text_ids)


def check_on_miss(on_miss: str) -> None:
    """Raises InvalidOption if ``on_miss`` is nothing that can be done for a missed chunk."""
    if on_miss not in get_args(OnMiss):
        raise InvalidOption(f"on_miss={on_miss!r}; allowed: {', '.join(get_args(OnMiss))}")
